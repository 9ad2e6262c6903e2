"""Checks before any document is read: footers and schemas of all parquet files, types of extra columns.

Invariant: what can be known to be wrong without reading documents is said here, before any work.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from pretrain_assets.config import IngestConfig
from pretrain_assets.errors import ConfigError, InputError
from pretrain_assets.ingest.documents import Layout, Tally
from pretrain_assets.ingest.jsonl import infer_type
from pretrain_assets.ingest.parquet import check_extra, inspect_parquet, schema_problem
from pretrain_assets.ingest.sources import SourceFile
from pretrain_assets.ingest.synthetic import size_of
from pretrain_assets.table.columns import COLUMNS
from pretrain_assets.table.schema import STAGE_KEY

if TYPE_CHECKING:
    import pyarrow as pa

Footers = dict[str, tuple["pa.Schema", int]]
"""Schema and number of rows of each parquet file, by name."""


def preflight(
    files: Sequence[SourceFile], config: IngestConfig, table_schema: pa.Schema | None
) -> tuple[Layout, int | None]:
    """The layout of the columns to read, and the number of rows when every file tells it beforehand.

    Raises:
        InputError: a parquet file that is not whole, or lacks a usable column while on_bad_row is `raise`.
        ConfigError: an extra column that cannot be kept.
    """
    parquet = [file for file in files if file.format == "parquet"]
    with ThreadPoolExecutor(config.files_in_flight) as pool:
        footers: Footers = dict(zip((f.name for f in parquet), pool.map(inspect_parquet, parquet), strict=True))
    fields = [_extra_field(name, files, footers, table_schema) for name in config.extra_columns]
    layout = Layout(config=config, extra=tuple(fields))
    for file in parquet:
        _check_schema(file, *footers[file.name], layout)
    known = [footers[f.name][1] if f.name in footers else size_of(f.path) for f in files if f.format != "jsonl"]
    return layout, sum(known) if len(known) == len(files) else None


def _check_schema(file: SourceFile, schema: pa.Schema, rows: int, layout: Layout) -> None:
    problem = schema_problem(schema, layout)
    if problem is None:
        check_extra(file, schema, layout)
    else:
        reason, column, found = problem
        Tally(file, layout.config).reject(reason, place=f"all {rows} rows", column=column, value=found)


def _extra_field(name: str, files: Sequence[SourceFile], footers: Footers, table_schema: pa.Schema | None) -> pa.Field:
    """The field of an extra column: as the table has it, or for a new table as the first file that tells has it."""
    import pyarrow as pa

    owner = next((column.owner for column in COLUMNS if column.name == name), None)
    if owner:
        raise ConfigError(f"extra_columns: {name!r} is a column that stage {owner!r} writes. Rename it in the files.")
    for file in files:
        if file.format == "synthetic":
            raise InputError(f"{file.name} has no extra column {name!r}. Take it out of extra_columns.")
    if table_schema is not None:
        return _table_field(name, table_schema)
    schemas = (schema for schema, _ in footers.values() if name in schema.names)
    types = (schema.field(name).type for schema in schemas)
    inferred = (infer_type(file, name) for file in files if file.format == "jsonl")
    arrow_type = next(types, None) or next((found for found in inferred if found is not None), None)
    if arrow_type is None:
        raise InputError(f"No file has extra column {name!r}: {', '.join(file.name for file in files[:3])} ...")
    return pa.field(name, arrow_type)


def _table_field(name: str, table_schema: pa.Schema) -> pa.Field:
    if name not in table_schema.names:
        raise ConfigError(
            f"extra_columns: the table has no column {name!r}, and extra columns are chosen when a table is created. "
            f"It has {', '.join(table_schema.names)}. Take it out, or ingest into a new table."
        )
    field = table_schema.field(name)
    if STAGE_KEY in (field.metadata or {}):
        stage = field.metadata[STAGE_KEY].decode()
        raise ConfigError(f"extra_columns: {name!r} is a column that stage {stage!r} writes. Rename it in the files.")
    return field
