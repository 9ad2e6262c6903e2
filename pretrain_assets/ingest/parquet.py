"""Parquet files as batches of documents, in slices of row groups.

Invariant: memory follows `batch_bytes`, not the size of a row group or a file; every file's schema is checked before
the first document of the ingest is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pretrain_assets.errors import InputError
from pretrain_assets.ingest.documents import Layout, Tally, readable, to_documents
from pretrain_assets.ingest.sources import SourceFile

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_PER_BATCH = 1024
"""Rows per batch at most: bounds memory where the average row says little about the largest."""

_BUFFER_BYTES = 4 << 20


def inspect_parquet(file: SourceFile) -> tuple[pa.Schema, int]:
    """Schema and number of rows, from the footer.

    Raises:
        InputError: the file is not a complete parquet file.
    """
    with readable(file), file.open() as handle, _open(handle) as parquet:
        return parquet.schema_arrow, parquet.metadata.num_rows


def schema_problem(schema: pa.Schema, layout: Layout) -> tuple[str, str, str] | None:
    """Why a file cannot be used: (reason, column, type found), or None."""
    import pyarrow.types as types

    config = layout.config
    for column in (config.text_column, config.id_column, config.score_column, config.source_column):
        if schema.names.count(column) > 1:
            return "ambiguous_column", column, f"{schema.names.count(column)} columns of this name"
    if config.text_column not in schema.names:
        return "missing_text", config.text_column, f"columns {', '.join(schema.names)}"
    checks = (
        ("text_not_a_string", config.text_column, (_is_text,)),
        ("bad_id", config.id_column, (_is_text, types.is_integer, types.is_floating)),
        ("bad_score", config.score_column, (types.is_integer, types.is_floating, types.is_decimal)),
        ("bad_source", config.source_column, (_is_text,)),
    )
    for reason, column, accepted in checks:
        if column in schema.names:
            found = schema.field(column).type
            if not types.is_null(found) and not any(accepts(found) for accepts in accepted):
                return reason, column, str(found)
    return None


def check_extra(file: SourceFile, schema: pa.Schema, layout: Layout) -> None:
    """Refuse a file whose extra columns are missing or of another type than the table's."""
    for extra in layout.extra:
        found = schema.field(extra.name).type if extra.name in schema.names else None
        if found != extra.type:
            has = f"has it as {found}" if found else f"has only {', '.join(schema.names)}"
            raise InputError(
                f"{file.name}: extra column {extra.name!r} must be {extra.type} as in the table; the file {has}. "
                "Convert the file, or leave the column out of extra_columns."
            )


def read_parquet(file: SourceFile, layout: Layout, tally: Tally) -> Iterator[pa.RecordBatch]:
    """Documents of one file. A file whose schema cannot be used is left out whole and counted."""
    with readable(file), file.open() as handle, _open(handle) as parquet:
        problem = schema_problem(parquet.schema_arrow, layout)
        if problem is not None:
            reason, column, found = problem
            rows = tally.rows_in = parquet.metadata.num_rows
            tally.reject(reason, place=f"all {rows} rows", column=column, value=found, rows=rows)
            return
        columns = [name for name in layout.wanted if name in parquet.schema_arrow.names]
        for raw in _slices(parquet, columns, layout.config.batch_bytes):
            usable = _usable(raw, layout.config.text_column, tally)
            if usable.num_rows:
                yield to_documents(usable, file, layout)


def _open(handle: Any) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(handle, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True)


def _slices(parquet: Any, columns: list[str], batch_bytes: int) -> Iterator[pa.RecordBatch]:
    """Batches of every row group, sized by the group's average row."""
    for number in range(parquet.metadata.num_row_groups):
        group = parquet.metadata.row_group(number)
        if group.num_rows:
            rows = max(1, min(ROWS_PER_BATCH, batch_bytes * group.num_rows // max(1, _group_bytes(group, columns))))
            yield from parquet.iter_batches(batch_size=rows, row_groups=[number], columns=columns, use_threads=False)


def _group_bytes(group: Any, columns: list[str]) -> int:
    """Uncompressed bytes of the wanted columns of a row group."""
    chunks = (group.column(index) for index in range(group.num_columns))
    return sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns)


def _usable(raw: pa.RecordBatch, text_column: str, tally: Tally) -> pa.RecordBatch:
    """The rows with a text; the others go to the tally with their row number, counted from 1."""
    import pyarrow as pa

    first_row = tally.rows_in + 1
    tally.rows_in += raw.num_rows
    bad = _bad_rows(raw, text_column)
    for row, (reason, column, value) in bad.items():
        tally.reject(reason, place=f"row {first_row + row}", column=column, value=value)
    if not bad:
        return raw
    return raw.filter(pa.array([row not in bad for row in range(raw.num_rows)]))


def _bad_rows(raw: pa.RecordBatch, text_column: str) -> dict[int, tuple[str, str, Any]]:
    """Row in the batch: (reason, column, value)."""
    bad: dict[int, tuple[str, str, Any]] = {}
    for name, column in zip(raw.schema.names, raw.columns, strict=True):
        if _is_text(column.type) and not _valid(column):
            bad.update({row: ("invalid_utf8", name, value) for row, value in _invalid_utf8(column)})
    text = raw.column(text_column)
    if text.null_count:
        nulls = (row for row, valid in enumerate(text.is_valid().to_pylist()) if not valid)
        bad.update(dict.fromkeys(nulls, ("null_text", text_column, None)))
    return dict(sorted(bad.items()))


def _valid(column: pa.Array) -> bool:
    import pyarrow as pa

    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _invalid_utf8(column: pa.Array) -> Iterator[tuple[int, bytes]]:
    import pyarrow as pa

    plain = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    for row, value in enumerate(plain.cast(pa.large_binary()).to_pylist()):
        try:
            (value or b"").decode()
        except UnicodeDecodeError:
            yield row, value


def _is_text(arrow_type: pa.DataType) -> bool:
    import pyarrow.types as types

    plain = arrow_type.value_type if types.is_dictionary(arrow_type) else arrow_type
    return bool(types.is_string(plain) or types.is_large_string(plain) or types.is_string_view(plain))
