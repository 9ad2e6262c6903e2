"""The curation report's facts: what a version's documents are like, and what a filter would keep of them.

Invariant: reads narrow columns only, never text or tokens, and shows only what the version has; what it lacks is named
with the command that makes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pretrain_assets.curate import eda
from pretrain_assets.curate.contamination_report import contamination_report
from pretrain_assets.curate.figures import Bars, Mark, Report, Section, Series, Table, histograms
from pretrain_assets.curate.filters import FILTERS, usable
from pretrain_assets.curate.funnel import Funnel, funnel
from pretrain_assets.curate.quality_rules import RULES
from pretrain_assets.curate.sql import and_terms
from pretrain_assets.table.columns import COLUMNS, columns_of
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.query import sql_rows
from pretrain_assets.table.versions import STAGES, VERBS, table_id

if TYPE_CHECKING:
    import lance

SOURCES = 20
"""Sources in a plot or table, the largest ones; the rest is one line."""
NAMED = 7
"""Columns of a stage that are named; the rest is a number."""
LANGUAGES = 15
"""Languages in a plot, the most common ones."""


def make_report(dataset: lance.LanceDataset, text: str | None = None) -> Report:
    """Everything about a version that its narrow columns tell.

    Args:
        dataset: The table at the version that is asked.
        text: Filter whose funnel is shown; None: `clean`, or as much of it as the version has columns for.

    Raises:
        FilterError: the table cannot evaluate the filter.
    """
    columns = dataset.schema.names
    text = text or default_filter(columns)
    found = funnel(dataset, text) if text else None
    return Report(
        uri=dataset.uri,
        pin=str(Pin(table_id(dataset), dataset.version)),
        rows=dataset.count_rows(),
        funnel=found,
        sections=(
            _stages(columns),
            _names(dataset),
            _sources(dataset, found),
            _lengths(dataset),
            _duplicates(dataset),
            _languages(dataset),
            _signals(dataset),
            _contamination(dataset),
        ),
    )


def default_filter(columns: list[str]) -> str | None:
    """`clean`, or those of its terms that a version has the columns for."""
    if "clean" in usable(columns):
        return "clean"
    terms = [term for term in and_terms(FILTERS["clean"].sql) if term.removeprefix("NOT ") in columns]
    return " AND ".join(terms) or None


def _stages(columns: list[str]) -> Section:
    """Which stages a version has been through."""
    rows = []
    for stage in STAGES:
        owned = [column.name for column in columns_of(stage) if not column.optional]
        there = [name for name in owned if name in columns]
        if owned:
            rows.append((stage, _few(there) or "-", "" if there == owned else f"pretrain {VERBS[stage]}"))
    headers = ("stage", "columns", "missing: run")
    return Section(title="Stages", figures=(Table(title="columns by stage", headers=headers, rows=tuple(rows)),))


def _names(dataset: lance.LanceDataset) -> Section:
    """What every named filter keeps."""
    total = dataset.count_rows()
    rows = []
    for name, sql in usable(dataset.schema.names).items():
        kept = dataset.count_rows(sql)
        rows.append((name, FILTERS[name].meaning, kept, kept / max(1, total)))
    lacking = [name for name in FILTERS if name not in {row[0] for row in rows}]
    return Section(
        title="Named filters",
        text="Rows that each keeps by itself; `pretrain filter NAME` shows its terms.",
        figures=(Table(title="named filters", headers=("name", "keeps", "rows", "share"), rows=tuple(rows)),),
        missing=f"not shown, for want of their columns: {', '.join(lacking)}" if lacking else "",
    )


def _sources(dataset: lance.LanceDataset, found: Funnel | None) -> Section:
    """Sources, and what the filter keeps of each."""
    columns = dataset.schema.names
    facts = {
        "rows": "count(*)",
        "tokens": "sum(n_tokens)" if "n_tokens" in columns else "",
        "characters": "sum(n_chars)",
        "median characters": "approx_median(n_chars)",
        "mean score": "avg(score)",
    }
    facts = {name: sql for name, sql in facts.items() if sql}
    asked = ", ".join(f"{sql} AS f{place}" for place, sql in enumerate(facts.values()))
    answer = sql_rows(
        dataset, f"SELECT source, {asked} FROM dataset GROUP BY source ORDER BY f0 DESC, source LIMIT {SOURCES}"
    )
    kept = {count.source: count.kept.rows / max(1, count.total.rows) for count in found.by_source} if found else {}
    rows = tuple(
        (
            row["source"] or "(none)",
            *(row[f"f{place}"] for place in range(len(facts))),
            *([kept.get(row["source"] or "(none)")] if found else []),
        )
        for row in answer
    )
    headers = ("source", *facts, *(["kept share"] if found else []))
    more = len(found.by_source) - len(rows) if found else 0
    return Section(
        title="Sources",
        text=f"The {len(rows)} largest; {more:,} more are not shown." if more > 0 else "",
        figures=(Table(title="sources", headers=headers, rows=rows),),
    )


def _lengths(dataset: lance.LanceDataset) -> Section:
    """Lengths and scores."""
    lengths, scores = eda.length_bins(dataset), eda.score_bins(dataset)
    return Section(
        title="Length and score",
        figures=(_bars("documents by characters", lengths), _bars("documents by score", scores)),
    )


def _bars(title: str, bins: list[eda.Bin]) -> Bars:
    labels, values = tuple(bin.label for bin in bins), tuple(bin.rows for bin in bins)
    return Bars(title=title, labels=labels, series=(Series(name="documents", values=values),))


def _duplicates(dataset: lance.LanceDataset) -> Section:
    """Shares of exact and near duplicates by source."""
    kinds = {"is_dup": "exact duplicates", "is_near_dup": "near duplicates"}
    there = {column: name for column, name in kinds.items() if column in dataset.schema.names}
    figures = _shares(dataset, there, "duplicates by source") if there else ()
    return Section(title="Duplicates", figures=figures, missing=_missing(dataset.schema.names, list(kinds)))


def _shares(dataset: lance.LanceDataset, flags: dict[str, str], title: str) -> tuple[Table | Bars, ...]:
    """How much of every source has a flag, as bars and as a table."""
    asked = ", ".join(f"count(*) FILTER (WHERE {column}) AS {column}" for column in flags)
    answer = sql_rows(
        dataset, f"SELECT source, count(*) AS n, {asked} FROM dataset GROUP BY source ORDER BY n DESC, source"
    )
    shown = answer[:SOURCES]
    labels = tuple(row["source"] or "(none)" for row in shown)
    series = tuple(
        Series(name=name, values=tuple(row[column] / row["n"] for row in shown)) for column, name in flags.items()
    )
    pairs = [header for name in flags.values() for header in (name, f"{name}, share")]
    rows = [
        (label, row["n"], *(value for column in flags for value in (row[column], row[column] / row["n"])))
        for label, row in zip(labels, shown, strict=True)
    ]
    whole = {name: sum(row[name] for row in answer) for name in ("n", *flags)}
    rows.append(
        ("all", whole["n"], *(v for column in flags for v in (whole[column], whole[column] / max(1, whole["n"]))))
    )
    table = Table(title=title, headers=("source", "rows", *pairs), rows=tuple(rows))
    return Bars(title=f"{title}, share of its rows", labels=labels, series=series, percent=True), table


def _languages(dataset: lance.LanceDataset) -> Section:
    """Rows by language."""
    figures: tuple[Bars, ...] = ()
    if "language" in dataset.schema.names:
        answer = sql_rows(
            dataset, "SELECT language, count(*) AS n FROM dataset GROUP BY language ORDER BY n DESC, language"
        )
        bins = [eda.Bin(label=row["language"] or "unknown", rows=row["n"]) for row in answer[:LANGUAGES]]
        rest = sum(row["n"] for row in answer[LANGUAGES:])
        figures = (_bars("documents by language", [*bins, *([eda.Bin(label="others", rows=rest)] if rest else [])]),)
    return Section(title="Language", figures=figures, missing=_missing(dataset.schema.names, ["language"]))


def _signals(dataset: lance.LanceDataset) -> Section:
    """Histograms of the quality signals with the published thresholds."""
    import pyarrow as pa

    owned = {column.name: column.meaning for column in columns_of("quality")}
    numeric = [f.name for f in dataset.schema if pa.types.is_floating(f.type) or pa.types.is_integer(f.type)]
    figures = histograms(dataset, {name: owned[name] for name in numeric if name in owned}, thresholds())
    return Section(
        title="Quality signals",
        text="Dashed lines are published thresholds. Another one is another filter; nothing is rebuilt."
        if figures
        else "",
        figures=tuple(figures),
        missing=_missing(dataset.schema.names, list(owned)),
    )


def thresholds() -> dict[str, list[Mark]]:
    """Published thresholds by column."""
    marks: dict[str, list[Mark]] = {}
    for name, rules in RULES.items():
        for rule in rules:
            marks.setdefault(rule.column, []).append(Mark(value=rule.threshold, label=f"{name} {rule.sign}"))
    return marks


def _contamination(dataset: lance.LanceDataset) -> Section:
    """Contaminated rows by eval set and by source."""
    there = "contaminated" in dataset.schema.names
    figures: tuple[Table | Bars, ...] = ()
    if there:
        sets = contamination_report(dataset, limit=0).sets
        rows = tuple((one.name, one.items, one.searched, one.items_found, one.documents) for one in sets)
        headers = ("eval set", "items", "searched for", "found", "documents that hold one")
        by_source = _shares(dataset, {"contaminated": "contaminated"}, "contaminated by source")
        figures = (Table(title="eval sets", headers=headers, rows=rows), *by_source)
    return Section(
        title="Contamination",
        text="Documents that hold an item of an evaluation set." if there else "",
        figures=figures,
        missing=_missing(dataset.schema.names, ["contaminated"]),
    )


def _missing(columns: list[str], wanted: list[str]) -> str:
    """What a version lacks, with the command that makes it."""
    lacking = [name for name in wanted if name not in columns]
    owners = {column.name: column.owner for column in COLUMNS}
    stages = dict.fromkeys(owners[name] for name in lacking if name in owners)
    commands = " && ".join(f"pretrain {VERBS.get(stage, stage)}" for stage in stages)
    return f"this version has no {_few(lacking)}: run `{commands}`" if lacking else ""


def _few(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"
