"""From a recipe and a table version to a complete, checked `RunSpec`.

Invariant: the run's directory is a function of recipe and data identity, so the same run is resumed and another filter,
seed or version never lands in its place.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from pretrain_assets.config import Recipe, RunSpec
from pretrain_assets.errors import ConfigError, FilterError
from pretrain_assets.loader.mixture import assign
from pretrain_assets.table.lineage import Pin, digest
from pretrain_assets.table.predicate import check_predicate
from pretrain_assets.table.query import sql_rows
from pretrain_assets.table.schema import tokenizer_identity
from pretrain_assets.table.storage import STORAGE_ENV_NAMES, Location, is_remote, join
from pretrain_assets.table.verify import filters_disjoint
from pretrain_assets.table.versions import open_pin

if TYPE_CHECKING:
    import lance

WITHOUT = "-without-"
"""In the name of the folder of a run with holes, which is a replay or could be one."""


def make_spec(location: Location, pin: Pin, tag: str, recipe: Recipe, runs_uri: str) -> RunSpec:
    """Resolve a run.

    Args:
        location: The table.
        pin: Version to train on, made by the tokenized stage.
        tag: Tag that names it.
        recipe: Complete recipe.
        runs_uri: Folder of all runs.

    Raises:
        FilterError: a filter of the recipe is not a predicate of the table, or its mixture does not fit it.
        TableError: the version is not there, or has no tokens.
        ConfigError: a local table or folder is given by a relative path.
    """
    for uri in (location.database_uri, runs_uri):
        if not is_remote(uri) and not uri.startswith("/"):
            raise ConfigError(f"{uri!r} must be absolute: the run starts in another process, perhaps on another node")
    dataset = open_pin(location, pin)
    tokenizer = tokenizer_identity(dataset, recipe.data.token_column)
    for setting in ("filter", "held_out_filter"):
        predicate = getattr(recipe.data, setting)
        check_predicate(dataset, predicate, setting=f"data.{setting}")
        if dataset.count_rows(predicate) == 0:
            raise FilterError(
                f"data.{setting}={predicate!r} keeps none of the {dataset.count_rows():,} rows of {tag}; widen it"
            )
    _check_rows(dataset, recipe)
    spec = RunSpec(
        recipe=recipe,
        database_uri=location.database_uri,
        table_name=location.table_name,
        pin=str(pin),
        tag=tag,
        tokenizer=tokenizer,
        run_dir="",
        storage_env=STORAGE_ENV_NAMES if is_remote(location.uri) or is_remote(runs_uri) else (),
    )
    holes = WITHOUT if recipe.data.without else "-"
    name = f"{recipe.name}-v{pin.version}{holes}{digest([spec.identity, recipe.lasting])[:8]}"
    return dataclasses.replace(spec, run_dir=join(runs_uri, name))


def _check_rows(dataset: lance.LanceDataset, recipe: Recipe) -> None:
    """Refuse before any process starts what every rank would refuse later: shared rows, or too few for one step."""
    data = recipe.data
    shared = filters_disjoint(dataset, data.filter, data.held_out_filter)
    if not shared.passed:
        raise FilterError(
            f"data.filter={data.filter!r} and data.held_out_filter={data.held_out_filter!r} must not share a row: "
            f"{shared.description}; change both together, as to `... AND training` and `... AND held_out`"
        )
    if data.mixture:
        assign(dataset, data.filter, data.mixture, count_column=data.count_column)
    query = f"SELECT sum({data.count_column} + 1) AS tokens FROM dataset WHERE {data.filter}"
    tokens = sql_rows(dataset, query)[0]["tokens"] or 0
    if tokens < recipe.train.global_batch_tokens:
        raise ConfigError(
            f"data.filter={data.filter!r} keeps {tokens:,} tokens, fewer than the {recipe.train.global_batch_tokens:,} "
            "of one step. Widen the filter, or lower train.global_batch_tokens (and data.num_splits)."
        )
