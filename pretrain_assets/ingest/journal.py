"""Finished work of an unfinished ingest: data files that are written but not yet committed.

Invariant: an entry's key holds everything that decides its content (table, first id, settings, files), so an entry
found under the key wanted is the work wanted. Entries are beside the table and removed once their work is committed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pretrain_assets.ingest.sources import SourceFile
from pretrain_assets.table.storage import Location, filesystem, is_remote, join

UNIT_BYTES = 256 << 20
"""Source bytes after which finished work is journaled: what a killed ingest can lose, about five seconds of work."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What one unit wrote."""

    table_id: str
    """Identity of the table, also of one that is yet to be created."""
    next_id: int
    """First id after the unit's rows."""
    fragments: list[dict[str, Any]]
    """Lance fragments written, as `FragmentMetadata.to_json()`."""
    files: list[dict[str, Any]]
    """Per source file: name, fingerprint, rows written, bytes read."""
    ledger: dict[str, int]
    """Rows in, written and left out by reason."""

    @property
    def data_files(self) -> list[tuple[str, int]]:
        """Name and size of every data file."""
        return [(file["path"], int(file["file_size_bytes"])) for part in self.fragments for file in part["files"]]


def units(files: Sequence[SourceFile]) -> Iterator[list[SourceFile]]:
    """Consecutive files, closed once they hold UNIT_BYTES."""
    unit: list[SourceFile] = []
    for file in files:
        unit.append(file)
        if sum(part.size for part in unit) >= UNIT_BYTES:
            yield unit
            unit = []
    if unit:
        yield unit


class Journal:
    """Entries of one table's unfinished ingest."""

    def __init__(self, location: Location):
        self._fs, self._folder = filesystem(join(location.staging_uri, "ingest"))
        self._data_folder = filesystem(join(location.uri, "data"))[1]
        self._is_remote = is_remote(location.staging_uri)

    def load(self, key: str) -> Entry | None:
        """The entry, if it is there with all its data files whole."""
        self._fs.invalidate_cache()
        path = self._path(key)
        if not self._fs.exists(path):
            return None
        entry = Entry(**json.loads(self._fs.cat_file(path)))
        return entry if all(self._is_whole(name, size) for name, size in entry.data_files) else None

    def save(self, key: str, entry: Entry) -> None:
        """Write an entry atomically: renamed into place on disk, one put on an object store."""
        path, content = self._path(key), json.dumps(asdict(entry), sort_keys=True).encode()
        if self._is_remote:
            self._fs.pipe_file(path, content)
        else:
            self._fs.makedirs(self._folder, exist_ok=True)
            self._fs.pipe_file(f"{path}.tmp", content)
            os.replace(f"{path}.tmp", path)

    def clear(self) -> None:
        """Remove all entries."""
        self._fs.invalidate_cache()
        if self._fs.exists(self._folder):
            self._fs.rm(self._folder, recursive=True)

    def _path(self, key: str) -> str:
        return join(self._folder, f"{key}.unit")

    def _is_whole(self, name: str, size: int) -> bool:
        path = join(self._data_folder, name)
        return bool(self._fs.exists(path)) and self._fs.info(path)["size"] == size
