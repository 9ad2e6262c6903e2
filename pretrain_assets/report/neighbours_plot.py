"""The threshold curve as a picture: the share of documents that have a neighbour at least so similar.

Invariant: one standalone SVG, drawn from the numbers given and nothing else; each point says its numbers when touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from pretrain_assets.forensics.retrieval.cluster_curve import Point
    from pretrain_assets.forensics.retrieval.clusters import Clusters

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 380, 62, 24, 74, 46
"""The picture and the room around the curve, in pixels."""
ANY, NEW, MARK = "#2f6f9f", "#d9825f", "#b3402a"
STEPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Of the scale of shares: the smallest that needs no more than six lines."""


def threshold_svg(found: Clusters) -> str:
    """Share of documents by threshold, of any neighbour and of those that deduplication does not know."""
    asked = max(1, found.asked - found.zero - found.missing)
    new = [point.documents_new / asked for point in found.curve]
    step = next((step for step in STEPS if found.curve[0].share <= 6 * step), STEPS[-1])
    top = step * max(1, -(-found.curve[0].share // step))
    low, high = found.curve[0].threshold, found.curve[-1].threshold

    def x(threshold: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (threshold - low) / (high - low)

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share / top

    parts = [_text(10, 20, "Documents with a neighbour at least so similar", weight="bold"), *_head(found)]
    for line in range(round(top / step) + 1):
        at = y(line * step)
        parts.append(f"<path d='M{LEFT} {at:.1f}H{WIDTH - RIGHT}' stroke='#e3e8ee'/>")
        parts.append(_text(LEFT - 8, at + 4, f"{line * step:.1%}", anchor="end"))
    for tenth in range(5, 11):
        parts.append(_text(x(tenth / 10), HEIGHT - BOTTOM + 18, f"{tenth / 10:g}", anchor="middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "similarity (cosine)", anchor="middle"))
    if found.asked < found.rows:
        edge = [(p.threshold, p.share + p.error) for p in found.curve]
        edge += [(p.threshold, max(0.0, p.share - p.error)) for p in reversed(found.curve)]
        corners = " ".join(f"{x(t):.1f},{y(min(s, top)):.1f}" for t, s in edge)
        parts.append(f"<polygon points='{corners}' fill='{ANY}' opacity='0.15'/>")
    mark = x(found.threshold)
    parts.append(f"<path d='M{mark:.1f} {TOP}V{HEIGHT - BOTTOM}' stroke='{MARK}' stroke-dasharray='4 3'/>")
    parts.append(_text(mark - 5, TOP + 10, f"clusters at {found.threshold:g}", anchor="end", colour=MARK))
    for colour, shares in ((ANY, [point.share for point in found.curve]), (NEW, new)):
        parts += _line(found.curve, shares, colour, x, y)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}' "
        "font-family='system-ui, sans-serif' font-size='12'><rect width='100%' height='100%' fill='#fff'/>"
        f"{''.join(parts)}</svg>\n"
    )


def _head(found: Clusters) -> list[str]:
    """What was asked, and the legend."""
    asked = f"{'all' if found.asked == found.rows else f'{found.asked:,} of'} {found.rows:,} documents"
    where = f" where {found.where[:60]}" if found.where else ""
    return [
        _text(10, 40, f"{asked}{where}; {found.method.describe()}"),
        f"<rect x='10' y='50' width='12' height='10' fill='{ANY}'/>",
        _text(28, 59, "any neighbour"),
        f"<rect x='130' y='50' width='12' height='10' fill='{NEW}'/>",
        _text(148, 59, "a neighbour that deduplication does not know"),
    ]


def _line(
    curve: tuple[Point, ...],
    shares: list[float],
    colour: str,
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> list[str]:
    """A curve, and at each point what it says."""
    points = [(x(point.threshold), y(share)) for point, share in zip(curve, shares, strict=True)]
    path = " ".join(f"{across:.1f},{down:.1f}" for across, down in points)
    dots = [
        f"<circle cx='{across:.1f}' cy='{down:.1f}' r='3' fill='{colour}'><title>{point.threshold:g}: {share:.2%}; "
        f"{point.pairs:,} pairs</title></circle>"
        for (across, down), point, share in zip(points, curve, shares, strict=True)
    ]
    return [f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'/>", *dots]


def _text(x: float, y: float, text: str, *, weight: str = "normal", colour: str = "#223", anchor: str = "start") -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-weight='{weight}' fill='{colour}' text-anchor='{anchor}'>"
        f"{escape(text)}</text>"
    )
