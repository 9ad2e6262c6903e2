"""Contamination in time: at which step a run first trained on each evaluation item, so which checkpoints' scores stand.

Invariant: a score is said to stand only where every document that the run had trained on by then was searched, and none
of them holds an item of the set. What decides is the first token of the document: never later than the item's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pretrain_assets.curate.contamination import STAGE
from pretrain_assets.errors import TableError
from pretrain_assets.forensics.checkpoints import Checkpoint
from pretrain_assets.forensics.contamination.item_documents import (
    Holding,
    Int64s,
    holding_documents,
    unsearched_documents,
)
from pretrain_assets.forensics.contamination.item_words import Sighting, sightings
from pretrain_assets.forensics.exposure import schedule_of
from pretrain_assets.forensics.subject import table_of
from pretrain_assets.loader.exposure import totals
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.schema import making_parameters
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.verify import Finding
from pretrain_assets.table.versions import find_record, latest_record, open_pin
from pretrain_assets.train.checkpoint import checkpoint_uri, find_fault, steps

if TYPE_CHECKING:
    import lance


CODE_VERSION = "1"
"""Raised when the same table and run would give another answer."""


@dataclass(frozen=True, kw_only=True)
class ItemInTime:
    """An evaluation item that stands in the corpus."""

    item: str
    """`set/id`."""
    documents: int
    """Documents that hold it."""
    documents_seen: int
    """Those that the checkpoint trained on."""
    times: int
    """How often it did, over all of them."""
    first_step: int | None
    """First step (from 1) that trained on one of them, up to the run's newest saved checkpoint; None if none did."""
    document: int
    """The one of that step, by the table's `id`; else the first that holds it."""


@dataclass(frozen=True, kw_only=True)
class SetInTime:
    """An evaluation set, and the saved checkpoints whose scores on it stand."""

    name: str
    """Its name."""
    fingerprint: str
    """Of its items' ids and texts."""
    items: int
    """Items that it has."""
    searched: int
    """Of these, searched for. Nothing is known of the others."""
    too_short: int
    """Not searched for: no text of `min_words` words."""
    boilerplate: int
    """Not searched for: every n-gram stands in more than `max_items` items."""
    found: int
    """Items that stand in a document of the table."""
    dirty: tuple[int, ...]
    """Items that the run had seen by each saved checkpoint."""
    first_step: int | None
    """First step that trained on an item, up to the newest saved checkpoint; None if none did."""
    newest_clean: int | None
    """Step of the newest saved checkpoint that had seen none, all its documents having been searched; None if none."""
    stands: bool | None
    """Whether the asked checkpoint's score on the items searched for stands: False where it had seen one, None where
    none was searched for, or documents that it trained on were not searched."""


@dataclass(frozen=True, kw_only=True)
class ContaminationInTime:
    """What a run had seen of the evaluation sets, and when."""

    checkpoint: str
    """The checkpoint asked about."""
    step: int
    """Optimizer steps that it has done."""
    pin: str
    """Version that it was trained on."""
    version: int
    """Version whose contamination columns were read."""
    parameters: dict[str, Any]
    """How documents were searched, and for what."""
    newer: str | None
    """Tag of a later version that was searched for other items or otherwise; None if there is none."""
    steps: tuple[int, ...]
    """The run's saved checkpoints, the asked one among them, ascending."""
    sets: tuple[SetInTime, ...]
    """Every evaluation set searched for."""
    items: tuple[ItemInTime, ...]
    """Every item that stands in the table: those seen by first step, then the others by name."""
    sightings: tuple[Sighting, ...]
    """The first of them, each in one document: the evidence."""
    documents: int
    """Documents of the table that hold an item."""
    documents_kept: int
    """Those that the run's filter keeps."""
    documents_seen: int
    """Those that the checkpoint trained on."""
    unsearched: int
    """Documents that the run's filter keeps and that were not searched."""
    unsearched_seen: int
    """Those that the checkpoint trained on."""

    @property
    def stands(self) -> bool | None:
        """Whether the checkpoint's scores on all sets stand: False where one does not, None where one is unknown."""
        found = [one.stands for one in self.sets]
        return False if False in found else None if None in found else True

    def first_step_of(self) -> dict[str, int]:
        """First step of every item that the run had seen by its newest saved checkpoint."""
        return {one.item: one.first_step for one in self.items if one.first_step is not None}


def contamination_in_time(
    location: Location, checkpoint: Checkpoint, *, tag: str | None = None, only: str | None = None, limit: int = 20
) -> ContaminationInTime:
    """When the run of a checkpoint first trained on each evaluation item that the corpus holds.

    The contamination columns are those of the version trained on. Where that has none, those of the newest version that
    has are as good: the text of a row never changes, and rows deleted since count as not searched.

    Args:
        location: The table.
        checkpoint: Whose scores are asked about.
        tag: A tag of the decontaminated stage, whose columns are read instead: of evaluation sets added later.
        only: Name of the one eval set to ask about; None for all.
        limit: Items that evidence is looked up for.

    Raises:
        TableError: no version was searched, there is no such tag, or the set was not searched for.
    """
    location = table_of(checkpoint.run_dir, checkpoint.pin, location)
    dataset = _searched_version(location, checkpoint, tag)
    parameters = making_parameters(dataset.schema.field("contaminated"))
    record = latest_record(open_dataset(location), STAGE)
    newer = record.tag if record and record.version > dataset.version and record.parameters != parameters else None
    sets = _wanted(parameters["eval_sets"], only, dataset.version, newer)
    schedule = schedule_of(location, checkpoint.pin, checkpoint.recipe)
    saved = tuple(sorted({*saved_steps(checkpoint.run_dir), checkpoint.step}))
    kept = schedule.plan(0).rows.doc_ids
    unsearched = unsearched_documents(dataset, kept)
    without_search = totals(schedule, unsearched, last_step=saved[-1]).first
    holding = holding_documents(dataset, only)
    first = totals(schedule, holding.ids, last_step=saved[-1]).first
    times = totals(schedule, holding.ids, last_step=checkpoint.step).times
    items = _items(holding, first, times)
    unknown_from = int(without_search[without_search > 0].min(initial=saved[-1] + 1))
    return ContaminationInTime(
        checkpoint=checkpoint.uri,
        step=checkpoint.step,
        pin=str(checkpoint.pin),
        version=dataset.version,
        parameters=parameters,
        newer=newer,
        steps=saved,
        sets=tuple(_set(one, items, saved, checkpoint.step, unknown_from) for one in sets),
        items=items,
        sightings=sightings(
            location,
            checkpoint,
            schedule,
            [(one.item, one.document) for one in items[:limit]],
            searched=Pin(checkpoint.pin.table_id, dataset.version),
            last_step=saved[-1],
        ),
        documents=len(holding.ids),
        documents_kept=int(np.isin(holding.ids, kept).sum()),
        documents_seen=int((times > 0).sum()),
        unsearched=len(unsearched),
        unsearched_seen=int(((without_search > 0) & (without_search <= checkpoint.step)).sum()),
    )


def scores_stand(found: ContaminationInTime) -> Finding:
    """The scores of the checkpoint on all evaluation sets stand: it had trained on none of the items searched for."""
    wrong = {one.name: one.dirty[found.steps.index(found.step)] for one in found.sets if one.stands is False}
    unknown = [one.name for one in found.sets if one.stands is None]
    said = [
        f"{name}: {count:,} {'item' if count == 1 else 'items'} trained on, so its score does not stand"
        for name, count in wrong.items()
    ]
    said += [f"{name}: unknown, since documents (or all of its items) were not searched" for name in unknown]
    return Finding(
        name="scores_stand",
        passed=not said,
        description="; ".join(said) or f"none of {', '.join(one.name for one in found.sets)} was trained on",
        details={"items_seen": wrong, "unknown": unknown, "newest_clean": {s.name: s.newest_clean for s in found.sets}},
    )


def saved_steps(run_dir: str) -> list[int]:
    """Steps of a run's complete checkpoints, by the sizes of their files, newest first."""
    return [step for step in steps(run_dir) if find_fault(checkpoint_uri(run_dir, step), digests=False) is None]


def _searched_version(location: Location, checkpoint: Checkpoint, tag: str | None) -> lance.LanceDataset:
    """The version whose contamination columns answer."""
    pinned = open_pin(location, checkpoint.pin)
    if tag is not None:
        return open_pin(location, find_record(location, STAGE, tag).pin)
    if "contaminated" in pinned.schema.names:
        return pinned
    record = latest_record(open_dataset(location), STAGE)
    if record is None:
        raise TableError(
            f"Not measured: neither version {pinned.version} of {location.uri}, on which {checkpoint.uri} was trained, "
            "nor a later one was searched for evaluation items. Run `pretrain decontaminate`, which can be done after "
            "training as well, and ask again."
        )
    return open_pin(location, record.pin)


def _wanted(
    sets: Sequence[dict[str, Any]], only: str | None, version: int, newer: str | None
) -> Sequence[dict[str, Any]]:
    """The sets asked about."""
    names = [one["name"] for one in sets]
    if only is None or only in names:
        return [one for one in sets if only in (None, one["name"])]
    more = f" {newer} was searched for others, or otherwise: ask with --tag {newer}." if newer else ""
    raise TableError(
        f"Version {version} was not searched for an eval set {only!r}, but for {', '.join(names)}.{more} `pretrain "
        f"decontaminate {only}=FILES ...` searches for it, also after training; then ask with its --tag."
    )


def _items(holding: Holding, first: Int64s, times: Int64s) -> tuple[ItemInTime, ...]:
    """Every item, from the first step and the times of each document that holds one."""
    count, never = len(holding.names), np.iinfo(np.int64).max
    at = np.where(first > 0, first, never)[holding.documents]
    order = np.lexsort((holding.documents, at, holding.items))
    leaders = order[np.searchsorted(holding.items[order], np.arange(count))]  # of each item, the earliest step, then id
    often = times[holding.documents]
    sums = [np.bincount(holding.items, weights, count).astype(int) for weights in (None, often > 0, often)]
    found = [
        ItemInTime(
            item=name,
            documents=int(sums[0][number]),
            documents_seen=int(sums[1][number]),
            times=int(sums[2][number]),
            first_step=None if at[leaders[number]] == never else int(at[leaders[number]]),
            document=int(holding.ids[holding.documents[leaders[number]]]),
        )
        for number, name in enumerate(holding.names)
    ]
    return tuple(sorted(found, key=lambda one: (one.first_step or never, one.item)))


def _set(
    described: dict[str, Any], items: tuple[ItemInTime, ...], saved: tuple[int, ...], step: int, unknown_from: int
) -> SetInTime:
    """One set, from all items; documents that were not searched come in from step `unknown_from` on."""
    mine = [one.first_step for one in items if one.item.partition("/")[0] == described["name"]]
    seen = sorted(first for first in mine if first is not None)
    first = seen[0] if seen else None
    unknown_from = unknown_from if described["searched"] else 0
    clean = [at for at in saved if at < min(unknown_from, first or unknown_from)]
    dirty_here = first is not None and first <= step
    return SetInTime(
        **{key: described[key] for key in ("name", "fingerprint", "items", "searched", "too_short", "boilerplate")},
        found=len(mine),
        dirty=tuple(int(np.searchsorted(seen, at, side="right")) for at in saved),
        first_step=first,
        newest_clean=clean[-1] if clean else None,
        stands=False if dirty_here else None if unknown_from <= step else True,
    )
