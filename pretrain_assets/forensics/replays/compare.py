"""A replay beside its original: losses step by step, and what each model makes of the documents left out.

Invariant: only what both runs have is compared, at the same step; both models are asked about the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain_assets.config import DataConfig, RunSpec
from pretrain_assets.errors import ConfigError
from pretrain_assets.forensics.exposure import schedule_of
from pretrain_assets.forensics.replays.blocks import BlocksLoss, blocks_loss, location_of
from pretrain_assets.launch.contract import RUN_NAME, read_file, read_result, read_spec
from pretrain_assets.loader.holes import hidden_per_step
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import join
from pretrain_assets.train.metrics import read_metrics


@dataclass(frozen=True, kw_only=True)
class LossPoint:
    """A step at which both runs wrote the same loss down."""

    step: int
    """Optimizer step."""
    original: float
    """Loss of the original, in nats per token."""
    replay: float
    """Loss of the replay."""
    tokens_in_holes: int = 0
    """Tokens of the step that only the original had: then the two training losses are means over other tokens."""

    @property
    def difference(self) -> float:
        """The replay's minus the original's."""
        return self.replay - self.original


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A replay and its original."""

    original: str
    """Folder of the original."""
    replay: str
    """Folder of the replay."""
    pin: str
    """Table version of both."""
    holes: str
    """The documents left out, in a line."""
    start_step: int
    """Step of the original that the replay began after."""
    seen_at_start: int
    """Documents left out that the original had trained on by then."""
    status: str
    """How the replay ended, or `unfinished`."""
    step: int
    """Newest step of the replay."""
    total_steps: int | None
    """Steps of the whole run; None before its first record."""
    training: tuple[LossPoint, ...]
    """Training losses."""
    validation: tuple[LossPoint, ...]
    """Validation losses, on the same held-out tokens."""
    curves: dict[str, tuple[tuple[int, float], ...]]
    """`original`, `replay`, `original validation` and `replay validation`: all losses that each wrote down, by step."""
    blocks: BlocksLoss | None
    """What both models make of the documents left out; None without a common checkpoint."""


def is_replay(run_dir: str) -> bool:
    """Whether a run is the replay of another, by its run.json."""
    try:
        return read_spec(join(run_dir, RUN_NAME)).replay is not None
    except ConfigError:
        return False


def compare(run_dir: str, *, measure: bool = True) -> Comparison:
    """Compare a replay, as far as it got, with its original.

    Args:
        run_dir: Folder of the replay.
        measure: Also ask both models about the documents left out, on this machine's CPU.

    Raises:
        ConfigError: the run is no replay, its original is gone, or nothing of it can be compared.
        TableError: the pinned version is gone.
    """
    spec = read_spec(join(run_dir, RUN_NAME))
    if spec.replay is None:
        raise ConfigError(f"{run_dir} is no replay of another run; `pretrain runs` shows which are")
    had, has = read_metrics(spec.replay.run_dir), read_metrics(run_dir)
    last = max((record["step"] for record in has), default=0)
    before = _data_before(spec)
    schedule, full = (_schedule(spec, data) for data in (spec.recipe.data, before))
    hidden = hidden_per_step(schedule, last) - hidden_per_step(full, last)
    training, validation = _points(had, has, "loss", hidden), _points(had, has, "val_loss", None)
    if not training and not validation:
        raise ConfigError(f"{run_dir} and {spec.replay.run_dir} have no loss of the same step: nothing to compare yet")
    result = read_result(run_dir)
    return Comparison(
        original=spec.replay.run_dir,
        replay=run_dir,
        pin=spec.pin,
        holes=str(spec.recipe.data.holes),
        start_step=spec.replay.start_step,
        seen_at_start=spec.replay.documents_seen,
        status=result["status"] if result else "unfinished",
        step=last,
        total_steps=has[-1].get("total_steps") if has else None,
        training=training,
        validation=validation,
        curves={
            f"{name}{kind}": _curve(records, key)
            for kind, key in (("", "loss"), (" validation", "val_loss"))
            for name, records in (("original", had), ("replay", has))
        },
        blocks=blocks_loss(spec, run_dir, schedule, before) if measure else None,
    )


def _curve(records: list[dict[str, Any]], key: str) -> tuple[tuple[int, float], ...]:
    return tuple((record["step"], float(record[key])) for record in records if record.get(key) is not None)


def _points(
    had: list[dict[str, Any]], has: list[dict[str, Any]], key: str, hidden: npt.NDArray[np.int64] | None
) -> tuple[LossPoint, ...]:
    """Both runs' values of a loss at the steps that both have."""
    one, two = dict(_curve(had, key)), dict(_curve(has, key))
    return tuple(
        LossPoint(
            step=step,
            original=one[step],
            replay=two[step],
            tokens_in_holes=0 if hidden is None else int(hidden[step]),
        )
        for step in sorted(one.keys() & two.keys())
    )


def _data_before(spec: RunSpec) -> DataConfig:
    """What the original was trained on: the same without holes, or, itself a replay, with fewer.

    Raises:
        ConfigError: it is gone.
    """
    assert spec.replay is not None
    run_json = join(spec.replay.run_dir, RUN_NAME)
    if read_file(run_json) is None:
        raise ConfigError(
            f"{spec.run_dir} replays {spec.replay.run_dir}, which is gone (it has no {RUN_NAME}): nothing is left to "
            "compare it with. Put the original back where it was; the replay itself is a run like any other."
        )
    return read_spec(run_json).recipe.data


def _schedule(spec: RunSpec, data: DataConfig) -> Schedule:
    return schedule_of(location_of(spec), Pin.parse(spec.pin), replace(spec.recipe, data=data))
