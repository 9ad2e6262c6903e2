"""Documents deleted, freed from storage where nothing pins them, and proved absent.

Invariant: what is deleted is exactly what the receipt names. A version that a run, a person's tag or an unfinished
stage keeps is never freed here: it is listed with what keeps it. Doing it again deletes and frees nothing and proves
again; where nothing was found to delete, history is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pretrain_assets.config import MaintainConfig
from pretrain_assets.errors import TableError
from pretrain_assets.forensics.maintenance import maintain
from pretrain_assets.forensics.pins import pinned_by_runs
from pretrain_assets.forensics.receipts.absence import Absence, prove
from pretrain_assets.forensics.receipts.documents import Documents
from pretrain_assets.forensics.receipts.receipt import Receipt, holders
from pretrain_assets.forensics.receipts.storage_search import cached_copies, search_folder
from pretrain_assets.forensics.receipts.traces import Traces, traces_of
from pretrain_assets.loader.entries import discard
from pretrain_assets.loader.store import cache_folder
from pretrain_assets.table.advance import advance
from pretrain_assets.table.delete import Request, delete
from pretrain_assets.table.lease import MAINTENANCE, hold
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.upkeep.maintain import MaintainReport

PURGE = MaintainConfig(older_than_seconds=0, keep_last=1, max_deleted_share=0.0, keep_unfinished_seconds=0)
"""Every fragment with a deleted row is rewritten, the index is built anew, nothing is kept because it is young, nor as
unfinished work: staged files of killed fills and ingests may hold the text as well."""


@dataclass(frozen=True, kw_only=True)
class Erasure:
    """What was done about documents, and what is left of them."""

    deleted: str | None
    """Tag of the version without them; None: there was nothing to delete."""
    rows: int
    """Rows deleted."""
    purged: bool
    """Whether storage was freed of them as far as nothing pins them."""
    versions_freed: tuple[int, ...]
    """Versions freed by that."""
    bytes_before: int | None
    """Bytes of the table on storage before; None without a purge, or where there was nothing to free."""
    bytes_after: int | None
    """Bytes afterwards."""
    waiting: tuple[str, ...]
    """Stages that have to run before their versions can be freed, with the reason and the command."""
    absence: Absence
    """The proof."""

    @property
    def done(self) -> bool:
        """What was asked for happened: no query gives them any more and, after a purge, nothing was found to hold them.

        What could not be looked for is told apart: `Absence.everywhere`.
        """
        return self.absence.nothing_found if self.purged else self.absence.in_newest


def erase(
    location: Location, runs_uri: str, documents: Documents, found: Receipt, *, purge: bool, project: str
) -> Receipt:
    """Delete the documents in one new version, free storage of them if that is asked, and search for them everywhere.

    Args:
        location: The table.
        runs_uri: Folder of all training runs.
        documents: Which ones.
        found: Their receipt.
        purge: Free the versions that hold them and rewrite their fragments and indexes, where nothing pins them.
        project: Local folder with Dagster's event log, which is searched too.

    Returns:
        The receipt with what was done, and with the versions that hold the documents still. It quotes none of them.

    Raises:
        TableError: there are none.
        BusyError: somebody works on the table.
        CommitError: other writers kept winning.
        CheckpointError: with `purge`, a run cannot be read, so that the version that it pins is not known.
    """
    if not len(documents):
        raise TableError(f"Nothing was deleted and nothing freed: no version of {location.uri} has such documents.")
    if purge:
        with hold(location, MAINTENANCE):  # refuse now what would be refused after the deletion
            pass
    pinned = pinned_by_runs(runs_uri, documents.newest.table_id, strict=purge)
    traces = traces_of(open_dataset(location), documents)  # before: afterwards nothing may be left to compare with
    there = tuple(documents.there.tolist())
    record = delete(location, Request(ids=there), pinned_by_runs=pinned).record if there else None
    reports: list[MaintainReport] = []
    waiting: tuple[str, ...] = ()
    if purge and (documents.last.any() or _in_files(location, traces)):
        reports.append(maintain(location, runs_uri, PURGE))
        waiting = advance(location).waiting  # of every stage the newest version is kept: now it is one without them
        reports.append(maintain(location, runs_uri, PURGE))
    if purge:
        for name in cached_copies(documents.newest.table_id, traces)[1]:
            discard(cache_folder() / name)
    pinned = pinned_by_runs(runs_uri, documents.newest.table_id, strict=purge)  # runs may have begun meanwhile
    dataset = open_dataset(location)
    absence = prove(location, runs_uri, documents, traces, pinned_by_runs=pinned, project=project)
    return replace(
        found,
        pin=str(Pin(documents.newest.table_id, dataset.version)),
        num_there=0,
        rows=tuple(
            replace(row, preview=None, deleted=row.deleted or (record.tag if record else None)) for row in found.rows
        ),
        versions=holders(location, runs_uri, documents),
        erasure=Erasure(
            deleted=record.tag if record else None,
            rows=record.rows if record else 0,
            purged=purge,
            versions_freed=tuple(sorted(version for report in reports for version in report.versions_freed)),
            bytes_before=reports[0].bytes_before if reports else None,
            bytes_after=reports[-1].bytes_after if reports else None,
            waiting=waiting,
            absence=absence,
        ),
    )


def _in_files(location: Location, traces: Traces) -> bool:
    """Whether files that a purge frees hold one of them, although no version does."""
    return any(search_folder(uri, traces).found for uri in (location.uri, location.staging_uri))
