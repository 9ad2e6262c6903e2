"""Rows that repeat given rows: the same content, or near it.

Invariant: what deduplication has not seen is not called unique, but counted as not compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pretrain_assets.loader.plan import Int64Array

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

SCAN_ROWS = 262_144


def related(dataset: lance.LanceDataset, found: pa.Table) -> tuple[Int64Array, Int64Array, int]:
    """Copies and near copies of the rows in the newest version, and how many rows were never compared."""
    import pyarrow as pa
    import pyarrow.compute as pc

    names, none = dataset.schema.names, np.empty(0, np.int64)
    ids = found["id"].to_numpy()
    copies, near, unhashed = none, none, dataset.count_rows()
    if "content_hash" in names:
        unhashed = dataset.count_rows("content_hash IS NULL")
        if "content_hash" in found.column_names and len(found):
            copies = ids_where(dataset, "content_hash", pc.unique(found["content_hash"].drop_null()))
    if "near_dup_of" in names and len(found):
        repeated = found["near_dup_of"].drop_null().to_numpy() if "near_dup_of" in found.column_names else none
        near = ids_where(dataset, "near_dup_of", pa.array(np.union1d(ids, repeated)))
        near = np.union1d(near, ids_where(dataset, "id", pa.array(repeated, pa.int64())))
    copies = np.setdiff1d(copies, ids)
    return copies, np.setdiff1d(near, np.union1d(ids, copies)), unhashed


def ids_where(dataset: lance.LanceDataset, column: str, values: pa.Array) -> Int64Array:
    """Ids of the rows that have one of the values in a narrow column."""
    import pyarrow.compute as pc

    if not len(values):
        return np.empty(0, np.int64)
    batches = dataset.scanner(columns=list(dict.fromkeys(["id", column])), batch_size=SCAN_ROWS).to_batches()
    parts = [batch["id"].filter(pc.is_in(batch[column], value_set=values)).to_numpy() for batch in batches]
    return np.sort(np.concatenate([np.empty(0, np.int64), *parts]))
