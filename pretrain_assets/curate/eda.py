"""Exploratory counts for the reports: scores, lengths, duplicates by source. Reads narrow columns only, never text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pretrain_assets.table.query import sql_rows

if TYPE_CHECKING:
    import lance

LENGTH_EDGES = (0, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
"""Lower edges of the length bins, in characters."""
WORD_EDGES = (0, 50, 100, 300, 1_000, 3_000, 10_000, 100_000)
"""Lower edges of the bins of documents by words; Gopher keeps those of 50 to 100,000."""


@dataclass(frozen=True, kw_only=True)
class Bin:
    """One bar of a histogram."""

    label: str
    """What the bar counts."""
    rows: int
    """Documents in it."""


@dataclass(frozen=True, kw_only=True)
class SourceShare:
    """Duplicates of one source."""

    source: str
    """Value of the `source` column."""
    rows: int
    """Documents of the source."""
    duplicates: int
    """Of these, duplicates."""


def score_bins(dataset: lance.LanceDataset) -> list[Bin]:
    """Documents by score in bins of 0.5, and those without a score."""
    query = "SELECT floor(score * 2) / 2 AS low, count(*) AS n FROM dataset GROUP BY 1 ORDER BY 1"
    return [
        Bin(label="none" if row["low"] is None else f"{row['low']:.1f}", rows=row["n"])
        for row in sql_rows(dataset, query)
    ]


def length_bins(dataset: lance.LanceDataset) -> list[Bin]:
    """Documents by length in characters."""
    return _bins(dataset, "n_chars", LENGTH_EDGES)


def word_bins(dataset: lance.LanceDataset) -> list[Bin]:
    """Measured documents by their words."""
    return _bins(dataset, "gopher_words", WORD_EDGES)


def language_bins(dataset: lance.LanceDataset, most: int = 12) -> list[Bin]:
    """Measured documents by language, the `most` frequent ones."""
    query = (
        "SELECT language, count(*) AS n FROM dataset WHERE language IS NOT NULL "
        f"GROUP BY language ORDER BY n DESC, language LIMIT {most}"
    )
    return [Bin(label=row["language"], rows=row["n"]) for row in sql_rows(dataset, query)]


def duplicates_by_source(dataset: lance.LanceDataset, flag: str = "is_dup") -> list[SourceShare]:
    """Rows and duplicates (rows with `flag`) of every source, largest source first."""
    query = (
        f"SELECT source, count(*) AS n, sum(CASE WHEN {flag} THEN 1 ELSE 0 END) AS dups "
        "FROM dataset GROUP BY source ORDER BY n DESC, source"
    )
    return [SourceShare(source=r["source"], rows=r["n"], duplicates=r["dups"]) for r in sql_rows(dataset, query)]


def _bins(dataset: lance.LanceDataset, column: str, edges: Sequence[int]) -> list[Bin]:
    cases = " ".join(f"WHEN {column} >= {edge} THEN {edge}" for edge in reversed(edges))
    query = f"SELECT CASE {cases} END AS low, count(*) AS n FROM dataset GROUP BY 1"
    counts = {row["low"]: row["n"] for row in sql_rows(dataset, query)}
    return [Bin(label=f"{edge:,}+", rows=counts.get(edge, 0)) for edge in edges]
