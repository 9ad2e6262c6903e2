"""Filters, funnels, explanations and the curation report, for terminals and as markdown.

Invariant: prints what it is given and looks up nothing; what is not known is printed as unknown.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from pretrain_assets.curate.explain import Example, Explanation, Truth
from pretrain_assets.curate.figures import Bars, Histogram, Report, Section, Table
from pretrain_assets.curate.filters import NamedFilter
from pretrain_assets.curate.funnel import Count, Funnel, Step
from pretrain_assets.plural import counted
from pretrain_assets.report import plots

BAR, WIDTH, SOURCES = 24, 110, 20
"""Characters of a full bar, of a line of prose, and sources that a table lists."""
_CAST = re.compile(r"CAST\(([0-9.]+) AS FLOAT\)")
FUNNEL_HEADERS = ("", "term", "removes", "of these\nunknown", "only it\nremoves", "in order", "rows left")


def filters_text(
    filters: Sequence[NamedFilter], plain: Mapping[str, str], advice: Mapping[str, str], columns: Sequence[str]
) -> str:
    """Every name with its meaning and SQL, what lacks columns with what to run; then the table's columns."""
    lines = []
    for named in filters:
        lines.append(f"{named.name}\n    {named.meaning}")
        lines.append(textwrap.fill(readable(named.sql), WIDTH, initial_indent="    ", subsequent_indent="      "))
        if named.name not in plain and advice.get(named.name):
            text = advice[named.name]
            lines.append(textwrap.fill(text, WIDTH, initial_indent="    ! ", subsequent_indent="      "))
    if columns:
        lines.append("\n" + textwrap.fill(f"columns: {', '.join(columns)}", WIDTH, subsequent_indent="    "))
    lines.append('\nCombine them with AND, OR, NOT and SQL: pretrain filter "clean AND score >= 3"')
    return "\n".join(lines)


def funnel_text(found: Funnel, *, tablefmt: str = "simple") -> str:
    """What is kept, the funnel term by term, and every source."""
    return "\n\n".join(
        [summary_text(found), steps_text(found, tablefmt=tablefmt), sources_text(found, tablefmt=tablefmt)]
    )


def summary_text(found: Funnel) -> str:
    """What is kept, and that the numbers add up."""
    removed = sum(step.in_order.rows for step in found.steps)
    kept, total = found.kept, found.total
    lines = [
        f"keeps {_of(kept.rows, total.rows)} rows, {_of(kept.amount, total.amount)} {found.unit}",
        f"{found.kept.rows:,} kept + {removed:,} removed in order = {found.total.rows:,} rows; of the removed "
        f"{found.rejected.rows:,} are false and {found.unknown.rows:,} unknown (NULL)",
    ]
    if found.unmeasured:
        lines.append(f"{counted(found.unmeasured, 'row')} without {found.unit} yet, counted as 0")
    return "\n".join(lines)


def steps_text(found: Funnel, *, tablefmt: str = "simple") -> str:
    """One line per term."""
    rows = [["", "all rows", "", "", "", "", *_left(found, found.total)]]
    rows += [_step(found, depth, step) for depth, step in lines_of(found.steps)]
    headers = [*FUNNEL_HEADERS, f"{found.unit} left", ""]
    if tablefmt != "simple":
        headers = [header.replace("\n", " ") for header in headers]
        rows = [[text.replace("|", "\\|") for text in row] for row in rows]
    align = ("left", "left", *["right"] * 6, "left")
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=align, tablefmt=tablefmt)


def lines_of(steps: Sequence[Step], depth: int = 0) -> Iterator[tuple[int, Step | str]]:
    """Terms with their depth, in order; those of a name that remove no row are one line of words."""
    idle = [step for step in steps if depth and not step.removes.rows]
    for step in steps:
        if step not in idle:
            yield depth, step
            yield from lines_of(step.children, depth + 1)
    if idle:
        yield depth, f"{len(idle):,} more remove{'s' if len(idle) == 1 else ''} no row"


def _step(found: Funnel, depth: int, step: Step | str) -> list[str]:
    indent = "  " * depth
    if isinstance(step, str):
        return ["", f"{indent}{step}"]
    counts = (step.removes, step.unknown, step.only, step.in_order)
    text = f"{indent}{readable(step.text, 60)}"
    return [step.number, text, *(f"{count.rows:,}" for count in counts), *_left(found, step.left)]


def _left(found: Funnel, left: Count) -> list[str]:
    return [f"{left.rows:,}", f"{left.amount:,}", bar(left.rows / max(1, found.total.rows))]


def sources_text(found: Funnel, *, tablefmt: str = "simple") -> str:
    """What is kept of every source."""
    rows = [
        [
            source.source,
            f"{source.total.rows:,}",
            f"{source.kept.rows:,}",
            _percent(source.kept.rows, source.total.rows),
            f"{source.kept.amount:,}",
            _percent(source.kept.amount, source.total.amount),
            bar(source.kept.rows / max(1, source.total.rows)),
        ]
        for source in found.by_source[:SOURCES]
    ]
    headers = ["source", "rows", "rows kept", "share", f"{found.unit} kept", "share", ""]
    align = ["left", *["right"] * 5, "left"] if rows else None
    text = tabulate(rows, headers=headers, disable_numparse=True, colalign=align, tablefmt=tablefmt)
    more = len(found.by_source) - SOURCES
    return f"{text}\n... and {more:,} smaller sources" if more > 0 else text


def examples_text(found: Sequence[Example], term: str) -> str:
    """Rows that a term removes, with the first of its rules that is not true and what that reads of them."""
    if not found:
        return f"term {term} removes no row"
    lines = []
    for example in found:
        rule = f"not {example.number}, {readable(example.rule, 60)}"
        lines.append(f"id {example.id} ({example.source}): {_values(example.values)} ({rule})")
        lines.append(textwrap.indent(textwrap.fill(example.preview, WIDTH - 4), "    "))
    return "\n".join(lines)


def explanation_text(found: Explanation) -> str:
    """Why a row is kept or left out."""
    head = f"row {found.id} ({found.values.get('source')}) at v{found.version}"
    if found.filter is not None:
        verdict = {True: "kept", False: "left out", None: "left out (NULL)"}[found.kept]
        because = f", by term {', '.join(found.removed_by)}" if found.removed_by else ""
        head += f": {verdict}{because}\nfilter {found.filter}"
    rows = [line for truth in found.terms for line in _truth(truth, 0)]
    parts = [head, textwrap.fill(found.preview, WIDTH, initial_indent="    ", subsequent_indent="    ")]
    parts.append(tabulate(rows, headers=["", "term", "true?", "values"], disable_numparse=True))
    for partner in found.repeats:
        alike = "unknown" if partner.similarity is None else f"{partner.similarity:.3f}"
        there = f"({partner.source})" if partner.is_there else "(deleted since)"
        parts.append(f"repeats row {partner.id} {there}, similarity {alike} ({partner.column})")
        parts.append(textwrap.fill(partner.preview, WIDTH, initial_indent="    ", subsequent_indent="    "))
    if found.contamination:
        facts = {name: value for name, value in found.contamination.items() if name != "text"}
        parts.append(f"evaluation text: {_values(facts)}")
        parts.append(textwrap.indent(textwrap.fill(found.contamination["text"], WIDTH - 4), "    "))
    return "\n\n".join(part for part in parts if part)


def _truth(truth: Truth, depth: int) -> list[list[str]]:
    """A term's line, then those of its terms that do not hold, and how many do."""
    word = {True: "yes", False: "NO", None: "unknown (NULL)"}[truth.holds]
    own = [truth.number, f"{'  ' * depth}{readable(truth.text, 60)}", word, _values(truth.values)]
    failing = [child for child in truth.children if child.holds is not True]
    holding = len(truth.children) - len(failing)
    rest = [["", f"{'  ' * (depth + 1)}{holding:,} of its terms", "yes", ""]] if failing and holding else []
    return [own, *(line for child in failing for line in _truth(child, depth + 1)), *rest]


def report_markdown(found: Report) -> dict[str, str]:
    """The report's parts as markdown by name, each short enough for the Dagster UI to show."""
    parts = {}
    if found.funnel:
        labels = ["all", *(readable(step.text, 30) for step in found.funnel.steps)]
        left = [found.funnel.total.rows, *(step.left.rows for step in found.funnel.steps)]
        parts["funnel_plot"] = plots.bars("rows left", labels, left)
        parts["funnel"] = f"{summary_text(found.funnel)}\n\n{steps_text(found.funnel, tablefmt='pipe')}"
    for section in found.sections:
        parts[section.title.lower().replace(" ", "_")] = _section(section)
    return parts


def _section(section: Section) -> str:
    drawn = [figure for figure in section.figures if isinstance(figure, Histogram)]
    figures = [_figure(figure) for figure in section.figures if not isinstance(figure, Histogram)]
    parts = [section.text, *figures, _histograms(drawn) if drawn else "", section.missing]
    return "\n\n".join(part for part in parts if part) or "nothing to show"


def _figure(figure: Table | Bars) -> str:
    if isinstance(figure, Table):
        rows = [
            [cell(value, share=header.endswith("share")) for value, header in zip(row, figure.headers, strict=True)]
            for row in figure.rows
        ]
        words = [any(isinstance(row[place], str) for row in figure.rows) for place in range(len(figure.headers))]
        align = ["left" if word else "right" for word in words] if rows else None
        return tabulate(rows, headers=figure.headers, disable_numparse=True, colalign=align, tablefmt="pipe")
    if figure.percent:  # the table beside it says the same
        return ""
    return "\n\n".join(plots.bars(figure.title, figure.labels, series.values) for series in figure.series)


def _histograms(figures: Sequence[Histogram]) -> str:
    """One line per column, the bins as a line of text."""
    rows = [
        [
            f"`{figure.title}`",
            f"{figure.low:.4g}",
            sparkline(figure.counts),
            f"{figure.high:.4g}",
            "; ".join(f"{mark.label} {mark.value:g}" for mark in figure.marks),
        ]
        for figure in figures
    ]
    headers = ["signal", "from", "documents", "to", "published thresholds"]
    return tabulate(rows, headers=headers, disable_numparse=True, tablefmt="pipe")


def sparkline(counts: Sequence[int], width: int = 20) -> str:
    """A histogram as one line of text; an empty bin is a dot, one with few rows is not."""
    step = max(1, len(counts) // width)
    sums = [sum(counts[place : place + step]) for place in range(0, len(counts), step)]
    top = max(*sums, 1)
    return "".join("\u00b7▁▂▃▄▅▆▇█"[-(-8 * count // top)] for count in sums)


def cell(value: Any, *, share: bool = False) -> str:
    """A value of a table for people."""
    if value is None:
        return "unknown"
    if isinstance(value, float):
        return percent(value) if share else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def bar(share: float, width: int = BAR) -> str:
    """A bar of text, in eighths of a character."""
    eighths = round(share * width * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {'NULL' if value is None else value}" for name, value in values.items()) or "-"


def _of(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({_percent(part, whole)})"


def _percent(part: int, whole: int) -> str:
    return percent(part / whole) if whole else "-"


def percent(share: float) -> str:
    """A share, never as nothing when it is something, nor as everything when it is not."""
    if 0 < share < 0.0005:
        return "<0.1%"
    return ">99.9%" if 0.9995 <= share < 1 else f"{share:.1%}"


def readable(text: str, width: int = 1000) -> str:
    """SQL for people: on one line, without the casts of plain numbers, cut at a width."""
    line = _CAST.sub(r"\1", " ".join(text.split()))
    return line if len(line) <= width else f"{line[: width - 3]}..."
