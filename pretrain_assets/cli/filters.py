"""Verbs that ask what a filter keeps and why: filter, explain.

Invariant: they read a version and change nothing; trying another threshold is a query, never a rebuild.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pretrain_assets.cli.common import as_json, check_folder
from pretrain_assets.errors import ConfigError, FilterError

if TYPE_CHECKING:
    import lance

    from pretrain_assets.table.storage import Location

at_version = click.option("--version", "--tag", "version", metavar="VERSION", help="3, v3 or a tag [the newest]")


@click.command("filter")
@click.argument("predicate", required=False)
@at_version
@click.option("--plot", type=click.Path(dir_okay=False, writable=True, path_type=Path), help="Write this SVG.")
@click.option("--removed-by", metavar="TERM", help="Show rows that this term removes: 2, 2.1 or its text.")
@click.option("--limit", type=click.IntRange(1), default=10, show_default=True, help="So many of them.")
@as_json
@click.pass_obj
def filter_command(
    obj: dict[str, Any],
    predicate: str | None,
    version: str | None,
    plot: Path | None,
    removed_by: str | None,
    limit: int,
    json_output: bool,
) -> None:
    """Rows and tokens that PREDICATE keeps, and what each of its terms removes; nothing is changed.

    PREDICATE: SQL over the table's columns and the named filters, joined with AND, OR and NOT. Without it: the names.
    """
    if predicate is None:
        _list_names(obj["location"], version, json_output)
        return
    if plot and plot.suffix.lower() != ".svg":
        raise ConfigError(f"--plot {plot}: the plot is written as SVG; name a file that ends in .svg")
    check_folder("--plot", plot)
    from pretrain_assets.curate.explain import examples
    from pretrain_assets.curate.funnel import funnel
    from pretrain_assets.report.curation_text import examples_text, funnel_text
    from pretrain_assets.report.funnel_plot import funnel_svg

    dataset = open_at(obj["location"], version)
    if removed_by is not None:
        rows = examples(dataset, predicate, removed_by, limit=limit)
        facts: Any = [asdict(row) for row in rows]
        text = examples_text(rows, removed_by)
    else:
        found = funnel(dataset, predicate)
        facts, text = asdict(found), funnel_text(found)
        if plot:
            plot.write_text(funnel_svg(found))
            text += f"\n\nplot: {plot}"
    click.echo(json.dumps(facts, indent=2) if json_output else text)


def _list_names(location: Location, version: str | None, json_output: bool) -> None:
    """Every name with its meaning and SQL, those that the table cannot evaluate with what is missing; and columns."""
    from pretrain_assets.curate.filters import FILTERS, expand
    from pretrain_assets.report.curation_text import filters_text
    from pretrain_assets.table.storage import exists

    plain: dict[str, str] = {}
    advice: dict[str, str] = {}
    columns: list[str] = []
    if exists(location):
        columns = open_at(location, version).schema.names
        for name in FILTERS:
            try:
                plain[name] = expand(name, columns)
            except FilterError as error:
                advice[name] = str(error).partition(" needs ")[2]
    if json_output:
        entries = [{**asdict(named), "plain_sql": plain.get(named.name)} for named in FILTERS.values()]
        click.echo(json.dumps(entries, indent=2))
    else:
        click.echo(filters_text(list(FILTERS.values()), plain, advice, columns))


@click.command()
@click.argument("row", metavar="ID", type=click.IntRange(0, 2**63 - 1))
@click.option("--filter", "predicate", help="SQL over columns and named filters [every named filter, each by itself]")
@at_version
@as_json
@click.pass_obj
def explain(obj: dict[str, Any], row: int, predicate: str | None, version: str | None, json_output: bool) -> None:
    """Why the row ID is kept or left out: each rule with the values it reads, and which row it repeats."""
    from pretrain_assets.curate.explain import explain as run
    from pretrain_assets.report.curation_text import explanation_text

    found = run(open_at(obj["location"], version), row, predicate)
    click.echo(json.dumps(asdict(found), indent=2, ensure_ascii=False) if json_output else explanation_text(found))


def open_at(location: Location, version: str | None) -> lance.LanceDataset:
    """The version that a person names: a number, a tag, or the newest.

    Raises:
        TableError: it is not there.
    """
    from pretrain_assets.table.diff import open_named
    from pretrain_assets.table.storage import open_dataset

    return open_dataset(location) if version is None else open_named(location, version)


VERBS = (filter_command, explain)
