"""The two commit operations of the column filler, built from staged column files.

Invariant: every field keeps its id for life; a new field takes the next id that the table never used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pretrain_assets.table.filler.columnfile import FILE_VERSION, StagedFile, leaf_ids

if TYPE_CHECKING:
    import lance
    import pyarrow as pa
    from lance.schema import LanceSchema

DROPPED_FIELD = -2
"""Lance's mark for a column of a data file that the table no longer reads from it."""


def replacement_operation(dataset: lance.LanceDataset, outputs: pa.Schema, staged: Mapping[int, StagedFile]) -> Any:
    """Values for columns that exist: commutes with appends, deletes, index builds and other columns."""
    import lance

    ids = leaf_ids(dataset.lance_schema, outputs.names)
    group = lance.LanceOperation.DataReplacementGroup
    return lance.LanceOperation.DataReplacement([group(at, _data_file(file, ids)) for at, file in staged.items()])


def merge_operation(
    dataset: lance.LanceDataset,
    outputs: Sequence[pa.Schema],
    staged: Sequence[Mapping[int, StagedFile]],
    *,
    remade: Sequence[bool],
) -> Any:
    """Values and schema in one version: new columns, columns made anew, or several groups of columns.

    A fragment without a staged file loses the values that it has of a group that is `remade`: they were made otherwise.
    """
    import lance

    schema = evolved_schema(dataset, [f for group in outputs for f in group])
    fragments = []
    for fragment in dataset.get_fragments():
        metadata = fragment.metadata
        for group, files, remake in zip(outputs, staged, remade, strict=True):
            ids = leaf_ids(schema, group.names)
            file = files.get(fragment.fragment_id)
            if file or remake:
                kept = [_without(old, set(ids)) for old in metadata.files]
                metadata.files = [old for old in kept if old] + ([_data_file(file, ids)] if file else [])
        fragments.append(metadata)
    return lance.LanceOperation.Merge(fragments, schema, preserves_nullability=True)


def evolved_schema(dataset: lance.LanceDataset, fields: Sequence[pa.Field]) -> LanceSchema:
    """The table's schema with these fields added, or described anew under the ids they have.

    `LanceSchema.from_pyarrow` numbers fields from 0, wrong once a column was ever dropped. So the serialised fields of
    the table's own schema (the form that pickle uses) are kept, and the new ones are added to them.
    """
    rebuild, (metadata, *serialised) = dataset.lance_schema.__reduce__()
    by_id = dict(zip(_all_ids(dataset.lance_schema.fields()), serialised, strict=True))
    following = dataset.max_field_id + 1
    for f in fields:
        existing = dataset.lance_schema.field(f.name)
        first = existing.id() if existing else following
        numbered = dict(enumerate(_serialised(f, first), first))
        by_id.update(numbered)
        following = max(following, first + len(numbered))
    return rebuild(metadata, *by_id.values())


def _all_ids(fields: Sequence[Any]) -> Iterator[int]:
    for f in fields:
        yield f.id()
        yield from _all_ids(f.children())


def _serialised(f: pa.Field, first_id: int) -> list[bytes]:
    """A field and its children as Lance stores them, numbered depth first from `first_id`."""
    import pyarrow as pa
    from lance.schema import LanceSchema

    before = [pa.field(f"_{i}", pa.int8()) for i in range(first_id)]
    _, (_, *serialised) = LanceSchema.from_pyarrow(pa.schema([*before, f])).__reduce__()
    return list(serialised[first_id:])


def _data_file(file: StagedFile, ids: list[int]) -> Any:
    from lance.fragment import DataFile

    return DataFile(file.name, ids, list(range(len(ids))), *FILE_VERSION, file.num_bytes)


def _without(file: Any, ids: set[int]) -> Any | None:
    """A data file that no longer provides these fields; None when it provides nothing else."""
    from lance.fragment import DataFile

    if not ids.intersection(file.fields):
        return file
    fields = [DROPPED_FIELD if leaf in ids else leaf for leaf in file.fields]
    if all(leaf == DROPPED_FIELD for leaf in fields):
        return None
    return DataFile(
        file.path,
        fields,
        file.column_indices,
        file.file_major_version,
        file.file_minor_version,
        file.file_size_bytes,
        file.base_id,
    )
