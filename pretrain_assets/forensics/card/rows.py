"""The rows of a run card: how often the filter's documents were seen, and which sources they are of.

Invariant: both count the very rows that the run's filter keeps at its pin, so their sums are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pretrain_assets.config import DataConfig
from pretrain_assets.errors import TableError
from pretrain_assets.forensics.card.lineage import public
from pretrain_assets.forensics.checkpoints import Checkpoint
from pretrain_assets.forensics.exposure import schedule_of
from pretrain_assets.loader.exposure import times_seen
from pretrain_assets.table.storage import Location
from pretrain_assets.train.provenance import sources

if TYPE_CHECKING:
    import lance

BINS = 16
"""Numbers of times seen that are counted one by one; beyond, they are counted by ranges."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Documents that were trained on so often."""

    low: int
    """Least number of times."""
    high: int
    """Most number of times; the same as `low` but for ranges."""
    documents: int
    """How many documents."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Training rows of one source, by the filter."""

    name: str
    """Value of `source`."""
    license: str | None
    """Value of `license`; None where the table has no such column, or no value."""
    rows: int
    """Documents."""
    tokens: int
    """Their tokens, one end-of-text each included."""
    share: float
    """Share of all tokens, 0 to 1."""


def exposures_of(location: Location, checkpoint: Checkpoint) -> tuple[Seen, ...]:
    """How many documents were seen how often: the first `BINS` numbers of times, then ranges that double."""
    schedule = schedule_of(location, checkpoint.pin, checkpoint.recipe)
    counts = np.bincount(times_seen(schedule, last_step=checkpoint.step))
    bins = [(times, times) for times in range(min(len(counts), BINS))]
    while bins and bins[-1][1] < len(counts) - 1:
        low = bins[-1][1] + 1
        bins.append((low, min(2 * low - 1, len(counts) - 1)))
    found = [Seen(low=low, high=high, documents=int(counts[low : high + 1].sum())) for low, high in bins]
    return tuple(seen for seen in found if seen.documents)


def sources_of(dataset: lance.LanceDataset, data: DataConfig) -> tuple[Source, ...]:
    """Training rows by source, and by licence where the table has one.

    Raises:
        TableError: the table names no sources.
    """
    if "source" not in dataset.schema.names:
        raise TableError("The table names no sources.")
    return tuple(
        Source(
            name=public(row["source"]) or "unknown",
            license=row.get("license"),
            rows=row["num_rows"],
            tokens=row["num_tokens"],
            share=row["share"],
        )
        for row in sources(dataset, data)
    )
