"""The trainer: its loss, equality over ranks and interruptions, checkpoints, the job contract, launching."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lance
import psutil
import pytest
from click.testing import CliRunner

from pretrain_assets.cli import cli
from pretrain_assets.config import RunSpec
from pretrain_assets.errors import ConfigError, DataIdentityError, FilterError, PretrainError, TableError
from pretrain_assets.launch.contract import read_result, read_spec, write_spec
from pretrain_assets.launch.local import run_local
from pretrain_assets.train import checkpoint, distributed
from pretrain_assets.train.lines import opening
from pretrain_assets.train.lock import sole_writer
from pretrain_assets.train.metrics import data_wait, read_metrics, speed_per_rank
from pretrain_assets.train.passport import missing_fields
from pretrain_assets.train.reporting import open_reporters
from pretrain_assets.train.run import run
from pretrain_assets_tests.runs import (
    SEQ,
    TOKENIZER,
    VOCAB,
    after,
    assert_close,
    eventually,
    losses,
    make_database,
    spec_in,
)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_database(tmp_path_factory.mktemp("train"))


@pytest.fixture
def make_spec(database: str, tmp_path: Path) -> Callable[..., RunSpec]:
    return lambda name="run", **changes: spec_in(database, str(tmp_path / name), **changes)


def processes_of(run_dir: str) -> list[psutil.Process]:
    """Every living process that names the run's directory on its command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(run_dir in a for a in process.info["cmdline"] or []):
            found.append(process)
    return found


@pytest.fixture(scope="module")
def undisturbed(database: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunSpec, dict[str, Any]]:
    """The tiny run on one rank, start to end."""
    spec = spec_in(database, str(tmp_path_factory.mktemp("undisturbed")))
    assert run(spec) == 0
    return spec, read_result(spec.run_dir)


@pytest.fixture(scope="module")
def on_two_ranks(database: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunSpec, dict[str, Any]]:
    """The same on two ranks through the launcher."""
    spec = spec_in(database, str(tmp_path_factory.mktemp("two-ranks")))
    return spec, run_local(spec, 2)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun: threads would only wait for each other in models this small."""
    monkeypatch.setattr(distributed, "_num_cores", lambda: 1)


# --- equality over ranks and interruptions --------------------------------------------------------------------------


def test_a_run_reports_everything(undisturbed):
    spec, result = undisturbed
    assert result["status"] == "done" and result["step"] == result["total_steps"] == 18
    assert result["first_loss"] == pytest.approx(math.log(VOCAB), abs=0.1)
    assert result["train_loss"] < result["first_loss"] - 0.5 and result["val_loss"] < result["first_val_loss"] - 0.5
    assert [step for step, _ in losses(spec.run_dir)["val_loss"]] == [0, 6, 12, 18]
    assert result["tokens"] == 18 * 256 and result["sample"].startswith("[")
    assert checkpoint.steps(spec.run_dir) == [18, 16]
    passport = result["passport"]
    assert missing_fields(passport) == [] and passport["pin"] == "table@1"
    assert set(passport["ledger"]) == {"0", "1"}  # the run crosses into the second epoch
    assert passport["tokens_seen"] == sum(e["tokens_trained"] for e in passport["ledger"].values())


@pytest.mark.parametrize(
    ("changes", "total", "epoch", "words"),
    [
        ({}, 8, 102, ["8 steps, 0.0784 epochs of 102, 2,048 tokens\n"]),
        ({"train__warmup_steps": 1}, 1, 1, ["1 step, 1 epoch of 1, 256 tokens\n"]),
        ({"train__warmup_steps": 10**8}, 2, 13, ["warning: train.warmup_steps=100,000,000, and the run has 2 steps: "]),
        ({"train__warmup_steps": 9}, 8, 13, ["warning: ", "no further than 0.89 of its peak"]),
        ({"train__warmup_steps": 8}, 8, 13, ["8 steps, 0.615 epochs of 13"]),
    ],
)
def test_the_opening_counts_in_words_and_warns_of_a_warm_up_without_end(make_spec, changes, total, epoch, words):
    settings = {"num_parameters": 9, "ranks": 1, "device_name": "CPU", "step": 0}
    text = opening(make_spec(**changes), total_steps=total, epoch_steps=epoch, **settings)
    for word in words:
        assert word in text
    assert ("warning" in text) == any("warning" in word for word in words)


@pytest.mark.slow
def test_two_ranks_equal_one(undisturbed, on_two_ranks):
    (one, result), (two, same) = undisturbed, on_two_ranks
    assert_close(losses(two.run_dir), losses(one.run_dir))
    different = {"train_loss", "val_loss", "recipe"}  # up to the order of sums
    assert same["status"] == "done" and same["total_steps"] == result["total_steps"]
    for name in set(result["passport"]) - different:
        assert same["passport"][name] == result["passport"][name], name


def test_lost_metrics_leave_the_losses_of_the_checkpoint(undisturbed, make_spec):
    spec, (whole, result) = make_spec(), undisturbed
    shutil.copytree(whole.run_dir, spec.run_dir)
    for name in ("metrics.jsonl", "result.json"):
        Path(spec.run_dir, name).unlink()
    assert run(spec) == 0
    again = read_result(spec.run_dir)
    assert {name: again[name] for name in again if name.startswith(("train_", "val_"))} == {
        name: result[name] for name in ("train_loss", "train_loss_step", "val_loss", "val_loss_step")
    }
    assert again["first_loss"] is None and again["data_wait"] is None


def test_the_verb_prints_a_run_without_losses(make_spec, monkeypatch):
    spec = make_spec()
    result = {"status": "done", "val_loss": None, "data_wait": None, "checkpoint": "there"}
    record = SimpleNamespace(pin=spec.pin, tag=spec.tag)
    monkeypatch.setattr("pretrain_assets.cli.stages.on_table", lambda *_: (spec.recipe, record))
    monkeypatch.setattr("pretrain_assets.train.spec.make_spec", lambda *_: spec)
    monkeypatch.setattr("pretrain_assets.table.tags.protect_run", lambda *_: None)
    monkeypatch.setattr("pretrain_assets.launch.local.run_local", lambda *_: result)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    said = CliRunner().invoke(cli, ["train", "demo", "--nproc", "1"], catch_exceptions=False).stdout
    assert said == "done: validation loss n/a, data-wait unknown, checkpoint there\n"


def test_damaged_lines_of_the_metrics_are_left_out_with_one_warning(make_spec, caplog):
    spec = make_spec(train__max_steps=2)
    assert run(spec, after(1)) == 75
    path = Path(spec.run_dir, "metrics.jsonl")
    good = path.read_bytes().splitlines()
    strange = [good[0][:20], b"\0" * 40, b"", b'{"loss": 1.0}', b'{"step": "1"}', b"[1]", b"[" * 100_000, b"\xff"]
    sparse = [b'{"step": 1, "seconds": 1.0, "ranks": 2}']
    path.write_bytes(b"\n".join([good[0], *strange, *good[1:], *sparse, "{é".encode()[:-1]]))
    before = [json.loads(line) for line in (*good, *sparse)]
    assert read_metrics(spec.run_dir) == before
    assert [record.getMessage() for record in caplog.records if "metrics.jsonl" in record.getMessage()] == [
        f"{path}: left out what is not the record of a step, in lines 2, 3, 4, 5, 6, 7, 8, 9"
    ]
    assert data_wait(before) == data_wait(before[:-1]) and speed_per_rank(before) == speed_per_rank(before[:-1])
    assert run(spec) == 0
    assert read_metrics(spec.run_dir)[: len(before)] == before
    assert b"\0" not in path.read_bytes()


@pytest.mark.parametrize("text", [b"\xff\xfe\0", b"[" * 100_000, b"", b"[1]"], ids=lambda text: repr(text[:3]))
def test_a_damaged_run_file_is_said(text, tmp_path):
    (tmp_path / "run.json").write_bytes(text)
    with pytest.raises(ConfigError, match=r"run.json is not JSON|must be a mapping"):
        read_spec(str(tmp_path / "run.json"))


def test_stopped_and_resumed_equals_undisturbed_bitwise(undisturbed, make_spec):
    """Twice, the second time in the second epoch."""
    spec = make_spec()
    assert run(spec, after(5)) == run(spec, after(10)) == 75
    assert read_result(spec.run_dir)["step"] == 15
    assert run(spec) == 0
    assert losses(spec.run_dir) == losses(undisturbed[0].run_dir)
    assert read_result(spec.run_dir)["digest"] == undisturbed[1]["digest"]


def test_micro_batches_do_not_change_the_run(undisturbed, make_spec):
    spec = make_spec(execution__micro_batch_blocks=8)
    run(spec)
    assert_close(losses(spec.run_dir), losses(undisturbed[0].run_dir))


def test_a_finished_run_is_not_run_again(undisturbed, caplog):
    spec, result = undisturbed
    with caplog.at_level(logging.INFO):
        assert run(spec) == 0
    assert "done already: nothing to do" in caplog.text
    assert read_result(spec.run_dir) == result


def test_epochs_are_exact_and_their_ledgers_close(make_spec):
    spec = make_spec(train__max_steps=None, train__epochs=2, execution__checkpoint_every=1000)
    assert run(spec) == 0
    result = read_result(spec.run_dir)
    steps = result["passport"]["budget"]["steps_per_epoch"]
    assert result["step"] == 2 * steps == result["total_steps"]
    for ledger in result["passport"]["ledger"].values():
        assert ledger["blocks"] == steps * 8 and ledger["tokens_not_reached"] == 0
        assert (
            ledger["tokens_in"]
            == sum(n for name, n in ledger.items() if "left_out" in name and "tokens" in name)
            + (ledger["tokens_trained"])
        )
    assert (
        run(override_spec(spec, train__epochs=3, execution__checkpoint_every=1000)) == 0
    )  # a longer run goes on from there
    assert read_result(spec.run_dir)["step"] == 3 * steps


def override_spec(spec: RunSpec, **changes: Any) -> RunSpec:
    return spec_in(spec.database_uri, spec.run_dir, **{"train__max_steps": None} | changes)


# --- refusals -------------------------------------------------------------------------------------------------------


OTHER_TOKENIZER = dataclasses.replace(TOKENIZER, fingerprint="g")
HALVES = [{"name": name, "predicate": f"id % 2 = {rest}", "weight": 1.0} for name, rest in (("even", 0), ("odd", 1))]


@pytest.fixture(scope="module")
def stopped(database: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of the tiny run, stopped after two steps."""
    run_dir = str(tmp_path_factory.mktemp("stopped"))
    assert run(spec_in(database, run_dir), after(2)) == 75
    return run_dir


@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        ({"data__filter": "id % 10 > 0"}, {"filter": ("'id % 10 != 0'", "'id % 10 > 0'")}),
        ({"pin": "table@2"}, {"table_version": ("'table@1'", "'table@2'")}),
        ({"pin": "recreated@1"}, None),
        ({"tokenizer": OTHER_TOKENIZER}, {"tokenizer": ("'f'", "'g'")}),
        ({"tokenizer": dataclasses.replace(TOKENIZER, eos_id=5)}, {"eos_id": ("299", "5")}),
        ({"data__seq_len": 16}, {"seq_len": ("32", "16")}),
        ({"data__num_splits": 2}, {"num_splits": ("4", "2")}),
        ({"data__seed": 9}, {"seed": ("1", "9")}),
        ({"data__shuffle_clump_size": 8}, {"shuffle_clump_size": ("1", "8")}),
        ({"data__mixture": HALVES}, {"mixture": ("[]", f"{HALVES!r}")}),
        ({"train__global_batch_tokens": 128}, {"global_batch_tokens": ("256", "128")}),
        ({"train__optimizer": "muon"}, {"optimizer": ("'adamw'", "'muon'")}),
        ({"model__n_layer": 2}, {"model": ("{'n_layer': 1, ", "{'n_layer': 2, ")}),
        (
            {"data__filter": "id > 60 AND id % 10 != 0", "data__seq_len": 64, "model__n_embd": 16},
            {"filter": ("'id ", "'id > 60"), "seq_len": ("32", "64"), "model": ("{", "{")},
        ),
    ],
)
def test_field_5_other_data_is_refused_with_every_difference_and_both_values(
    database: str, stopped: str, changes: dict[str, Any], differences: dict[str, tuple[str, str]] | None
) -> None:
    if differences is None:
        with pytest.raises(PretrainError, match="recreated"):
            run(spec_in(database, stopped, **changes))
        return
    with pytest.raises(DataIdentityError) as caught:
        run(spec_in(database, stopped, **changes))
    text = str(caught.value)
    assert f"step_00000002 cannot be resumed by this run, which differs in {', '.join(differences)}:" in text
    for name, (had, asked) in differences.items():
        assert re.search(rf"  {name}.*:\n    checkpoint: {re.escape(had)}.*\n    this run:   {re.escape(asked)}", text)
    assert text.endswith("or another run_dir to start afresh.")
    assert read_result(stopped)["error_type"] == "DataIdentityError"
    assert checkpoint.newest(stopped) == 2


def test_field_5_appended_rows_change_nothing_and_a_version_cleaned_up_is_named(tmp_path, undisturbed):
    database, run_dir = make_database(tmp_path / "table"), str(tmp_path / "run")
    spec, uri = spec_in(database, run_dir), f"{database}/corpus.lance"
    assert run(spec, after(9)) == 75
    lance.write_dataset(lance.dataset(uri).to_table(), uri, mode="append")
    assert run(spec, after(4)) == 75
    assert losses(run_dir)["loss"] == losses(undisturbed[0].run_dir)["loss"][:13]
    lance.dataset(uri).cleanup_old_versions(timedelta(0))
    with pytest.raises(TableError, match="has no version 1"):
        run(spec)
    assert checkpoint.newest(run_dir) == 13


def in_copy(spec: RunSpec, name: str) -> RunSpec:
    """The same run in a copy of its directory, so that other tests keep theirs."""
    folder = f"{spec.run_dir}-{name}"
    shutil.copytree(spec.run_dir, folder)
    return dataclasses.replace(spec, run_dir=folder)


def test_never_resume_refuses_a_used_directory(undisturbed):
    spec = spec_in(undisturbed[0].database_uri, undisturbed[0].run_dir, resume="never", train__max_steps=30)
    with pytest.raises(ConfigError, match="holds a run already"):
        run(in_copy(spec, "never"))


def test_train_and_held_out_rows_must_be_disjoint(make_spec):
    with pytest.raises(FilterError, match=r"9 rows match both data.filter='id > 0'"):
        run(make_spec(data__filter="id > 0", data__held_out_filter="id < 10"))


def test_a_step_larger_than_the_epoch_is_refused(make_spec):
    with pytest.raises(ConfigError, match=r"fewer than the 4000 of one step"):
        run(make_spec(train__global_batch_tokens=4000 * SEQ))


def test_launching_on_a_number_of_processes_that_does_not_divide_starts_nothing(make_spec):
    spec = make_spec()
    with pytest.raises(ConfigError, match="nproc=3 cannot share num_splits=4 equally; use one of 1, 2, 4 processes"):
        run_local(spec, 3)
    assert not Path(spec.run_dir).exists()


def test_a_diverging_loss_stops_with_its_step_and_saves_nothing(make_spec):
    spec = make_spec(train__learning_rate=1e30, train__warmup_steps=1, execution__log_every=5)
    with pytest.raises(PretrainError, match=r"The loss of step [2-5] is not finite"):
        run(spec)
    assert checkpoint.steps(spec.run_dir) == []
    assert read_result(spec.run_dir)["status"] == "failed"


# --- processes ------------------------------------------------------------------------------------------------------

ENDLESS = {"train__max_steps": 1_000_000, "train__eval_every": 1_000_000, "execution__checkpoint_every": 1_000_000}


def trained_past(run_dir: str, step: int) -> bool:
    return any(record["step"] > step for record in read_metrics(run_dir))


@pytest.mark.slow
def test_sigterm_saves_exits_75_and_resumes_and_needs_no_orchestrator(make_spec):
    """Without torchrun, with dagster, ray and geneva blocked, and with Pipes promised but not installed."""
    spec = make_spec(**ENDLESS)
    code = (
        "import sys\n"
        "for name in ('dagster', 'dagster_pipes', 'ray', 'geneva'): sys.modules[name] = None\n"
        "from pretrain_assets.train.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, write_spec(spec)],
        env={**os.environ, "DAGSTER_PIPES_CONTEXT": "x"},
        stdout=subprocess.PIPE,
        text=True,
    )
    eventually(lambda: trained_past(spec.run_dir, 3))
    process.terminate()
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "dagster-pipes is missing" in printed and "step       2/1000000 | loss" in printed
    result = read_result(spec.run_dir)
    assert result["status"] == "stopped" and checkpoint.newest(spec.run_dir) == result["step"]
    assert run(override_spec(spec, train__max_steps=result["step"] + 2)) == 0
    assert [step for step, _ in losses(spec.run_dir)["loss"]] == list(range(1, result["step"] + 3))


def test_one_job_per_run_directory(make_spec):
    spec = make_spec()
    with sole_writer(spec.run_dir), pytest.raises(ConfigError, match="is being trained by another process"):
        run(spec)
    assert checkpoint.steps(spec.run_dir) == [] and read_result(spec.run_dir) is None
    assert run(spec, after(1)) == 75


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["launcher", "torchrun"])
def test_no_process_outlives_a_killed_launcher_or_torchrun(make_spec, victim):
    spec = make_spec(victim, **ENDLESS)
    code = (
        "import sys; from pretrain_assets.launch import contract, local\n"
        "local.run_local(contract.read_spec(sys.argv[1]), 1)\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, write_spec(spec)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    eventually(lambda: trained_past(spec.run_dir, 3))
    torchrun = psutil.Process(launcher.pid).children()[0]
    assert len(processes_of(spec.run_dir)) == 3  # launcher, torchrun, rank
    os.kill(launcher.pid if victim == "launcher" else torchrun.pid, signal.SIGKILL)
    launcher.wait(60)
    eventually(lambda: not processes_of(spec.run_dir))
    if victim == "launcher":
        assert read_result(spec.run_dir)["status"] == "stopped"  # torchrun got SIGTERM, and its rank saved


def test_reports_reach_dagster_pipes(make_spec, tmp_path, monkeypatch):
    from dagster_pipes import encode_param

    context = {"asset_keys": ["model"], "run_id": "r", "job_name": "j", "retry_number": 0, "extras": {}}
    (tmp_path / "context.json").write_text(
        json.dumps(
            context
            | dict.fromkeys(
                (
                    "code_version_by_asset_key",
                    "provenance_by_asset_key",
                    "partition_key",
                    "partition_key_range",
                    "partition_time_window",
                )
            )
        )
    )
    monkeypatch.setenv("DAGSTER_PIPES_CONTEXT", encode_param({"path": str(tmp_path / "context.json")}))
    monkeypatch.setenv("DAGSTER_PIPES_MESSAGES", encode_param({"path": str(tmp_path / "messages")}))
    with open_reporters(make_spec(), True) as reporters:
        for reporter in reporters:
            reporter.progress({"step": 0, "val_loss": 5.5, "val_tokens": 10, "total_steps": 3})
            reporter.result({"status": "done", "step": 3, "train_loss": 4.0, "val_loss": None, "seconds": 1.0})
    messages = [json.loads(line) for line in (tmp_path / "messages").read_text().splitlines()]
    sent = [m["params"]["payload"] for m in messages if m["method"] == "report_custom_message"]
    assert [(m["kind"], m["step"]) for m in sent] == [("progress", 0), ("result", 3)]
    with open_reporters(make_spec(), False) as reporters:
        assert reporters == []


def test_run_files_are_checked(make_spec, tmp_path):
    spec = make_spec()
    assert read_spec(write_spec(spec)) == spec
    with pytest.raises(ConfigError, match="There is no run file"):
        read_spec(str(tmp_path / "nothing.json"))
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_spec(str(tmp_path / "broken.json"))
