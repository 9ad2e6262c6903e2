"""Which step saw which tokens of which document: arithmetic on plans, no logs kept.

Invariant: what is computed here is what the loader emits, token by token; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pretrain_assets.loader.plan import EpochPlan
from pretrain_assets.loader.schedule import Schedule


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
        for entry in plan.places_of(found):
            for span in _spans(plan, int(entry), 0, cycles, first_step, schedule.cycles_per_step):
                found[span.doc_id].append(span)
    return {i: sorted(spans) or None for i, spans in found.items()}  # a mixture may repeat a document in any split


def times_seen(schedule: Schedule, *, last_step: int) -> npt.NDArray[np.uint32]:
    """How often a run of `last_step` steps trained on each row that its filter keeps, in table order; shape (rows,).

    A document counts once for every draw of it of which at least one token was trained on.
    """
    times = np.zeros(len(schedule.plan(0).rows), np.uint32)
    for plan, _, cycles in _epochs(schedule, last_step):
        reached = plan.position(cycles).docs_consumed
        for first, count in zip(plan.offsets[:-1], reached, strict=True):
            np.add.at(times, plan.order[first : first + count], 1)
    return times


def documents(schedule: Schedule, step: int) -> list[Exposure]:
    """Every exposure of one step, in block order."""
    epoch, start = schedule.locate(step)
    stop = start + schedule.cycles_per_step
    plan = schedule.plan(epoch)
    seen: list[Exposure] = []
    for split in range(plan.num_splits):
        ends, base = plan.ends_of(split), int(plan.offsets[split])
        first = int(np.searchsorted(ends, start * plan.seq_len, side="right"))
        last = min(len(ends), int(np.searchsorted(ends, stop * plan.seq_len, side="left")) + 1)
        for entry in range(base + first, base + last):
            first_step = step - start // schedule.cycles_per_step
            seen += _spans(plan, entry, start, stop, first_step, schedule.cycles_per_step)
    return sorted(seen, key=lambda exposure: (exposure.block, exposure.offset))


def _epochs(schedule: Schedule, last_step: int) -> Iterator[tuple[EpochPlan, int, int]]:
    """Plan, number of the first step, and cycles trained, of every epoch that the run entered."""
    first_step, epoch = 1, 0
    while first_step <= last_step:
        steps = min(schedule.steps_in(epoch), last_step - first_step + 1)
        yield schedule.plan(epoch), first_step, steps * schedule.cycles_per_step
        first_step += steps
        epoch += 1


def _spans(
    plan: EpochPlan, entry: int, start_cycle: int, stop_cycle: int, first_step: int, cycles_per_step: int
) -> Iterator[Exposure]:
    """Spans of the document at one place of the plan inside the cycles from `start_cycle` to `stop_cycle`."""
    split = int(np.searchsorted(plan.offsets, entry, side="right")) - 1
    doc_begin = int(plan.ends[entry - 1]) if entry > plan.offsets[split] else 0
    begin = max(doc_begin, start_cycle * plan.seq_len)
    end = min(int(plan.ends[entry]), stop_cycle * plan.seq_len)
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
            doc_id=int(plan.rows.doc_ids[plan.order[entry]]),
        )
        begin += tokens
