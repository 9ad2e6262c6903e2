"""Columns of a remote table copied to local disk, so that their random reads need no network.

Invariant: the copy holds the pinned version's rows under their row ids, with these columns and `id`, and no other; it
is opened only once it is whole, and a copy that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain_assets.errors import PretrainError, TableError
from pretrain_assets.loader.entries import (
    CACHE_VARIABLE,
    MANIFEST,
    keep,
    read_manifest,
    remove_unused,
    sole_process,
    sync,
    write_manifest,
    writing,
)
from pretrain_assets.progress import Progress
from pretrain_assets.table.lineage import digest
from pretrain_assets.table.storage import filesystem, storage_options
from pretrain_assets.table.versions import content_digest

if TYPE_CHECKING:
    import lance
    from lance.file import LanceFileSession

PIECE_BYTES = 8 << 20
"""Bytes of one request: enough to hide the latency of an object store."""
THREADS = 16
"""Requests at once; twice as many pieces may be in memory, 256 MB."""
SMALLEST_GAP_BYTES = 1 << 20
"""Parts of a file that are not needed are read all the same where they are shorter than this."""

_PART = ".part"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _File:
    """A file of the copy."""

    name: str
    """Path inside the table's folder, here and there."""
    size: int
    """Bytes of the whole file."""
    spans: tuple[tuple[int, int], ...]
    """Parts that are copied, as (start, stop) in ascending order up to the end; between them the copy has holes."""

    def missing(self, entry: Path) -> Iterator[_Piece]:
        """Pieces not there yet. A file under its own name is whole; under its other one it is up to its length."""
        if _size(entry / self.name) == self.size:
            return
        # the last byte is fetched again: every unfinished file has a piece, whose arrival finishes it
        there = max(0, (_size(entry / (self.name + _PART)) or 0) - 1)
        for start, stop in self.spans:
            for at in range(max(start, there), stop, PIECE_BYTES):
                yield _Piece(file=self, start=at, stop=min(stop, at + PIECE_BYTES))


@dataclass(frozen=True, kw_only=True)
class _Piece:
    file: _File
    start: int
    stop: int


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def mirror(
    dataset: lance.LanceDataset,
    columns: Sequence[str],
    folder: Path,
    *,
    free_bytes: Callable[[Path], int] = _free_bytes,
) -> lance.LanceDataset:
    """A local copy of some columns of one version, made by one process of the node while the others wait.

    The dataset returned has these columns and `id` only. Its row ids are those of the original; its version number is
    higher by one where columns were left out.

    Args:
        dataset: The table at its pinned version.
        columns: Columns to copy.
        folder: Folder of all copies; this one goes to `columns-<digest of the version's content and columns>` in it.
        free_bytes: Free bytes of the disk that holds a folder.

    Raises:
        TableError: a column is not there or holds blobs, or the version refers to files of another table.
        PretrainError: the disk has not enough room, or the folder cannot be written.
    """
    import lance

    chosen = sorted({"id", *columns})  # `id` carries the table's identity, and every fragment has it
    key = {"version": dataset.version, "content": content_digest(dataset), "columns": chosen}
    entry = folder / f"columns-{digest(key)}"
    if not _is_whole(entry, key, log_level=logging.DEBUG):
        with sole_process(entry, f"copies columns of {dataset.uri} to {entry}"):
            if not _is_whole(entry, key, log_level=logging.WARNING):
                files = _files(dataset, chosen)
                with writing(folder):
                    shutil.rmtree(entry / "_versions", ignore_errors=True)
                    entry.mkdir(exist_ok=True)
                _copy(dataset.uri, files, entry, free_bytes)
                _leave_out_others(entry, chosen)
                found = (path for path in entry.rglob("*") if path.is_file() and path.name != MANIFEST)
                sizes = {str(path.relative_to(entry)): path.stat().st_size for path in found}
                write_manifest(entry, {"key": key, "files": sizes})
                remove_unused(folder)
    keep(entry)
    return lance.dataset(str(entry))


def _is_whole(entry: Path, key: dict[str, Any], *, log_level: int) -> bool:
    if not (entry / MANIFEST).exists():
        return False
    try:
        wrong = [name for name, size in read_manifest(entry, key)["files"].items() if _size(entry / name) != size]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        wrong = [f"{MANIFEST}: {error}"]
    if wrong:
        _log.log(log_level, "%s is damaged, and what it lacks is copied again: %s", entry, wrong[0])
    return not wrong


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.exists() else None


def _leave_out_others(entry: Path, columns: Sequence[str]) -> None:
    """Drop all other columns from the copy: where they share a file with these, their values are holes."""
    import lance

    copy = lance.dataset(str(entry))
    if others := [name for name in copy.schema.names if name not in columns]:
        copy.drop_columns(others)


def _files(dataset: lance.LanceDataset, columns: Sequence[str]) -> list[_File]:
    """The version's own file, its deletions, and the data files that hold these columns.

    Raises:
        TableError: as `mirror`.
    """
    from lance.file import LanceFileSession

    where = f"{dataset.uri} at version {dataset.version}"
    fields = {field.name(): field for field in dataset.lance_schema.fields()}
    if unknown := [name for name in columns if name not in fields]:
        raise TableError(f"{where} has no column {unknown[0]!r}; it has {', '.join(fields)}")
    blobs = [field for field in map(dataset.schema.field, columns) if "blob" in f"{field.type} {field.metadata}"]
    if blobs:
        raise TableError(f"{where} holds blobs in {blobs[0].name!r}: such a column cannot be copied to local disk")
    wanted = {number for name in columns for number in _field_ids(fields[name])}
    data, deletions = [], {}
    for fragment in dataset.get_fragments():
        metadata = fragment.metadata
        data += [file for file in metadata.files if wanted.intersection(file.fields)]
        if metadata.deletion_file is not None:
            deletions[metadata.deletion_file.path(fragment.fragment_id).lstrip("/")] = metadata.deletion_file
    if any(file.base_id is not None for file in [*data, *deletions.values()]):
        raise TableError(
            f"{where} refers to files of another table (it is a branch or a shallow clone), which cannot be copied to "
            "local disk. Switch loader.prefetch off."
        )
    session = LanceFileSession(dataset.uri, storage_options=storage_options(dataset.uri))
    fs, root = filesystem(dataset.uri)

    def plain(name: str) -> _File:
        size = int(fs.size(f"{root}/{name}"))
        return _File(name=name, size=size, spans=((0, size),))

    names = [f"_versions/{2**64 - 1 - dataset.version:020}.manifest", f"_versions/{dataset.version}.manifest"]
    version = next((name for name in names if fs.exists(f"{root}/{name}")), names[0])
    with ThreadPoolExecutor(THREADS) as pool:
        data_files = pool.map(lambda file: _data_file(session, file, wanted), data)
        return [*pool.map(plain, [version, *deletions]), *data_files]


def _field_ids(field: Any) -> Iterator[int]:
    yield field.id()
    for child in field.children():
        yield from _field_ids(child)


def _data_file(session: LanceFileSession, file: Any, wanted: set[int]) -> _File:
    """A data file, less the parts that only other columns need."""
    name, size = f"data/{file.path}", int(file.file_size_bytes)
    if wanted.issuperset(file.fields) or (file.file_major_version, file.file_minor_version) < (2, 1):
        return _File(name=name, size=size, spans=((0, size),))
    layout = session.open_reader(name).metadata()
    places = [at for field, at in zip(file.fields, file.column_indices, strict=True) if field in wanted and at >= 0]
    buffers = list(layout.global_buffers)
    for column in (layout.columns[at] for at in places):
        buffers += [*column.column_buffers, *(buffer for page in column.pages for buffer in page.buffers)]
    tail = (layout.num_data_bytes, size)  # what describes all columns stands behind their data
    spans: list[tuple[int, int]] = []
    for start, stop in sorted([*((b.position, b.position + b.size) for b in buffers), tail]):
        if spans and start - spans[-1][1] < SMALLEST_GAP_BYTES:
            spans[-1] = (spans[-1][0], max(stop, spans[-1][1]))
        else:
            spans.append((start, stop))
    return _File(name=name, size=size, spans=tuple(spans))


def _copy(uri: str, files: Sequence[_File], entry: Path, free_bytes: Callable[[Path], int]) -> None:
    """Copy what is missing of the files, pieces at once but written in order.

    Raises:
        TableError: a file cannot be read.
        PretrainError: the disk has not enough room, or the folder cannot be written.
    """
    from lance.file import LanceFileSession

    pieces = [piece for file in files for piece in file.missing(entry)]
    needed, free = sum(piece.stop - piece.start for piece in pieces), free_bytes(entry)
    if needed > free:
        raise PretrainError(
            f"{entry.parent} has {free:,} bytes free, and the copy of columns of {uri} needs {needed:,} more. Make "
            f"room, set {CACHE_VARIABLE} to a folder on a larger disk, or switch loader.prefetch off."
        )
    session = LanceFileSession(uri, storage_options=storage_options(uri))

    def read(piece: _Piece) -> bytes:
        name, wanted = piece.file.name, piece.stop - piece.start
        try:
            content: bytes = session.read_range(name, piece.start, wanted)
        except OSError as error:
            raise TableError(f"{uri}/{name} cannot be read; a new run goes on from here: {error}") from error
        if len(content) != wanted:
            raise TableError(f"{uri}/{name} ends before byte {piece.stop:,}, its size in the table's manifest")
        return content

    total = sum(stop - start for file in files for start, stop in file.spans)
    with Progress(f"copying to {entry}", total=total, unit="bytes") as progress, ThreadPoolExecutor(THREADS) as pool:
        progress.skip(total - needed)
        for file, arriving in groupby(_in_order(pool, read, pieces), key=lambda piece: piece[0].file):
            _write(entry, file, arriving, progress)


def _in_order(
    pool: ThreadPoolExecutor, read: Callable[[_Piece], bytes], pieces: Sequence[_Piece]
) -> Iterator[tuple[_Piece, bytes]]:
    """Every piece with its content, in order; some are read ahead."""
    ahead: deque[tuple[_Piece, Future[bytes]]] = deque()
    for piece in pieces:
        ahead.append((piece, pool.submit(read, piece)))
        if len(ahead) == 2 * THREADS:
            first, content = ahead.popleft()
            yield first, content.result()
    for piece, content in ahead:
        yield piece, content.result()


def _write(entry: Path, file: _File, pieces: Iterator[tuple[_Piece, bytes]], progress: Progress) -> None:
    part = entry / (file.name + _PART)
    with writing(entry.parent):
        part.parent.mkdir(exist_ok=True)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as out:
            for piece, content in pieces:
                out.seek(piece.start)
                out.write(content)
                progress.update(len(content), len(content))
        sync(part)
        part.rename(entry / file.name)
