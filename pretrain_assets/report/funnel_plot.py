"""A filter's funnel as a picture: what every term leaves, and what it takes away.

Invariant: one standalone SVG, a row per term, drawn from the numbers given and nothing else.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

from pretrain_assets.curate.funnel import Count, Funnel
from pretrain_assets.report.curation_text import lines_of, readable

LABELS, BARS, NUMBERS, ROW, TOP = 330, 420, 250, 26, 58
"""Widths of the three columns, heights of a row and of the head, in pixels."""
LEFT, GONE, INNER = "#2f6f9f", "#e8b4a0", "#8fb8d4"
LABEL_CHARACTERS, INDENT = 46, 14
"""Of a label, and pixels that a term of a name stands further in."""


def funnel_svg(found: Funnel) -> str:
    """Rows left after every term as bars, with what the term took away of the bar before it."""
    lines = list(lines_of(found.steps))
    height = TOP + ROW * (len(lines) + 1) + 12
    kept, total = found.kept, found.total
    head = f"keeps {kept.rows:,} of {total.rows:,} rows, {kept.amount:,} of {total.amount:,} {found.unit}"
    parts = [
        _text(10, 20, readable(found.filter, 110), weight="bold"),
        _text(10, 40, f"{head}; {found.unknown.rows:,} rows are unknown (NULL) and not kept"),
        *_row(0, "all rows", found.total, found.total.rows, found, depth=0),
    ]
    for place, (depth, step) in enumerate(lines, 1):
        if isinstance(step, str):
            parts.append(_text(10 + INDENT * depth, TOP + ROW * place + 14, step, colour="#889"))
            continue
        label = f"{step.number}  {readable(step.text)}"
        parts += _row(place, label, step.left, step.left.rows + step.in_order.rows, found, depth=depth)
    width = LABELS + BARS + NUMBERS
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' "
        "font-family='system-ui, sans-serif' font-size='12'><rect width='100%' height='100%' fill='#fff'/>"
        f"{''.join(parts)}</svg>\n"
    )


def _row(place: int, label: str, left: Count, before: int, found: Funnel, *, depth: int) -> list[str]:
    """A label, the bar of what is left with what is gone behind it, and the numbers."""
    y, scale = TOP + ROW * place, BARS / max(1, found.total.rows)
    numbers = f"{left.rows:,} rows, {left.amount:,} {found.unit}"
    gone = f", -{before - left.rows:,}" if before > left.rows else ""
    return [
        f"<g><title>{escape(label)}: {numbers}{gone}</title>",
        _text(10 + INDENT * depth, y + 14, readable(label, LABEL_CHARACTERS - 2 * depth)),
        _bar(y, before * scale, GONE),
        _bar(y, left.rows * scale, INNER if depth else LEFT),
        _text(LABELS + BARS + 10, y + 14, f"{left.rows:,}{gone}"),
        "</g>",
    ]


def _bar(y: float, width: float, colour: str) -> str:
    return f"<rect x='{LABELS}' y='{y}' width='{width:.1f}' height='{ROW - 8}' rx='2' fill='{colour}'/>"


def _text(x: float, y: float, text: str, *, weight: str = "normal", colour: str = "#223") -> str:
    return f"<text x='{x}' y='{y}' font-weight='{weight}' fill='{colour}'>{escape(text)}</text>"
