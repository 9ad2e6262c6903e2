"""Text of what a run saw at one step.

Invariant: prints what it is given; what is not known is printed as `-`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tabulate import tabulate

from pretrain_assets.plural import counted
from pretrain_assets.report.clean import clean, named

if TYPE_CHECKING:
    from pretrain_assets.forensics.seen import SeenStep

WIDTH = 60
"""Characters of a document in a line."""
SOURCE = 40
"""Characters of a source."""


def seen_text(seen: SeenStep) -> str:
    """The step in two lines, then one line per part of a document."""
    by = "ranks unknown" if seen.ranks is None else counted(seen.ranks, "rank")
    head = (
        f"{seen.run}\nstep {seen.step:,} of {seen.total_steps:,}{'' if seen.done else ', yet to come'}, epoch "
        f"{seen.epoch}, {by}, {seen.pin}\n{counted(seen.num_documents, 'document')} in "
        f"{counted(len(seen.blocks), 'block')}: {counted(seen.tokens, 'token')} and {seen.tokens_padded:,} of padding"
    )
    rows = [
        [
            part.span.block,
            "-" if part.span.rank is None else part.span.rank,
            part.span.offset,
            part.span.tokens,
            part.id,
            named(part.source, SOURCE),
            "-" if part.score is None else f"{part.score:.4g}",
            part.span.doc_start,
            ("-" if part.text is None else part.text)[:WIDTH],
        ]
        for part in seen.parts
    ]
    begins = "its tokens" if all(part.is_decoded for part in seen.parts) else "the document begins"
    headers = ["block", "rank", "offset", "tokens", "id", "source", "score", "from token", begins]
    align = ["right"] * 5 + ["left", "right", "right", "left"]
    parts = [head]
    if rows:
        parts.append(tabulate(rows, headers=headers, disable_numparse=True, colalign=align))
    if seen.num_parts > len(rows):
        parts.append(f"{len(rows):,} of {seen.num_parts:,} parts; --limit {seen.num_parts} shows all")
    return clean("\n\n".join(parts))
