"""The documents that clusters are made of: which are asked, what they are known to repeat, and who hangs with whom.

Invariant: places are in the order of ids, and the parent of a place is never a later one, so that the root of a cluster
is its document with the lowest id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pretrain_assets.forensics.retrieval.neighbours import PARTNERS

if TYPE_CHECKING:
    import lance

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
Places = npt.NDArray[np.int32]

SCAN_ROWS = 262_144


@dataclass(kw_only=True, eq=False)
class Rows:
    """Documents in the order of their ids; arrays of shape (rows,) but for the sample."""

    ids: Int64Array
    """The table's `id`."""
    family: Int64Array
    """Id of the document that deduplication says each one repeats; its own id where that is none."""
    flagged: npt.NDArray[np.bool_]
    """Whether deduplication leaves it out."""
    parent: Places
    """Place of a document of the same cluster, or the own place: a forest, see `join`."""
    sample: npt.NDArray[np.uint64] | None
    """Row ids of the documents asked, ascending, shape (asked,); None: all are asked."""
    partners: tuple[str, ...]
    """Columns that `family` comes from."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def asked(self) -> int:
        """Documents whose neighbours are looked for."""
        return len(self.ids) if self.sample is None else len(self.sample)

    def places(self, ids: Int64Array) -> Places:
        """Places of ids that are there."""
        return np.searchsorted(self.ids, ids).astype(np.int32)

    def join(self, ones: Places, others: Places) -> None:
        """Put the documents of each pair into one cluster: their roots are hung onto lower ones until they agree."""
        while len(ones):
            ones, others = self._roots(ones), self._roots(others)
            apart = ones != others
            ones, others = ones[apart], others[apart]
            np.minimum.at(self.parent, np.maximum(ones, others), np.minimum(ones, others))

    def clusters(self) -> tuple[Places, Int64Array, Int64Array]:
        """Root, size and flagged documents of every cluster of two or more."""
        linked = self._linked()
        roots, cluster, sizes = np.unique(self.parent[linked], return_inverse=True, return_counts=True)
        flagged = np.bincount(cluster, self.flagged[linked], len(roots)).astype(np.int64) + self.flagged[roots]
        return roots, sizes + 1, flagged

    def members(self, root: int) -> Int64Array:
        """Places of a cluster's documents, ascending."""
        return np.flatnonzero(self.parent == root)

    def _roots(self, places: Places) -> Places:
        """Roots of places, which then hang from them directly."""
        roots = self.parent[places]
        while not np.array_equal(above := self.parent[roots], roots):
            roots = above
        self.parent[places] = roots
        return roots

    def _linked(self) -> Int64Array:
        """Places that hang from another one, all of them directly from their root."""
        linked = np.flatnonzero(self.parent != np.arange(len(self), dtype=np.int32))
        self._roots(linked.astype(np.int32))
        return linked


def read_rows(dataset: lance.LanceDataset, where: str | None, *, sample: int | None, seed: int) -> Rows:
    """One scan of the ids, and of what deduplication says.

    Args:
        dataset: The table at the version that is asked.
        where: SQL predicate of the documents that take part.
        sample: How many are asked; None, or more than there are: all.
        seed: Of the sample.
    """
    count = dataset.count_rows(where)
    partners = tuple(name for name in PARTNERS if name in dataset.schema.names)
    ids, family = np.empty(count, np.int64), np.empty(count, np.int64)
    chosen = np.empty((2, 0), np.uint64)
    at = 0
    scanner = dataset.scanner(
        columns=["id", *partners], filter=where, with_row_id=True, batch_size=SCAN_ROWS, scan_in_order=True
    )
    for batch in scanner.to_batches():
        place = slice(at, at + len(batch))
        ids[place] = family[place] = batch["id"].to_numpy()
        for name in reversed(partners):
            there = batch[name].is_valid().to_numpy(zero_copy_only=False)
            family[place][there] = batch[name].drop_null().to_numpy()
        if sample is not None and sample < count:
            fresh = np.stack([_hashed(ids[place], seed), batch["_rowid"].to_numpy().astype(np.uint64)])
            if chosen.shape[1] == sample:
                fresh = fresh[:, fresh[0] < chosen[0, -1]]
            chosen = np.concatenate([chosen, fresh], axis=1)
            chosen = chosen[:, np.argsort(chosen[0], kind="stable")[:sample]]
        at += len(batch)
    if np.any(ids[1:] < ids[:-1]):
        order = np.argsort(ids)
        ids, family = ids[order], family[order]
    flagged = family != ids
    _follow(ids, family, flagged)
    return Rows(
        ids=ids,
        family=family,
        flagged=flagged,
        parent=np.arange(count, dtype=np.int32),
        sample=np.sort(chosen[1]) if sample is not None and sample < count else None,
        partners=partners,
    )


def _follow(ids: Int64Array, family: Int64Array, flagged: npt.NDArray[np.bool_]) -> None:
    """A copy of a near duplicate belongs to what that one repeats, which is a kept text: one step is enough."""
    copies = np.flatnonzero(flagged)
    at = np.minimum(np.searchsorted(ids, family[copies]), len(ids) - 1)
    there = ids[at] == family[copies] if len(ids) else np.empty(0, bool)
    family[copies[there]] = family[at[there]]


def _hashed(ids: Int64Array, seed: int) -> npt.NDArray[np.uint64]:
    """Ids scattered over 64 bits: the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    value = ids.astype(np.uint64) + np.uint64(seed * 0x9E3779B97F4A7C15 % (1 << 64))
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
