"""The losses of a replay and its original as a picture: both above, their difference below; one SVG, or a page with it.

Invariant: drawn from the numbers given and nothing else; no script, no other file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from pretrain_assets.report.card.curve import ticks
from pretrain_assets.report.replay_text import comparison_text

if TYPE_CHECKING:
    from pretrain_assets.forensics.replays.compare import Comparison

WIDTH, LEFT, RIGHT, TOP, HEIGHT = 900, 70, 20, 70, 500
"""Size of the picture, and the room around the panels, in pixels."""
PANELS = {"loss": (TOP, 310), "difference": (342, 452)}
"""Upper and lower edge of each panel."""
ORIGINAL, REPLAY, HOLES, START = "#888", "#258", "#d84", "#c22"
MOST_POINTS = 2_000
"""Points of a line: more cannot be told apart."""
Curve = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class _Panel:
    """A panel's scales."""

    top: float
    bottom: float
    low: float
    high: float
    last_step: int

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / max(self.last_step, 1)

    def y(self, value: float) -> float:
        return self.top + (self.bottom - self.top) * (self.high - value) / (self.high - self.low)


def replay_svg(found: Comparison) -> str:
    """Training losses as lines, validation losses as dots; below, the replay's minus the original's."""
    curves = found.curves
    differences = {
        kind: [(point.step, point.difference) for point in points]
        for kind, points in (("training", found.training), ("validation", found.validation))
    }
    last = max(step for curve in curves.values() for step, _ in curve)
    above, marks = _panel("loss", curves.values(), last)
    below, fine_marks = _panel("difference", [*differences.values(), [(0, 0.0)]], last)
    parts = [
        _text(LEFT, 22, f"Replay without {found.holes}", extra=" font-weight='bold'"),
        *_legend(),
        *_grid(above, marks, "nats per token"),
        *_grid(below, fine_marks, "replay - original"),
        *_steps(below, found),
        _line("original", curves["original"], ORIGINAL, above),
        _line("replay", curves["replay"], REPLAY, above),
        _dots("original", curves["original validation"], ORIGINAL, above),
        _dots("replay", curves["replay validation"], REPLAY, above),
        _line("difference", differences["training"], REPLAY, below),
        _dots("difference", differences["validation"], REPLAY, below),
    ]
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}' viewBox='0 0 {WIDTH} {HEIGHT}' "
        "font-family='sans-serif' font-size='12'><rect width='100%' height='100%' fill='#fff'/>"
        f"{''.join(parts)}</svg>\n"
    )


def replay_html(found: Comparison) -> str:
    """The picture and the tables as one page."""
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>Counterfactual replay</title><style>"
        "body{max-width:960px;margin:2em auto;padding:0 1em;font-family:sans-serif}svg{max-width:100%;height:auto}"
        "pre{overflow-x:auto;font-size:13px}</style></head><body><h1>Counterfactual replay</h1>"
        f"{replay_svg(found)}<pre>{escape(comparison_text(found))}</pre></body></html>\n"
    )


def _panel(name: str, curves: Iterable[Curve], last_step: int) -> tuple[_Panel, list[float]]:
    """A panel that holds the curves, and round numbers for its axis."""
    values = [value for curve in curves for _, value in curve]
    top, bottom = PANELS[name]
    marks = ticks(min(values), max(values), 5 if name == "loss" else 3)
    return _Panel(top, bottom, min(marks[0], *values), max(marks[-1], *values), last_step), marks


def _grid(panel: _Panel, marks: Sequence[float], unit: str) -> list[str]:
    parts = [_text(LEFT, panel.top - 8, unit, extra=" fill='#666'")]
    for mark in marks:
        parts.append(f"<path d='M{LEFT} {panel.y(mark):.1f}H{WIDTH - RIGHT}' stroke='#e4e4e4'/>")
        parts.append(_text(LEFT - 8, panel.y(mark) + 4, f"{mark:g}", extra=" text-anchor='end'"))
    return parts


def _steps(panel: _Panel, found: Comparison) -> list[str]:
    """The axis of steps, where the replay begins, and which of the steps drawn have tokens in holes."""
    floor = panel.bottom
    parts = [
        f"<path d='M{panel.x(point.step):.1f} {floor}v7' stroke='{HOLES}' stroke-width='2'>"
        f"<title>step {point.step:,}: {point.tokens_in_holes:,} tokens in holes</title></path>"
        for point in found.training
        if point.tokens_in_holes
    ]
    for step in ticks(0, panel.last_step, 8):
        if step <= panel.last_step:
            parts.append(_text(panel.x(step), floor + 22, f"{step:,.0f}", extra=" text-anchor='middle'"))
    parts.append(_text(WIDTH - RIGHT, HEIGHT - 8, "step", extra=" text-anchor='end' fill='#666'"))
    if found.start_step:
        x, late = panel.x(found.start_step), found.start_step > panel.last_step / 2
        parts.append(f"<path d='M{x:.1f} {TOP}V{floor}' stroke='{START}' stroke-dasharray='5 3'/>")
        extra = f" fill='{START}' text-anchor='{'end' if late else 'start'}'"
        parts.append(_text(x - 5 if late else x + 5, TOP + 12, "the replay begins", extra=extra))
    return parts


def _line(name: str, curve: Curve, colour: str, panel: _Panel) -> str:
    if not curve:
        return ""
    kept = [*curve[:: -(-len(curve) // MOST_POINTS)], curve[-1]]
    points = " ".join(f"{panel.x(step):.1f},{panel.y(value):.1f}" for step, value in kept)
    return (
        f"<polyline fill='none' stroke='{colour}' stroke-width='1.5' points='{points}'>"
        f"<title>{escape(name)}, training</title></polyline>"
    )


def _dots(name: str, curve: Curve, colour: str, panel: _Panel) -> str:
    return "".join(
        f"<circle cx='{panel.x(step):.1f}' cy='{panel.y(value):.1f}' r='4' fill='{colour}' stroke='#fff'>"
        f"<title>{escape(name)}, validation, step {step:,}: {value:.4f}</title></circle>"
        for step, value in curve
    )


def _legend() -> list[str]:
    parts, at = [], float(LEFT)
    for name, colour in (("original", ORIGINAL), ("replay", REPLAY)):
        parts.append(f"<path d='M{at} 42h22' stroke='{colour}' stroke-width='2'/>")
        parts.append(f"<circle cx='{at + 11}' cy='42' r='4' fill='{colour}' stroke='#fff'/>")
        parts.append(_text(at + 28, 46, name))
        at += 100
    parts.append(_text(at, 46, "lines: training loss; dots: validation loss; ticks below: steps with holes"))
    return parts


def _text(x: float, y: float, text: str, *, extra: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}'{extra}>{escape(text)}</text>"
