"""The verb that judges a model on held-out rows: evaluate.

Invariant: it reads the checkpoint and the table and changes neither; the answer names the version and rows it is of.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from pretrain_assets.cli.common import as_json, pin_of
from pretrain_assets.cli.model import found_model, tokenizer_place
from pretrain_assets.errors import ConfigError

if TYPE_CHECKING:
    from pretrain_assets.config import DataConfig, Recipe
    from pretrain_assets.table.lineage import Pin
    from pretrain_assets.table.storage import Location
    from pretrain_assets.train.assessment import Subject


@click.command()
@click.argument("checkpoint", required=False)
@click.option("--filter", "predicate", help="SQL predicate of the rows [the held-out rows of the run]")
@click.option("--version", help="Version of the table: 3, a tag, or a pin TABLE-ID@3 [the run's]")
@click.option("--blocks", type=click.IntRange(1), help="Blocks at most, from the first [the run's train.eval_blocks]")
@click.option("--all", "everything", is_flag=True, help="All blocks.")
@click.option("--micro-batch", type=click.IntRange(1), help="Blocks per forward pass [the run's]")
@tokenizer_place
@as_json
@click.pass_obj
def evaluate(
    obj: dict[str, Any],
    checkpoint: str | None,
    predicate: str | None,
    version: str | None,
    blocks: int | None,
    everything: bool,
    micro_batch: int | None,
    tokenizer: str | None,
    json_output: bool,
) -> None:
    """Loss, perplexity and bits per byte of a model on held-out rows, of all and by source.

    CHECKPOINT: folder of a run, checkpoint or exported model, or a recipe's name [the newest run]. Without options the
    loss is the one that the run recorded. On several GPUs: torchrun --nproc-per-node N -m pretrain_assets.cli evaluate.
    """
    if blocks and everything:
        raise ConfigError(f"--blocks {blocks} and --all are two ways to say how much: give one")
    from pretrain_assets.config import ExecutionConfig, LoaderConfig, TrainConfig
    from pretrain_assets.report.evaluation_text import evaluation_text
    from pretrain_assets.train.assessment import assess
    from pretrain_assets.train.distributed import join_world

    location = obj["location"]
    subject, recipe = _load(checkpoint, obj["runs"], predicate)
    pin = _pin(location, version, subject.pin)
    if predicate:
        subject = replace(subject, data=_plain(location, pin, subject.data))
    usual = recipe.train.eval_blocks if recipe else TrainConfig.eval_blocks
    with join_world() as world:
        found = assess(
            location,
            subject,
            pin,
            world,
            num_blocks=None if everything else blocks or usual,
            micro_batch_blocks=micro_batch or (recipe.execution if recipe else ExecutionConfig()).micro_batch_blocks,
            settings=recipe.loader if recipe else LoaderConfig(),
            tokenizer_place=tokenizer,
        )
        if world.is_main:
            click.echo(json.dumps(asdict(found), indent=2) if json_output else evaluation_text(found))


def _load(which: str | None, runs_uri: str, predicate: str | None) -> tuple[Subject, Recipe | None]:
    """A model by what a person types, with the rows to judge it on, and the recipe that it was trained with.

    Raises:
        ConfigError: the model says nothing about its data, and no rows are named.
    """
    from pretrain_assets.config import DataConfig, Recipe, from_dict
    from pretrain_assets.table.lineage import Pin
    from pretrain_assets.train.assessment import Subject

    with found_model(which, runs_uri) as found:
        name, model, identity, facts = found.name, found.model, found.tokenizer, found.facts
    recipe = from_dict(Recipe, facts["recipe"]) if facts else None
    if recipe:
        data = replace(recipe.data, held_out_filter=predicate or recipe.data.held_out_filter)
    elif predicate:
        data = DataConfig(filter=predicate, held_out_filter=predicate, seq_len=model.seq_len)
    else:
        raise ConfigError(f"{name} says nothing about its data: name the rows to judge it on with --filter")
    pin = Pin.parse(facts["pin"]) if facts else None
    return Subject(name=name, model=model, tokenizer=identity, data=data, pin=pin), recipe


def _plain(location: Location, pin: Pin, data: DataConfig) -> DataConfig:
    """The rows to judge a model on, with named filters in plain SQL.

    Raises:
        FilterError: a word is neither a column nor a name.
    """
    from pretrain_assets.curate.filters import expand
    from pretrain_assets.table.versions import open_pin

    columns = open_pin(location, pin).schema.names
    return replace(data, held_out_filter=expand(data.held_out_filter, columns, setting="--filter"))


def _pin(location: Location, version: str | None, trained: Pin | None) -> Pin:
    """The version asked for, the one trained on, or the newest one with tokens.

    Raises:
        TableError: it is not there.
        ConfigError: it is not a version.
    """
    from pretrain_assets.table.diff import open_named
    from pretrain_assets.table.lineage import Pin
    from pretrain_assets.table.versions import table_id

    if version is None:
        return trained or pin_of(location, "tokenized")
    if "@" in version:
        try:
            return Pin.parse(version)
        except ValueError as error:
            raise ConfigError(f"--version {version!r} is not a pin: it is written TABLE-ID@NUMBER") from error
    dataset = open_named(location, version)
    return Pin(table_id(dataset), dataset.version)


VERBS = (evaluate,)
