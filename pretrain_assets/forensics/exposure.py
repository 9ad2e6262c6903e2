"""What a checkpoint saw of a document: computed from its passport and the table at its pin, no logs kept.

Invariant: the answer names the reason whenever the document was not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pretrain_assets.config import Recipe
from pretrain_assets.forensics.why import why_not_yet, why_outside
from pretrain_assets.loader.exposure import exposures
from pretrain_assets.loader.planner import Planner
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.loader.turns import Turn, turns
from pretrain_assets.plural import counted
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location


@dataclass(frozen=True, kw_only=True)
class SeenBy:
    """What one checkpoint saw of one document."""

    times: int
    """Draws of it, over all epochs and as often as a mixture repeats it, with at least one token trained on."""
    first_step: int | None
    """Optimizer step (from 1) of its first token; None if never."""
    last_step: int | None
    """Optimizer step of its last token so far; None if never."""
    tokens: int
    """Tokens of it trained on, end-of-text included, over all epochs."""
    reason: str
    """Why it was not seen; empty if it was."""

    def describe(self) -> str:
        """One phrase for people."""
        if self.first_step is None:
            return f"not seen: {self.reason}"
        often = "once" if self.times == 1 else f"{self.times} times"
        return f"seen {often}, first at step {self.first_step}, {counted(self.tokens, 'token')}"


def schedule_of(location: Location, pin: Pin, recipe: Recipe) -> Schedule:
    """Steps and plans of a run on a pinned version."""
    return Schedule(Planner(location, pin, recipe.data).plan, recipe.cycles_per_step)


def seen_by(location: Location, *, pin: Pin, recipe: Recipe, step: int, ids: Sequence[int]) -> dict[int, SeenBy]:
    """What a checkpoint at `step` of a run saw of each document.

    Args:
        location: The table.
        pin: The run's pinned version.
        recipe: The run's recipe.
        step: Optimizer steps done by the checkpoint.
        ids: Documents, by the table's `id`.
    """
    planner = Planner(location, pin, recipe.data)
    schedule = Schedule(planner.plan, recipe.cycles_per_step)
    found = exposures(schedule, ids, last_step=step)
    outside = why_outside(location, pin, recipe.data, [i for i, spans in found.items() if not spans])
    kept = [i for i, spans in found.items() if not spans and i not in outside]
    entered = range(schedule.locate(max(step, 1))[0] + 1)  # what comes in later epochs is not looked at
    made = turns_of(planner, schedule, kept, entered)
    last = recipe.train.max_steps or sys.maxsize  # without it a run ends with an epoch
    why = outside | {i: why_not_yet(made[i], step=step, total_steps=last) for i in kept}
    return {
        i: SeenBy(
            times=sum(span.doc_start == 0 for span in spans or ()),  # every draw that was reached begins at its start
            first_step=spans[0].step if spans else None,
            last_step=spans[-1].step if spans else None,
            tokens=sum(span.tokens for span in spans or ()),
            reason=why[i].text if i in why else "",
        )
        for i, spans in found.items()
    }


def turns_of(planner: Planner, schedule: Schedule, ids: Iterable[int], epochs: Iterable[int]) -> dict[int, list[Turn]]:
    """What several epochs make of each document that the filter keeps."""
    found: dict[int, list[Turn]] = {i: [] for i in ids}
    for epoch in epochs if found else ():
        for i, of_epoch in turns(schedule, found, epoch, left_over=planner.left_over).items():
            found[i] += of_epoch
    return found
