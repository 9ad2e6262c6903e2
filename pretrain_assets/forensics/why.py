"""Why a run did not train on documents: the term of the filter, the row repeated, or that there was no such row.

Invariant: computed from the pinned version, the table's records and the plan. A reason is given only when it is true:
where a version that would tell is gone, that is what is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import DataConfig
from pretrain_assets.curate.explain import shown
from pretrain_assets.curate.filters import Term, terms_of
from pretrain_assets.curate.sql import columns_in
from pretrain_assets.loader.turns import Turn
from pretrain_assets.table.lineage import LineageRecord, Pin
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.versions import open_pin, records

if TYPE_CHECKING:
    import lance

HELD_OUT = "held out for validation"
LEFT_OUT = {
    "partial_step": "its blocks come after the last whole step of epoch {epoch}",
    "end_of_split": "left out at the end of split {split} of epoch {epoch}, where the other splits had no more blocks",
    "beyond_splits": "left over when the rows of epoch {epoch} were shared out to the splits equally",
    "thinned": "the mixture did not draw it for epoch {epoch}",
}
"""What the ledger's reasons mean for one document."""


@dataclass(frozen=True, kw_only=True)
class Why:
    """Why a document was not trained on."""

    kind: str
    """`unknown`, `later`, `deleted`, `filter`, `duplicate`, `near_duplicate`, `contaminated`, `held_out`, `hole`,
    `not_reached`, `past_the_end`, or a reason of the ledger: `partial_step`, `end_of_split`, `beyond_splits`,
    `thinned`."""
    text: str
    """The same for people, with its evidence; a part of a sentence."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The evidence for programs: `terms` (of the filter that are not true, in order), `repeats` (id), `step`, ..."""


def why_outside(location: Location, pin: Pin, data: DataConfig, ids: Iterable[int]) -> dict[int, Why]:
    """Why each of the documents is not among the rows that the filter keeps; nothing of those that it keeps.

    One scan, whatever the number of documents.

    Args:
        location: The table.
        pin: The run's pinned version.
        data: The run's filters.
        ids: Documents, by the table's `id`.
    """
    wanted = sorted({int(i) for i in ids})
    if not wanted:
        return {}
    dataset = open_pin(location, pin)
    terms = [leaf for term in terms_of(data.filter, dataset.schema.names) for leaf in term.leaves]
    rows = {row["id"]: row for row in _judged(dataset, data, terms, wanted)}
    found = {i: _by_filter(row, terms) for i, row in rows.items() if not row["kept"]}
    missing = [i for i in wanted if i not in rows]
    return found | (_absent(location, pin, missing) if missing else {})


def why_not_yet(turns: Sequence[Turn], *, step: int, total_steps: int) -> Why:
    """Why a run of `step` steps had trained on no token of a document that its filter keeps.

    Args:
        turns: What the epochs make of it, at least one.
        step: Optimizer steps done.
        total_steps: Steps of the whole run.
    """
    for kind, text in (("hole", "left out on purpose (data.without): masked padding stood in its place"),):
        if any(span.step <= step for turn in turns for span in turn.masked):
            return Why(kind=kind, text=text, facts={"step": min(s.step for turn in turns for s in turn.masked)})
    coming = sorted(span for turn in turns for span in turn.exposures)
    if coming and coming[0].step <= total_steps:
        first = coming[0]
        text = f"not reached by step {step:,}: its turn comes at step {first.step:,} (epoch {first.epoch})"
        return Why(kind="not_reached", text=text, facts={"step": first.step, "epoch": first.epoch})
    if coming:
        first = coming[0]
        text = f"the run ends at step {total_steps:,}; its turn would have come at step {first.step:,}"
        return Why(kind="past_the_end", text=text, facts={"step": first.step, "epoch": first.epoch})
    if any(turn.masked for turn in turns):
        first = min(span for turn in turns for span in turn.masked)
        text = f"left out on purpose (data.without): masked padding stands in its place, at step {first.step:,}"
        return Why(kind="hole", text=text, facts={"step": first.step, "epoch": first.epoch})
    reasons = {(reason, turn.epoch): turn for turn in turns for reason in turn.left_out}
    said = [LEFT_OUT[reason].format(epoch=epoch, split=turn.split) for (reason, epoch), turn in reasons.items()]
    return Why(kind=next(iter(reasons))[0], text="; ".join(said))


def deletions(history: Sequence[LineageRecord], row: int, *, after: int, upto: int) -> list[LineageRecord]:
    """The deletions that can have taken a row away after one version and up to another: those that name it, if any."""
    made = [r for r in history if r.stage == "deleted" and after < r.version <= upto]
    return [r for r in made if row in r.details.get("ids", ())] or [r for r in made if "ids" not in r.details]


