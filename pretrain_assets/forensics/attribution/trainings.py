"""What a checkpoint was trained on of documents, to the token: how far into each, and at which steps.

Invariant: a run of tokens was trained on where its last token was, since every draw of a document begins at its first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pretrain_assets.forensics.checkpoints import Checkpoint
from pretrain_assets.forensics.exposure import schedule_of
from pretrain_assets.loader.exposure import Exposure, exposures, reached
from pretrain_assets.table.storage import Location

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Trainings:
    """How far into each document a checkpoint was trained, so that rows that it was not trained on crowd out no other.

    12 bytes for each row that the filter keeps, 240 MB for 20 million.
    """

    ids: Int64s
    """The table's `id` of those rows, ascending, shape (rows,)."""
    tokens: Int32s
    """Tokens of each, from its first on and EOS included, that were trained on in some draw; 0 if never seen."""

    def of(self, ids: Int64s) -> Int32s:
        """Tokens of some documents that were trained on, 0 for those that the filter leaves out; shape (ids,)."""
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[at] == ids, self.tokens[at], np.int32(0))


def trainings(location: Location, checkpoint: Checkpoint) -> Trainings:
    """Look at every row that the filter keeps."""
    schedule = schedule_of(location, checkpoint.pin, checkpoint.recipe)
    tokens, ids = reached(schedule, last_step=checkpoint.step), schedule.plan(0).rows.doc_ids
    order = np.argsort(ids, kind="stable")
    return Trainings(ids=ids[order], tokens=tokens[order])


def parts_of(location: Location, checkpoint: Checkpoint, ids: Collection[int]) -> dict[int, list[Exposure]]:
    """Every part of documents that was trained on, in training order; those not seen are left out."""
    if not ids:
        return {}
    schedule = schedule_of(location, checkpoint.pin, checkpoint.recipe)
    return {i: parts for i, parts in exposures(schedule, ids, last_step=checkpoint.step).items() if parts}


def steps_at(parts: Sequence[Exposure], stops: Int64s) -> Counter[int]:
    """Steps at which the tokens before some places of a document (ascending) were trained on, and how many at each."""
    begins = np.array([part.doc_start for part in parts], np.int64)
    ends = begins + np.array([part.tokens for part in parts], np.int64)
    counts = np.searchsorted(stops, ends, side="right") - np.searchsorted(stops, begins, side="right")
    steps = Counter[int]()
    for at in np.flatnonzero(counts).tolist():
        steps[parts[at].step] += int(counts[at])
    return steps
