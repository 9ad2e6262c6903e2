"""How well a vector index finds: recall@10 against reading every vector, measured on rows of the table themselves.

Invariant: a neighbour counts when it is as near as the tenth nearest, so copies of a document, which are equally near,
cannot count as misses (as ann-benchmarks does: Aumueller, Bernhardsson and Faithfull 2020).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pretrain_assets.forensics.retrieval.vectors import VectorColumn, nearest, read_vectors

if TYPE_CHECKING:
    import lance
    import numpy as np
    import numpy.typing as npt

NEIGHBOURS = 10
QUERIES = 64
"""Rows asked for their neighbours: a recall of 0.9 is then known to about 0.02 (the ten of a query miss together)."""
TOLERANCE = 1e-3
"""Of a cosine: what float16 rounds, and more than the order of a sum does."""


def measure(dataset: lance.LanceDataset, column: VectorColumn) -> dict[str, Any]:
    """Recall of the index on a column: `recall_at_10`, 0 to 1 (None: nothing has a neighbour), and `queries` asked.

    Reads every vector twice, a batch at a time: of 20 million of 384 float16 that is 15 GB a pass.
    """
    import numpy as np

    queries = _sample(dataset, column)
    every = nearest(dataset, column, queries, limit=NEIGHBOURS + 1, exact=True)
    found = nearest(dataset, column, queries, limit=NEIGHBOURS + 1)
    tenth = np.nan_to_num(every.similarity, nan=-np.inf)  # the first is the row itself
    due = np.isfinite(tenth[:, 1:]).sum(axis=1)
    least = np.where(due > 0, np.take_along_axis(tenth, due[:, None], 1)[:, 0], np.inf)
    near = np.nan_to_num(found.similarity, nan=-np.inf) >= least[:, None] - TOLERANCE
    hits = np.clip(near.sum(axis=1) - 1, 0, due)
    recall = float(hits.sum() / due.sum()) if due.sum() else None
    return {"recall_at_10": None if recall is None else round(recall, 4), "queries": len(queries)}


def _sample(dataset: lance.LanceDataset, column: VectorColumn) -> npt.NDArray[np.float32]:
    """Vectors drawn evenly from all that point somewhere, shape (up to 64, dims): Vitter's algorithm R, seeded."""
    import numpy as np

    random = np.random.default_rng(0)
    chosen, seen = np.zeros((0, column.dims), np.float32), 0
    for ids, vectors in read_vectors(dataset, column):
        room = QUERIES - len(chosen)
        chosen = np.concatenate([chosen, vectors[:room]])
        later = np.arange(seen + min(room, len(ids)), seen + len(ids))
        places = random.integers(0, later + 1) if len(later) else later
        for place, at in zip(places[places < QUERIES], np.flatnonzero(places < QUERIES), strict=True):
            chosen[place] = vectors[len(ids) - len(later) + at]
        seen += len(ids)
    return chosen
