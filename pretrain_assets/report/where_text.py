"""Text of where documents are in a run.

Invariant: prints what it is given; what is not known is printed as `-`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tabulate import tabulate

from pretrain_assets.plural import counted
from pretrain_assets.report.clean import clean, named

if TYPE_CHECKING:
    from pretrain_assets.forensics.subject import Span
    from pretrain_assets.forensics.where import Where, Whereabouts

MOST_SPANS = 20
"""Lines of one document's table; JSON has all."""
WIDTH = 100
REASONS = {
    "partial_step": "after the epoch's last whole step",
    "end_of_split": "at the end of a split",
    "beyond_splits": "left over when rows were shared out to splits",
    "thinned": "not drawn by the mixture",
}


def where_text(found: Whereabouts) -> str:
    """The run in one line, then every document."""
    head = f"{found.run}\nstep {found.step:,} of {found.total_steps:,}, {found.pin}"
    return clean("\n\n".join([head, *(_document(document, found.step) for document in found.documents)]))


def _document(document: Where, step: int) -> str:
    """What is known of one document in a run up to a step."""
    facts = [f"document {document.id}"]
    if document.tokens is not None or document.doc_id is not None:
        known = [named(name) for name in (document.doc_id, document.source) if name]
        known += [] if document.score is None else [f"score {document.score:.4g}"]
        length = "not tokenized" if document.tokens is None else counted(document.tokens, "token")
        facts[0] += f" ({', '.join([*known, length])})"
    if document.preview:
        facts.append(textwrap.indent(textwrap.fill(document.preview, WIDTH), "  "))
    facts.append(f"  {_verdict(document, step)}")
    spans = document.seen or document.to_come or document.past_the_end or document.masked
    if spans:
        facts.append(textwrap.indent(_table(spans), "  "))
    if document.seen and document.to_come:
        rest, first = sum(span.tokens for span in document.to_come), document.to_come[0]
        facts.append(f"  to come: {counted(rest, 'token')}, next at step {first.step:,} (epoch {first.epoch})")
    if document.seen and document.masked:
        hidden = sum(span.tokens for span in document.masked)
        facts.append(f"  masked (data.without): {counted(hidden, 'token')}, from step {document.masked[0].step:,} on")
    if document.seen:
        facts += [
            f"  left out of epoch {left.epoch}: {counted(left.tokens, 'token')}, {REASONS[left.reason]}"
            for left in document.left_out
        ]
    if document.deleted:
        facts.append(f"  deleted since, by {' or '.join(document.deleted)}")
    return "\n".join(facts)


def _verdict(document: Where, step: int) -> str:
    if not document.seen:
        assert document.why is not None
        return f"not seen: {document.why.text}"
    often = "once" if document.times == 1 else f"{document.times:,} times"
    tokens = sum(span.tokens for span in document.seen)
    first, last = document.seen[0].step, document.seen[-1].step
    steps = f"at step {first:,}" if first == last else f"from step {first:,} to {last:,}"
    return f"seen {often} by step {step:,}, {counted(tokens, 'token')}, {steps}"


def _table(spans: Sequence[Span]) -> str:
    rows = [
        [s.epoch, s.step, s.block, s.split, "-" if s.rank is None else s.rank, s.offset, s.tokens, s.doc_start]
        for s in spans[:MOST_SPANS]
    ]
    headers = ["epoch", "step", "block", "split", "rank", "offset", "tokens", "from token"]
    table = tabulate(rows, headers=headers, disable_numparse=True, colalign=["right"] * len(headers))
    more = len(spans) - len(rows)
    return f"{table}\nand {more:,} more; --json has all" if more else table
