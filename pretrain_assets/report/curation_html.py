"""The curation report as one HTML file: no script, no other file, readable without a network.

Invariant: everything shown comes from the report given, escaped; numbers that a picture rounds stand in its tooltip.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from pretrain_assets.curate.figures import Bars, Histogram, Mark, Report, Section, Table
from pretrain_assets.curate.funnel import Funnel, Step
from pretrain_assets.plural import counted
from pretrain_assets.report.curation_text import cell, lines_of, percent, readable
from pretrain_assets.report.funnel_plot import funnel_svg
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import filesystem, join

COLOURS = ("#2f6f9f", "#d9825f")
"""Of the first and the second set of bars."""
PLOT_WIDTH, PLOT_HEIGHT, MARKS_TOP = 360, 130, 34
"""Size of a histogram in pixels, and of the room above it for the labels of its marks."""
INDENT = "\u2003"
COUNTS = ("removes", "unknown", "only it removes", "removes in order", "rows left")
STYLE = """
:root { --ink: #1d2733; --soft: #5c6b7a; --line: #e3e8ee; --blue: #2f6f9f; --paper: #f5f7f9; }
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 14px/1.5 system-ui, "Segoe UI", sans-serif }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px }
h1 { font-size: 24px; margin: 0 0 4px } h2 { font-size: 18px; margin: 0 0 8px } h3 { font-size: 13px; margin: 0 0 6px }
p { margin: 0 0 10px } .soft { color: var(--soft) } code { font: 12px ui-monospace, monospace; overflow-wrap: anywhere }
nav { margin: 12px 0 20px } nav a { color: var(--blue); margin-right: 14px; text-decoration: none }
section { background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: 18px 20px; margin: 0 0 16px }
details { margin: 0 0 12px } summary { cursor: pointer }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 0 0 14px }
.tile { border: 1px solid var(--line); border-radius: 6px; padding: 8px 14px; min-width: 150px }
.tile b { display: block; font-size: 20px }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(330px, 1fr)); gap: 18px 22px }
.wide { grid-column: 1 / -1; overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th { text-align: left; color: var(--soft); font-weight: 600; border-bottom: 2px solid var(--line) }
th, td { padding: 4px 10px 4px 0; vertical-align: top } td { border-bottom: 1px solid var(--line) }
th.number, td.number { text-align: right }
.bars { display: grid; grid-template-columns: minmax(70px, max-content) 1fr max-content; gap: 3px 10px }
.bars div { align-self: center }
.bars i { display: block; height: 8px; border-radius: 2px; min-width: 1px } .bars span { overflow-wrap: anywhere }
.missing { background: #fff7e8; border-left: 3px solid #e0a93b; padding: 8px 12px; margin: 12px 0 0 }
svg { max-width: 100%; height: auto; display: block } .key b { margin-right: 14px; font-weight: 400 }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px }
"""


def report_html(found: Report) -> str:
    """The whole page."""
    titles = [*(["Filter"] if found.funnel else []), *(section.title for section in found.sections)]
    links = "".join(f"<a href='#{_anchor(title)}'>{escape(title)}</a>" for title in titles)
    body = [
        "<h1>Curation report</h1>",
        f"<p class='soft'>{found.rows:,} documents, version <code>{escape(found.pin)}</code> of "
        f"<code>{escape(found.uri)}</code></p>",
        f"<nav>{links}</nav>",
        *([_funnel(found.funnel)] if found.funnel else []),
        *(_section(section) for section in found.sections),
    ]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>Curation report</title><style>{STYLE}</style></head><body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def write_report(found: Report, runs_uri: str) -> str:
    """Write the page into the folder of runs, local or `s3://`, under the version's number; the place is returned."""
    place = join(runs_uri, "curation", f"report-v{Pin.parse(found.pin).version}.html")
    fs, path = filesystem(place)
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    with fs.open(path, "w", encoding="utf-8") as file:
        file.write(report_html(found))
    return place


def _funnel(found: Funnel) -> str:
    """What the filter keeps: tiles, the plot, and the terms as a table."""
    share = found.kept.rows / max(1, found.total.rows)
    tiles = [
        ("rows kept", f"{found.kept.rows:,}", f"{percent(share)} of {found.total.rows:,}"),
        (f"{found.unit} kept", f"{found.kept.amount:,}", f"of {found.total.amount:,}"),
        ("rows left out", f"{found.rejected.rows:,}", "the filter is false"),
        ("rows unknown", f"{found.unknown.rows:,}", "the filter is NULL: not kept"),
    ]
    boxes = "".join(
        f"<div class='tile'>{name}<b>{value}</b><span class='soft'>{note}</span></div>" for name, value, note in tiles
    )
    headers = ("", "term", *COUNTS, f"{found.unit} left")
    rows = [_step_row(depth, step) for depth, step in lines_of(found.steps)]
    sql = f"<details class='soft'><summary>in plain SQL</summary><code>{escape(found.sql)}</code></details>"
    return (
        f"<section id='filter'><h2>Filter</h2><p><code>{escape(found.filter)}</code></p>"
        f"{sql if found.sql != found.filter else ''}"
        f"<div class='tiles'>{boxes}</div><div class='wide'>{funnel_svg(found)}</div>"
        f"<div class='wide'>{_table(headers, rows)}</div></section>"
    )


def _step_row(depth: int, step: Step | str) -> tuple[Any, ...]:
    if isinstance(step, str):
        return "", INDENT * depth + step, *[""] * (len(COUNTS) + 1)
    counts = (step.removes, step.unknown, step.only, step.in_order, step.left)
    label = INDENT * depth + readable(step.text)
    return step.number, label, *(count.rows for count in counts), step.left.amount


def _section(section: Section) -> str:
    figures = "".join(_figure(figure) for figure in section.figures)
    text = f"<p class='soft'>{_with_code(section.text)}</p>" if section.text else ""
    missing = f"<p class='missing'>{_with_code(section.missing)}</p>" if section.missing else ""
    grid = f"<div class='grid'>{figures}</div>" if figures else ""
    return f"<section id='{_anchor(section.title)}'><h2>{escape(section.title)}</h2>{text}{grid}{missing}</section>"


def _figure(figure: Table | Bars | Histogram) -> str:
    if isinstance(figure, Table):
        shares = [header.endswith("share") for header in figure.headers]
        return f"<div class='wide'>{_table(figure.headers, figure.rows, shares)}</div>"
    return _bars(figure) if isinstance(figure, Bars) else _histogram(figure)


def _table(headers: Sequence[str], rows: Sequence[Sequence[Any]], shares: Sequence[bool] = ()) -> str:
    """Numbers to the right, words to the left."""
    columns = [[row[place] for row in rows] for place in range(len(headers))]
    kinds = [all(value is None or value == "" or isinstance(value, (int, float)) for value in c) for c in columns]
    shares = shares or [False] * len(headers)

    def line(tag: str, cells: Sequence[str]) -> str:
        classes = (" class='number'" if kind else "" for kind in kinds)
        inner = "".join(f"<{tag}{c}>{escape(text)}</{tag}>" for c, text in zip(classes, cells, strict=True))
        return f"<tr>{inner}</tr>"

    body = [line("td", [cell(value, share=share) for value, share in zip(row, shares, strict=True)]) for row in rows]
    return f"<table><thead>{line('th', list(headers))}</thead><tbody>{''.join(body)}</tbody></table>"


def _bars(figure: Bars) -> str:
    """Horizontal bars, the sets of one label below each other."""
    top = max((value for series in figure.series for value in series.values), default=0) or 1
    lines = []
    for place, label in enumerate(figure.labels):
        values = [series.values[place] for series in figure.series]
        bars = "".join(
            f"<i style='width:{100 * value / top:.2f}%;background:{colour}'></i>"
            for value, colour in zip(values, COLOURS, strict=False)
            if value
        )
        numbers = " / ".join(cell(float(v), share=True) if figure.percent else cell(int(v)) for v in values)
        lines.append(f"<span>{escape(label)}</span><div>{bars}</div><span class='soft'>{numbers}</span>")
    key = "".join(
        f"<b><i style='background:{colour}'></i>{escape(series.name)}</b>"
        for series, colour in zip(figure.series, COLOURS, strict=False)
    )
    legend = f"<p class='key soft'>{key}</p>" if len(figure.series) > 1 else ""
    return f"<div><h3>{escape(figure.title)}</h3>{legend}<div class='bars'>{''.join(lines)}</div></div>"


def _histogram(figure: Histogram) -> str:
    """Bins as bars, with a dashed line at every threshold."""
    top, wide = max(*figure.counts, 1), PLOT_WIDTH / len(figure.counts)
    base, span = MARKS_TOP + PLOT_HEIGHT, figure.high - figure.low
    step = span / len(figure.counts)
    parts = []
    for place, count in enumerate(figure.counts):
        tall, begin = PLOT_HEIGHT * count / top, figure.low + step * place
        parts.append(
            f"<rect x='{wide * place:.1f}' y='{base - tall:.1f}' width='{wide - 1:.1f}' height='{tall:.1f}' "
            f"fill='{COLOURS[0]}'><title>{begin:.4g} to {begin + step:.4g}: {count:,} rows</title></rect>"
        )
    shown = [mark for mark in figure.marks if figure.low <= mark.value <= figure.high]
    beyond = [f"{mark.label} {mark.value:,g}" for mark in figure.marks if mark not in shown]
    for place, mark in enumerate(shown):
        at = PLOT_WIDTH * (mark.value - figure.low) / span
        parts.append(_mark(mark, min(max(at, 1), PLOT_WIDTH - 1), place, base))
    parts.append(f"<text x='0' y='{base + 14}'>{figure.low:.4g}</text>")
    parts.append(f"<text x='{PLOT_WIDTH}' y='{base + 14}' text-anchor='end'>{figure.high:.4g}</text>")
    notes = [f"{counted(figure.outside, 'row')} beyond the edges"] if figure.outside else []
    notes += [f"{figure.nulls:,} without a value"] if figure.nulls else []
    notes += [f"not shown: {', '.join(beyond)}"] if beyond else []
    return (
        f"<div><h3>{escape(figure.title)}</h3><p class='soft'>{_with_code(figure.meaning)}</p>"
        f"<svg viewBox='0 0 {PLOT_WIDTH} {base + 18}' font-size='10' fill='#5c6b7a'>"
        f"<path d='M0 {base}H{PLOT_WIDTH}' stroke='#c6ced6'/>{''.join(parts)}</svg>"
        f"<p class='soft'>{escape('; '.join(notes))}</p></div>"
    )


def _mark(mark: Mark, x: float, place: int, base: float) -> str:
    """A dashed line with its label, on one of three levels so that neighbours stay readable."""
    y, at_end = 9 + 11 * (place % 3), x > PLOT_WIDTH / 2
    text = f"{mark.label} {mark.value:g}"
    anchor = "end" if at_end else "start"
    return (
        f"<path d='M{x:.1f} {y + 2}V{base}' stroke='#b3402a' stroke-dasharray='4 3'/>"
        f"<text x='{x + (-3 if at_end else 3):.1f}' y='{y}' fill='#b3402a' text-anchor='{anchor}'>{escape(text)}</text>"
    )


def _with_code(text: str) -> str:
    """Escaped, with what stands between backticks as code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")
