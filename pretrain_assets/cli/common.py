"""What several verbs share: options, the pin of a stage, and how a stage's result is printed.

Invariant: imports nothing heavy and no verb, so that every file of verbs can import it.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pretrain_assets import project
from pretrain_assets.config import EngineConfig
from pretrain_assets.errors import ConfigError
from pretrain_assets.plural import counted
from pretrain_assets.table.storage import Location

if TYPE_CHECKING:
    from pretrain_assets.config import Recipe
    from pretrain_assets.table.lineage import LineageRecord, Pin, StageResult

as_json = click.option("--json", "json_output", is_flag=True, help="Print one JSON document instead of text.")


def with_engine(verb: Callable[..., None]) -> Callable[..., None]:
    """The options that say where a stage computes its columns; the verb gets `engine`, an `EngineConfig`."""

    @functools.wraps(verb)
    def with_config(*arguments: Any, engine: str | None, workers: int | None, **rest: Any) -> None:
        config = EngineConfig(
            engine=engine or project.engine(),  # type: ignore[arg-type]  # checked by EngineConfig
            workers=workers or project.workers(),
            ray_address=project.ray_address(),
        )
        verb(*arguments, engine=config, **rest)

    for option in (
        click.option("--workers", type=click.IntRange(1), help="Worker processes [PRETRAIN_WORKERS; one per core]"),
        click.option("--engine", help="local, ray or geneva: where it is computed [PRETRAIN_ENGINE; local]"),
    ):
        with_config = option(with_config)
    return with_config


def pin_of(location: Location, *stages: str) -> Pin:
    """The pin of the newest version that one of the stages committed.

    Raises:
        TableError: none of them has run; it says to run the first.
    """
    from pretrain_assets.table.storage import open_dataset
    from pretrain_assets.table.versions import find_record, records

    found = [record for record in records(open_dataset(location)) if record.stage in stages]
    return found[-1].pin if found else find_record(location, stages[0]).pin


def pin_at(location: Location, version: str | None) -> Pin:
    """The pin of a version by its number or tag; None: of the newest.

    Raises:
        TableError: it is not there.
    """
    from pretrain_assets.table.diff import open_named
    from pretrain_assets.table.lineage import Pin
    from pretrain_assets.table.storage import open_dataset
    from pretrain_assets.table.versions import table_id

    dataset = open_dataset(location) if version is None else open_named(location, version)
    return Pin(table_id(dataset), dataset.version)


def on_table(location: Location, recipe: Recipe, tag: str | None) -> tuple[Recipe, LineageRecord]:
    """A recipe with named filters in plain SQL, and the version to train it on: the newest of the stage of its tokens.

    Args:
        location: The table.
        recipe: As asked for.
        tag: A version of that stage instead of the newest.

    Raises:
        TableError: the stage has not run, or has no such tag.
        FilterError: a word of a filter is neither a column nor a name, or, without a tag, a later version has made a
            column of it anew.
    """
    from pretrain_assets.curate.current import check_current
    from pretrain_assets.curate.filters import resolve
    from pretrain_assets.table.versions import find_record, open_pin

    record = find_record(location, recipe.data.token_stage, tag)
    resolved = resolve(recipe, open_pin(location, record.pin).schema.names)
    if tag is None:
        check_current(location, resolved, record)
    return resolved, record


def check_folder(option: str, file: Path | None) -> None:
    """Refuse a file to write whose folder is not there, before the work for it.

    Raises:
        ConfigError: there is no such folder.
    """
    if file and not file.absolute().parent.is_dir():
        raise ConfigError(f"{option} {file}: there is no folder {file.parent}; make it, or name another")


def stage_facts(result: StageResult) -> dict[str, Any]:
    """What a stage did, as plain JSON values."""
    return {**asdict(result.record), "tag": result.record.tag, "changed": result.changed}


def print_stage(result: StageResult, json_output: bool) -> None:
    """Print what a stage did."""
    from pretrain_assets.report.text import megabytes

    record = result.record
    if json_output:
        click.echo(json.dumps(stage_facts(result), indent=2))
    elif result.changed:
        ledger = ", ".join(f"{name} {count:,}" for name, count in record.ledger.items())
        click.echo(f"{record.tag}: {counted(record.rows, 'row')}, {megabytes(record.bytes_added)} added ({ledger})")
    else:
        click.echo(f"{record.tag}: nothing to do, no new version")


SPELLINGS = {"none": None, "null": None, "true": True, "false": False, "inf": math.inf, "nan": math.nan}
"""How people write what JSON spells `null`, `true`, `false`, `Infinity` and `NaN`, in lower case."""


def parse_change(text: str) -> tuple[str, Any]:
    """`train.max_steps=50` as name and value: JSON, or a value as Python spells it; anything else is text.

    Raises:
        ConfigError: no `=` in it.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text!r} is not NAME=VALUE, for example --set train.max_steps=50")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, SPELLINGS.get(value.strip().lower(), value)
