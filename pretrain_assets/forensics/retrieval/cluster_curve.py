"""Neighbours counted by similarity: the threshold curve, and what of it deduplication knew.

Invariant: a batch is counted once and forgotten; what stays is a few numbers per threshold, and who hangs with whom.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pretrain_assets.forensics.retrieval.cluster_rows import Float32Array, Int64Array, Rows
from pretrain_assets.forensics.retrieval.vectors import NO_ID

GRID = tuple(round(0.5 + step / 100, 2) for step in range(51))
"""Thresholds of the curve."""
DECIMALS = 4
"""Of a similarity: vectors of float16 give no more, and those of equal texts must come out as 1."""
Z_95 = 1.96
"""Normal quantile of a 95% interval."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One threshold of the curve."""

    threshold: float
    """Least similarity (cosine) of a neighbour."""
    documents: int
    """Documents asked that have such a neighbour."""
    documents_new: int
    """Documents asked that have such a neighbour of which deduplication knows nothing."""
    share: float
    """`documents` of those with a vector."""
    error: float
    """Half of the 95% interval of `share` for the whole table (normal, finite population); 0 when all were asked."""
    pairs: int
    """Pairs in the whole table, each counted once; of a sample, estimated."""
    lists_full: int
    """Documents with `limit` such neighbours, and perhaps more that are not counted."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What vectors and deduplication (`is_dup`, `is_near_dup`) say of the same documents, at the threshold."""

    columns: tuple[str, ...]
    """The columns that say what a row repeats; those missing here have not been made."""
    neighbours_known: int
    """Near neighbours in the lists that are known as copies of the document, or of what it repeats."""
    neighbours_new: int
    """The others: paraphrases, templates, other editions."""
    flagged: int
    """Documents asked, with a vector, that deduplication has flagged."""
    flagged_found: int
    """Of them, those that have a known copy among their near neighbours."""
    clustered_beyond: int
    """Documents that would go, beyond those flagged, if one document of each cluster were kept."""


class Tally:
    """Counts neighbours by similarity, batch after batch."""

    def __init__(self, rows: Rows, threshold: float, limit: int):
        self.zero = self.missing = 0
        self._rows, self._threshold, self._limit = rows, threshold, limit
        self._grid = np.unique([*GRID, threshold])
        self._counts = np.zeros((4, len(self._grid) + 1), np.int64)
        """By place in the grid: documents, documents with a new neighbour, neighbours, full lists."""
        self._known = self._new = self._flagged = self._flagged_found = self._documents = 0

    def add(self, ids: Int64Array, found: Int64Array, similarity: Float32Array) -> None:
        """Count the neighbours of documents, shape (documents, more than limit), and join those that are near."""
        rows = self._rows
        there = (found != NO_ID) & (found != ids[:, None])
        there &= there.cumsum(axis=1) <= self._limit
        near = np.where(there, similarity, -1.0).astype(np.float64).round(DECIMALS)
        own = rows.places(ids)
        others = np.broadcast_to(own[:, None], found.shape).copy()
        others[there] = rows.places(found[there])
        known = there & (rows.family[others] == rows.family[own][:, None])
        last = np.where(there.sum(axis=1) == self._limit, near.min(axis=1, where=there, initial=1.0), -1.0)
        best_known = near.max(axis=1, where=known, initial=-1.0)
        for line, values in enumerate(
            (near.max(axis=1, initial=-1.0), near.max(axis=1, where=there & ~known, initial=-1.0), near[there], last)
        ):
            at = np.searchsorted(self._grid, values, side="right")
            self._counts[line] += np.bincount(at, minlength=len(self._grid) + 1)
        linked = near >= self._threshold
        rows.join(np.broadcast_to(own[:, None], found.shape)[linked], others[linked])
        self._known += int((linked & known).sum())
        self._new += int((linked & ~known).sum())
        self._flagged += int(rows.flagged[own].sum())
        self._flagged_found += int((rows.flagged[own] & (best_known >= self._threshold)).sum())
        self._documents += len(ids)

    def curve(self) -> tuple[Point, ...]:
        """A point for each threshold of the grid."""
        reached = self._counts[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]
        whole, asked = len(self._rows), self._rows.asked
        points = []
        for threshold, (documents, new, neighbours, full) in zip(self._grid, reached.T, strict=True):
            share = documents / max(1, self._documents)
            error = Z_95 * (share * (1 - share) / max(1, self._documents) * (1 - asked / whole)) ** 0.5
            points.append(
                Point(
                    threshold=float(threshold),
                    documents=int(documents),
                    documents_new=int(new),
                    share=round(float(share), 6),
                    error=round(float(error), 6),
                    pairs=round(float(neighbours) * whole / asked / 2),
                    lists_full=int(full),
                )
            )
        return tuple(points)

    def agreement(self, *, clustered_beyond: int) -> Agreement:
        """What deduplication knew of it."""
        return Agreement(
            columns=self._rows.partners,
            neighbours_known=self._known,
            neighbours_new=self._new,
            flagged=self._flagged,
            flagged_found=self._flagged_found,
            clustered_beyond=clustered_beyond,
        )
