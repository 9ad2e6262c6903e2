"""Holes: documents that a run leaves out (`data.without`) while every other token stays in its place.

Invariant: arithmetic on plans, equal to what the packer lays; a test compares the two. Holes change no plan, so the
steps, blocks and splits of a run are those of the run without holes. The first token after a hole is learned like any
other: its document is not left out, and padding before it says what an end-of-text says, that a document ended.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from pretrain_assets.loader.plan import EpochPlan, Int64Array
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.plural import counted

_log = logging.getLogger(__name__)


class Targets:
    """Which steps of a run have a token to predict, on any rank: without holes each has."""

    def __init__(self, schedule: Schedule):
        self._schedule = schedule
        self._per_cycle = lru_cache(maxsize=2)(lambda epoch: targets_per_cycle(schedule.plan(epoch)))

    def any_in(self, step: int) -> bool:
        """Whether there is anything to learn from a step."""
        epoch, cycle = self._schedule.locate(step)
        if not len(self._schedule.plan(epoch).holes):
            return True
        return bool(self._per_cycle(epoch)[cycle : cycle + self._schedule.cycles_per_step].any())


def describe_holes(plan: EpochPlan, without: Sequence[int]) -> None:
    """Log what an epoch leaves out; a warning where documents are in no epoch, as the filter does not keep them.

    Args:
        plan: Of the epoch.
        without: `data.without`.
    """
    found, (begins, ends) = len(np.unique(plan.order[plan.holes])), plan.hole_spans
    text = f"{found:,} of {counted(len(without), 'document')}, {counted(int((ends - begins).sum()), 'token')}"
    _log.info("holes: %s, in the order of epoch %d", text, plan.epoch)
    if never := len(without) - len(plan.rows.places_of(without)):
        _log.warning("data.without names %s that this run's filter does not keep", counted(never, "document"))


def targets_per_cycle(plan: EpochPlan) -> Int64Array:
    """Tokens that are predicted in each cycle over all splits, shape (cycles,): none at the start of a block, none in
    padding or holes. Where a whole step has none, there is nothing to learn from it.
    """
    at = _predicted_before(np.arange(plan.cycles_per_epoch + 1, dtype=np.int64) * plan.seq_len, plan.seq_len)
    ends, *hole = (_predicted_before(some, plan.seq_len) for some in (plan.tokens_per_split, *plan.hole_spans))
    return np.diff(_before(ends, at) - _before(hole[1], at) + _before(hole[0], at))


def hidden_per_step(schedule: Schedule, last_step: int) -> Int64Array:
    """Tokens in holes of each step of a run, shape (last_step + 1,): by the number of the step, 0 being before all."""
    found = [np.zeros(1, np.int64)]
    for plan, steps in _epochs(schedule, last_step):
        at = np.arange(steps + 1, dtype=np.int64) * schedule.cycles_per_step * plan.seq_len
        begins, ends = plan.hole_spans
        found.append(np.diff(_before(ends, at) - _before(begins, at)))
    return np.concatenate(found)


def same_until(one: Schedule, other: Schedule, step: int) -> bool:
    """Whether two runs whose plans are the same have the same holes in the steps up to and including `step`."""
    pairs = zip(_hidden(one, step), _hidden(other, step), strict=True)
    return all(np.array_equal(mine, theirs) for mine, theirs in pairs)


def _hidden(schedule: Schedule, last_step: int) -> Iterator[Int64Array]:
    """Place, begin and end of every hole in every epoch that a run of `last_step` steps entered, cut there."""
    for plan, steps in _epochs(schedule, last_step):
        begins, ends = plan.hole_spans
        reached = steps * schedule.cycles_per_step * plan.seq_len
        inside = begins < reached
        yield np.stack([plan.holes[inside], begins[inside], np.minimum(ends[inside], reached)])


def _epochs(schedule: Schedule, last_step: int) -> Iterator[tuple[EpochPlan, int]]:
    """Plan and steps trained of every epoch that a run of `last_step` steps entered."""
    left, epoch = last_step, 0
    while left > 0:
        steps = min(schedule.steps_in(epoch), left)
        yield schedule.plan(epoch), steps
        left, epoch = left - steps, epoch + 1


def _before(positions: Int64Array, at: Int64Array) -> Int64Array:
    """Over streams that end at `positions`, the tokens before each of the places `at`, summed; shape of `at`."""
    ends = np.sort(positions)
    sums, whole = np.concatenate([np.zeros(1, np.int64), np.cumsum(ends)]), np.searchsorted(ends, at)
    return np.asarray(sums[whole] + (len(ends) - whole) * at)


def _predicted_before(positions: Int64Array, seq_len: int) -> Int64Array:
    """Of the tokens before a position of a stream, those that do not stand at the start of a block."""
    return positions - -(-positions // seq_len)
