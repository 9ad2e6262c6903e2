"""The lineage of a run card as a picture: from files to checkpoint, across a wide page or down a narrow one.

Invariant: one SVG that takes its colours from the page's style, drawn from the graph given and nothing else. Every node
carries all of its text as a tooltip, so that what is cut can be read.
"""

from __future__ import annotations

from markupsafe import Markup, escape

from pretrain_assets.forensics.run_card_lineage import DataLineage, Edge, Node
from pretrain_assets.report.run_card_words import clean, marks_of, rows_of

WIDTH, HEIGHT, GAP, ROW_GAP = 118, 96, 20, 30
"""Of a node across the page, and between nodes, in pixels."""
TALL_WIDTH, TALL_HEIGHT, TALL_GAP, GUTTER = 300, 62, 20, 44
"""Of a node down the page; at the right there is room for lines that pass nodes by."""
LINE, CHARACTERS = 15, 16
"""Height of a line of text, and characters that fit a node across the page."""
MARKS = 2
"""Reasons that a node shows; the tooltip has all."""

Place = tuple[float, float]


def graph_svg(lineage: DataLineage, *, tall: bool) -> Markup:
    """The graph; `tall` for narrow pages."""
    places = _down(lineage) if tall else _across(lineage)
    width = TALL_WIDTH + GUTTER if tall else max(x for x, _ in places.values()) + WIDTH + 2
    height = max(y for _, y in places.values()) + (TALL_HEIGHT if tall else HEIGHT) + 2
    edges = [_edge(edge, places, tall=tall) for edge in lineage.edges]
    nodes = [(_tall_node if tall else _node)(node, *places[node.key]) for node in lineage.nodes]
    label = " to ".join(dict.fromkeys(clean(node.title) for node in lineage.nodes))
    return Markup(
        "<svg class='graph {kind}' role='img' aria-label='{label}' viewBox='0 0 {width:.0f} {height:.0f}' "
        "width='{width:.0f}' height='{height:.0f}'>{edges}{nodes}</svg>"
    ).format(
        kind="tall" if tall else "wide",
        label=f"Data lineage: {label}",
        width=width,
        height=height,
        edges=Markup("").join(edges),
        nodes=Markup("").join(nodes),
    )


def _across(lineage: DataLineage) -> dict[str, Place]:
    """Files at the left, the chain to the right, what stands beside it below; several ingests are a column."""
    column = {"files": 0, "ingest": 1}
    fill: dict[int, int] = {}
    places: dict[str, Place] = {}
    chain = [node for node in lineage.nodes if node.kind in ("stage", "checkpoint")]
    at = {node.key: 2 + number for number, node in enumerate(chain)}
    ingests = [node for node in lineage.nodes if node.kind == "ingest"]
    level = {node.key: number for number, node in enumerate(reversed(ingests))}  # the newest stands beside the chain
    level |= {e.start: level[e.end] for e in lineage.edges if e.start.startswith("files-")}
    reads = {edge.end: edge.start for edge in lineage.edges}
    below = max(level.values(), default=0) + 1
    for node in lineage.nodes:
        if node.kind in column:
            x, y = column[node.kind], level[node.key]
        elif node.kind == "beside":
            x = min(at.get(reads[node.key], 1) + 1, at["checkpoint"] - 1)
            y = fill[x] = fill.get(x, (below if x < 2 else 1) - 1) + 1
        else:
            x, y = at[node.key], 0
        places[node.key] = (1 + x * (WIDTH + GAP), 1 + y * (HEIGHT + ROW_GAP))
    return places


def _down(lineage: DataLineage) -> dict[str, Place]:
    return {node.key: (1, 1 + n * (TALL_HEIGHT + TALL_GAP)) for n, node in enumerate(lineage.nodes)}


def _edge(edge: Edge, places: dict[str, Place], *, tall: bool) -> Markup:
    """A line with an arrow head, straight to a neighbour, curved to anything else."""
    (x, y), (to_x, to_y) = places[edge.start], places[edge.end]
    if tall:
        middle, right = 1 + TALL_WIDTH / 8, 1 + TALL_WIDTH
        begin, end = y + TALL_HEIGHT, to_y
        if end - begin <= TALL_GAP:
            path, head = f"M{middle:.1f} {begin:.1f}V{end - 6:.1f}", _head(middle, end, 0, 1)
        else:
            begin, end, out = begin - TALL_HEIGHT / 3, end + TALL_HEIGHT / 3, right + GUTTER - 6
            path = f"M{right} {begin:.1f}C{out} {begin:.1f} {out} {end:.1f} {right + 6} {end:.1f}"
            head = _head(right, end, -1, 0)
    elif to_x == x:  # an older ingest stands below the newer one
        middle = x + WIDTH / 2
        path, head = f"M{middle:.1f} {y:.1f}V{to_y + HEIGHT + 6:.1f}", _head(middle, to_y + HEIGHT, 0, -1)
    elif to_y == y:
        begin, end, middle = x + WIDTH, to_x, y + HEIGHT / 2
        path, head = f"M{begin:.1f} {middle:.1f}H{end - 6:.1f}", _head(end, middle, 1, 0)
    elif to_y > y:  # down to a stage beside the chain
        begin, down, to_middle = x + WIDTH * 0.75, y + HEIGHT, to_y + HEIGHT / 2
        path = f"M{begin:.1f} {down:.1f}C{begin:.1f} {to_middle:.1f} {begin:.1f} {to_middle:.1f} {to_x - 6:.1f} {to_middle:.1f}"
        head = _head(to_x, to_middle, 1, 0)
    else:  # and up from it
        middle, right, below = y + HEIGHT / 2, to_x + WIDTH / 2, to_y + HEIGHT
        path = f"M{x + WIDTH:.1f} {middle:.1f}C{right:.1f} {middle:.1f} {right:.1f} {middle:.1f} {right:.1f} {below + 6:.1f}"
        head = _head(right, below, 0, -1)
    title = Markup("<title>{}</title>").format(clean(edge.label)) if edge.label else ""
    return Markup("<g class='edge{}'>{}<path d='{}'/><path class='head' d='{}'/></g>").format(
        " part" if edge.label else "", title, path, head
    )


def _head(x: float, y: float, right: int, down: int) -> str:
    """An arrow head whose point is at (x, y)."""
    back_x, back_y = x - 7 * right, y - 7 * down
    return f"M{x:.1f} {y:.1f}L{back_x + 4 * down:.1f} {back_y + 4 * right:.1f}L{back_x - 4 * down:.1f} {back_y - 4 * right:.1f}Z"


def _node(node: Node, x: float, y: float) -> Markup:
    lines = [("title", node.title), ("soft", _version(node)), ("", rows_of(node))]
    marks = marks_of(node)
    lines += [("mark", mark) for mark in marks[:MARKS]] if len(marks) <= MARKS else [("mark", _more(marks))]
    text = [
        _text(x + 9, y + 19 + LINE * number, _cut(line, CHARACTERS - (kind == "title")), kind)
        for number, (kind, line) in enumerate((kind, line) for kind, line in lines if line)
    ]
    return _box(node, x, y, WIDTH, HEIGHT, text)


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


def _more(marks: list[str]) -> str:
    return f"{marks[0]}, +{len(marks) - 1}"


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def _text(x: float, y: float, text: str, kind: str) -> Markup:
    return Markup("<text x='{:.1f}' y='{:.1f}' class='{}'>{}</text>").format(x, y, kind, escape(clean(text)))
