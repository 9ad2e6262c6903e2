"""The table's history: every version with what it added, who made it and who pins it.

Invariant: only reads. A version whose record says what it added is not opened, so that a long history lists quickly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pretrain_assets.table.lineage import LineageRecord
from pretrain_assets.table.versions import HISTORY_TAG, records

if TYPE_CHECKING:
    import lance


@dataclass(frozen=True, kw_only=True)
class VersionInfo:
    """One line of `pretrain versions`."""

    version: int
    """LanceDB version number."""
    created: datetime
    """Commit time."""
    rows: int
    """Rows of the table at this version."""
    bytes_total: int
    """Bytes of all data files that this version refers to."""
    columns_added: tuple[str, ...] | None
    """Columns that got values, by the records; columns new in the schema, where a version left no record; None when
    that cannot be known, because the versions before it were cleaned up."""
    bytes_added: int | None
    """Bytes of the data files (of an index: its files) that this version added; None when that cannot be known."""
    records: tuple[LineageRecord, ...]
    """Lineage records of the stages whose tag names this version."""
    tags: tuple[str, ...]
    """Every tag that names this version."""
    runs: tuple[str, ...]
    """Training runs and their checkpoints that were pinned to this version."""
    indexed: bool
    """The full-text index stands here: searches open this version."""

    @property
    def pinned_by(self) -> tuple[str, ...]:
        """Everything that keeps this version from being cleaned up."""
        index = ("full-text index",) if self.indexed else ()
        return (*(f"tag {tag}" for tag in self.tags), *self.runs, *index)


def list_versions(
    dataset: lance.LanceDataset, pinned_by_runs: Mapping[int, Sequence[str]] | None = None
) -> list[VersionInfo]:
    """Every version still there, oldest first.

    Args:
        dataset: The table, at any version.
        pinned_by_runs: Training runs by the version they were pinned to (`forensics.pins.pinned_by_runs`).
    """
    by_version: dict[int, list[LineageRecord]] = {}
    for record in records(dataset):
        by_version.setdefault(record.version, []).append(record)
    tags: dict[int, list[str]] = {}
    for name, tag in dataset.tags.list().items():
        if name == HISTORY_TAG:  # an archive of records, which holds nothing by itself
            continue
        tags.setdefault(tag["version"], []).append(name)
    newest_index = max((v for v, made in by_version.items() if any(r.stage == "indexed" for r in made)), default=None)
    listed = []
    previous = None
    for entry in dataset.versions():
        version = entry["version"]
        made = tuple(by_version.get(version, ()))
        columns, num_bytes = _added(dataset, previous, version, made)
        listed.append(
            VersionInfo(
                version=version,
                created=entry["timestamp"],
                rows=int(entry["metadata"].get("total_rows", 0)),
                bytes_total=int(entry["metadata"].get("total_files_size", 0)),
                columns_added=columns,
                bytes_added=num_bytes,
                records=made,
                tags=tuple(sorted(tags.get(version, ()))),
                runs=tuple((pinned_by_runs or {}).get(version, ())),
                indexed=version == newest_index,
            )
        )
        previous = version
    return listed


def data_files(dataset: lance.LanceDataset) -> dict[tuple[int | None, str], int]:
    """Bytes of every data file that this version refers to, by storage base and path."""
    files = (file for fragment in dataset.get_fragments() for file in fragment.metadata.files)
    return {(file.base_id, file.path): int(file.file_size_bytes) for file in files}


def _added(
    dataset: lance.LanceDataset, previous: int | None, version: int, made: Sequence[LineageRecord]
) -> tuple[tuple[str, ...] | None, int | None]:
    """Columns and bytes that a version added, from its records, else from what it has more than the one before."""
    wrote = [record for record in made if record.rows or record.bytes_added]  # a stage may adopt a version as it is
    if wrote:
        columns = tuple(dict.fromkeys(name for record in wrote for name in record.columns))
        return columns, sum(record.bytes_added for record in wrote)
    if previous is None and version > 1:
        return None, None
    opened = dataset.checkout_version(version)
    before = dataset.checkout_version(previous) if previous else None
    known = set(before.schema.names) if before else set()
    return tuple(name for name in opened.schema.names if name not in known), _bytes_added(opened, before)


def _bytes_added(opened: lance.LanceDataset, before: lance.LanceDataset | None) -> int:
    """Bytes of data files that `before` lacks; the usual commits say it themselves, without walking all fragments."""
    import lance

    operation: Any = _operation(opened)
    if isinstance(operation, lance.LanceOperation.Append):
        return sum(int(file.file_size_bytes) for fragment in operation.fragments for file in fragment.files)
    if isinstance(operation, (lance.LanceOperation.Delete, lance.LanceOperation.CreateIndex)):
        return 0
    known = data_files(before) if before else {}
    return sum(num_bytes for path, num_bytes in data_files(opened).items() if path not in known)


def _operation(opened: lance.LanceDataset) -> object:
    try:
        transaction = opened.read_transaction(opened.version)
    except (ValueError, OSError):  # its transaction was cleaned up
        return None
    return transaction.operation if transaction else None
