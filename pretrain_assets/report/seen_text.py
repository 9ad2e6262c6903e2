"""Text of what a run saw at one step.

Invariant: prints what it is given; what is not known is printed as `-`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tabulate import tabulate

from pretrain_assets.plural import counted

if TYPE_CHECKING:
    from pretrain_assets.forensics.seen import SeenStep

WIDTH = 60
"""Characters of a document in a line."""


def seen_text(seen: SeenStep) -> str:
    """The step in one line, then one line per part of a document."""
    head = (
        f"{seen.run}\nstep {seen.step:,} of {seen.total_steps:,}, epoch {seen.epoch}, {seen.pin}: "
        f"{counted(seen.num_documents, 'document')} in {counted(seen.num_blocks, 'block')}"
    )
    rows = [
        [
            part.exposure.block,
            part.exposure.offset,
            part.exposure.tokens,
            part.exposure.doc_id,
            part.source or "-",
            part.exposure.doc_start,
            (part.preview or "-")[:WIDTH],
        ]
        for part in seen.parts
    ]
    headers = ["block", "offset", "tokens", "id", "source", "from token", "the document begins"]
    align = ["right"] * 4 + ["left", "right", "left"]
    parts = [head, tabulate(rows, headers=headers, disable_numparse=True, colalign=align)]
    if seen.num_parts > len(rows):
        parts.append(f"{len(rows):,} of {seen.num_parts:,} parts; --limit {seen.num_parts} shows all")
    return "\n\n".join(parts)
