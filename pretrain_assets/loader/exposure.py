"""Which step saw which tokens of which document: arithmetic on plans, no logs kept.

Invariant: what is computed here is what the loader emits, token by token; a test compares the two. Tokens in holes
(`data.without`) were not seen, and are no exposures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pretrain_assets.loader.plan import EpochPlan, Int64Array
from pretrain_assets.loader.schedule import Schedule

_CHUNK_PLACES = 1 << 20


@dataclass(frozen=True, kw_only=True, order=True)
class Exposure:
    """A run of one document's tokens inside one block of one step."""

    step: int
    """Optimizer step, from 1."""
    epoch: int
    """Epoch, from 0."""
    block: int
    """Block in the epoch's order, cycle-major then split: cycle * num_splits + split."""
    split: int
    """Split that the block belongs to."""
    offset: int
    """First token's place in the block."""
    tokens: int
    """Tokens of the document in the block, its EOS included."""
    doc_start: int
    """First token's place in the document."""
    doc_id: int
    """Document, the table's `id`."""


def exposures(schedule: Schedule, ids: Iterable[int], *, last_step: int) -> dict[int, list[Exposure] | None]:
    """Every exposure of the given documents in a run of `last_step` steps, in training order, every repeat included.

    A document that the run never reached, or that its filter leaves out, maps to None.
    """
    found: dict[int, list[Exposure]] = {int(i): [] for i in ids}
    for plan, first_step, cycles in _epochs(schedule, last_step):
        for place in plan.places_of(found).tolist():
            for span in spans(plan, place, 0, unmasked(plan, place, cycles), first_step, schedule.cycles_per_step):
                found[span.doc_id].append(span)
    return {i: sorted(seen) or None for i, seen in found.items()}  # a mixture may repeat a document in any split


def times_seen(schedule: Schedule, *, last_step: int) -> npt.NDArray[np.uint32]:
    """How often a run of `last_step` steps trained on each row that its filter keeps, in table order; shape (rows,).

    A document counts once for every draw of it of which at least one token was trained on.
    """
    times = np.zeros(len(schedule.plan(0).rows), np.uint32)
    for plan, _, cycles in _epochs(schedule, last_step):
        reached = plan.position(cycles).docs_consumed
        for first, count in zip(plan.offsets[:-1], reached, strict=True):
            np.add.at(times, plan.order[first : first + count], 1)
        begins = starts(plan, plan.holes)
        hidden = (begins < cycles * plan.seq_len) & (begins >= plan.holes_from * plan.seq_len)
        np.subtract.at(times, plan.order[plan.holes[hidden]], 1)
    return times


def reached(schedule: Schedule, *, last_step: int) -> npt.NDArray[np.int32]:
    """Tokens of each row that its filter keeps, from its first on, that a run of `last_step` steps trained on.

    EOS included, in the draw of it that came furthest; in table order, shape (rows,).
    """
    furthest = np.zeros(len(schedule.plan(0).rows), np.int32)
    for plan, _, cycles in _epochs(schedule, last_step):
        for first in range(0, len(plan.order), _CHUNK_PLACES):
            places = np.arange(first, min(first + _CHUNK_PLACES, len(plan.order)))
            places, begins, stops = _trained(plan, places, cycles)
            np.maximum.at(furthest, plan.order[places], (stops - begins).astype(np.int32))
    return furthest


class Totals(NamedTuple):
    """What a run trained on of many documents; arrays of shape (documents,), all 0 where it never reached one."""

    first: npt.NDArray[np.int64]
    """Step (from 1) of each document's first token."""
    last: npt.NDArray[np.int64]
    """Step of its last token."""
    times: npt.NDArray[np.int64]
    """Draws of it with at least one token trained on."""
    tokens: npt.NDArray[np.int64]
    """Tokens of it trained on, EOS included."""


def totals(schedule: Schedule, ids: npt.NDArray[np.int64], *, last_step: int) -> Totals:
    """What a run of `last_step` steps trained on of many documents.

    As `exposures` says it, in numbers alone: 32 bytes per document, however often it is drawn.

    Args:
        schedule: Of the run.
        ids: Different documents, by the table's `id`, in ascending order; shape (ids,).
        last_step: Optimizer steps done.
    """
    found = Totals(*(np.zeros(len(ids), np.int64) for _ in Totals._fields))
    never = np.iinfo(np.int64).max
    found.first[:] = never
    for plan, first_step, cycles in _epochs(schedule, last_step):
        places, begins, stops = _trained(plan, plan.places_of(ids), cycles)
        at = np.searchsorted(ids, plan.rows.doc_ids[plan.order[places]])
        step_tokens = plan.seq_len * schedule.cycles_per_step
        np.minimum.at(found.first, at, first_step + begins // step_tokens)
        np.maximum.at(found.last, at, first_step + (stops - 1) // step_tokens)
        np.add.at(found.times, at, 1)
        np.add.at(found.tokens, at, stops - begins)
    found.first[found.first == never] = 0
    return found


def documents(schedule: Schedule, step: int) -> list[Exposure]:
    """Every exposure of one step, in block order."""
    epoch, start = schedule.locate(step)
    stop, plan = start + schedule.cycles_per_step, schedule.plan(epoch)
    first_step = step - start // schedule.cycles_per_step
    seen: list[Exposure] = []
    for split in range(plan.num_splits):
        ends, base = plan.ends_of(split), int(plan.offsets[split])
        first = int(np.searchsorted(ends, start * plan.seq_len, side="right"))
        last = min(len(ends), int(np.searchsorted(ends, stop * plan.seq_len, side="left")) + 1)
        for place in range(base + first, base + last):
            seen += spans(plan, place, start, unmasked(plan, place, stop), first_step, schedule.cycles_per_step)
    return sorted(seen, key=lambda exposure: (exposure.block, exposure.offset))


def _epochs(schedule: Schedule, last_step: int) -> Iterator[tuple[EpochPlan, int, int]]:
    """Plan, number of the first step, and cycles trained, of every epoch that the run entered."""
    first_step, epoch = 1, 0
    while first_step <= last_step:
        steps = min(schedule.steps_in(epoch), last_step - first_step + 1)
        yield schedule.plan(epoch), first_step, steps * schedule.cycles_per_step
        first_step += steps
        epoch += 1


def _trained(plan: EpochPlan, places: Int64Array, cycles: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The places whose documents an epoch's first cycles train on, and where that begins and stops in their splits."""
    begins = starts(plan, places)
    reach = np.where(np.isin(places, plan.holes), min(cycles, plan.holes_from), cycles) * plan.seq_len
    entered = begins < reach
    places, begins = places[entered], begins[entered]
    return places, begins, np.minimum(plan.ends[places], reach[entered])


def starts(plan: EpochPlan, places: Int64Array) -> Int64Array:
    """Where the documents at places of the order begin in the token streams of their splits."""
    return np.where(np.isin(places, plan.offsets), 0, plan.ends[places - 1])


def spans(
    plan: EpochPlan, place: int, start_cycle: int, stop_cycle: int, first_step: int, cycles_per_step: int
) -> Iterator[Exposure]:
    """Spans of the document at one place of the plan inside the cycles from `start_cycle` to `stop_cycle`.

    Args:
        plan: Of an epoch.
        place: In its order.
        start_cycle: First cycle.
        stop_cycle: Cycle after the last.
        first_step: Number of the epoch's first step.
        cycles_per_step: Blocks of every split in a step.
    """
    split = int(np.searchsorted(plan.offsets, place, side="right")) - 1
    doc_begin = int(plan.ends[place - 1]) if place > plan.offsets[split] else 0
    begin = max(doc_begin, start_cycle * plan.seq_len)
    end = min(int(plan.ends[place]), stop_cycle * plan.seq_len)
    while begin < end:
        cycle, offset = divmod(begin, plan.seq_len)
        tokens = min(end - begin, plan.seq_len - offset)
        yield Exposure(
            step=first_step + cycle // cycles_per_step,
            epoch=plan.epoch,
            block=cycle * plan.num_splits + split,
            split=split,
            offset=offset,
            tokens=tokens,
            doc_start=begin - doc_begin,
            doc_id=int(plan.rows.doc_ids[plan.order[place]]),
        )
        begin += tokens


def unmasked(plan: EpochPlan, place: int, stop_cycle: int) -> int:
    """The cycle up to which a place's tokens are trained on: `stop_cycle`, or earlier where it is a hole."""
    at = int(np.searchsorted(plan.holes, place))
    is_hole = at < len(plan.holes) and plan.holes[at] == place
    return min(stop_cycle, plan.holes_from) if is_hole else stop_cycle
