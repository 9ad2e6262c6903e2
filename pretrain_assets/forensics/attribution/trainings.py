"""What a checkpoint was trained on of documents, to the token: which as a whole, which in part, and at which steps.

Invariant: a run of tokens was trained on where its last token was, since every draw of a document begins at its first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pretrain_assets.forensics.checkpoints import Checkpoint
from pretrain_assets.forensics.exposure import schedule_of
from pretrain_assets.loader.exposure import Exposure, exposures, totals
from pretrain_assets.table.storage import Location


@dataclass(frozen=True, kw_only=True)
class Trainings:
    """Documents by how far they were trained on."""

    times: Mapping[int, int]
    """Draws of each with at least one token trained on; 0 for those not seen."""
    whole: frozenset[int]
    """Those that were trained on to their end in every draw."""
    begun: Mapping[int, int]
    """The others that were seen, and the tokens of each, from its first on, that were trained on in some draw."""

    def reached(self, i: int, num_tokens: int) -> int:
        """How many of a document's tokens were trained on, from its first on."""
        return num_tokens if i in self.whole else min(num_tokens, self.begun.get(i, 0))


def trainings(location: Location, checkpoint: Checkpoint, ids: Collection[int]) -> Trainings:
    """Look documents up by the table's `id`: some 200 bytes for each, and one for each row that the filter keeps."""
    schedule = schedule_of(location, checkpoint.pin, checkpoint.recipe)
    wanted = np.array(sorted(ids), np.int64)
    found, rows = totals(schedule, wanted, last_step=checkpoint.step), schedule.plan(0).rows
    kept = np.flatnonzero(np.isin(rows.doc_ids, wanted))
    lengths = np.zeros(len(wanted), np.int64)
    lengths[np.searchsorted(wanted, rows.doc_ids[kept])] = rows.num_tokens[kept]
    whole = (found.times > 0) & (found.tokens == found.times * (lengths + 1))
    begun = parts_of(location, checkpoint, wanted[(found.times > 0) & ~whole].tolist())
    return Trainings(
        times=dict(zip(wanted.tolist(), found.times.tolist(), strict=True)),
        whole=frozenset(wanted[whole].tolist()),
        begun={i: max(part.doc_start + part.tokens for part in parts) for i, parts in begun.items()},
    )


def parts_of(location: Location, checkpoint: Checkpoint, ids: Collection[int]) -> dict[int, list[Exposure]]:
    """Every part of documents that was trained on, in training order; those not seen are left out."""
    if not ids:
        return {}
    schedule = schedule_of(location, checkpoint.pin, checkpoint.recipe)
    return {i: parts for i, parts in exposures(schedule, ids, last_step=checkpoint.step).items() if parts}


def steps_at(parts: Sequence[Exposure], stop: int) -> list[int]:
    """Steps at which the token before place `stop` of a document was trained on, one for each draw that came to it."""
    return [part.step for part in parts if part.doc_start < stop <= part.doc_start + part.tokens]
