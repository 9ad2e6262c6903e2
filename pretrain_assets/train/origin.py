"""Which checkpoint a run goes on from, and on what conditions: its own, or one of the run that it is a replay of.

Invariant: a checkpoint is taken only if it is what this run itself would have been at that step. One of the original is
that if it differs in documents left out later and in nothing else; it is read where it is, and never written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pretrain_assets.config import DataConfig, Recipe, ReplayOf, RunSpec, from_dict, override
from pretrain_assets.errors import ConfigError, DataIdentityError
from pretrain_assets.loader.holes import same_until
from pretrain_assets.loader.planner import Planner
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.loader.state import check_same
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location
from pretrain_assets.train import checkpoint
from pretrain_assets.train.engine import Engine
from pretrain_assets.train.passport import check_identity, check_plan
from pretrain_assets.train.state import restore


def restore_own(spec: RunSpec, schedule: Schedule, engine: Engine, step: int, *, total_steps: int) -> None:
    """Load the run's own checkpoint of a step.

    Raises:
        DataIdentityError: it was trained on other data.
        ConfigError: it is past the run's last step.
    """
    with checkpoint.open_checkpoint(spec.run_dir, step, weights_only=False) as folder:
        passport = checkpoint.read_passport(folder)
        check_identity(spec, passport, folder)
        check_plan(schedule, passport, folder)
        if step > total_steps:
            raise ConfigError(
                f"Checkpoint {folder} is past the last step, {total_steps}; raise train.max_steps or train.epochs, or "
                "choose another run_dir"
            )
        restore(folder, engine)


def restore_original(spec: RunSpec, schedule: Schedule, engine: Engine, origin: ReplayOf) -> None:
    """Load the checkpoint of the original run that a replay begins with.

    Raises:
        DataIdentityError: it was trained on other data, or had seen documents that the replay leaves out before it; or
            it is another checkpoint than was chosen.
        ReplacedError: it is no longer there.
    """
    with checkpoint.open_checkpoint(origin.run_dir, origin.start_step, weights_only=False) as folder:
        if checkpoint.digest(folder) != origin.start:
            raise DataIdentityError(f"Checkpoint {folder} has changed since it was chosen: run `pretrain replay` again")
        passport = checkpoint.read_passport(folder)
        before = _with_holes_of(spec, passport)
        check_identity(before, passport, folder)
        check_same(
            from_dict(Recipe, passport["recipe"]).lasting["train"],
            before.recipe.lasting["train"],
            between=("checkpoint", "this run"),
            sentence=f"Checkpoint {folder} is no start for this run",
            remedy="A replay changes nothing but the documents left out: run `pretrain replay` again.",
        )
        check_plan(schedule, passport, folder)
        if not same_until(schedule, _schedule(spec, before.recipe.data), origin.start_step):
            raise DataIdentityError(
                f"Checkpoint {folder} had seen documents by then that this run leaves out: it is no start for it. "
                "`pretrain replay` finds one that is."
            )
        restore(folder, engine)


def _with_holes_of(spec: RunSpec, passport: Mapping[str, Any]) -> RunSpec:
    """The run with the holes of the checkpoint's instead of its own."""
    had: Mapping[str, Any] = passport["recipe"].get("data", {})
    holes = {"data.without": had.get("without", ()), "data.without_from": had.get("without_from", (0, 0))}
    return dataclasses.replace(spec, recipe=override(spec.recipe, holes))


def _schedule(spec: RunSpec, data: DataConfig) -> Schedule:
    location = Location(database_uri=spec.database_uri, table_name=spec.table_name)
    return Schedule(Planner(location, Pin.parse(spec.pin), data).plan, spec.recipe.cycles_per_step)
