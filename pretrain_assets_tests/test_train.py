"""The trainer: its loss, equality over ranks and interruptions, checkpoints, the job contract, launching."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from pretrain_assets.config import ModelConfig, RunSpec, TrainConfig
from pretrain_assets.errors import CheckpointError, ConfigError, DataIdentityError, FilterError, PretrainError
from pretrain_assets.launch.contract import read_result, read_spec, write_spec
from pretrain_assets.launch.local import run_local
from pretrain_assets.train import checkpoint, distributed
from pretrain_assets.train.flops import flops_per_token, mfu, peak_tflops
from pretrain_assets.train.lock import sole_writer
from pretrain_assets.train.metrics import read_metrics
from pretrain_assets.train.model import GPT
from pretrain_assets.train.optim import learning_rate, make_optimizers
from pretrain_assets.train.passport import missing_fields
from pretrain_assets.train.reporting import open_reporters
from pretrain_assets.train.run import run
from pretrain_assets.train.sampling import generate
from pretrain_assets_tests.runs import (
    EOS,
    MODEL,
    PAD,
    RECIPE,
    SEQ,
    TOKENIZER,
    VOCAB,
    after,
    assert_close,
    drive,
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
    """The tiny run on two ranks through the launcher, start to end."""
    spec = spec_in(database, str(tmp_path_factory.mktemp("undisturbed")))
    return spec, run_local(spec, 2)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun: threads would only wait for each other in models this small."""
    monkeypatch.setattr(distributed, "_num_cores", lambda: 1)


def tiny_model() -> GPT:
    model = GPT(MODEL, TOKENIZER, SEQ)
    model.init_weights(0)
    return model


@torch.no_grad()
def loss_of(model: GPT, ids: torch.Tensor) -> float:
    return float(model(ids))


def random_blocks(blocks: int = 4) -> torch.Tensor:
    return torch.randint(0, VOCAB, (blocks, SEQ), generator=torch.Generator().manual_seed(0))


# --- the model ---------------------------------------------------------------------------------------------------


def test_initial_loss_is_near_ln_v():
    assert loss_of(tiny_model(), random_blocks()) / (4 * (SEQ - 1)) == pytest.approx(math.log(VOCAB), abs=0.05)


def test_padded_vocabulary_equals_unpadded():
    model, ids = tiny_model(), random_blocks()
    assert model.token_embedding.weight.shape == (384, 32)
    loss = loss_of(model, ids)
    model(ids).backward()
    assert torch.equal(model.token_embedding.weight.grad[VOCAB:], torch.zeros(84, 32))
    with torch.no_grad():
        model.token_embedding.weight[VOCAB:] = 50.0
    assert loss_of(model, ids) == loss
    logits = model.logits(ids).detach()[:, :-1].flatten(0, 1)
    plain = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum")
    assert float(plain) == pytest.approx(loss, rel=1e-6)


def test_a_padded_tail_changes_the_loss_by_exactly_nothing_and_eos_counts():
    model, ids = tiny_model(), random_blocks()
    ids[:, 20] = EOS
    ids[:, 21:] = PAD
    before = loss_of(model, ids)
    with torch.no_grad():
        model.token_embedding.weight[PAD] += 7.0  # what the pads look like to the model
    assert loss_of(model, ids) == before
    ids[:, 20] = PAD
    assert loss_of(model, ids) != before


def test_residual_projections_start_smaller():
    deep = GPT(ModelConfig(n_layer=8, n_head=2, n_embd=64), TOKENIZER, SEQ)
    deep.init_weights(0)
    assert float(deep.layers[0].expand.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(deep.layers[0].projection.weight.detach().std()) == pytest.approx(0.02 / 4, rel=0.05)


def test_only_matrices_decay():
    model = tiny_model()
    decayed, spared = make_optimizers(model, RECIPE.train)[0].param_groups
    assert {p.dim() for p in decayed["params"]} == {2} and decayed["weight_decay"] == 0.1
    assert {p.dim() for p in spared["params"]} == {1} and spared["weight_decay"] == 0.0


def test_learning_rate_warms_up_then_follows_the_cosine():
    config = TrainConfig(global_batch_tokens=1, learning_rate=1.0, min_learning_rate=0.1, warmup_steps=10)
    rates = [learning_rate(config, step, 110) for step in (1, 10, 60, 110)]
    assert rates == pytest.approx([0.1, 1.0, 0.55, 0.1])


def test_flops_of_gpt2_124m_and_peaks():
    config = ModelConfig(n_layer=12, n_head=12, n_embd=768)
    assert flops_per_token(124_475_904, config, 1024) == 860_101_632
    assert mfu(490_000, 860_101_632, "NVIDIA H200", 1) == pytest.approx(0.426, abs=0.001)
    assert peak_tflops("NVIDIA H100 PCIe") == 756 and peak_tflops("NVIDIA H100 80GB HBM3") == 989
    assert peak_tflops("CPU") is None and mfu(1.0, 1, "CPU", 1) is None


def test_generation_is_repeatable_and_stays_in_the_vocabulary():
    model = tiny_model()
    texts = [generate(model, [1, 2], num_tokens=SEQ + 5, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) == SEQ + 7 and max(texts[0]) < VOCAB
    assert generate(model, [1], num_tokens=3, temperature=0) == generate(
        model, [1], num_tokens=3, temperature=0, seed=5
    )


# --- equality over ranks and interruptions --------------------------------------------------------------------------


def test_two_ranks_report_everything(undisturbed):
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


def test_one_rank_equals_two(undisturbed, make_spec):
    spec = make_spec()
    assert run(spec) == 0
    assert_close(losses(spec.run_dir), losses(undisturbed[0].run_dir))


def test_stopped_and_resumed_on_other_numbers_of_ranks_equals_undisturbed(undisturbed, make_spec, tmp_path):
    """One rank to step 5, two ranks to step 11, one rank to the end, over the end of the first epoch."""
    spec = make_spec()
    assert run(spec, after(5)) == 75
    assert read_result(spec.run_dir)["status"] == "stopped"
    assert drive(spec, "stop", 6, tmp_path) != 0
    assert read_result(spec.run_dir)["step"] == 11
    assert run(spec) == 0
    assert_close(losses(spec.run_dir), losses(undisturbed[0].run_dir))


@pytest.mark.slow
def test_killed_rank_then_the_same_command_again_is_bitwise_undisturbed(undisturbed, make_spec, tmp_path):
    spec = make_spec()
    assert drive(spec, "kill", 10, tmp_path) != 0  # after step 10; the newest checkpoint is step 8
    assert checkpoint.newest(spec.run_dir) == 8
    result = run_local(spec, 2)
    assert losses(spec.run_dir) == losses(undisturbed[0].run_dir)
    assert result["digest"] == undisturbed[1]["digest"]  # weights, moments, generator state, passport
    assert result["passport"] == undisturbed[1]["passport"]


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


def test_other_data_is_refused_with_every_difference(undisturbed):
    changed = spec_in(
        undisturbed[0].database_uri,
        undisturbed[0].run_dir,
        pin="table@2",
        data__filter="id % 10 > 0",
        data__seed=9,
        model__n_layer=2,
    )
    with pytest.raises(DataIdentityError) as caught:
        run(in_copy(changed, "other-data"))
    text = str(caught.value)
    assert "differs in table_version, filter, seed, model:" in text
    assert "    checkpoint: 'id % 10 != 0'\n    this run:   'id % 10 > 0'" in text
    assert "    checkpoint: 'table@1'\n    this run:   'table@2'" in text
    assert text.endswith("or another run_dir to start afresh.")
    assert read_result(f"{changed.run_dir}-other-data")["error_type"] == "DataIdentityError"


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


# --- checkpoints ----------------------------------------------------------------------------------------------------


def save_tiny(run_dir: Path, step: int) -> Path:
    tensors = {"model": {"w": torch.arange(100_000.0) + step}}
    return Path(checkpoint.save(str(run_dir), step, tensors, {"step": step}))


def test_broken_checkpoints_are_skipped_with_the_reason(tmp_path, caplog):
    folders = {step: save_tiny(tmp_path, step) for step in (1, 2, 3, 4, 5)}
    with (folders[5] / "model.safetensors").open("r+b") as handle:
        handle.truncate(1000)
    data = bytearray((folders[4] / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folders[4] / "model.safetensors").write_bytes(data)
    (folders[3] / "COMPLETE").unlink()
    (folders[2] / "passport.json").unlink()
    assert checkpoint.newest(str(tmp_path)) == 1
    for reason in (
        "has 1000 bytes, not",
        "does not match its digest",
        "no COMPLETE marker",
        "passport.json is missing",
    ):
        assert reason in caplog.text
    assert torch.equal(checkpoint.read_tensors(folders[1], "model")["w"], torch.arange(100_000.0) + 1)
    checkpoint.prune(str(tmp_path), keep_last=2)
    assert checkpoint.steps(str(tmp_path)) == [5, 4]


def test_a_resumed_run_skips_a_truncated_checkpoint(undisturbed, make_spec, caplog):
    spec = make_spec()
    shutil.copytree(undisturbed[0].run_dir, spec.run_dir)
    (Path(spec.run_dir) / "result.json").unlink()
    with (Path(checkpoint.checkpoint_uri(spec.run_dir, 18)) / "optimizer.safetensors").open("r+b") as handle:
        handle.truncate(64)
    assert run(spec) == 0
    assert "skipping checkpoint" in caplog.text and "step_00000018" in caplog.text
    assert_close(losses(spec.run_dir), losses(undisturbed[0].run_dir))
    assert checkpoint.newest(spec.run_dir) == 18


@contextmanager
def no_file_larger_than(num_bytes: int) -> Iterator[None]:
    """Writes past this size fail with an OSError, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_reported_and_leaves_the_earlier_checkpoint(tmp_path):
    save_tiny(tmp_path, 1)
    with no_file_larger_than(100_000), pytest.raises(CheckpointError, match=r"step_00000002.* bytes are free there"):
        save_tiny(tmp_path, 2)
    assert checkpoint.newest(str(tmp_path)) == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


def test_checkpoints_live_on_s3_too(undisturbed, database, s3):
    spec = spec_in(database, f"{s3.bucket('train-runs')}/tiny")
    assert run(spec, after(5)) == 75
    assert checkpoint.newest(spec.run_dir) == 5
    assert run(spec) == 0
    assert_close(losses(spec.run_dir), losses(undisturbed[0].run_dir))
    assert checkpoint.steps(spec.run_dir) == [18, 16]


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
    assert "dagster-pipes is missing" in printed and "step 2/1000000 | loss" in printed
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


def test_a_result_without_its_checkpoint_is_not_done(make_spec):
    spec = make_spec(train__max_steps=2)
    assert run(spec) == 0
    digest = read_result(spec.run_dir)["digest"]
    shutil.rmtree(Path(spec.run_dir, "checkpoints"))
    Path(spec.run_dir, "result.json").write_text("{")  # and a damaged result counts as none
    assert run(spec) == 0
    assert read_result(spec.run_dir)["digest"] == digest


@pytest.mark.parametrize("damage", ["[]", "{}", '{"passport.json": {}}', "\xff"])
def test_a_damaged_marker_is_no_marker(make_spec, damage):
    spec = make_spec(train__max_steps=2)
    assert run(spec) == 0
    folder = Path(spec.run_dir, "checkpoints", "step_00000002")
    (folder / "COMPLETE").write_text(damage, encoding="latin-1")
    assert "marker" in checkpoint.find_fault(folder) and checkpoint.newest(spec.run_dir) is None


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
