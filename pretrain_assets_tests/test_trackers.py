"""Experiment trackers: their real packages, the points read back from their own files, and a run that outlives them."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrain_assets.config import RunSpec
from pretrain_assets.errors import ConfigError
from pretrain_assets.launch.contract import read_result, write_spec
from pretrain_assets.train import tracker_kinds, trackers
from pretrain_assets.train.metrics import read_metrics
from pretrain_assets.train.run import run
from pretrain_assets_tests.runs import after, make_database, spec_in

Points = dict[str, list[tuple[int, float]]]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_database(tmp_path_factory.mktemp("trackers"))


@pytest.fixture
def make_spec(database: str, tmp_path: Path) -> Callable[..., RunSpec]:
    return lambda *names, **changes: spec_in(
        database, str(tmp_path / "tiny-v1-abc"), execution__trackers=names, train__max_steps=6, **changes
    )


def expected(spec: RunSpec) -> Points:
    """What every tracker must hold: the losses of metrics.jsonl, each once."""
    records = read_metrics(spec.run_dir)
    names = {"train/loss": "loss", "val/loss": "val_loss", "train/lr": "lr"}
    return {name: [(r["step"], r[key]) for r in records if key in r] for name, key in names.items()}


def tensorboard_points(folder: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder)).Reload()
    return {name: [(p.step, p.value) for p in shown.Scalars(name)] for name in shown.Tags()["scalars"]}


def assert_same(found: Points, wanted: Points) -> None:
    for name, points in wanted.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in points], rel=1e-6)


def test_tensorboard_holds_every_point_once_over_a_resume_with_recipe_and_result(make_spec):
    spec = make_spec("tensorboard")
    assert run(spec, after(3)) == 75
    assert run(spec) == 0
    folder = Path(spec.run_dir) / "trackers" / "tensorboard"
    found = tensorboard_points(folder)
    assert_same(found, expected(spec))
    assert [step for step, _ in found["val/loss"]] == [0, 6]
    result = read_result(spec.run_dir)
    assert result is not None
    assert found["final/val_loss"][-1] == (6, pytest.approx(result["val_loss"], rel=1e-6))
    assert {"speed/tok_per_s", "speed/data_wait", "train/grad_norm"} <= set(found) and "speed/step" not in found
    text = b"".join(path.read_bytes() for path in folder.iterdir()).decode("latin-1")
    assert "train.learning_rate" in text and "table@1" in text and "AWS_" not in text
