"""What a curation report shows, as plain values: tables, bars and histograms in sections.

Invariant: holds numbers and words only; how they look is decided where they are written (report/curation_*.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pretrain_assets.table.query import sql_rows

if TYPE_CHECKING:
    import lance

    from pretrain_assets.curate.funnel import Funnel

BINS = 40
"""Bars of a histogram: as many as can be told apart in a third of a page."""
FAR = 10
"""A mark further away than so many widths would leave of the histogram a single bar."""
SCAN_ROWS = 262_144


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of values; numbers stay numbers."""

    title: str
    """What it shows."""
    headers: tuple[str, ...]
    """Names of the columns; one that ends in `share` holds numbers from 0 to 1."""
    rows: tuple[tuple[Any, ...], ...]
    """Values; None is unknown."""
    kind: Literal["table"] = "table"
    """For programs."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One set of bars."""

    name: str
    """What they count."""
    values: tuple[float, ...]
    """One per label."""


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Bars by label."""

    title: str
    """What they show."""
    labels: tuple[str, ...]
    """One per bar."""
    series: tuple[Series, ...]
    """Bars side by side."""
    percent: bool = False
    """Whether values are shares from 0 to 1."""
    kind: Literal["bars"] = "bars"
    """For programs."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A published threshold."""

    value: float
    """Where it stands."""
    label: str
    """Whose it is, and what is kept."""


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Rows by value, in bins of equal width."""

    title: str
    """The column."""
    meaning: str
    """What a value is."""
    low: float
    """Lower edge of the first bin."""
    high: float
    """Upper edge of the last bin."""
    counts: tuple[int, ...]
    """Rows per bin; those below `low` and above `high` are in the first and the last."""
    outside: int
    """Of these, rows whose value lies outside the edges."""
    nulls: int
    """Rows without a value."""
    marks: tuple[Mark, ...] = ()
    """Thresholds to compare with."""
    kind: Literal["histogram"] = "histogram"
    """For programs."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the report."""

    title: str
    """What it is about."""
    text: str = ""
    """A sentence or two."""
    figures: tuple[Table | Bars | Histogram, ...] = ()
    """Tables and plots."""
    missing: str = ""
    """What this version lacks, with the command that makes it; empty when nothing."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What is known of a version's documents, and what a filter would keep of them."""

    uri: str
    """The table."""
    pin: str
    """Version of it."""
    rows: int
    """Documents."""
    funnel: Funnel | None
    """Of the filter asked for; None where the version has nothing to filter by."""
    sections: tuple[Section, ...]
    """In the order of the stages."""


def histograms(
    dataset: lance.LanceDataset, columns: Mapping[str, str], marks: Mapping[str, Sequence[Mark]]
) -> list[Histogram]:
    """Histograms of numeric columns, in two passes over them: one for their ranges, one to count.

    A histogram reaches from the first to the 99th percentile, and to marks that are not `FAR` times that away.

    Args:
        dataset: The table at the version that is asked.
        columns: Meaning by column.
        marks: Thresholds by column.
    """
    import numpy as np

    if not columns:
        return []
    names = list(columns)
    asked = ", ".join(
        f"approx_percentile_cont(CAST({name} AS DOUBLE), {share}) AS {word}{place}"
        for place, name in enumerate(names)
        for word, share in (("low", 0.01), ("high", 0.99))
    )
    (ranges,) = sql_rows(dataset, f"SELECT {asked} FROM dataset")
    edges = [
        _edges(ranges[f"low{place}"], ranges[f"high{place}"], [mark.value for mark in marks.get(name, ())])
        for place, name in enumerate(names)
    ]
    counts = np.zeros((len(names), BINS), np.int64)
    outside, nulls = np.zeros(len(names), np.int64), np.zeros(len(names), np.int64)
    for batch in dataset.scanner(columns=names, batch_size=SCAN_ROWS).to_batches():
        for place, name in enumerate(names):
            values = batch[name].drop_null().cast("float64").to_numpy()
            values, (low, high) = values[~np.isnan(values)], edges[place]
            nulls[place] += batch.num_rows - len(values)
            outside[place] += np.count_nonzero((values < low) | (values > high))
            counts[place] += np.histogram(np.clip(values, low, high), BINS, (low, high))[0]
    return [
        Histogram(
            title=name,
            meaning=columns[name],
            low=edges[place][0],
            high=edges[place][1],
            counts=tuple(counts[place].tolist()),
            outside=int(outside[place]),
            nulls=int(nulls[place]),
            marks=tuple(marks.get(name, ())),
        )
        for place, name in enumerate(names)
    ]


def _edges(low: float | None, high: float | None, marks: Sequence[float]) -> tuple[float, float]:
    """Where a histogram begins and ends; something wide even for a constant column or one of NULLs."""
    if low is None or high is None or low != low or high != high:
        return 0.0, 1.0
    span = (high - low) or 1.0
    near = [mark for mark in marks if low - FAR * span <= mark <= high + FAR * span]
    begin, end = min([low, *near]), max([high, *near])
    return (begin, end) if begin < end else (begin, begin + 1.0)
