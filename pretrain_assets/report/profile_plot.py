"""The loader's profile as a picture: tokens/s of every setting beside the share of time of each stage.

Invariant: one standalone SVG, a row per setting, drawn from the numbers given and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from pretrain_assets.loader.profile import Measurement

LABELS, RATES, SHARES, GAP, ROW, TOP = 380, 320, 260, 90, 24, 64
"""Widths of the three columns, space between them, heights of a row and of the head, in pixels."""
STAGES = (("packs", "#4a7"), ("waits for reads", "#d84"), ("neither", "#ccc"))


def profile_svg(title: str, measurements: Sequence[Measurement], *, best: int, trainer: float | None) -> str:
    """Bars of tokens/s with the trainer's speed as a line, and the time of the packer as a stack."""
    top = max(*(measured.tokens_per_second for measured in measurements), trainer or 0.0)
    at_rates, at_shares = LABELS + 10, LABELS + RATES + GAP
    bottom = TOP + ROW * len(measurements)
    parts = [
        _text(10, 20, title, extra=" font-weight='bold'"),
        _text(at_rates, 46, "tokens/s of one rank"),
        *_legend(at_shares),
    ]
    for number, measured in enumerate(measurements):
        y, rate = TOP + ROW * number, measured.tokens_per_second
        mark = " font-weight='bold'" if number == best else ""
        parts.append(_text(LABELS, y + 14, _label(measured, best=number == best), end=True, extra=mark))
        width = RATES * rate / top
        parts.append(_bar(at_rates, y, width, "#258" if number == best else "#69c"))
        parts.append(_text(at_rates + width + 4, y + 14, f"{rate:,.0f}"))
        x: float = at_shares
        for (_, colour), share in zip(STAGES, _shares(measured), strict=True):
            parts.append(_bar(x, y, SHARES * share, colour))
            x += SHARES * share
    if trainer:
        x = at_rates + RATES * trainer / top
        parts.append(f"<path d='M{x:.1f} {TOP - 4}V{bottom}' stroke='#c22' stroke-width='2' stroke-dasharray='5 3'/>")
        parts.append(_text(at_rates, bottom + 18, f"dashed: the trainer takes {trainer:,.0f}", extra=" fill='#c22'"))
    width, height = at_shares + SHARES + 10, bottom + 30
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' font-family='sans-serif' "
        f"font-size='12'><rect width='100%' height='100%' fill='#fff'/>{''.join(parts)}</svg>\n"
    )


def _label(measured: Measurement, *, best: bool) -> str:
    return f"{measured.variant.name}{' (best)' if best else ' (other order)' if measured.variant.changes_order else ''}"


def _shares(measured: Measurement) -> tuple[float, float, float]:
    """Shares of the packer's time, one after the other."""
    packs = min(1.0, measured.pack_seconds / measured.seconds)
    waits = min(1.0 - packs, measured.pack_wait_seconds / measured.seconds)
    return packs, waits, 1.0 - packs - waits


def _legend(x: float) -> list[str]:
    parts = [_text(x, 32, "the packer's time: it")]
    for name, colour in STAGES:
        parts += [f"<rect x='{x:.1f}' y='40' width='8' height='8' fill='{colour}'/>", _text(x + 11, 48, name)]
        x += 21 + 5.6 * len(name)
    return parts


def _bar(x: float, y: float, width: float, colour: str) -> str:
    return f"<rect x='{x:.1f}' y='{y:.0f}' width='{width:.1f}' height='{ROW - 6}' fill='{colour}'/>"


def _text(x: float, y: float, text: str, *, end: bool = False, extra: str = "") -> str:
    anchor = " text-anchor='end'" if end else ""
    return f"<text x='{x:.1f}' y='{y:.0f}'{anchor}{extra}>{escape(text)}</text>"
