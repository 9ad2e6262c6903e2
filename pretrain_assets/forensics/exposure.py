"""What a checkpoint saw of a document: computed from its passport and the table at its pin, no logs kept.

Invariant: the answer names the reason whenever the document was not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pretrain_assets.config import Recipe
from pretrain_assets.loader.exposure import exposures
from pretrain_assets.loader.planner import Planner
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.plural import counted
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location
from pretrain_assets.table.versions import open_pin


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
    found = exposures(schedule_of(location, pin, recipe), ids, last_step=step)
    reasons = _reasons(location, pin, recipe, [i for i, spans in found.items() if not spans])
    return {
        i: SeenBy(
            times=sum(span.doc_start == 0 for span in spans or ()),  # every draw that was reached begins at its start
            first_step=spans[0].step if spans else None,
            last_step=spans[-1].step if spans else None,
            tokens=sum(span.tokens for span in spans or ()),
            reason=reasons.get(i, ""),
        )
        for i, spans in found.items()
    }


def _reasons(location: Location, pin: Pin, recipe: Recipe, ids: Sequence[int]) -> dict[int, str]:
    """Why each of these documents was not trained on."""
    if not ids:
        return {}
    dataset = open_pin(location, pin)
    among = f"id IN ({', '.join(map(str, ids))})"

    def matching(predicate: str) -> set[int]:
        return set(dataset.to_table(columns=["id"], filter=f"{among} AND ({predicate})")["id"].to_pylist())

    there, kept = matching("true"), matching(recipe.data.filter)
    held_out, duplicate = matching(recipe.data.held_out_filter), matching("is_dup")

    def reason(i: int) -> str:
        if i not in there:
            return f"no row of version {pin.version}"
        if i in kept:
            thinned = "or the mixture did not draw it, " if recipe.data.mixture else ""
            return f"the run stopped before its turn, {thinned}or it was left out at the end of a split"
        if i in duplicate:
            return "marked as a duplicate of an earlier row"
        return "held out for validation" if i in held_out else f"outside the filter {recipe.data.filter!r}"

    return {i: reason(i) for i in ids}
