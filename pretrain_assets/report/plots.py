"""Plots as tiny SVG images in markdown.

Why not a plotting library: the Dagster UI shows markdown at once only below 1,000 characters, and an SVG of that size
is one path; the smallest PNG of matplotlib is twenty times as large.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, BASE = 360, 90, 76
MAX_POINTS = 24
"""Points of a line: more do not fit in 1,000 characters of markdown."""


def bars(title: str, labels: Sequence[str], values: Sequence[float]) -> str:
    """A bar chart as a markdown image; first, last and highest bars are labelled."""
    if not values:
        return f"{title}: nothing to plot"
    top = max(*values, 1)
    step = WIDTH / len(values)
    heights = [round(60 * value / top) for value in values]
    path = "".join(f"M{round(i * step)} {BASE}v-{h}h{round(step * 0.8)}v{h}" for i, h in enumerate(heights) if h)
    peak = max(range(len(values)), key=lambda i: values[i])
    marks = {0: "start", len(values) - 1: "end", peak: "middle"}
    texts = "".join(
        f"<text x='{WIDTH if a == 'end' else round(i * step + (step / 2 if a == 'middle' else 0))}' y='88' "
        f"text-anchor='{a}'>{escape(labels[i])}</text>"
        for i, a in marks.items()
    )
    return _image(title, f"<path fill='#4a7' d='{path}'/>{texts}<text y='10'>max {top:,.0f}</text>")


def line(title: str, xs: Sequence[float], ys: Sequence[float]) -> str:
    """A line chart as a markdown image, thinned to `MAX_POINTS`; first and last values are labelled."""
    if not ys:
        return f"{title}: nothing to plot"
    texts = (
        f"<text y='10'>{ys[0]:.3g}</text><text x='{WIDTH}' y='10' text-anchor='end'>{ys[-1]:.3g}</text>"
        f"<text y='88'>{xs[0]:,.0f}</text><text x='{WIDTH}' y='88' text-anchor='end'>{xs[-1]:,.0f}</text>"
    )
    path = _path(xs, ys, 0, WIDTH, MAX_POINTS)
    return _image(title, f"<path fill='none' stroke='#47a' stroke-width='2' d='{path}'/>{texts}")


def lines(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> str:
    """Small line charts side by side in one markdown image, each with its name, first and last value below it."""
    shown = {name: curve for name, curve in curves.items() if curve[1]}
    if not shown:
        return f"{', '.join(curves)}: nothing to plot"
    width, body = WIDTH // len(shown), ""
    for place, (name, (xs, ys)) in enumerate(shown.items()):
        left = place * width
        body += (
            f"<path fill='none' stroke='#47a' d='{_path(xs, ys, left, width - 12, MAX_POINTS // len(shown))}'/>"
            f"<text x='{left}' y='10'>{escape(name)}</text><text x='{left}' y='88'>{ys[0]:.3g} to {ys[-1]:.3g}</text>"
        )
    return _image(", ".join(shown), body)


def _path(xs: Sequence[float], ys: Sequence[float], left: int, width: int, num_points: int) -> str:
    """A thinned line as SVG path data."""
    keep = sorted({round(i * (len(ys) - 1) / max(1, num_points - 1)) for i in range(num_points)} & set(range(len(ys))))
    low, span_x, span_y = min(ys), max(xs[-1] - xs[0], 1e-9), max(max(ys) - min(ys), 1e-9)
    points = [(left + (xs[i] - xs[0]) / span_x * width, BASE - 60 * (ys[i] - low) / span_y) for i in keep]
    return "M" + " ".join(f"{round(x)},{round(y)}" for x, y in points)


def _image(title: str, body: str) -> str:
    svg = f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}' font-size='10'>{body}</svg>"
    return f"![{title}](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"
