"""Boundaries of documents for attention kernels that take sequences of different lengths (`varlen`).

Invariant: one shape for a whole epoch, known from the plan, so that compiled models see no new shape.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pretrain_assets.loader.plan import EpochPlan


def most_segments(plan: EpochPlan, splits: range, cycles_per_batch: int, start_cycle: int) -> int:
    """The largest number of documents' parts in any batch of some splits; a block begins a part, so does a document.

    Args:
        plan: Order of the epoch.
        splits: Splits of the batches.
        cycles_per_batch: Cycles of a batch.
        start_cycle: A cycle at which a batch begins.
    """
    skipped, length = start_cycle % cycles_per_batch, cycles_per_batch * plan.seq_len
    batches = (plan.cycles_per_epoch - skipped) // cycles_per_batch
    first = skipped * plan.seq_len
    starts = np.zeros(batches, np.int64)
    for split in splits:
        begins = plan.ends_of(split)[:-1]
        inside = (begins % plan.seq_len != 0) & (begins >= first) & (begins < first + batches * length)
        starts += np.bincount((begins[inside] - first) // length, minlength=batches)
    return int(starts.max(initial=0)) + len(splits) * cycles_per_batch


def cu_seqlens(doc_ids: npt.NDArray[np.integer], segments: int) -> npt.NDArray[np.int32]:
    """Where each document's part begins in the flattened blocks, then the end: int32 of shape (segments + 1,).

    Args:
        doc_ids: Document numbers within blocks, shape (..., seq_len).
        segments: Number of parts there is room for; the rest is filled with the end.
    """
    flat = doc_ids.reshape(-1)
    begins = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    blocks = np.arange(0, flat.size, doc_ids.shape[-1])
    found = np.full(segments + 1, flat.size, np.int32)
    both = np.union1d(begins, blocks)
    found[: len(both)] = both
    return found
