"""Which documents of a searched version hold which evaluation items, and which were not searched: as arrays of numbers.

Invariant: no text is read, and memory is bounded by what is said of each array, whatever the documents hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import lance

Int64s = npt.NDArray[np.int64]
READ_ROWS = 8192


class Holding(NamedTuple):
    """Which documents hold which items: 8 bytes per document and 8 per item that it holds, 12 more while it is read."""

    ids: Int64s
    """Documents that hold one, ascending; shape (documents,)."""
    documents: npt.NDArray[np.int32]
    """Place in `ids`; shape (pairs,)."""
    items: npt.NDArray[np.int32]
    """Place in `names`; shape (pairs,)."""
    names: tuple[str, ...]
    """Items."""


def holding_documents(dataset: lance.LanceDataset, only: str | None) -> Holding:
    """The documents that hold items (of one set), and which; not their texts."""
    import pyarrow.compute as pc

    numbers: dict[str, int] = {}
    documents, items = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
    rows = dataset.scanner(["id", "contamination_items"], filter="contaminated", batch_size=READ_ROWS)
    for batch in rows.to_batches():
        held = batch["contamination_items"]
        names, holders = pc.list_flatten(held), batch["id"].take(pc.list_parent_indices(held))
        if only is not None:
            wanted = pc.starts_with(names, f"{only}/")
            names, holders = names.filter(wanted), holders.filter(wanted)
        coded = names.dictionary_encode()
        known = [numbers.setdefault(name, len(numbers)) for name in coded.dictionary.to_pylist()]
        documents.append(holders.to_numpy())
        items.append(np.array(known, np.int32)[coded.indices.to_numpy()])
    ids, places = np.unique(np.concatenate(documents), return_inverse=True)
    return Holding(ids, places.astype(np.int32), np.concatenate(items), tuple(numbers))


def unsearched_documents(dataset: lance.LanceDataset, kept: Int64s) -> Int64s:
    """Ids, ascending, of the documents that a run keeps and that were not searched.

    Memory is 17 bytes per kept row: 350 MB for 20 million.
    """
    ids = np.sort(kept)
    searched = np.zeros(len(ids), bool)
    rows = dataset.scanner(["id"], filter="contaminated IS NOT NULL", batch_size=READ_ROWS)
    for batch in rows.to_batches():
        found = batch["id"].to_numpy()
        places = np.searchsorted(ids, found)
        there = places < len(ids)
        searched[places[there][ids[places[there]] == found[there]]] = True
    return ids[~searched]
