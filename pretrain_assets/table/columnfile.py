"""Column files: staged beside the table's data under deterministic names, checked, then handed to a commit.

Invariant: a staged file holds exactly one value per physical row of its fragment (NULL for deleted rows). Its name is a
digest of the fragment's input files and of everything that makes the values, so equal work has an equal name and a
file found under that name can be used as it is once its footer was checked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pretrain_assets.progress import Progress
from pretrain_assets.table.lineage import digest
from pretrain_assets.table.storage import filesystem, storage_options

if TYPE_CHECKING:
    import lance
    import pyarrow as pa
    from lance.schema import LanceSchema

_log = logging.getLogger(__name__)

FILE_VERSION = (2, 2)
"""Lance file format of staged files; equals the table's data_storage_version."""
READ_BATCH_ROWS = 262_144
"""Rows per batch when a narrow numeric column is read whole."""


@dataclass(frozen=True, kw_only=True)
class StagedFile:
    """A finished column file of one fragment."""

    name: str
    """File name inside the table's data directory."""
    num_rows: int
    """Physical rows of the fragment."""
    num_bytes: int
    """Size of the file."""


def leaf_ids(schema: LanceSchema, names: Sequence[str]) -> list[int]:
    """Field ids of the leaves of these columns, depth first: what a data file lists (the list itself is no leaf)."""
    fields = {f.name(): f for f in schema.fields()}
    return [leaf for name in names for leaf in _leaves(fields[name])]


def _leaves(lance_field: Any) -> Iterator[int]:
    children = lance_field.children()
    if not children:
        yield lance_field.id()
    for child in children:
        yield from _leaves(child)


def stage(
    dataset: lance.LanceDataset,
    fragments: Sequence[lance.LanceFragment],
    *,
    outputs: pa.Schema,
    inputs: Sequence[str],
    make_function: Callable[[], Callable[[pa.RecordBatch], Sequence[pa.Array]]],
    key: Mapping[str, Any],
    whole_table: bool,
    batch_bytes: int,
    progress: Progress,
) -> dict[int, StagedFile]:
    """Write one column file for every fragment, reusing those that an earlier run finished.

    Returns:
        Fragment id to staged file.
    """
    function = None
    staged: dict[int, StagedFile] = {}
    leaves = set(leaf_ids(dataset.lance_schema, inputs))
    everything = [_identity(f, leaves) for f in dataset.get_fragments()] if whole_table else None
    for fragment in fragments:
        name = "fill-" + digest({**key, "fragment": _identity(fragment, leaves), "all": everything}) + ".lance"
        found = _finished(dataset, name, outputs, fragment.physical_rows)
        if found is None:
            function = function or make_function()
            batches = _input_batches(fragment, inputs, batch_bytes)
            found = _write(dataset, name, outputs, fragment.physical_rows, batches, function, progress)
        else:
            _log.info("fragment %d was finished by an earlier run", fragment.fragment_id)
            progress.update(fragment.count_rows())
        staged[fragment.fragment_id] = found
    return staged


def _identity(fragment: lance.LanceFragment, leaves: set[int]) -> list[Any]:
    """What the values of a fragment depend on: the files (never rewritten) of its input columns and of its deletions.

    Deletions count because a version with fewer of them can be restored: its rows would be NULL in the old file.
    """
    files = [file.path for file in fragment.metadata.files if leaves.intersection(file.fields)]
    deletions = fragment.metadata.deletion_file
    return [fragment.fragment_id, files, deletions.path(fragment.fragment_id) if deletions else None]


def _path(dataset: lance.LanceDataset, name: str) -> str:
    return f"{dataset.uri.rstrip('/')}/data/{name}"


def _finished(dataset: lance.LanceDataset, name: str, outputs: pa.Schema, num_rows: int) -> StagedFile | None:
    """The staged file of that name if it is complete; a torn one is treated as absent and written again."""
    from lance.file import LanceFileReader

    fs, path = filesystem(_path(dataset, name))
    fs.invalidate_cache()
    if not fs.exists(path) or not fs.size(path):  # Lance's reader panics on an empty file
        return None
    try:
        metadata = LanceFileReader(_path(dataset, name), storage_options=storage_options(dataset.uri)).metadata()
    except (OSError, ValueError):
        return None
    types = [(f.name, f.type) for f in metadata.schema]
    if metadata.num_rows != num_rows or types != [(f.name, f.type) for f in outputs]:
        return None
    return StagedFile(name=name, num_rows=num_rows, num_bytes=int(fs.size(path)))


def _input_batches(
    fragment: lance.LanceFragment, inputs: Sequence[str], batch_bytes: int
) -> Iterator[tuple[pa.RecordBatch, Any]]:
    """Batches of live rows with their physical offsets (numpy int64) inside the fragment."""
    scanner = fragment.scanner(columns=list(inputs), with_row_address=True, batch_size_bytes=batch_bytes)
    for batch in scanner.to_batches():
        yield batch.select(list(inputs)), _offsets(batch)


def _offsets(batch: pa.RecordBatch) -> Any:
    """Physical offsets inside the fragment: the low 32 bits of the row addresses."""
    import numpy as np

    return batch.column("_rowaddr").to_numpy().astype(np.int64) & 0xFFFFFFFF


def _write(
    dataset: lance.LanceDataset,
    name: str,
    outputs: pa.Schema,
    num_rows: int,
    batches: Iterator[tuple[pa.RecordBatch, Any]],
    function: Callable[[pa.RecordBatch], Sequence[pa.Array]],
    progress: Progress,
) -> StagedFile:
    import pyarrow as pa
    from lance.file import LanceFileWriter

    plain = pa.schema([pa.field(f.name, f.type) for f in outputs])
    version = ".".join(map(str, FILE_VERSION))
    options = storage_options(dataset.uri)
    with LanceFileWriter(_path(dataset, name), plain, version=version, storage_options=options) as writer:
        position = 0
        for batch, offsets in batches:
            arrays = [_checked(a, f, batch.num_rows) for a, f in zip(function(batch), plain, strict=True)]
            stop = int(offsets[-1]) + 1
            writer.write_batch(_at_offsets(arrays, plain, offsets - position, stop - position))
            position = stop
            progress.update(batch.num_rows, batch.nbytes)
        if position < num_rows:
            writer.write_batch(_nulls(plain, num_rows - position))
    done = _finished(dataset, name, outputs, num_rows)
    if done is None:
        raise OSError(f"column file {_path(dataset, name)} does not hold {num_rows} rows after writing: disk full?")
    return done


def _checked(array: pa.Array, expected: pa.Field, num_rows: int) -> pa.Array:
    if array.type != expected.type or len(array) != num_rows or array.null_count:
        raise AssertionError(
            f"column {expected.name}: got {len(array)} values of {array.type} with {array.null_count} nulls, expected "
            f"{num_rows} values of {expected.type} without nulls"
        )
    return array


def _at_offsets(arrays: Sequence[pa.Array], schema: pa.Schema, offsets: Any, length: int) -> pa.RecordBatch:
    """Place values at their physical offsets; deleted rows in between become NULL."""
    import numpy as np
    import pyarrow as pa

    if len(offsets) != length:
        where = np.full(length, -1, dtype=np.int64)
        where[offsets] = np.arange(len(offsets))
        indices = pa.array(where, mask=where < 0)
        arrays = [array.take(indices) for array in arrays]
    return pa.record_batch(list(arrays), schema=schema)


def _nulls(schema: pa.Schema, length: int) -> pa.RecordBatch:
    import pyarrow as pa

    return pa.record_batch([pa.nulls(length, f.type) for f in schema], schema=schema)


def read_column(
    dataset: lance.LanceDataset,
    fragments: Sequence[lance.LanceFragment],
    column: pa.Field,
    *,
    staged: Mapping[int, StagedFile],
    in_table: bool,
) -> pa.ChunkedArray:
    """All live values of one column in row order; NULL where it has not been computed.

    Args:
        dataset: The table.
        fragments: Fragments to read, in order.
        column: Name and type of the column.
        staged: Files that hold the values of some fragments.
        in_table: Read the other fragments from the table; otherwise their values are NULL.
    """
    import pyarrow as pa

    chunks: list[pa.Array] = []
    for fragment in fragments:
        if fragment.fragment_id in staged:
            chunks.extend(_read_staged(dataset, fragment, column.name, staged[fragment.fragment_id]))
        elif in_table:
            scanner = fragment.scanner(columns=[column.name], batch_size=READ_BATCH_ROWS)
            chunks.extend(batch.column(0) for batch in scanner.to_batches())
        else:
            chunks.append(pa.nulls(fragment.count_rows(), column.type))
    return pa.chunked_array(chunks, column.type)


def _read_staged(
    dataset: lance.LanceDataset, fragment: lance.LanceFragment, name: str, file: StagedFile
) -> Iterator[pa.Array]:
    import numpy as np
    from lance.file import LanceFileReader

    alive = np.zeros(file.num_rows, dtype=bool)
    for batch in fragment.scanner(columns=[], with_row_address=True, batch_size=READ_BATCH_ROWS).to_batches():
        alive[_offsets(batch)] = True
    reader = LanceFileReader(_path(dataset, file.name), storage_options=storage_options(dataset.uri), columns=[name])
    position = 0
    for batch in reader.read_all(batch_size=READ_BATCH_ROWS).to_batches():
        yield batch.column(0).filter(alive[position : position + batch.num_rows])
        position += batch.num_rows


def read_back(dataset: lance.LanceDataset, fragment_ids: Sequence[int], names: Sequence[str]) -> None:
    """Read the first and last row of each filled fragment; Lance itself does not check a committed column file.

    Raises:
        AssertionError: a value is NULL or cannot be read.
    """
    for fragment_id in fragment_ids:
        fragment = dataset.get_fragment(fragment_id)
        rows = fragment.count_rows()
        for offset in {0, rows - 1} if rows else set():
            batch = fragment.to_table(columns=list(names), offset=offset, limit=1)
            for name in names:
                if batch.num_rows != 1 or batch.column(name).null_count:
                    raise AssertionError(
                        f"{dataset.uri} version {dataset.version}: column {name} of fragment {fragment_id} reads back "
                        f"empty at row {offset}"
                    )
