"""At which steps a checkpoint was trained on a given place of a document, for the documents of one question.

Invariant: a run of tokens counts as trained on only where its last token was, since every draw of a document begins at
its first one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pretrain_assets.forensics.checkpoints import Checkpoint
from pretrain_assets.forensics.exposure import SeenBy, schedule_of, seen_by
from pretrain_assets.loader.exposure import Exposure, exposures
from pretrain_assets.table.lookup import rows_by_id
from pretrain_assets.table.storage import Location


@dataclass(frozen=True, kw_only=True)
class Trainings:
    """What a checkpoint saw of some documents."""

    seen: Mapping[int, SeenBy]
    """In sum, or why nothing."""
    parts: Mapping[int, Sequence[Exposure]]
    """Every part of each that it was trained on; empty for those not seen."""
    num_tokens: Mapping[int, int]
    """Tokens of each."""

    def reached(self, i: int) -> int:
        """Tokens of a document that were trained on: all of them, or the first ones; 0 for one not asked about."""
        most = max((part.doc_start + part.tokens for part in self.parts.get(i, ())), default=0)
        return min(most, self.num_tokens.get(i, 0))

    def steps(self, i: int, stop: int) -> list[int]:
        """Steps at which the token before place `stop` of a document was trained on, one for each draw of it."""
        return [part.step for part in self.parts.get(i, ()) if part.doc_start < stop <= part.doc_start + part.tokens]


def trainings(location: Location, checkpoint: Checkpoint, ids: Collection[int]) -> Trainings:
    """Look documents up, by the table's `id`. Memory for each part in each draw: some 200 bytes."""
    wanted, pin, recipe = sorted(ids), checkpoint.pin, checkpoint.recipe
    found = exposures(schedule_of(location, pin, recipe), wanted, last_step=checkpoint.step)
    rows = rows_by_id(location, pin, wanted, [recipe.data.count_column])
    return Trainings(
        seen=seen_by(location, pin=pin, recipe=recipe, step=checkpoint.step, ids=wanted),
        parts={i: parts or [] for i, parts in found.items()},
        num_tokens={i: row[recipe.data.count_column] or 0 for i, row in rows.items()},
    )
