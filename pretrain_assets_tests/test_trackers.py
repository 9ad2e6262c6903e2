"""Experiment trackers: real packages, their points read back from their own files, and a run that outlives them."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pretrain_assets.config import RunSpec
from pretrain_assets.errors import ConfigError
from pretrain_assets.launch.contract import read_result, write_spec
from pretrain_assets.train import trackers
from pretrain_assets.train.metrics import read_metrics
from pretrain_assets.train.run import run
from pretrain_assets.train.tracker_kinds import KINDS
from pretrain_assets_tests.runs import after, make_database, spec_in

Points = dict[str, list[tuple[int, float]]]
STEPS = 6


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_database(tmp_path_factory.mktemp("trackers"))


@pytest.fixture
def make_spec(database: str, tmp_path: Path) -> Callable[..., RunSpec]:
    run_dir = str(tmp_path / "tiny-v1-abc")
    return lambda *names: spec_in(database, run_dir, execution__trackers=names, train__max_steps=STEPS)


def assert_complete(found: Points, spec: RunSpec) -> None:
    """A tracker holds what metrics.jsonl says, every point once."""
    records = read_metrics(spec.run_dir)
    for name, key in {"train/loss": "loss", "val/loss": "val_loss", "train/lr": "lr"}.items():
        wanted = [(r["step"], r[key]) for r in records if key in r]
        assert [step for step, _ in found[name]] == [step for step, _ in wanted], name
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in wanted], rel=1e-6)
    assert [step for step, _ in found["train/loss"]] == [*range(1, STEPS + 1)]
    assert [step for step, _ in found["val/loss"]] == [0, STEPS]


def tensorboard_points(folder: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder)).Reload()
    return {name: [(p.step, p.value) for p in shown.Scalars(name)] for name in shown.Tags()["scalars"]}


class Broken:
    """A tracker whose disk is full from step 2 on."""

    where, newest_step, finished = "nowhere", -1, False

    def __init__(self, run: Any):
        pass

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == 2:
            raise OSError(28, "No space left on device")
        assert step < 2, "it is asked again after it failed"

    def finish(self, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
        raise AssertionError("it is asked again after it failed")


def test_every_point_once_over_a_resume_and_a_broken_tracker_ends_only_itself(make_spec, monkeypatch, caplog):
    monkeypatch.setitem(KINDS, "mlflow", Broken)
    monkeypatch.setattr(trackers, "check_trackers", lambda names: None)
    spec = make_spec("mlflow", "tensorboard")
    assert run(spec, after(3)) == 75
    warnings = [r.message for r in caplog.records if r.levelname == "WARNING" and "mlflow" in r.message]
    assert len(warnings) == 1 and "No space left on device" in warnings[0] and "goes on without it" in warnings[0]
    assert run(spec) == 0
    folder = Path(spec.run_dir) / "trackers" / "tensorboard"
    found = tensorboard_points(folder)
    assert_complete(found, spec)
    result = read_result(spec.run_dir)
    assert result is not None and result["status"] == "done"
    assert found["final/val_loss"][-1] == (STEPS, pytest.approx(result["val_loss"], rel=1e-6))
    text = b"".join(path.read_bytes() for path in folder.iterdir()).decode("latin-1")
    assert "train.learning_rate" in text and "table@1" in text and "AWS_" not in text


def test_a_tracker_added_later_gets_the_run_from_its_beginning(make_spec):
    assert run(make_spec(), after(3)) == 75
    spec = make_spec("tensorboard")
    assert run(spec) == 0
    assert_complete(tensorboard_points(Path(spec.run_dir) / "trackers" / "tensorboard"), spec)


def test_a_missing_package_stops_the_run_before_it_starts_with_the_command(make_spec, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("wandb", "trackio") else found(name))
    with pytest.raises(ConfigError, match=r"pip install 'pretrain-assets\[wandb,trackio\]'"):
        run(make_spec("wandb", "tensorboard", "trackio"))


def test_records_get_the_names_that_trackers_group_by():
    record = {"step": 10, "total_steps": 20, "loss": 4.5, "lr": 1e-3, "mfu": None, "tok_per_s": 7, "eta_seconds": 1.0}
    assert trackers.tidy(record) == {"train/loss": 4.5, "train/lr": 1e-3, "speed/tok_per_s": 7.0}
    record = {"step": 10, "val_loss": 4.0, "val_by_source": {"wiki": {"loss": 3.0, "note": "x"}}}
    assert trackers.tidy(record) == {"val/loss": 4.0, "val/by_source/wiki/loss": 3.0}


@pytest.mark.slow
def test_a_run_on_s3_gets_its_trackers_files_at_the_end(database, s3, tmp_path):
    from pretrain_assets.table.storage import filesystem

    run_dir = f"{s3.bucket('trackers')}/runs/tiny-v1-s3"
    spec = spec_in(database, run_dir, execution__trackers=("tensorboard",), train__max_steps=STEPS)
    assert run(spec, after(3)) == 75 and run(spec) == 0
    fs, path = filesystem(f"{run_dir}/trackers/tensorboard")
    fs.get(f"{path}/", f"{tmp_path}/", recursive=True)
    assert_complete(tensorboard_points(tmp_path), spec)


# --- packages that are too heavy to be required ------------------------------------------------------------------

PROGRAM = """
import socket, sys
from pretrain_assets.launch.contract import read_spec
from pretrain_assets.train.run import run
from pretrain_assets_tests.runs import after

connect = socket.socket.connect
def local_only(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
        print("CONNECTED TO", address, flush=True)
        raise OSError(f"no network: {address}")
    return connect(self, address)
socket.socket.connect = local_only
stop = int(sys.argv[2])
sys.exit(run(read_spec(sys.argv[1]), *([after(stop)] if stop else [])))
"""


def wandb_points(folder: Path) -> Points:
    """From the one .wandb file: a LevelDB log of protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, at, piece = file.read_bytes(), 7, b""
    found: Points = {}
    while at + 7 <= len(data):
        at += 32768 - at % 32768 if 32768 - at % 32768 < 7 else 0
        length, kind = struct.unpack_from("<HB", data, at + 4)
        piece += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            history, piece = Record.FromString(piece).history, b""
            values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item}
            for name, value in values.items():
                found.setdefault(name, []).append((values["_step"], value))
    return found


def mlflow_points(folder: Path) -> Points:
    with sqlite3.connect(folder / "mlflow.db") as database:
        assert database.execute("SELECT name, status FROM runs").fetchall() == [("tiny-v1-abc", "FINISHED")]
        return by_name(database.execute("SELECT key, step, value FROM metrics ORDER BY step"))


def trackio_points(folder: Path) -> Points:
    with sqlite3.connect(folder / "pretrain_assets.db") as database:
        assert database.execute("SELECT DISTINCT run_name FROM metrics").fetchall() == [("tiny-v1-abc",)]
        rows = database.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    return by_name((name, step, value) for step, text in rows for name, value in json.loads(text).items())


def by_name(rows: Any) -> Points:
    found: Points = {}
    for name, step, value in rows:
        found.setdefault(name, []).append((step, value))
    return found


@pytest.mark.slow
@pytest.mark.optional
@pytest.mark.parametrize("kind", ["wandb", "mlflow", "trackio"])
def test_other_trackers_hold_every_point_once_over_a_resume_and_reach_nobody(make_spec, kind):
    pytest.importorskip(kind)
    spec = make_spec(kind)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "MLFLOW", "TRACKIO"))}
    for stop, code in ((3, 75), (0, 0)):
        command = [sys.executable, "-c", PROGRAM, write_spec(spec), str(stop)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert "CONNECTED TO" not in done.stdout and "is off for the rest" not in done.stderr
    read = {"wandb": wandb_points, "mlflow": mlflow_points, "trackio": trackio_points}[kind]
    assert_complete(read(Path(spec.run_dir) / "trackers" / kind), spec)
