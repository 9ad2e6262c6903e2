"""Text for people: what a search found, and what the indexes hold.

Invariant: prints what it is given and looks up nothing; a mark stands where the search said that a word stands.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pretrain_assets.plural import counted
from pretrain_assets.report.clean import clean, named

if TYPE_CHECKING:  # forensics needs torch, which takes seconds to import
    from pretrain_assets.forensics.retrieval.search import Found, Hit
    from pretrain_assets.table.lineage import LineageRecord

WIDTH = 100
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"


def found_text(found: Found, *, mark: bool = False) -> str:
    """An answer: its hits, then what a reader has to know of it."""
    return "\n".join([hits_text(found.hits, mark=mark), *found.notes])


def hits_text(hits: Sequence[Hit], *, mark: bool = False) -> str:
    """Hits with their preview and what the checkpoint saw of each; `mark` makes the words found bold on a terminal."""
    if not hits:
        return "no hits"
    lines = []
    for place, hit in enumerate(hits, 1):
        lines.append(f"{place}. id {hit.id} ({named(hit.source)}){_scores(hit)}{clean(_seen(hit))}")
        lines.append(textwrap.indent(_preview(hit, mark), "   "))
    return "\n".join(lines)


def index_text(record: LineageRecord) -> str:
    """What the indexes of a version hold, in a line each."""
    words = "words and phrases" if record.parameters.get("with_position") else "words, no phrases"
    lines = [f"text: {record.ledger['indexed']:,} of {counted(record.ledger['in'], 'row')} ({words})"]
    if facts := record.details.get("vectors"):
        parts = [f"{facts[name]:,} {said}" for name, said in _VECTORS.items() if facts[name]]
        lines.append(f"vectors: {', '.join(parts) or 'none'}, of {counted(facts['rows'], 'row')}")
        if not facts["segments"]:
            lines[-1] += f"; fewer than {record.parameters['exact_below']:,} need no index, so recall is 1"
        elif facts["recall_at_10"] is not None:
            asked = f"{counted(facts['queries'], 'row')} asked at version {facts['measured_at']}"
            lines[-1] += f"; recall@10 {facts['recall_at_10']:.3f} ({asked})"
    return "\n".join(lines)


_VECTORS = {"indexed": "indexed", "read": "compared by reading them", "without": "rows without one"}


def _scores(hit: Hit) -> str:
    """A single score plainly; several with the place in each ranking."""
    if len(hit.scores) < 2:
        return "".join(f", score {score:.{_digits(name)}f}" for name, score in hit.scores.items())
    return "".join(f", {name} {score:.{_digits(name)}f} (#{hit.ranks[name]})" for name, score in hit.scores.items())


def _digits(name: str) -> int:
    return {"bm25": 1, "rrf": 4}.get(name, 3)


def _seen(hit: Hit) -> str:
    if hit.seen is None:
        return ""
    then = f"; the run comes to it at step {hit.next_step}" if hit.next_step is not None else ""
    return f", {hit.seen.describe()}{then}"


def _preview(hit: Hit, mark: bool) -> str:
    """Wrapped, each new line in the place of one space, so that the marks still fit."""
    text = textwrap.fill(hit.preview, WIDTH, break_long_words=False, break_on_hyphens=False)
    parts, at = [], 0
    for start, stop in hit.matches if mark else ():
        parts += [clean(text[at:start]), BOLD, clean(text[start:stop]), PLAIN]
        at = stop
    return "".join([*parts, clean(text[at:])])
