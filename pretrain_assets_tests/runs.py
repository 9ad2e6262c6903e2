"""The tiny run that the trainer's tests share: its table, recipe and drivers."""

from __future__ import annotations

import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from pretrain_assets.config import (
    DataConfig,
    ExecutionConfig,
    ModelConfig,
    Recipe,
    RunSpec,
    TokenizerIdentity,
    TrainConfig,
    override,
    to_dict,
)
from pretrain_assets.launch.contract import write_spec
from pretrain_assets.launch.local import torchrun_argv
from pretrain_assets.table.versions import identified
from pretrain_assets.train.metrics import read_metrics

VOCAB, EOS, PAD, SEQ = 300, 299, 300, 32
TOKENIZER = TokenizerIdentity(name="none", fingerprint="f", vocab_size=VOCAB, eos_id=EOS, pad_id=PAD)
MODEL = ModelConfig(n_layer=1, n_head=2, n_embd=32)
RECIPE = Recipe(
    name="tiny",
    model=MODEL,
    data=DataConfig(filter="id % 10 != 0", held_out_filter="id % 10 = 0", seq_len=SEQ, num_splits=4, seed=1),
    train=TrainConfig(
        global_batch_tokens=4 * SEQ * 2,
        max_steps=18,
        learning_rate=1e-2,
        warmup_steps=4,
        eval_every=6,
        eval_blocks=5,
    ),
    execution=ExecutionConfig(micro_batch_blocks=3, log_every=1, checkpoint_every=4),
)

DRIVER = """
import os, signal, sys
from pretrain_assets.launch.contract import read_spec
from pretrain_assets.train.run import run
deed, at, rank, calls = sys.argv[2], int(sys.argv[3]), int(os.environ["RANK"]), 0

def should_stop():
    global calls
    calls += 1
    if calls == at and deed == "kill" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return calls == at and deed == "stop" and rank == 1

sys.exit(run(read_spec(sys.argv[1]), should_stop))
"""


def make_database(folder: Path) -> str:
    """250 random documents with a skewed distribution, so that there is something to learn: about 13 steps an epoch."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 30, 250)
    tokens = [(rng.zipf(1.5, n) % 299).tolist() for n in lengths]
    table = pa.table(
        {
            "id": pa.array(range(250), pa.int64()),
            "input_ids": pa.array(tokens, pa.list_(pa.int32())),
            "n_tokens": pa.array(lengths, pa.int32()),
        }
    )
    table = table.cast(identified(table.schema, "table"))
    lance.write_dataset(table, f"{folder}/corpus.lance", enable_stable_row_ids=True, data_storage_version="2.2")
    lance.write_dataset(table.slice(0, 50), f"{folder}/corpus.lance", mode="append")  # version 2
    return str(folder)


def spec_in(database: str, run_dir: str, **changes: Any) -> RunSpec:
    """The tiny run, with RunSpec fields or (dotted, `__` for `.`) recipe settings changed."""
    recipe_changes = {name.replace("__", "."): v for name, v in changes.items() if "__" in name}
    spec_changes = {name: v for name, v in changes.items() if "__" not in name}
    values = {
        "recipe": override(RECIPE, recipe_changes),
        "database_uri": database,
        "table_name": "corpus",
        "pin": "table@1",
        "tag": "tokenized-v1",
        "tokenizer": TOKENIZER,
        "run_dir": run_dir,
    }
    return RunSpec(**(values | spec_changes))


def passport_of(step: int, recipe: Recipe = RECIPE) -> dict[str, Any]:
    """A passport with every field that is read of one, for checkpoints that no run made."""
    return {
        **dict.fromkeys(("pin", "table_id", "tag", "filter", "held_out_filter", "code_version"), "table@1"),
        **dict.fromkeys(("version", "seed", "num_splits", "seq_len", "global_batch_tokens", "epoch", "tokens_seen"), 1),
        "identity": {},
        "tokenizer": to_dict(TOKENIZER),
        "step": step,
        "budget": {"total_steps": 9},
        "ledger": {},
        "recipe": to_dict(recipe),
    }


@contextmanager
def no_file_larger_than(num_bytes: int) -> Iterator[None]:
    """Writes past this size fail with an OSError, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def drive(spec: RunSpec, deed: str, at: int, tmp_path: Path) -> int:
    """Two ranks under torchrun, with a deed done after a step; returns torchrun's exit code."""
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    argv = [*torchrun_argv("", 2)[:-3], str(driver), write_spec(spec), deed, str(at)]
    return subprocess.run(argv, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode


def after(steps: int) -> Callable[[], bool]:
    """A `should_stop` that says yes after so many steps."""
    left = iter([False] * (steps - 1) + [True])
    return lambda: next(left)


def losses(run_dir: str) -> dict[str, list[tuple[int, float]]]:
    """Training and validation losses by step."""
    records = read_metrics(run_dir)
    return {key: [(r["step"], r[key]) for r in records if key in r] for key in ("loss", "val_loss")}


def assert_close(one: dict[str, list[tuple[int, float]]], two: dict[str, list[tuple[int, float]]]) -> None:
    for key in one:
        assert [step for step, _ in one[key]] == [step for step, _ in two[key]]
        assert [x for _, x in one[key]] == pytest.approx([x for _, x in two[key]], abs=1e-5)


def eventually(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """Wait for something to become true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return value
