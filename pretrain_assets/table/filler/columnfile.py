"""Column files: staged beside the table's data under deterministic names, checked, then handed to a commit.

Invariant: a staged file holds one value per physical row of a fragment, or of consecutive rows of it (a part), NULL for
deleted rows. Its name is a digest of the fragment's input files, of everything that makes the values and of the stage's
last version, so equal work has an equal name until it is committed, and a committed file's name is never given again. A
file found under the name is used as it is once its footer and its NULLs were checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pretrain_assets.table.lineage import digest
from pretrain_assets.table.storage import filesystem, storage_options

if TYPE_CHECKING:
    import lance
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    from lance.schema import LanceSchema

    Offsets = npt.NDArray[np.int64]

FILE_VERSION = (2, 2)
"""Lance file format of staged files; equals the table's data_storage_version."""
READ_BATCH_ROWS = 262_144
"""Rows per batch when a narrow numeric column is read whole."""
PREFIX = "fill-"
"""How the names of all staged files begin; maintenance knows them by it."""
_NAME = re.compile(rf"(?P<stem>{PREFIX}[0-9a-f]+)(?:-(?P<start>\d{{9,}}))?\.lance")


@dataclass(frozen=True, kw_only=True)
class StagedFile:
    """A finished column file of one fragment, or of consecutive rows of it."""

    name: str
    """File name inside the table's data directory."""
    num_rows: int
    """Physical rows that it holds."""
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


def stems(
    dataset: lance.LanceDataset,
    fragments: Sequence[lance.LanceFragment],
    inputs: Sequence[str],
    key: Mapping[str, Any],
    *,
    whole_table: bool,
) -> dict[int, str]:
    """Name of each fragment's staged file, short of its ending.

    It stands for `key` and the files of the input columns (files are never rewritten); with `whole_table` for those of
    all fragments, and for what is deleted in them. A row-wise value does not depend on deletions: a file staged before
    one is as good after it, and one staged before a deletion was undone shows it by a NULL (`finished`).
    """
    leaves = set(leaf_ids(dataset.lance_schema, inputs))
    everything = [[*_identity(f, leaves), _deletions(f)] for f in dataset.get_fragments()] if whole_table else None
    return {
        f.fragment_id: PREFIX + digest({**key, "fragment": _identity(f, leaves), "all": everything}) for f in fragments
    }


def _identity(fragment: lance.LanceFragment, leaves: set[int]) -> list[Any]:
    files = [file.path for file in fragment.metadata.files if leaves.intersection(file.fields)]
    return [fragment.fragment_id, files]


def _deletions(fragment: lance.LanceFragment) -> str | None:
    deletions = fragment.metadata.deletion_file
    return str(deletions.path(fragment.fragment_id)) if deletions else None


def live_offsets(fragment: lance.LanceFragment) -> Offsets | None:
    """Physical offsets of the rows that are not deleted, ascending; None when no row is deleted."""
    import numpy as np

    if not fragment.num_deletions:
        return None
    scanner = fragment.scanner(columns=[], with_row_address=True, batch_size=READ_BATCH_ROWS)
    found = [offsets_of(batch) for batch in scanner.to_batches()]
    return np.concatenate(found) if found else np.empty(0, np.int64)


def offsets_of(batch: pa.RecordBatch) -> Offsets:
    """Physical offsets inside the fragment: the low 32 bits of the row addresses."""
    import numpy as np

    offsets: Offsets = batch.column("_rowaddr").to_numpy().astype(np.int64) & 0xFFFFFFFF
    return offsets


def data_path(uri: str, name: str) -> str:
    """Where a data file of a table lies."""
    return f"{uri.rstrip('/')}/data/{name}"


def finished(
    uri: str, name: str, outputs: pa.Schema, *, start: int, stop: int, live: Offsets | None, judged: Sequence[str]
) -> StagedFile | None:
    """The staged file of that name if it is whole; a torn or outdated one counts as absent and is written again.

    Args:
        uri: The table.
        name: File name.
        outputs: Columns that it must hold.
        start: Physical offset of its first row in the fragment.
        stop: Offset that it must not go beyond.
        live: Offsets of the rows that are not deleted; None when all are there.
        judged: A live row must have a value in one of these columns.
    """
    metadata = _footer(uri, name)
    if metadata is None:
        return None
    types = [(f.name, f.type) for f in metadata.schema]
    rows = metadata.num_rows
    if not 0 < rows <= stop - start or types != [(f.name, f.type) for f in outputs]:
        return None
    try:
        if _lacks_live_row(read_batches(uri, name, READ_BATCH_ROWS, judged), start, start + rows, live):
            return None
    except (OSError, ValueError):
        return None
    fs, path = filesystem(data_path(uri, name))
    return StagedFile(name=name, num_rows=rows, num_bytes=int(fs.size(path)))


def _lacks_live_row(batches: Iterable[pa.RecordBatch], start: int, stop: int, live: Offsets | None) -> bool:
    import numpy as np

    alive = np.ones(stop - start, dtype=bool)
    if live is not None:
        alive[:] = False
        alive[live[np.searchsorted(live, start) : np.searchsorted(live, stop)] - start] = True
    position = 0
    for batch in batches:
        null = np.ones(batch.num_rows, dtype=bool)
        for column in batch.columns:
            null &= column.is_null().to_numpy(zero_copy_only=False)
        if (null & alive[position : position + batch.num_rows]).any():
            return True
        position += batch.num_rows
    return False


def sizes(uri: str) -> dict[str, int]:
    """Bytes of every file beside the table's data, by name."""
    fs, folder = filesystem(data_path(uri, ""))
    fs.invalidate_cache()
    if not fs.exists(folder.rstrip("/")):  # a table that never had a row
        return {}
    return {str(info["name"]).rsplit("/", 1)[-1]: int(info["size"]) for info in fs.ls(folder.rstrip("/"), detail=True)}


def staged_parts(uri: str) -> dict[str, list[int]]:
    """Offsets at which the parts begin that lie beside the table's data, by the stem of their names."""
    found: dict[str, list[int]] = {}
    for name in sizes(uri):
        match = _NAME.fullmatch(name)
        if match and match["start"]:
            found.setdefault(match["stem"], []).append(int(match["start"]))
    return found


def stem_of(name: str) -> str | None:
    """The stem of a file's name; None when it is no file of the filler."""
    match = _NAME.fullmatch(name)
    return match["stem"] if match else None


def part_name(stem: str, start: int) -> str:
    """Name of the part that begins at this offset of the fragment."""
    return f"{stem}-{start:09d}.lance"


def part_rows(uri: str, stem: str, start: int) -> int:
    """Rows that a part holds; 0 when it is torn."""
    metadata = _footer(uri, part_name(stem, start))
    return int(metadata.num_rows) if metadata else 0


def _footer(uri: str, name: str) -> Any | None:
    """What a staged file says of itself; None when it is absent or torn."""
    from lance.file import LanceFileReader

    fs, path = filesystem(data_path(uri, name))
    fs.invalidate_cache()
    if not fs.exists(path) or not fs.size(path):  # Lance's reader panics on an empty file
        return None
    try:
        return LanceFileReader(data_path(uri, name), storage_options=storage_options(uri)).metadata()
    except (OSError, ValueError):
        return None


class ColumnWriter:
    """Writes one staged file; it appears under its name when it is closed, whole."""

    def __init__(self, uri: str, name: str, outputs: pa.Schema):
        import pyarrow as pa
        from lance.file import LanceFileWriter

        self.name, self.num_rows = name, 0
        self._uri = uri
        self._schema = pa.schema([pa.field(f.name, f.type) for f in outputs])
        version = ".".join(map(str, FILE_VERSION))
        self._writer = LanceFileWriter(
            data_path(uri, name), self._schema, version=version, storage_options=storage_options(uri)
        )

    def write(self, arrays: Sequence[pa.Array], offsets: Offsets) -> None:
        """Append values at these offsets, counted from the first row of the file; rows left out become NULL."""
        import numpy as np
        import pyarrow as pa

        length = int(offsets[-1]) + 1 - self.num_rows
        if len(offsets) != length:
            where = np.full(length, -1, dtype=np.int64)
            where[offsets - self.num_rows] = np.arange(len(offsets))
            indices = pa.array(where, mask=where < 0)
            arrays = [array.take(indices) for array in arrays]
        self.append(pa.record_batch(list(arrays), schema=self._schema))

    def append(self, batch: pa.RecordBatch) -> None:
        """Append a batch of the file's own columns."""
        self._writer.write_batch(batch)
        self.num_rows += batch.num_rows

    def close(self, num_rows: int) -> StagedFile:
        """Fill up with NULL to `num_rows`, and finish the file."""
        import pyarrow as pa

        if self.num_rows < num_rows:
            missing = num_rows - self.num_rows
            self.append(pa.record_batch([pa.nulls(missing, f.type) for f in self._schema], schema=self._schema))
        self._writer.close()
        fs, path = filesystem(data_path(self._uri, self.name))
        fs.invalidate_cache()
        return StagedFile(name=self.name, num_rows=self.num_rows, num_bytes=int(fs.size(path)))


def read_batches(uri: str, name: str, batch_rows: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Some columns of a staged file."""
    from lance.file import LanceFileReader

    reader = LanceFileReader(data_path(uri, name), storage_options=storage_options(uri), columns=list(columns))
    yield from reader.read_all(batch_size=batch_rows).to_batches()
