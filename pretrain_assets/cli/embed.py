"""Verbs that run models over documents: embed, score.

Invariant: as for all stages (cli/stages.py): each does what the asset of the same stage does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from pretrain_assets.cli.common import as_json, pin_of, print_stage, with_engine
from pretrain_assets.config import EngineConfig

DEVICES = click.Choice(["auto", "cpu", "cuda"])
PRECISIONS = click.Choice(["float32", "bfloat16"])


def with_model(verb: Callable[..., None]) -> Callable[..., None]:
    """The options that all models share."""
    for option in (
        click.option("--text-column", default="text", show_default=True, help="Or text_masked."),
        click.option("--max-tokens", type=click.IntRange(1), default=512, show_default=True, help="Read of each text."),
        click.option("--precision", type=PRECISIONS, default="float32", show_default=True, help="bfloat16 is faster."),
        click.option(
            "--device", type=DEVICES, default="auto", show_default=True, help="auto: a GPU where there is one."
        ),
    ):
        verb = option(verb)
    return verb


@click.command()
@click.argument("model")
@click.option(
    "--library",
    type=click.Choice(["sentence-transformers", "model2vec"]),
    default="sentence-transformers",
    show_default=True,
    help="model2vec: static vectors, hundreds of times faster.",
)
@click.option("--dtype", type=click.Choice(["float16", "float32"]), default="float16", show_default=True)
@with_model
@with_engine
@as_json
@click.pass_obj
def embed(obj: dict[str, Any], /, engine: EngineConfig, json_output: bool, **settings: Any) -> None:
    """Fill the column embedding for the rows that have none; with another MODEL, for all rows.

    MODEL: a local directory, or a name on the Hugging Face hub.
    """
    from pretrain_assets.config import EmbedConfig, from_dict
    from pretrain_assets.curate.embedding import embed as run

    location, config = obj["location"], from_dict(EmbedConfig, settings)
    print_stage(run(location, config, input_pin=pin_of(location, "ingested"), engine=engine), json_output)


@click.command()
@click.argument("name")
@click.argument("model")
@click.option("--label", default="", help="Label whose probability is the score; none for a model of one output.")
@click.option(
    "--activation",
    type=click.Choice(["auto", "none", "sigmoid", "softmax"]),
    default="auto",
    show_default=True,
    help="From outputs to scores.",
)
@with_model
@with_engine
@as_json
@click.pass_obj
def score(obj: dict[str, Any], /, engine: EngineConfig, json_output: bool, **settings: Any) -> None:
    """Fill the column model_score_NAME by a text-classification MODEL, for the rows that have none.

    MODEL: a local directory, or a name on the Hugging Face hub.
    """
    from pretrain_assets.config import ModelScoreConfig, from_dict
    from pretrain_assets.curate.model_scores import score as run

    location, config = obj["location"], from_dict(ModelScoreConfig, settings)
    print_stage(run(location, config, input_pin=pin_of(location, "ingested"), engine=engine), json_output)


VERBS = (embed, score)
