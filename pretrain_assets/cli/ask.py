"""Verbs that answer questions: lineage, search, recipes, runs.

Invariant: they change nothing, neither in the table nor in a run.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from pretrain_assets.cli.common import as_json


@click.command()
@click.argument("query")
@click.option("--checkpoint", help="Folder of a run or checkpoint, or a recipe name [the newest run]")
@click.option("--limit", type=click.IntRange(1), default=5, show_default=True, help="Number of hits.")
@click.option("--where", help="SQL predicate that hits must satisfy.")
@as_json
@click.pass_obj
def search(
    obj: dict[str, Any], query: str, checkpoint: str | None, limit: int, where: str | None, json_output: bool
) -> None:
    """Search the rows a checkpoint was pinned to; each hit says whether and when the model saw it."""
    from pretrain_assets.forensics.checkpoints import find_checkpoint
    from pretrain_assets.forensics.search import search_seen
    from pretrain_assets.report.text import hits_text

    found = find_checkpoint(checkpoint, obj["runs"])
    hits = search_seen(obj["location"], query, checkpoint=found, limit=limit, where=where)
    if json_output:
        click.echo(json.dumps({"checkpoint": found.uri, "hits": [asdict(hit) for hit in hits]}, indent=2))
    else:
        click.echo(f"{found.uri} ({found.pin})\n{hits_text(hits)}")


@click.command()
@click.argument("checkpoint", required=False)
@as_json
@click.pass_obj
def lineage(obj: dict[str, Any], checkpoint: str | None, json_output: bool) -> None:
    """The chain from CHECKPOINT (default: of the newest run) back to the source files."""
    from pretrain_assets.forensics.checkpoints import find_checkpoint
    from pretrain_assets.forensics.lineage import lineage_of
    from pretrain_assets.report.text import lineage_text

    found = lineage_of(obj["location"], find_checkpoint(checkpoint, obj["runs"]))
    click.echo(json.dumps(found.to_dict(), indent=2) if json_output else lineage_text(found))


@click.command("recipes")
@click.argument("name", required=False)
@as_json
def recipes_command(name: str | None, json_output: bool) -> None:
    """Named recipes, or all settings of one."""
    from pretrain_assets import recipes
    from pretrain_assets.config import to_dict
    from pretrain_assets.report.runs_text import recipes_text

    if name:
        click.echo(json.dumps(to_dict(recipes.get(name)), indent=2))
        return
    known = [recipes.summary(recipe) for recipe in recipes.RECIPES]
    click.echo(json.dumps(known, indent=2) if json_output else recipes_text(known))


@click.command()
@as_json
@click.pass_obj
def runs(obj: dict[str, Any], json_output: bool) -> None:
    """Training runs side by side, the newest first."""
    from pretrain_assets.report.runs_text import runs_text
    from pretrain_assets.train.runs import list_runs

    found = list_runs(obj["runs"])
    if json_output:
        click.echo(json.dumps([asdict(run) for run in found], indent=2))
    else:
        click.echo(runs_text(found) if found else f"No runs in {obj['runs']}; `pretrain train RECIPE` makes one.")


VERBS = (lineage, search, recipes_command, runs)
