"""What is on storage: bytes of a table, and the files that no version refers to, left by killed or failed work.

Invariant: only what Lance itself finds unreferenced (by any version, tag or branch that is there), unfinished writes
(`.tmp*`) and what stands in the staging folder are ever called leftovers. Young ones may be work that goes on: age
decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from pretrain_assets.table.filler.columnfile import PREFIX
from pretrain_assets.table.storage import Location, filesystem

if TYPE_CHECKING:
    import lance

UNFINISHED = ".tmp"
"""How the names begin under which Lance writes on a disk, before it renames."""
NO_LIMIT = 1 << 40


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file on storage."""

    uri: str
    """Path inside its filesystem."""
    name: str
    """Path inside the table's folder, or inside its staging folder."""
    num_bytes: int
    """Size."""
    age_seconds: float
    """Since it was last written."""

    @property
    def is_staged_column(self) -> bool:
        """Whether it is finished work of a fill that was not committed."""
        return self.name.startswith(f"data/{PREFIX}")


def listing(uri: str) -> list[StoredFile]:
    """Every file under a folder."""
    fs, root = filesystem(uri)
    fs.invalidate_cache()
    now = datetime.now(timezone.utc).timestamp()
    start = len(root.rstrip("/")) + 1
    found: dict[str, dict[str, Any]] = fs.find(root, detail=True) if fs.exists(root) else {}
    return [
        StoredFile(uri=path, name=path[start:], num_bytes=int(info["size"]), age_seconds=now - _written(info))
        for path, info in sorted(found.items())
    ]


def _written(info: dict[str, Any]) -> float:
    """Unix time of the last write: a number on local disk, a date on S3."""
    written = info.get("mtime") or info.get("LastModified") or info.get("last_modified") or info.get("updated")
    if isinstance(written, datetime):
        return written.timestamp()
    return float(written) if written else datetime.now(timezone.utc).timestamp()  # unknown counts as young


def find_leftovers(location: Location, dataset: lance.LanceDataset, files: Sequence[StoredFile]) -> list[StoredFile]:
    """Leftovers of any age, the table's and those of its staging folder.

    Args:
        location: The table.
        dataset: It, at its newest version.
        files: Listing of its folder, made before.
    """
    explained = dataset.explain_cleanup_old_versions(
        versions=[dataset.version],  # never removed itself: what is left are files that no version refers to
        error_if_tagged_old_versions=False,
        delete_unverified=True,
        include_files=True,
        max_files=NO_LIMIT,
    )
    folder = location.uri.rstrip("/").rsplit("/", 1)[-1]
    unreferenced = {f.path.rsplit(f"{folder}/", 1)[-1] for f in explained.candidate_files if f.unverified}
    unreferenced |= _unreferenced_deletions(dataset, files)
    mine = [f for f in files if f.name in unreferenced or f.name.rsplit("/", 1)[-1].startswith(UNFINISHED)]
    return [*mine, *(f for f in listing(location.staging_uri) if not f.name.startswith("leases/"))]


def _unreferenced_deletions(dataset: lance.LanceDataset, files: Sequence[StoredFile]) -> set[str]:
    """Deletion files that no version refers to: Lance itself only looks for them while it frees later versions."""
    there = {file.name for file in files if file.name.startswith("_deletions/")}
    if not there or dataset.branches.list():  # a branch may refer to any of them
        return set()
    for entry in dataset.versions():
        for fragment in dataset.checkout_version(entry["version"]).get_fragments():
            deletions = fragment.metadata.deletion_file
            there -= {deletions.path(fragment.fragment_id).lstrip("/")} if deletions is not None else set()
    return there


def remove(location: Location, leftovers: Sequence[StoredFile]) -> None:
    """Remove these files."""
    fs, _ = filesystem(location.uri)
    for file in leftovers:
        fs.rm_file(file.uri)
