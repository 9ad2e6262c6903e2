"""Stages move on to the newest version without computing anything, where it is what they would make of it.

Why: of every stage the newest version is kept, since the stages after it open it. After a deletion these versions still
hold the deleted rows, and only once every stage stands at a version without them can they be freed. Running the stages
again does the same (each adopts the version that has nothing for it to do); here it takes no sources and no models.

Invariant: a stage moves on only where each row has its values, made as its newest version says, and none of them refers
to a row that is gone. One that cannot says why and which command makes it.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pretrain_assets.plural import counted
from pretrain_assets.table.columns import columns_of
from pretrain_assets.table.filler.spec import ERROR_SUFFIX
from pretrain_assets.table.lease import hold
from pretrain_assets.table.lineage import LineageRecord, Pin
from pretrain_assets.table.schema import STAGE_KEY, same_making
from pretrain_assets.table.storage import Location
from pretrain_assets.table.upkeep.retention import OPENED
from pretrain_assets.table.versions import VERBS, heal, records, table_id, tag_version

if TYPE_CHECKING:
    import lance

REFERENCES = ("dup_of", "near_dup_of")
"""Columns that name another row by its id."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Advance:
    """Where the stages stand afterwards."""

    moved: tuple[str, ...]
    """Tags of the stages that moved on."""
    waiting: tuple[str, ...]
    """Stages that cannot yet, each with the reason and the command."""


def advance(location: Location, *, run_id: str | None = None) -> Advance:
    """Let every stage that has nothing to do move on to the newest version: a tag each, no commit; again is nothing.

    Args:
        location: The table.
        run_id: Dagster run id for the lineage records.

    Raises:
        BusyError: maintenance is running.
    """
    moved, waiting = [], []
    with hold(location, "advance"):
        dataset = heal(location)
        there = {int(entry["version"]) for entry in dataset.versions()}
        newest = {record.stage: record for record in records(dataset) if record.stage in OPENED}
        for stage, record in newest.items():
            if record.version == dataset.version or record.version not in there:
                continue
            reason = _obstacle(dataset, record)
            if reason:
                waiting.append(f"{record.tag}: {reason}; run `pretrain {VERBS[stage]}`")
                continue
            tag_version(dataset, _adopted(dataset, record, run_id))
            moved.append(f"{stage}-v{dataset.version}")
    if moved:
        _log.info("nothing to do for %d stages, which move on to version %d", len(moved), dataset.version)
    return Advance(moved=tuple(moved), waiting=tuple(waiting))


def _obstacle(dataset: lance.LanceDataset, record: LineageRecord) -> str:
    """Why the newest version is not what a stage would make of it; empty where it is."""
    if record.stage == "ingested":
        return ""
    if record.stage == "indexed":
        text = [index for index in dataset.describe_indices() if index.field_names == ["text"]]
        covered = {f for index in text for segment in index.segments for f in segment.fragment_ids}
        return "" if covered >= set(dataset.fragment_ids()) else "rows are not in the index"
    before = {f.name: f for f in dataset.checkout_version(record.version).schema}
    fields = {f.name: f for f in dataset.schema if (f.metadata or {}).get(STAGE_KEY) == record.stage.encode()}
    if not fields or any(name not in before or not same_making(before[name], field) for name, field in fields.items()):
        return "its columns were made anew since, or taken away"
    reasons = [name for name in fields if name.endswith(ERROR_SUFFIX)]  # of rows that failed, whose values are NULL
    nullable = {column.name for column in columns_of(record.stage) if column.nullable}
    failed = " AND ".join(f"{name} IS NULL" for name in reasons) or "true"
    for name in (name for name in fields if name not in nullable and name not in reasons):
        if lacking := dataset.count_rows(f"{name} IS NULL AND {failed}"):
            return f"{counted(lacking, 'row')} without {name}"
    for name in REFERENCES:
        if name in fields and (gone := _referring_to_nothing(dataset, name)):
            return f"{name} of {counted(gone, 'row')} names one that is gone"
    return ""


def _referring_to_nothing(dataset: lance.LanceDataset, name: str) -> int:
    """Rows that name another one which is not there."""
    import numpy as np

    named = dataset.to_table(columns=[name], filter=f"{name} IS NOT NULL")[name].to_numpy()
    if not len(named):
        return 0
    ids = dataset.to_table(columns=["id"])["id"].to_numpy()  # 8 bytes for each row
    return int(np.isin(named, ids, invert=True).sum())


def _adopted(dataset: lance.LanceDataset, record: LineageRecord, run_id: str | None) -> LineageRecord:
    """The record of a stage at the newest version, of which it wrote nothing."""
    wrote_nothing: dict[str, dict[str, Any]] = {"ingested": {"files": []}, "indexed": {"anew": False}}
    inputs = record.inputs if record.stage == "ingested" else (str(Pin(table_id(dataset), dataset.version)),)
    return dataclasses.replace(
        record,
        version=dataset.version,
        inputs=inputs,
        run_id=run_id,
        rows=0,
        rows_total=dataset.count_rows(),
        bytes_added=0,
        ledger={"in": 0, "written": 0},
        seconds=0.0,
        details={**record.details, **wrote_nothing.get(record.stage, {})},
    )
