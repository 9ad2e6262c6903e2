"""The losses of a replay and its original as a picture: one SVG, alone or in a page of its own.

Invariant: drawn from the numbers given and nothing else; no script, no other file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from pretrain_assets.report.replay_text import comparison_text
from pretrain_assets.report.run_card_curve import ticks

if TYPE_CHECKING:
    from pretrain_assets.forensics.replay_compare import Comparison

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 420, 60, 20, 64, 44
"""Size of the picture and the room around the axes, in pixels."""
COLOURS = {"original": "#888", "replay": "#258"}
MOST_POINTS = 2_000
"""Points of a line: more cannot be told apart."""
Scale = Callable[[float], float]
Curve = Sequence[tuple[int, float]]


def replay_svg(found: Comparison) -> str:
    """Both training losses as lines, both validation losses as dots, the steps with holes as ticks below."""
    curves = {name: curve for name, curve in found.curves.items() if curve}
    values = [loss for curve in curves.values() for _, loss in curve]
    last = max(step for curve in curves.values() for step, _ in curve)
    marks = ticks(min(values), max(values), 6)
    low, high = min(marks[0], *values), max(marks[-1], *values)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / max(last, 1)

    def y(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low)

    parts = [_text(LEFT, 20, f"Replay without {found.holes}", extra=" font-weight='bold'"), *_legend()]
    for mark in marks:
        parts.append(f"<path d='M{LEFT} {y(mark):.1f}H{WIDTH - RIGHT}' stroke='#e4e4e4'/>")
        parts.append(_text(LEFT - 8, y(mark) + 4, f"{mark:g}", extra=" text-anchor='end'"))
    for step in ticks(0, last, 8):
        if step <= last:
            parts.append(_text(x(step), HEIGHT - 14, f"{step:,.0f}", extra=" text-anchor='middle'"))
    parts += _holes(found, x)
    if found.start_step:
        at = f"M{x(found.start_step):.1f} {TOP}V{HEIGHT - BOTTOM}"
        parts.append(f"<path d='{at}' stroke='#c22' stroke-dasharray='5 3'/>")
        parts.append(_text(x(found.start_step) + 5, TOP + 12, "the replay begins", extra=" fill='#c22'"))
    for name, curve in curves.items():
        parts.append(_dots(name, curve, x, y) if name.endswith("validation") else _line(name, curve, x, y))
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}' viewBox='0 0 {WIDTH} {HEIGHT}' "
        "font-family='sans-serif' font-size='12'><rect width='100%' height='100%' fill='#fff'/>"
        f"{''.join(parts)}</svg>\n"
    )


def replay_html(found: Comparison) -> str:
    """The picture and the tables as one page."""
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>Replay</title><style>"
        "body{max-width:960px;margin:2em auto;padding:0 1em;font-family:sans-serif}svg{max-width:100%;height:auto}"
        "pre{overflow-x:auto;font-size:13px}</style></head><body><h1>Counterfactual replay</h1>"
        f"{replay_svg(found)}<pre>{escape(comparison_text(found))}</pre></body></html>\n"
    )


def _line(name: str, curve: Curve, x: Scale, y: Scale) -> str:
    every = -(-len(curve) // MOST_POINTS)
    kept = [*curve[::every], curve[-1]]
    points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in kept)
    return (
        f"<polyline fill='none' stroke='{_colour(name)}' stroke-width='1.5' points='{points}'>"
        f"<title>{escape(name)}, training loss</title></polyline>"
    )


def _dots(name: str, curve: Curve, x: Scale, y: Scale) -> str:
    return "".join(
        f"<circle cx='{x(step):.1f}' cy='{y(loss):.1f}' r='4' fill='{_colour(name)}' stroke='#fff'>"
        f"<title>{escape(name)} loss {loss:.4f} at step {step:,}</title></circle>"
        for step, loss in curve
    )


def _holes(found: Comparison, x: Scale) -> list[str]:
    floor = HEIGHT - BOTTOM
    return [
        f"<path d='M{x(point.step):.1f} {floor}v6' stroke='#d84' stroke-width='2'>"
        f"<title>step {point.step:,}: {point.tokens_in_holes:,} tokens in holes</title></path>"
        for point in found.training
        if point.tokens_in_holes
    ]


def _legend() -> list[str]:
    parts, at = [], float(LEFT)
    for name, colour in COLOURS.items():
        parts.append(f"<path d='M{at} 42h22' stroke='{colour}' stroke-width='2'/>")
        parts.append(f"<circle cx='{at + 11}' cy='42' r='4' fill='{colour}' stroke='#fff'/>")
        parts.append(_text(at + 28, 46, name))
        at += 110
    parts.append(_text(at, 46, "lines: training loss; dots: validation loss; orange ticks: steps with holes"))
    return parts


def _colour(name: str) -> str:
    return COLOURS[name.partition(" ")[0]]


def _text(x: float, y: float, text: str, *, extra: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}'{extra}>{escape(text)}</text>"
