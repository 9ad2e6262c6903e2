"""Opt-out: rows deleted by id or predicate, in one new version; older versions keep them until they are freed.

Invariant: exactly the rows that were asked for are gone, whatever was committed meanwhile; nothing matched means no new
version. Deleted ids are never given out again.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import MaintainConfig
from pretrain_assets.errors import CommitError, ConfigError, TableError
from pretrain_assets.table.lease import hold
from pretrain_assets.table.lineage import RECORD_KEY, LineageRecord, Pin
from pretrain_assets.table.predicate import check_predicate, redacted
from pretrain_assets.table.storage import Location, open_dataset, storage_options
from pretrain_assets.table.upkeep.retention import Kept, plan_retention
from pretrain_assets.table.versions import heal, table_id, tag_version

if TYPE_CHECKING:
    import lance
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

STAGE = "deleted"
CODE_VERSION = "1"
COMMIT_TRIES = 8
SCAN_ROWS = 262_144
LISTED_IDS = 100
"""Up to this many ids are written into the record and the report."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Request:
    """Which rows to delete."""

    ids: tuple[int, ...] = ()
    """Rows with these ids."""
    where: str | None = None
    """Rows that satisfy this SQL predicate."""
    with_duplicates: bool = False
    """Rows with the same text as one of those, too."""

    @property
    def predicate(self) -> str:
        """One SQL predicate for both.

        Raises:
            ConfigError: neither ids nor a predicate.
        """
        parts = [f"id IN ({', '.join(map(str, self.ids))})"] if self.ids else []
        parts += [f"({self.where})"] if self.where else []
        if not parts:
            raise ConfigError("Which rows? Give --id NUMBER, once or more, or --where PREDICATE.")
        return " OR ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Deletion:
    """Rows to be deleted, or that were."""

    request: Request
    """What was asked for."""
    rows: int
    """Rows deleted; copies included when they were asked for."""
    copies: int
    """Rows with the same text: deleted too when that was asked for, else they stay."""
    unhashed: int
    """Rows that no deduplication has seen yet, so that whether they are copies is not known."""
    ids: tuple[int, ...]
    """Ids of the rows, unless they are many."""
    missing_ids: tuple[int, ...]
    """Ids asked for that are not in the table."""
    still_in: tuple[Kept, ...]
    """Older versions that have some of the rows, and what keeps each, its age aside."""
    record: LineageRecord | None = None
    """Record of the version made; None when none was."""


@dataclass(frozen=True, kw_only=True)
class _Found:
    dataset: lance.LanceDataset
    ids: npt.NDArray[np.int64]
    addresses: npt.NDArray[np.int64]
    copies: int
    unhashed: int
    oldest: int


def preview(
    location: Location, request: Request, *, pinned_by_runs: Mapping[int, Sequence[str]] | None = None
) -> Deletion:
    """What `delete` would do now; changes nothing.

    Raises:
        FilterError: `where` is not a predicate of the table.
        TableError: copies are asked for, and rows were not deduplicated yet.
    """
    return _deletion(_find(open_dataset(location), request), request, pinned_by_runs or {})


def delete(
    location: Location,
    request: Request,
    *,
    pinned_by_runs: Mapping[int, Sequence[str]] | None = None,
    run_id: str | None = None,
) -> Deletion:
    """Delete rows in one new version, tagged `deleted-v<N>`; fills and ingests may go on beside it.

    Args:
        location: The table.
        request: Which rows.
        pinned_by_runs: Training runs by the version that they name, for the report.
        run_id: Dagster run id for the lineage record.

    Raises:
        FilterError: `where` is not a predicate of the table.
        TableError: copies are asked for, and rows were not deduplicated yet.
        BusyError: maintenance, or another deletion, is running.
        CommitError: other writers kept winning.
    """
    from lance.commit import CommitConflictError

    started = time.monotonic()
    with hold(location, "delete"):
        for attempt in range(COMMIT_TRIES):
            found = _find(heal(location), request)
            if not len(found.ids):
                return _deletion(found, request, {})
            try:
                record = _commit(location, found, request, run_id, started)
            except CommitConflictError as error:
                _log.info("another writer committed first; trying again (%d of %d): %s", attempt, COMMIT_TRIES, error)
                continue
            return dataclasses.replace(_deletion(found, request, pinned_by_runs or {}), record=record)
    raise CommitError(
        f"Deleting lost {COMMIT_TRIES} commits in a row to other writers of {location.uri}. Run it again."
    )


def _find(dataset: lance.LanceDataset, request: Request) -> _Found:
    import numpy as np

    if request.where is not None:
        check_predicate(dataset, request.where, setting="where")
    found = _scan(dataset, request.predicate)
    copies, unhashed = 0, dataset.count_rows()
    if "content_hash" in dataset.schema.names:
        unhashed = dataset.count_rows("content_hash IS NULL")
        same = _same_text(dataset, found)
        copies = len(same) - len(found)
        if request.with_duplicates:
            found = same
    if request.with_duplicates and unhashed:
        raise TableError(
            f"{unhashed:,} rows of {dataset.uri} were not compared yet, so copies could be missed: run `pretrain "
            "dedup` first, then delete again."
        )
    created = found.column("_row_created_at_version").to_numpy()
    return _Found(
        dataset=dataset,
        ids=found.column("id").to_numpy(),
        addresses=found.column("_rowaddr").to_numpy().astype(np.int64),
        copies=copies,
        unhashed=unhashed,
        oldest=int(created.min()) if len(created) else 0,
    )


def _scan(dataset: lance.LanceDataset, predicate: str) -> pa.Table:
    columns = ["id", "_row_created_at_version"]
    columns += ["content_hash"] if "content_hash" in dataset.schema.names else []
    return dataset.scanner(columns=columns, filter=predicate, with_row_address=True, batch_size=SCAN_ROWS).to_table()


def _same_text(dataset: lance.LanceDataset, found: pa.Table) -> pa.Table:
    """The rows, and all that have a content hash in common with one of them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = ["id", "_row_created_at_version", "content_hash"]
    scanner = dataset.scanner(columns=columns, with_row_address=True, batch_size=SCAN_ROWS)
    hashes, ids = pc.unique(found.column("content_hash").drop_null()), found.column("id")
    parts = [
        batch.filter(
            pc.or_(
                pc.is_in(batch.column("content_hash"), value_set=hashes), pc.is_in(batch.column("id"), value_set=ids)
            )
        )
        for batch in scanner.to_batches()
    ]
    return pa.Table.from_batches(parts, schema=scanner.projected_schema) if parts else found


def _commit(location: Location, found: _Found, request: Request, run_id: str | None, started: float) -> LineageRecord:
    import lance
    import numpy as np

    updated, emptied = [], []
    fragments, offsets = found.addresses >> 32, found.addresses & 0xFFFFFFFF
    for fragment_id in np.unique(fragments).tolist():
        left = found.dataset.get_fragment(fragment_id).delete_rows(offsets[fragments == fragment_id].tolist())
        if left is None:
            emptied.append(fragment_id)
        else:
            updated.append(left)
    record = _record(found, request, run_id, time.monotonic() - started)
    committed = lance.LanceDataset.commit(
        location.uri,
        lance.Transaction(
            read_version=found.dataset.version,
            operation=lance.LanceOperation.Delete(updated, emptied, str(record.parameters["predicate"])),
            transaction_properties={RECORD_KEY: record.to_json()},
        ),
        storage_options=storage_options(location.uri),
    )
    record = dataclasses.replace(record, version=committed.version, rows_total=committed.count_rows())
    tag_version(committed, record)
    _log.info("deleted: %s rows, version %d, tag %s", f"{record.rows:,}", record.version, record.tag)
    return record


def _record(found: _Found, request: Request, run_id: str | None, seconds: float) -> LineageRecord:
    rows, total, identity = len(found.ids), found.dataset.count_rows(), table_id(found.dataset)
    details: dict[str, Any] = {"copies": found.copies}
    return LineageRecord(
        stage=STAGE,
        table_id=identity,
        version=found.dataset.version + 1,
        inputs=(str(Pin(identity, found.dataset.version)),),
        columns=(),
        parameters={
            "predicate": _redacted_request(request),
            "with_duplicates": request.with_duplicates,
        },
        code_version=CODE_VERSION,
        run_id=run_id,
        rows=rows,
        rows_total=total - rows,
        bytes_added=0,
        ledger={"in": total, "deleted": rows, "kept": total - rows},
        seconds=round(seconds, 3),
        details=details | ({"ids": found.ids.tolist()} if rows <= LISTED_IDS else {}),
    )


def _redacted_request(request: Request) -> str:
    if len(request.ids) > LISTED_IDS:
        return f"{len(request.ids)} ids" + (" and a predicate" if request.where else "")
    return redacted(request.predicate)


def _deletion(found: _Found, request: Request, pinned_by_runs: Mapping[int, Sequence[str]]) -> Deletion:
    config = MaintainConfig(older_than_seconds=0)
    kept = plan_retention(found.dataset, config, pinned_by_runs=pinned_by_runs, keep_newest=False).kept
    gone = set(found.ids.tolist())
    return Deletion(
        request=request,
        rows=len(found.ids),
        copies=found.copies,
        unhashed=found.unhashed,
        ids=tuple(found.ids.tolist()) if len(found.ids) <= LISTED_IDS else (),
        missing_ids=tuple(row for row in request.ids if row not in gone),
        still_in=tuple(entry for entry in kept if found.oldest <= entry.version) if gone else (),
    )
