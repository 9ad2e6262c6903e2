"""What an epoch makes of a document, draw by draw, down to its last token: trained on, masked, or left out and why.

Invariant: the lines of all documents that a filter keeps add up to the epoch's ledger (`EpochPlan.ledger`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from pretrain_assets.loader.exposure import Exposure, spans, starts, unmasked
from pretrain_assets.loader.mixture import UInt32Array
from pretrain_assets.loader.plan import EpochPlan
from pretrain_assets.loader.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One draw of a document for one epoch, and what becomes of it; a document that is not drawn has one as well."""

    doc_id: int
    """Document, the table's `id`."""
    epoch: int
    """Epoch, from 0."""
    split: int | None
    """Split that it stands in; None where it stands in none."""
    exposures: tuple[Exposure, ...]
    """Its tokens in whole steps of the epoch, trained on once the run gets there."""
    masked: tuple[Exposure, ...]
    """Those that are in a hole instead (`data.without`)."""
    left_out: dict[str, int]
    """Its other tokens, by the ledger's reason: `partial_step`, `end_of_split`, `beyond_splits` or `thinned`."""


def turns(
    schedule: Schedule, ids: Iterable[int], epoch: int, *, left_over: Callable[[int], UInt32Array]
) -> dict[int, list[Turn]]:
    """What an epoch makes of each document, draws in its order; nothing of documents that the filter leaves out.

    Args:
        schedule: Of the run.
        ids: Documents, by the table's `id`.
        epoch: Epoch, from 0.
        left_over: `Planner.left_over` of the run.
    """
    plan = schedule.plan(epoch)
    first_step = 1 + sum(schedule.steps_in(earlier) for earlier in range(epoch))
    found: dict[int, list[Turn]] = {int(i): [] for i in ids}
    for place in plan.places_of(found).tolist():
        turn = _planned(plan, place, first_step, schedule.cycles_per_step)
        found[turn.doc_id].append(turn)
    rows = plan.rows.places_of(found).tolist()
    rest = Counter(left_over(epoch).tolist()) if rows else Counter()
    for row in rows:
        doc_id, tokens = int(plan.rows.doc_ids[row]), int(plan.rows.num_tokens[row]) + 1
        reasons = ["beyond_splits"] * rest[row] or ([] if found[doc_id] else ["thinned"])
        found[doc_id] += [
            Turn(doc_id=doc_id, epoch=epoch, split=None, exposures=(), masked=(), left_out={reason: tokens})
            for reason in reasons
        ]
    return found


def _planned(plan: EpochPlan, place: int, first_step: int, cycles_per_step: int) -> Turn:
    """What becomes of the document at a place of the order."""
    usable = plan.cycles_per_epoch - plan.cycles_per_epoch % cycles_per_step
    begin, end = int(starts(plan, np.array([place]))[0]), int(plan.ends[place])
    steps, cycles = usable * plan.seq_len, plan.cycles_per_epoch * plan.seq_len
    left_out = {
        "partial_step": max(0, min(end, cycles) - max(begin, steps)),
        "end_of_split": max(0, end - max(begin, cycles)),
    }
    seen = unmasked(plan, place, usable)
    return Turn(
        doc_id=int(plan.rows.doc_ids[plan.order[place]]),
        epoch=plan.epoch,
        split=int(np.searchsorted(plan.offsets, place, side="right")) - 1,
        exposures=tuple(spans(plan, place, 0, seen, first_step, cycles_per_step)),
        masked=tuple(spans(plan, place, seen, usable, first_step, cycles_per_step)),
        left_out={reason: tokens for reason, tokens in left_out.items() if tokens},
    )
