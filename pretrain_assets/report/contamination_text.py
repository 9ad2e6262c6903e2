"""The contamination report for terminals and as markdown.

Invariant: prints what it is given and looks up nothing.
"""

from __future__ import annotations

from tabulate import tabulate

from pretrain_assets.curate.contamination_report import ContaminationReport
from pretrain_assets.report.clean import clean, named

EXCERPT, SOURCES = 60, 20
"""Characters of a match, and sources, that are shown."""


def contamination_text(found: ContaminationReport, *, tablefmt: str = "simple") -> str:
    """How much, in which sets, in which sources, and the largest matches."""
    how = found.parameters
    parts = [
        f"{found.contaminated:,} of {found.rows:,} documents hold an evaluation item: {how['min_overlap']:.0%} or more "
        f"of the {how['ngram']}-grams of one of its texts. `NOT contaminated` leaves them out.",
        sets_text(found, tablefmt=tablefmt),
    ]
    if found.contaminated:
        parts += [sources_text(found, tablefmt=tablefmt), matches_text(found, tablefmt=tablefmt)]
    return "\n\n".join(parts)


def sets_text(found: ContaminationReport, *, tablefmt: str = "simple") -> str:
    """One line per eval set."""
    headers = ["eval set", "items", "searched", "too short", "boilerplate", "items found", "documents"]
    rows = [
        [one.name, one.items, one.searched, one.too_short, one.boilerplate, one.items_found, one.documents]
        for one in found.sets
    ]
    return _table(rows, headers, tablefmt)


def sources_text(found: ContaminationReport, *, tablefmt: str = "simple") -> str:
    """One line per source with contaminated documents, the most first."""
    some = [one for one in found.sources if one.contaminated]
    rows = [
        [named(one.source), one.rows, one.contaminated, f"{one.contaminated / one.rows:.2%}"] for one in some[:SOURCES]
    ]
    more = f"\n... and {len(some) - SOURCES} more sources" if len(some) > SOURCES else ""
    return _table(rows, ["source", "documents", "contaminated", "share"], tablefmt) + more


def matches_text(found: ContaminationReport, *, tablefmt: str = "simple") -> str:
    """One line per match, the largest first."""
    rows = [
        [
            str(one.id),
            named(one.doc_id),
            one.item + (f" (+{one.items - 1})" if one.items > 1 else ""),
            f"{one.overlap:.2f}",
            f"{one.start}-{one.stop}",
            _cut(one.excerpt),
        ]
        for one in found.matches
    ]
    return _table(rows, ["id", "document", "item", "overlap", "characters", "text"], tablefmt)


def _table(rows: list[list[object]] | list[list[str]], headers: list[str], tablefmt: str) -> str:
    plain = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    return clean(tabulate(plain, headers=headers, disable_numparse=True, tablefmt=tablefmt))


def _cut(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\u2502")
    return line if len(line) <= EXCERPT else f"{line[: EXCERPT - 3]}..."
