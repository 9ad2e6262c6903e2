"""Verbs that answer questions: lineage, search, recipes, runs.

Invariant: they change nothing, neither in the table nor in a run.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import click

from pretrain_assets import project
from pretrain_assets.cli.common import as_json, pin_at
from pretrain_assets.errors import CheckpointError, ConfigError


@click.command()
@click.argument("query", default="")
@click.option("--checkpoint", help="Folder of a run or checkpoint, or a recipe name [the newest run]")
@click.option("--version", "--tag", "version", metavar="VERSION", help="Search 3, v3 or a tag, without a checkpoint.")
@click.option(
    "--mode",
    type=click.Choice(["text", "vector", "hybrid"]),
    help="BM25, cosine of vectors, or both by reciprocal rank fusion [text; vector with --like]",
)
@click.option("--limit", type=int, default=5, show_default=True, help="Number of hits.")
@click.option("--where", help="SQL predicate that hits must satisfy, over columns and named filters.")
@click.option("--like", type=int, metavar="ID", help="By the vector of this document instead of the query's.")
@click.option("--model", help="Folder of the model that made the vectors [PRETRAIN_EMBED_MODEL; as the column says]")
@click.option("--rerank", metavar="MODEL", help="Folder or hub name of a cross-encoder that orders the best 50 anew.")
@as_json
@click.pass_obj
def search(
    obj: dict[str, Any], /, query: str, checkpoint: str | None, version: str | None, json_output: bool, **how: Any
) -> None:
    """Search the rows a checkpoint was pinned to; each hit says whether and when the model saw it.

    QUERY: words, and phrases in double quotes, as in '"carbon dioxide" leaves'. Without it, --where lists rows and
    --like finds the nearest vectors.
    """
    from pretrain_assets.forensics.checkpoints import find_checkpoint
    from pretrain_assets.forensics.retrieval.search import find, with_exposures
    from pretrain_assets.forensics.subject import table_of
    from pretrain_assets.report.search_text import found_text

    if version is not None and checkpoint is not None:
        raise ConfigError("--checkpoint names its version itself: give it, or --version, not both.")
    try:
        of = find_checkpoint(checkpoint, obj["runs"]) if version is None else None
    except CheckpointError as error:
        if checkpoint is not None:
            raise
        raise CheckpointError(f"{error} Without a model, --version NUMBER searches that version.") from error
    how["mode"] = how["mode"] or ("text" if how["like"] is None else "vector")
    how["model"] = how["model"] or project.setting("EMBED_MODEL", "") or None
    location = table_of(of.run_dir, of.pin, obj["location"]) if of else obj["location"]
    pin = of.pin if of else pin_at(location, version)
    found = find(location, query, pin=pin, **how)
    if of:
        found = replace(found, hits=with_exposures(location, found.hits, of))
    if json_output:
        click.echo(json.dumps({"checkpoint": of.uri if of else None, **found.to_dict()}, indent=2))
    else:
        click.echo(f"{f'{of.uri} ({pin})' if of else pin}\n{found_text(found, mark=True)}")


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
