"""Fields of the table's columns.

Invariant: the metadata of every computed field names its owner stage, the code version and the parameters that made its
values.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import TokenizerIdentity, from_dict
from pretrain_assets.errors import TableError
from pretrain_assets.table.columns import columns_of
from pretrain_assets.table.lineage import canonical_json

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

STAGE_KEY = b"pretrain.stage"
CODE_VERSION_KEY = b"pretrain.code_version"
PARAMETERS_KEY = b"pretrain.parameters"


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


def making_changes(existing: pa.Field, wanted: pa.Field) -> list[str]:
    """What of a column's making is another now, as `name: old -> new`."""
    ours, theirs = existing.metadata or {}, wanted.metadata or {}
    old, new = (json.loads(making.get(PARAMETERS_KEY, b"{}")) for making in (ours, theirs))
    versions = [making.get(CODE_VERSION_KEY, b"none").decode() for making in (ours, theirs)]
    changes = [f"code version: {versions[0]} -> {versions[1]}"] if versions[0] != versions[1] else []
    return changes + [
        f"{name}: {json.dumps(old.get(name)):.60} -> {json.dumps(new.get(name)):.60}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def tokenizer_identity(dataset: lance.LanceDataset, column: str = "input_ids") -> TokenizerIdentity:
    """The tokenizer that made a token column at this version, from the column's own metadata.

    Raises:
        TableError: the version has no token column.
    """
    if column not in dataset.schema.names:
        raise TableError(
            f"{dataset.uri} version {dataset.version} has no {column}: {_remedy(column)}, and train on its version."
        )
    parameters = making_parameters(dataset.schema.field(column))
    return from_dict(TokenizerIdentity, {f.name: parameters[f.name] for f in fields(TokenizerIdentity)})


def _remedy(token_column: str) -> str:
    word = token_column.removeprefix("input_ids_")
    if word == token_column:
        return "materialize corpus/tokenized first (`pretrain tokenize`)"
    return f"run `pretrain tokenize --beside {word} --tokenizer NAME` first"


def made_by(existing: pa.Field) -> list[str]:
    """What made a computed column, for the parameters of one that is computed from it; empty for another one."""
    found = existing.metadata or {}
    return [found[key].decode() for key in (CODE_VERSION_KEY, PARAMETERS_KEY) if key in found]


def text_parameters(schema: pa.Schema, column: str) -> dict[str, Any]:
    """What a stage's parameters say of the text column that it reads: nothing of `text`, which no stage makes anew."""
    if column == "text":
        return {}
    made = made_by(schema.field(column))
    return {"text_column": column} | ({"text_made_by": made} if made else {})


def making_parameters(existing: pa.Field) -> dict[str, Any]:
    """The parameters that made a computed column; empty for another one."""
    found: dict[str, Any] = json.loads((existing.metadata or {}).get(PARAMETERS_KEY, b"{}"))
    return found
