"""The lineage of a run card as a picture: from files to checkpoint, across a wide page or down a narrow one.

Invariant: one SVG that takes its colours from the page's style, drawn from the graph given and nothing else. Every node
carries all of its text as a tooltip, so that what is cut can be read.
"""

from __future__ import annotations

import textwrap

from markupsafe import Markup, escape

from pretrain_assets.forensics.card.lineage import DataLineage, Edge, Node
from pretrain_assets.report.card.words import marks_of, rows_of
from pretrain_assets.report.clean import clean

WIDTH, GAP, ROW_GAP = 118, 20, 30
"""Width of a node across the page, and the room between nodes, in pixels."""
TALL_WIDTH, TALL_HEIGHT, TALL_GAP, GUTTER = 300, 62, 20, 44
"""Of a node down the page; at the right there is room for lines that pass nodes by."""
LINE, TITLE, CHARACTERS, MARKS = 15, 14, 17, 2
"""Height of a line of text; across the page, characters of a title and of a line, and lines of what was left out."""

LEAST_WIDTH = 940
"""Pixels to which the graph may shrink before it scrolls."""

Place = tuple[float, float]


def graph_svg(lineage: DataLineage, *, tall: bool) -> Markup:
    """The graph; `tall` for narrow pages."""
    if tall:
        height = TALL_HEIGHT
        places = {node.key: (1.0, 1.0 + n * (height + TALL_GAP)) for n, node in enumerate(lineage.nodes)}
        nodes = [_tall_node(node, *places[node.key]) for node in lineage.nodes]
        edges = [_edge(edge, *_down(places[edge.start], places[edge.end])) for edge in lineage.edges]
    else:
        texts = {node.key: _lines(node) for node in lineage.nodes}
        height = LINE * max(map(len, texts.values())) + 14
        places = _places(lineage, height)
        nodes = [_node(node, texts[node.key], *places[node.key], height) for node in lineage.nodes]
        edges = [_edge(edge, *_across(places[edge.start], places[edge.end], height)) for edge in lineage.edges]
    width: float = TALL_WIDTH + GUTTER if tall else max(x for x, _ in places.values()) + WIDTH + 2
    label = " to ".join(dict.fromkeys(clean(node.title) for node in lineage.nodes))
    return Markup(
        "<svg class='graph {kind}' role='img' aria-label='{label}' viewBox='0 0 {width:.0f} {height:.0f}' "
        "width='{width:.0f}' height='{height:.0f}' style='min-width:{least:.0f}px'>{edges}{nodes}</svg>"
    ).format(
        kind="tall" if tall else "wide",
        label=f"Data lineage: {label}",
        width=width,
        least=0 if tall else min(width, LEAST_WIDTH),
        height=max(y for _, y in places.values()) + height + 2,
        edges=Markup("").join(edges),
        nodes=Markup("").join(nodes),
    )


def _places(lineage: DataLineage, height: int) -> dict[str, Place]:
    """Files at the left, the chain to the right, what stands beside it below; several ingests are a column."""
    chain = [node.key for node in lineage.nodes if node.kind in ("stage", "checkpoint")]
    ingests = [node.key for node in lineage.nodes if node.kind == "ingest"]
    reads = {edge.end: edge.start for edge in lineage.edges}
    cells = {key: (2 + number, 0) for number, key in enumerate(chain)}
    cells |= {key: (1, number) for number, key in enumerate(reversed(ingests))}  # the newest begins the chain
    cells |= {e.start: (0, cells[e.end][1]) for e in lineage.edges if e.start.startswith("files-")}
    for node in lineage.nodes:
        if node.kind == "beside":
            x = min(cells[reads[node.key]][0] + 1, cells["checkpoint"][0] - 1)
            cells[node.key] = (x, 1 + max(y for at, y in cells.values() if at == x))
    return {key: (1 + x * (WIDTH + GAP), 1 + y * (height + ROW_GAP)) for key, (x, y) in cells.items()}


def _edge(edge: Edge, path: str, head: str) -> Markup:
    """A line with an arrow head; dashed, with what is read as a tooltip, where that is not the whole version."""
    title = Markup("<title>{}</title>").format(clean(edge.label)) if edge.label else ""
    return Markup("<g class='edge{}'>{}<path d='{}'/><path class='head' d='{}'/></g>").format(
        " part" if edge.label else "", title, path, head
    )


def _down(start: Place, end: Place) -> tuple[str, str]:
    """To the node below, or past nodes along the right side."""
    y, to_y, right = start[1] + TALL_HEIGHT, end[1], 1 + TALL_WIDTH
    if to_y - y <= TALL_GAP:
        middle = 1 + TALL_WIDTH / 8
        return _path((middle, y), (middle, to_y - 6)), _head(middle, to_y, 0, 1)
    y, to_y, out = y - TALL_HEIGHT / 3, to_y + TALL_HEIGHT / 3, right + GUTTER - 6
    return _path((right, y), (out, y), (out, to_y), (right + 6, to_y)), _head(right, to_y, -1, 0)


def _across(start: Place, end: Place, height: int) -> tuple[str, str]:
    """To the node at the right; up to the newer of two ingests; down to a stage beside the chain, and up from it."""
    (x, y), (to_x, to_y) = start, end
    middle, to_middle, below = y + height / 2, to_y + height / 2, to_y + height
    if to_x == x:
        return _path((x + WIDTH / 2, y), (x + WIDTH / 2, below + 6)), _head(x + WIDTH / 2, below, 0, -1)
    if to_y == y:
        return _path((x + WIDTH, middle), (to_x - 6, middle)), _head(to_x, middle, 1, 0)
    if to_y > y:
        at, head = x + WIDTH * 0.75, _head(to_x, to_middle, 1, 0)
        return _path((at, y + height), (at, to_middle), (at, to_middle), (to_x - 6, to_middle)), head
    at = to_x + WIDTH / 2
    return _path((x + WIDTH, middle), (at, middle), (at, middle), (at, below + 6)), _head(at, below, 0, -1)


def _path(start: Place, *points: Place) -> str:
    """A straight line to one point, a curve along three."""
    kind = "L" if len(points) == 1 else "C"
    return f"M{_at(start)}{kind}{' '.join(map(_at, points))}"


def _head(x: float, y: float, right: int, down: int) -> str:
    """An arrow head whose point is at (x, y)."""
    back, side = (x - 7 * right, y - 7 * down), (4 * down, 4 * right)
    corners = [(x, y), *((back[0] + sign * side[0], back[1] + sign * side[1]) for sign in (1, -1))]
    return f"M{'L'.join(map(_at, corners))}Z"


def _at(place: Place) -> str:
    return f"{place[0]:.1f} {place[1]:.1f}"


def _lines(node: Node) -> list[tuple[str, str]]:
    """Kind and text of every line in a node across the page."""
    title = node.title if len(node.title) <= TITLE else f"…{node.title[1 - TITLE :]}"  # a source by its end
    rows, _, new = rows_of(node).partition(", ")
    lines = [("title", title), ("soft", _version(node)), ("", rows), ("soft", new)]
    marks = textwrap.wrap(", ".join(marks_of(node)), CHARACTERS, max_lines=MARKS, placeholder="…")
    return [(kind, line) for kind, line in [*lines, *(("mark", mark) for mark in marks)] if line]


def _node(node: Node, lines: list[tuple[str, str]], x: float, y: float, height: int) -> Markup:
    text = [
        _text(x + 9, y + 19 + LINE * number, _cut(line, CHARACTERS), kind) for number, (kind, line) in enumerate(lines)
    ]
    return _box(node, x, y, WIDTH, height, text)


def _tall_node(node: Node, x: float, y: float) -> Markup:
    text = [
        _text(x + 14, y + 20, _cut(node.title, 26), "title"),
        _text(x + TALL_WIDTH - 12, y + 20, _version(node), "soft end"),
        _text(x + 14, y + 37, rows_of(node), ""),
        _text(x + 14, y + 53, _cut(", ".join(marks_of(node)), 44), "mark"),
    ]
    return _box(node, x, y, TALL_WIDTH, TALL_HEIGHT, text)


def _box(node: Node, x: float, y: float, width: int, height: int, text: list[Markup]) -> Markup:
    facts = [node.title, node.tag, node.note, rows_of(node), *marks_of(node)]
    return Markup(
        "<g class='node {kind}'><title>{facts}</title>"
        "<rect x='{x:.1f}' y='{y:.1f}' width='{width}' height='{height}' rx='8'/>{text}</g>"
    ).format(
        kind=node.kind,
        facts=clean("\n".join(fact for fact in facts if fact)),
        x=x,
        y=y,
        width=width,
        height=height,
        text=Markup("").join(text),
    )


def _version(node: Node) -> str:
    return " · ".join(part for part in (f"v{node.version}" if node.version else "", node.note) if part)


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def _text(x: float, y: float, text: str, kind: str) -> Markup:
    return Markup("<text x='{:.1f}' y='{:.1f}' class='{}'>{}</text>").format(x, y, kind, escape(clean(text)))
