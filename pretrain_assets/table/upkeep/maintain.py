"""Maintenance: index deltas, compaction, clean-up of versions, removal of leftovers; of each, only what has work.

Invariant: everything is planned from one look at the table and then carried out, so `dry_run` shows the same plan; no
value, row id or pinned version changes, and a kill at any point leaves a table that reads as before.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import MaintainConfig
from pretrain_assets.table.lease import MAINTENANCE, hold
from pretrain_assets.table.lineage import RECORD_KEY, LineageRecord, Pin
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.upkeep import compaction
from pretrain_assets.table.upkeep.compaction import Group
from pretrain_assets.table.upkeep.leftovers import StoredFile, find_leftovers, listing, remove
from pretrain_assets.table.upkeep.retention import Kept, Retention, apply_retention, duration_text, plan_retention
from pretrain_assets.table.versions import heal, table_id, tag_version

if TYPE_CHECKING:
    import lance

STAGE = "maintained"
CODE_VERSION = "1"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class IndexUpkeep:
    """How to bring an index up to date: given by its owner, since this room builds none."""

    name: str
    """Name of the index."""
    extend: Callable[[int], object]
    """Index what is not indexed yet, together with so many of the newest segments (0: as a segment of its own), and
    record the version made."""
    rebuild: Callable[[], object] | None = None
    """Build it anew, without the words of deleted rows; None when it has none of them."""


@dataclass(frozen=True, kw_only=True)
class MaintainReport:
    """What maintenance did, or with `dry_run` what it would do."""

    dry_run: bool
    """Nothing was changed."""
    version: int
    """Newest version afterwards."""
    bytes_before: int
    """Bytes of all files of the table on storage."""
    bytes_after: int | None
    """The same afterwards; None where nothing was done to know it by."""
    bytes_rewritten: int
    """Bytes of data files written by compaction; with `dry_run`, of those that it would read."""
    fragments_before: int
    """Fragments of the newest version."""
    fragments_after: int
    """The same afterwards."""
    rows_indexed: int
    """Rows added to the index."""
    segments_merged: int
    """Segments of the index that became one."""
    versions_freed: tuple[int, ...]
    """Versions cleaned up."""
    versions_kept: tuple[Kept, ...]
    """Versions that stay, with the reasons for each."""
    leftovers_removed: int
    """Files removed that no version referred to."""
    leftover_bytes: int
    """Their bytes."""
    waiting: tuple[str, ...]
    """What was left for later, and why."""
    seconds: float
    """Wall-clock seconds."""

    @property
    def changed(self) -> bool:
        """Whether there was anything to do."""
        work = (self.bytes_rewritten, self.rows_indexed, self.segments_merged, self.leftovers_removed)
        return bool(any(work) or self.versions_freed)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    dataset: lance.LanceDataset
    files: list[StoredFile]
    rows_to_index: int
    segments: int
    rebuild: bool
    groups: list[Group]
    retention: Retention
    leftovers: list[StoredFile]
    waiting: tuple[str, ...]


def maintain(
    location: Location,
    config: MaintainConfig,
    *,
    pinned_by_runs: Mapping[int, Sequence[str]],
    index: IndexUpkeep | None = None,
    dry_run: bool = False,
    run_id: str | None = None,
) -> MaintainReport:
    """Look after the table while nobody works on it.

    Args:
        location: The table.
        config: What stays, and what is rewritten.
        pinned_by_runs: Training runs by the version that they, or their checkpoints, name.
        index: How to bring the table's index up to date; None leaves indexes as they are.
        dry_run: Only say what would be done.
        run_id: Dagster run id for the lineage record.

    Raises:
        BusyError: somebody works on the table now.
        CommitError: a writer that takes no lease committed meanwhile.
    """
    started = time.monotonic()
    with nullcontext() if dry_run else hold(location, MAINTENANCE):
        plan = _plan(location, config, pinned_by_runs, index, open_dataset(location) if dry_run else heal(location))
        dataset, rewritten = plan.dataset, sum(group.num_bytes for group in plan.groups)
        fragments = len(dataset.fragment_ids())
        after = fragments - sum(len(group.fragment_ids) - 1 for group in plan.groups)
        retention, num_bytes = plan.retention, None
        if not dry_run:
            dataset, rewritten = _rewrite(location, config, plan, index, run_id)
            retention = plan_retention(dataset, config, pinned_by_runs=pinned_by_runs)  # with the versions just made
            apply_retention(dataset, retention)
            remove(location, plan.leftovers)
            after, num_bytes = len(dataset.fragment_ids()), sum(file.num_bytes for file in listing(location.uri))
    return MaintainReport(
        dry_run=dry_run,
        version=dataset.version,
        bytes_before=sum(file.num_bytes for file in plan.files),
        bytes_after=num_bytes,
        bytes_rewritten=rewritten,
        fragments_before=fragments,
        fragments_after=after,
        rows_indexed=plan.rows_to_index,
        segments_merged=plan.segments,
        versions_freed=retention.freed,
        versions_kept=retention.kept,
        leftovers_removed=len(plan.leftovers),
        leftover_bytes=sum(file.num_bytes for file in plan.leftovers),
        waiting=plan.waiting,
        seconds=round(time.monotonic() - started, 3),
    )


def _plan(
    location: Location,
    config: MaintainConfig,
    pinned_by_runs: Mapping[int, Sequence[str]],
    index: IndexUpkeep | None,
    dataset: lance.LanceDataset,
) -> _Plan:
    files = listing(location.uri)
    found = find_leftovers(location, dataset, files)
    old = [file for file in found if file.age_seconds >= config.keep_unfinished_seconds]
    young = [file for file in found if file.age_seconds < config.keep_unfinished_seconds]
    plans = listing(location.plans_uri)  # of training runs: copies that any run can make again
    old += [file for file in plans if file.age_seconds >= config.keep_unfinished_seconds]
    waiting = []
    if young:
        waiting.append(
            f"{len(young)} files of unfinished work, younger than {duration_text(config.keep_unfinished_seconds)}, stay"
        )
    rows, segments, neighbours = _index_work(dataset, index, config)
    rebuild = config.max_deleted_share == 0 and index is not None and index.rebuild is not None
    if rebuild:
        rows, segments = dataset.count_rows(), 0
    groups = compaction.plan_groups(dataset, config, neighbours=neighbours)
    if groups and any(file.is_staged_column for file in young):
        waiting.append("compaction, for the unfinished fill: its staged columns fit the fragments as they are")
        groups = []
    makes_version = bool(groups or rows or segments)
    return _Plan(
        dataset=dataset,
        files=files,
        rows_to_index=rows,
        segments=segments,
        rebuild=rebuild,
        groups=groups,
        retention=plan_retention(
            dataset,
            config,
            pinned_by_runs=pinned_by_runs,
            keep_newest=not makes_version,
            index_to_come=bool(rows or segments),
        ),
        leftovers=old,
        waiting=tuple(waiting),
    )


def _index_work(
    dataset: lance.LanceDataset, upkeep: IndexUpkeep | None, config: MaintainConfig
) -> tuple[int, int, Callable[[int], Any]]:
    """Rows to index, segments to merge, and then for each fragment in which segments it is."""
    rows, merge, segment_of = 0, 0, []
    for index in dataset.describe_indices():
        mine = {fragment: at for at, segment in enumerate(index.segments) for fragment in segment.fragment_ids}
        if upkeep is not None and index.name == upkeep.name:
            rows = dataset.count_rows() - int(index.num_rows_indexed)
            sizes = [int(segment.size_bytes or 0) for segment in index.segments]
            merge = compaction.segments_to_merge(sizes, config.merge_factor)
            new = len(sizes) - merge
            mine = {fragment: min(at, new) for fragment, at in mine.items()}
            mine |= {f: new for f in dataset.fragment_ids() if rows and f not in mine}
        segment_of.append(mine)
    return rows, merge, lambda fragment: tuple(mine.get(fragment) for mine in segment_of)


def _rewrite(
    location: Location, config: MaintainConfig, plan: _Plan, index: IndexUpkeep | None, run_id: str | None
) -> tuple[lance.LanceDataset, int]:
    """Bring the index up to date and compact; the newest version afterwards, and the bytes of data files written."""
    if index is not None and index.rebuild is not None and plan.rebuild:
        index.rebuild()
    elif index is not None and (plan.rows_to_index or plan.segments):
        index.extend(plan.segments)
    started, dataset = time.monotonic(), open_dataset(location)
    parts = compaction.rewrite(dataset, plan.groups)
    if parts:
        dataset = _commit(dataset, config, plan.groups, parts, run_id, started)
    return dataset, sum(part.num_bytes for part in parts)


def _commit(
    dataset: lance.LanceDataset,
    config: MaintainConfig,
    groups: Sequence[Group],
    parts: Sequence[compaction.Part],
    run_id: str | None,
    started: float,
) -> lance.LanceDataset:
    rows, total = sum(group.num_rows for group in groups), dataset.count_rows()
    old, new = (sum(len(side) for side in sides) for sides in zip(*((p.old, p.new) for p in parts), strict=True))
    record = LineageRecord(
        stage=STAGE,
        table_id=table_id(dataset),
        version=dataset.version + 1,
        inputs=(str(Pin(table_id(dataset), dataset.version)),),
        columns=(),
        parameters={name: getattr(config, name) for name in ("target_bytes", "merge_factor", "max_deleted_share")},
        code_version=CODE_VERSION,
        run_id=run_id,
        rows=rows,
        rows_total=total,
        bytes_added=sum(part.num_bytes for part in parts),
        ledger={"in": total, "rewritten": rows, "left": total - rows},
        seconds=round(time.monotonic() - started, 3),
        details={"fragments_rewritten": old, "fragments_written": new},
    )
    committed = compaction.commit(dataset, parts, {RECORD_KEY: record.to_json()})
    record = dataclasses.replace(record, version=committed.version)
    tag_version(committed, record)
    _log.info("maintained: %d fragments became %d, version %d, tag %s", old, new, record.version, record.tag)
    return committed
