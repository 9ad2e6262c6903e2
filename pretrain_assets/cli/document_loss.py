"""The verb that measures the loss of every document: measure-loss.

Invariant: as for all stages (cli/stages.py): it does what the asset of the same stage does.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from pretrain_assets.cli.common import as_json, pin_of, print_stage, stage_facts, with_engine
from pretrain_assets.config import EngineConfig


@click.command("measure-loss")
@click.argument("checkpoint", required=False)
@click.option(
    "--name", help="A word: the columns are loss_NAME, loss_max_NAME and loss_tokens_NAME [the recipe's name]"
)
@click.option("--max-tokens", type=click.IntRange(1), help="Of each document, from its beginning [all]")
@click.option(
    "--precision",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="bfloat16 is faster on a GPU.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto: a GPU where there is one.",
)
@click.option("--limit", type=click.IntRange(0), default=5, show_default=True, help="Documents named at either end.")
@with_engine
@as_json
@click.pass_obj
def measure_loss(
    obj: dict[str, Any],
    /,
    checkpoint: str | None,
    name: str | None,
    limit: int,
    engine: EngineConfig,
    json_output: bool,
    **settings: Any,
) -> None:
    """Fill the column loss_NAME, mean nats per token of every document under CHECKPOINT, for the rows that have none.

    CHECKPOINT: folder of a run or checkpoint, or a recipe name [the newest run]. Another one under the same NAME
    measures all rows anew. Then `pretrain search --where "loss_NAME > 8"` and every filter knows the column.
    """
    from pretrain_assets.config import DocumentLossConfig
    from pretrain_assets.forensics.checkpoints import find_checkpoint
    from pretrain_assets.forensics.losses.document_loss import column_name
    from pretrain_assets.forensics.losses.document_loss import measure_loss as run
    from pretrain_assets.forensics.losses.loss_report import loss_report
    from pretrain_assets.report.loss_text import loss_text

    found = find_checkpoint(checkpoint, obj["runs"])
    location, recipe = obj["location"], found.recipe  # it is written to: never another table than the one named
    config = DocumentLossConfig(name=name or column_name(recipe), **settings)
    pin = pin_of(location, recipe.data.token_stage)
    result = run(location, found, config, input_pin=pin, engine=engine)
    report = loss_report(location, found, config.name, limit=limit)
    if json_output:
        click.echo(json.dumps({**stage_facts(result), "report": asdict(report)}, indent=2))
        return
    print_stage(result, False)
    click.echo(loss_text(report))


VERBS = (measure_loss,)
