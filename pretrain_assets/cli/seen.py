"""The verb that looks into one optimizer step: seen.

Invariant: changes nothing, neither in the table nor in a run.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from pretrain_assets.cli.common import as_json


@click.command()
@click.argument("run", required=False)
@click.option("--step", type=int, required=True, help="Optimizer step, from 1.")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="Parts of documents to show.")
@as_json
@click.pass_obj
def seen(obj: dict[str, Any], run: str | None, step: int, limit: int, json_output: bool) -> None:
    """The documents that a model saw at one step, in block order.

    RUN: folder of a run or checkpoint, or a recipe name [the newest run]. The run needs no checkpoint.
    """
    from pretrain_assets.forensics.seen import seen_at
    from pretrain_assets.report.seen_text import seen_text

    found = seen_at(run, step, location=obj["location"], runs_uri=obj["runs"], limit=limit)
    click.echo(json.dumps(asdict(found), indent=2, ensure_ascii=False) if json_output else seen_text(found))


VERBS = (seen,)
