"""Verbs that ask the vectors of documents: neighbours, clusters.

Invariant: they change nothing, neither in the table nor in a run.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pretrain_assets.cli.common import as_json, check_folder

with_where = click.option("--where", help="SQL predicate that neighbours must satisfy.")
exactly = click.option("--exact", is_flag=True, help="Compare every vector, even where there is an index.")


@click.command()
@click.option("--doc", metavar="ID", required=True, help="The table's id (a number), or the source's doc_id.")
@click.option("--checkpoint", help="Say what a model saw of each: folder of a run or checkpoint, or a recipe name.")
@click.option("--limit", type=click.IntRange(1), default=5, show_default=True, help="Number of neighbours.")
@with_where
@exactly
@as_json
@click.pass_obj
def neighbours(
    obj: dict[str, Any],
    doc: str,
    checkpoint: str | None,
    limit: int,
    where: str | None,
    exact: bool,
    json_output: bool,
) -> None:
    """The documents nearest to one, by their vectors (`pretrain embed`)."""
    from pretrain_assets.forensics.checkpoints import find_checkpoint
    from pretrain_assets.forensics.retrieval.neighbours import neighbours_of
    from pretrain_assets.report.neighbours_text import neighbours_text

    of_run = find_checkpoint(checkpoint, obj["runs"]) if checkpoint else None
    found = neighbours_of(obj["location"], doc, limit=limit, where=where, exact=exact, checkpoint=of_run)
    click.echo(json.dumps(asdict(found), indent=2, ensure_ascii=False) if json_output else neighbours_text(found))


@click.command()
@click.option("--sample", type=click.IntRange(1), default=10_000, show_default=True, help="Documents to ask for.")
@click.option("--all", "ask_all", is_flag=True, help="Ask for every document.")
@click.option("--seed", type=int, default=0, show_default=True, help="Another seed is another sample.")
@click.option("--threshold", type=float, default=0.9, show_default=True, help="Least similarity within a cluster.")
@click.option("--limit", type=click.IntRange(1), default=10, show_default=True, help="Most neighbours of a document.")
@click.option("--show", type=click.IntRange(0), default=5, show_default=True, help="Clusters to show.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write the threshold curve as SVG.")
@with_where
@exactly
@as_json
@click.pass_obj
def clusters(
    obj: dict[str, Any],
    sample: int,
    ask_all: bool,
    seed: int,
    threshold: float,
    limit: int,
    show: int,
    plot: Path | None,
    where: str | None,
    exact: bool,
    json_output: bool,
) -> None:
    """Near duplicates by meaning: the share of documents with a near neighbour, by threshold, and the clusters.

    Says how many of them deduplication knew. A sample looks for its neighbours among all documents.
    """
    from pretrain_assets.forensics.retrieval.clusters import find_clusters
    from pretrain_assets.report.neighbours_plot import threshold_svg
    from pretrain_assets.report.neighbours_text import clusters_text

    check_folder("--plot", plot)
    found = find_clusters(
        obj["location"],
        sample=None if ask_all else sample,
        threshold=threshold,
        where=where,
        limit=limit,
        seed=seed,
        exact=exact or None,
        shown=show,
    )
    if plot:
        plot.write_text(threshold_svg(found), encoding="utf-8")
    click.echo(json.dumps(asdict(found), indent=2, ensure_ascii=False) if json_output else clusters_text(found))


VERBS = (neighbours, clusters)
