"""The table's columns: one owner stage each, with type, meaning and unit.

Invariant: a column is written by its owner alone. The metadata of every computed field names the owner, the code
version and the parameters that made its values.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import TokenizerIdentity, from_dict
from pretrain_assets.errors import TableError
from pretrain_assets.table.lineage import canonical_json

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

STAGE_KEY = b"pretrain.stage"
CODE_VERSION_KEY = b"pretrain.code_version"
PARAMETERS_KEY = b"pretrain.parameters"


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of the table."""

    name: str
    """Column name."""
    arrow_type: str
    """Arrow type, as `str(pa.DataType)` prints it."""
    owner: str
    """The one stage that writes it."""
    meaning: str
    """What a value is, with its unit."""
    optional: bool = False
    """Whether the table has it only once there was something to write."""


COLUMNS = (
    Column(name="id", arrow_type="int64", owner="ingested", meaning="dense row number, given once, never used again"),
    Column(name="doc_id", arrow_type="string", owner="ingested", meaning="the source's own id, or the text's hash"),
    Column(name="text", arrow_type="string", owner="ingested", meaning="the document, unchanged"),
    Column(name="source", arrow_type="string", owner="ingested", meaning="where the document comes from"),
    Column(name="source_file", arrow_type="string", owner="ingested", meaning="the file it was read from"),
    Column(name="score", arrow_type="float", owner="ingested", meaning="the source's quality score, or null"),
    Column(name="n_chars", arrow_type="int32", owner="ingested", meaning="length of `text` in Unicode code points"),
    Column(
        name="content_hash",
        arrow_type="fixed_size_binary[16]",
        owner="deduped",
        meaning="xxh3-128 of the text with runs of white space made one space",
    ),
    Column(name="is_dup", arrow_type="bool", owner="deduped", meaning="an earlier row has the same content_hash"),
    Column(name="input_ids", arrow_type="list<item: int32>", owner="tokenized", meaning="token ids, no end-of-text"),
    Column(name="n_tokens", arrow_type="int32", owner="tokenized", meaning="length of input_ids, in tokens"),
    Column(
        name="input_ids_error",
        arrow_type="string",
        owner="tokenized",
        meaning="why the text could not be encoded (`on_error` null), else NULL",
        optional=True,
    ),
)
"""All columns that the stages of this project own. Extra ingested columns belong to `ingested` as well."""


def columns_of(stage: str) -> list[Column]:
    """The columns that a stage owns."""
    return [column for column in COLUMNS if column.owner == stage]


def ingested_schema(extra: list[pa.Field] | None = None) -> pa.Schema:
    """Arrow schema of the columns that ingest writes, then the extra columns asked for."""
    import pyarrow as pa

    types = {"int64": pa.int64(), "string": pa.string(), "float": pa.float32(), "int32": pa.int32()}
    fields = [pa.field(column.name, types[column.arrow_type]) for column in columns_of("ingested")]
    return pa.schema([*fields, *(extra or [])])


def computed_field(
    name: str, arrow_type: pa.DataType, *, stage: str, code_version: str, parameters: dict[str, Any]
) -> pa.Field:
    """A field whose metadata says which stage, code version and parameters made its values."""
    import pyarrow as pa

    return pa.field(
        name,
        arrow_type,
        metadata={
            STAGE_KEY: stage.encode(),
            CODE_VERSION_KEY: code_version.encode(),
            PARAMETERS_KEY: canonical_json(parameters).encode(),
        },
    )


def same_making(existing: pa.Field, wanted: pa.Field) -> bool:
    """Whether two fields have the same type and were made by the same code version and parameters."""
    ours, theirs = existing.metadata or {}, wanted.metadata or {}
    return bool(existing.type == wanted.type) and all(
        ours.get(key) == theirs.get(key) for key in (CODE_VERSION_KEY, PARAMETERS_KEY)
    )


def tokenizer_identity(dataset: lance.LanceDataset, column: str = "input_ids") -> TokenizerIdentity:
    """The tokenizer that made a token column at this version, from the column's own metadata.

    Raises:
        TableError: the version has no token column.
    """
    if column not in dataset.schema.names:
        raise TableError(
            f"{dataset.uri} version {dataset.version} has no {column}: materialize corpus/tokenized first (`pretrain "
            "tokenize`, with `--beside` for a second tokenizer), and train on its version."
        )
    metadata = dataset.schema.field(column).metadata or {}
    return from_dict(TokenizerIdentity, json.loads(metadata[PARAMETERS_KEY]))
