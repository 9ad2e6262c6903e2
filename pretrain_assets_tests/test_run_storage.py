"""Where a run is kept, when it fails: outages of an object store, full and read-only disks, what is in the way."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from pretrain_assets.config import ExecutionConfig, RunSpec
from pretrain_assets.errors import CheckpointError, ConfigError, StorageError
from pretrain_assets.launch import contract
from pretrain_assets.launch.contract import read_file, read_result, write_file
from pretrain_assets.train import checkpoint, distributed, metrics
from pretrain_assets.train.lock import sole_writer
from pretrain_assets.train.metrics import MetricsLog, read_metrics
from pretrain_assets.train.run import run
from pretrain_assets.train.saver import Saver
from pretrain_assets.train.shards import Piece
from pretrain_assets_tests.ranks import ONE
from pretrain_assets_tests.runs import losses, make_database, no_file_larger_than, passport_of, spec_in


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_database(tmp_path_factory.mktemp("storage"))


@pytest.fixture
def make_spec(database: str, tmp_path: Path) -> Callable[..., RunSpec]:
    short = {"train__max_steps": 4, "train__eval_every": 2, "execution__checkpoint_every": 2}
    return lambda run_dir=str(tmp_path / "run"), **changes: spec_in(database, run_dir, **(short | changes))


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_num_cores", lambda: 1)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that were waited for; nobody really waits."""
    waited: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(waited), sleep=waited.append)
    monkeypatch.setattr(contract, "time", clock)
    monkeypatch.setattr(metrics, "time", clock)
    return waited


def failing(monkeypatch: pytest.MonkeyPatch, method: str, error: Exception, *, times: int, name: str = "") -> None:
    """Let a method of the object store in memory fail so many times for files of a name."""
    real, left = getattr(MemoryFileSystem, method), [error] * times

    def method_of(self: Any, path: str, *arguments: Any, **settings: Any) -> Any:
        if path.endswith(name) and left:
            raise left.pop()
        return real(self, path, *arguments, **settings)

    monkeypatch.setattr(MemoryFileSystem, method, method_of)


NO_ANSWER = ConnectionError("Could not connect to the endpoint\nand more lines")


def test_an_outage_is_waited_out_with_one_warning(pauses, monkeypatch, caplog):
    failing(monkeypatch, "pipe_file", NO_ANSWER, times=6)
    write_file("memory://outage/run.json", b"{}")
    assert pauses == [1, 2, 4, 8, 15, 15] and read_file("memory://outage/run.json") == b"{}"
    (warning,) = caplog.messages
    assert warning == "memory://outage/run.json: Could not connect to the endpoint; trying again for 120 s"


def test_an_outage_that_does_not_end_is_one_line_after_two_minutes(pauses, monkeypatch):
    failing(monkeypatch, "pipe_file", NO_ANSWER, times=99)
    with pytest.raises(StorageError) as caught:
        write_file("memory://outage/result.json", b"{}")
    assert 105 < sum(pauses) <= 120 and "\n" not in str(caught.value)
    assert str(caught.value).startswith("Cannot write memory://outage/result.json: Could not connect to the endpoint. ")
    assert "AWS_ENDPOINT_URL" in str(caught.value)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [(FileNotFoundError("no such bucket"), "Make the bucket"), (PermissionError("denied"), "Allow this user")],
)
def test_what_does_not_pass_by_itself_is_not_waited_for(pauses, monkeypatch, error, remedy):
    failing(monkeypatch, "pipe_file", error, times=1)
    with pytest.raises(StorageError, match=rf"{remedy}.* choose another place for runs \(--runs, PRETRAIN_RUNS_URI\)"):
        write_file("memory://outage/run.json", b"{}")
    assert pauses == []


def test_uploads_of_a_checkpoint_begin_anew_after_an_outage(pauses, monkeypatch):
    failing(monkeypatch, "_open", NO_ANSWER, times=3, name=".safetensors")
    run_dir, saver = "memory://uploads/run", Saver("memory://uploads/run", ONE, ExecutionConfig())
    saver.save(1, {"model": {"w": Piece(torch.arange(9.0), (0,))}}, passport_of(1))
    saver.wait()
    assert pauses == [1, 2, 4] and checkpoint.newest(run_dir) == 1
    failing(monkeypatch, "_open", NO_ANSWER, times=99, name="passport.json")
    saver.save(2, {"model": {"w": Piece(torch.arange(9.0), (0,))}}, passport_of(2))
    with pytest.raises(CheckpointError, match=r"step_00000002: rank 0: Could not connect to the endpoint\. Look at"):
        saver.wait()
    assert checkpoint.newest(run_dir) == 1


def test_the_history_waits_for_an_object_store_and_stops_nobody(pauses, monkeypatch, caplog):
    run_dir = "memory://history/run"
    log = MetricsLog(run_dir, last_step=-1)
    log.append({"step": 1})
    with monkeypatch.context() as patch:
        failing(patch, "pipe_file", NO_ANSWER, times=2)
        log.append({"step": 2})
        log.append({"step": 3})  # is not even tried: a try can take long
        pauses.append(metrics.PAUSE_SECONDS)
        log.append({"step": 4})
        assert read_metrics(run_dir) == [{"step": 1}] and len(caplog.messages) == 1
        log.flush()
    assert read_metrics(run_dir) == log.records == [{"step": step} for step in (1, 2, 3, 4)]
    assert "waits in memory, the run goes on" in caplog.messages[0] and "written again" in caplog.messages[-1]


def test_a_run_goes_on_through_outages_of_its_history(make_spec, monkeypatch):
    whole, spec = make_spec(), make_spec("memory://through/run")
    assert run(whole) == 0
    monkeypatch.setattr(metrics, "PAUSE_SECONDS", 0.0)
    log, real = MetricsLog(spec.run_dir, last_step=-1), MetricsLog._store

    def store(self: MetricsLog, patience: float | None) -> None:
        with monkeypatch.context() as patch:
            if 2 <= len(self.records) <= 5:
                failing(patch, "pipe_file", NO_ANSWER, times=1)
            real(self, patience)

    assert log.records == []
    monkeypatch.setattr(MetricsLog, "_store", store)
    assert run(spec) == 0
    assert losses(spec.run_dir) == losses(whole.run_dir)
    assert read_result(spec.run_dir)["digest"] == read_result(whole.run_dir)["digest"]


def test_a_full_disk_costs_no_line_of_the_history_nor_half_of_one(tmp_path, caplog):
    log = MetricsLog(str(tmp_path), last_step=-1)
    records = [{"step": step, "loss": 1 / 3} for step in range(1, 9)]
    size = len(json.dumps(records[0])) + 1
    with no_file_larger_than(3 * size + 10):
        for record in records[:6]:
            log.append(record)
        lines = (tmp_path / "metrics.jsonl").read_bytes().split(b"\n")
        assert [json.loads(line) for line in lines[:-1]] == records[:3] and lines[-1] == b""
    log.append(records[6])
    assert read_metrics(str(tmp_path)) == records[:7]
    assert ["waits in memory" in message for message in caplog.messages] == [True, False]
    assert "bytes are free there. Free space" in caplog.messages[0]


def test_a_run_on_a_disk_full_for_a_while_ends_well(make_spec, monkeypatch, caplog):
    whole, spec, append = make_spec(), make_spec(str(Path(make_spec().run_dir).with_name("full"))), metrics._append
    assert run(whole) == 0
    calls: list[int] = []

    def full(path: Path, lines: bytes) -> None:
        calls.append(1)
        if 2 <= len(calls) <= 4:
            raise OSError(28, "No space left on device")
        append(path, lines)

    monkeypatch.setattr(metrics, "_append", full)
    assert run(spec) == 0
    assert losses(spec.run_dir) == losses(whole.run_dir)
    assert sum("waits in memory" in message for message in caplog.messages) == 1


def test_a_full_disk_leaves_the_old_file_and_says_how_much_is_free(tmp_path):
    write_file(f"{tmp_path}/result.json", b"old")
    with no_file_larger_than(100), pytest.raises(StorageError, match=r"[\d,]+ bytes are free there\. Free space"):
        write_file(f"{tmp_path}/result.json", bytes(1000))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("result.json", b"old")]


def test_a_folder_that_cannot_be_written_is_said_at_once(tmp_path, make_spec, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"cannot write to its folder {tmp_path}/file/run: .*Not a directory"):
        run(make_spec(f"{tmp_path}/file/run"))

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", read_only)
        with (
            pytest.raises(ConfigError, match=r"Read-only file system\. Allow this user .*--runs"),
            sole_writer(f"{tmp_path}/run"),
        ):
            pass


@pytest.mark.parametrize("kind", ["a file", "read-only"])
def test_a_folder_of_checkpoints_that_takes_none_is_said_before_training(make_spec, monkeypatch, kind):
    spec = make_spec()
    folder = Path(spec.run_dir, "checkpoints")
    folder.parent.mkdir()
    if kind == "a file":
        folder.write_text("")
    else:
        folder.mkdir()
        denied = PermissionError(13, "Permission denied", str(folder))
        monkeypatch.setattr("tempfile.TemporaryFile", lambda dir: (_ for _ in ()).throw(denied))
    with pytest.raises(ConfigError, match=f"Checkpoints cannot be written to {folder}: ") as caught:
        run(spec)
    assert "Free space" not in str(caught.value) and losses(spec.run_dir) == {"loss": [], "val_loss": []}


def test_a_missing_bucket_is_said_once_and_before_training(make_spec, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    failing(monkeypatch, "pipe_file", FileNotFoundError("The specified bucket does not exist"), times=99)
    with pytest.raises(ConfigError) as caught:
        run(make_spec("memory://nowhere/run"))
    assert str(caught.value) == (
        "Checkpoints cannot be written to memory://nowhere/run/checkpoints: The specified bucket does not exist. Make "
        "the bucket, or choose another place for runs (--runs, PRETRAIN_RUNS_URI)."
    )
    assert "Traceback" not in caplog.text
