"""Rows by their `id`, at a pinned version.

Invariant: one scan, whatever the number of ids; columns that the table lacks are left out, not invented.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.predicate import in_list
from pretrain_assets.table.storage import Location
from pretrain_assets.table.versions import open_pin


def rows_by_id(location: Location, pin: Pin, ids: Iterable[int], columns: Sequence[str]) -> dict[int, dict[str, Any]]:
    """The rows that have these ids, with those of the columns that the table has."""
    wanted = sorted({int(i) for i in ids})
    if not wanted:
        return {}
    dataset = open_pin(location, pin)
    there = [name for name in columns if name in dataset.schema.names]
    found = dataset.to_table(columns=["id", *there], filter=in_list("id", wanted))
    return {row["id"]: row for row in found.to_pylist()}
