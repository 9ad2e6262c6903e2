"""The two loops that `benchmarks.train_cpu` runs in processes of their own.

Invariant: both do the same arithmetic on blocks of the same shape; only what is around it differs.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks import loader_table
from pretrain_assets.config import ExecutionConfig, ModelConfig, Recipe, RunSpec, TrainConfig
from pretrain_assets.launch import local

ROWS, MEAN_TOKENS = 400, 900
"""Of the table: about what is trained on, so that no more is read than used."""
SEQ_LEN, BLOCKS = 256, 8
UNTIMED_STEPS = 2


def recipe(steps: int) -> Recipe:
    """A model whose step takes most of a second on two cores; one checkpoint on the way, and one at the end."""
    data = replace(loader_table.data(num_splits=BLOCKS), seq_len=SEQ_LEN, held_out_filter="is_dup")
    return Recipe(
        name="train_cpu",
        model=ModelConfig(n_layer=4, n_head=4, n_embd=128),
        data=data,
        train=TrainConfig(global_batch_tokens=BLOCKS * SEQ_LEN, max_steps=steps, eval_every=10**6, eval_blocks=4),
        execution=ExecutionConfig(
            micro_batch_blocks=4, log_every=max(1, steps // 5), checkpoint_every=max(2, steps - 4)
        ),
    )


def facts(steps: int) -> dict[str, Any]:
    """What is trained, for the report."""
    made = recipe(steps)
    return {
        "layers": made.model.n_layer,
        "width": made.model.n_embd,
        "vocabulary": loader_table.TOKENIZER.vocab_size,
        "tokens_per_step": made.train.global_batch_tokens,
        "micro_batch_blocks": made.execution.micro_batch_blocks,
        "log_every": made.execution.log_every,
        "checkpoint_every": made.execution.checkpoint_every,
        "steps": steps,
        "untimed_steps": UNTIMED_STEPS,
    }


def use_launchers_environment() -> None:
    """Give this process's children what `launch.local` gives the ranks of a run with one process."""
    for name, value in local._defaults(1).items():
        os.environ.setdefault(name, value)


def ours(database: str, run_dir: str, steps: int) -> Callable[[], Any]:
    """A whole run: table, loader, metrics, checkpoints."""
    from pretrain_assets.train.run import run

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    spec = RunSpec(
        recipe=recipe(steps),
        database_uri=database,
        table_name="corpus",
        pin=str(loader_table.PIN),
        tag="benchmark",
        tokenizer=loader_table.TOKENIZER,
        run_dir=run_dir,
    )

    def work() -> dict[str, float]:
        marks = _Marks()
        code = run(spec, marks.step_done)
        assert code == 0 and len(marks.wall) == steps, (code, len(marks.wall))
        return marks.answer()

    return work


def bare(steps: int) -> Callable[[], Any]:
    """The least that trains the same model: forward, backward, clip, AdamW."""
    import torch

    from pretrain_assets.train.model import GPT
    from pretrain_assets.train.optim import make_optimizers

    made, tokenizer = recipe(steps), loader_table.TOKENIZER
    generator = torch.Generator().manual_seed(0)
    batches = torch.randint(0, tokenizer.vocab_size, (steps, BLOCKS, SEQ_LEN), generator=generator)
    model = GPT(made.model, tokenizer, SEQ_LEN)
    model.init_weights(0)
    optimizers = make_optimizers(model, made.train)
    predicted = BLOCKS * (SEQ_LEN - 1)

    def work() -> dict[str, float]:
        marks = _Marks()
        for batch in batches:
            for part in batch.split(made.execution.micro_batch_blocks):
                (model(part) / predicted).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), made.train.grad_clip)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            marks.step_done()
        return marks.answer()

    return work


class _Marks:
    """When each step was done: on the wall, and in processor time."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def step_done(self) -> bool:
        """A step is done; never asks to stop."""
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())
        return False

    def answer(self) -> dict[str, float]:
        """Speed over the timed steps."""
        timed = len(self.wall) - UNTIMED_STEPS
        wall = self.wall[-1] - self.wall[UNTIMED_STEPS - 1]
        return {
            "tokens_per_second": timed * BLOCKS * SEQ_LEN / wall,
            "step_seconds": wall / timed,
            "cpu_seconds_per_step": (self.cpu[-1] - self.cpu[UNTIMED_STEPS - 1]) / timed,
        }
