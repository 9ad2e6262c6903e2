"""Programs for `torchrun -m pretrain_assets_tests.elastic`: a run that notes what it trains on, and facts about saving.

Invariant: every rank writes only files of its own name.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pretrain_assets.config import RunSpec, override
from pretrain_assets.errors import CheckpointError
from pretrain_assets.launch.contract import read_spec, write_spec
from pretrain_assets.launch.local import torchrun_argv
from pretrain_assets.train import checkpoint
from pretrain_assets.train.distributed import World, join_world
from pretrain_assets.train.engine import Engine
from pretrain_assets.train.run import run
from pretrain_assets.train.saver import Saver
from pretrain_assets.train.state import capture, restore
from pretrain_assets_tests.ranks import blocks_of
from pretrain_assets_tests.runs import RECIPE, TOKENIZER, passport_of

SMALL: dict[str, Any] = {"model.n_embd": 6, "execution.keep_last": 9}
"""Too few rows for four equal parts: 2, 2, 2 and none of its weights, 5, 5, 5 and 3 of its fused queries."""
FSDP = {"execution.parallel": "fsdp"}


def on_ranks(num_ranks: int, *arguments: str) -> int:
    """Run this module under torchrun; returns its exit code."""
    argv = [*torchrun_argv("", num_ranks)[:-2], "pretrain_assets_tests.elastic", *arguments]
    return subprocess.run(argv, check=False, stdout=subprocess.DEVNULL).returncode


def run_until(spec: RunSpec, last: int, seen: Path) -> int:
    """Run in this process until a step, noting this rank's blocks of every step as files `<step>-<rank>.npy`."""
    train_step, now = Engine.train_step, 0

    def noting(self: Engine, blocks: Any, *, step: int, total_steps: int) -> Any:
        nonlocal now
        now = step
        np.save(seen / f"{step}-{self.world.rank}", blocks.input_ids.numpy())
        return train_step(self, blocks, step=step, total_steps=total_steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "train_step", noting)
        return run(spec, lambda: now == last)


def run_on(num_ranks: int, spec: RunSpec, last: int, seen: Path) -> int:
    """`run_until` on so many ranks."""
    seen.mkdir(exist_ok=True)
    if num_ranks == 1:
        return run_until(spec, last, seen)
    return on_ranks(num_ranks, "run", write_spec(spec), str(last), str(seen))


def blocks_seen(seen: Path) -> dict[int, list[bytes]]:
    """The blocks of every step over all ranks, in a canonical order."""
    found: dict[int, list[bytes]] = {}
    for path in seen.iterdir():
        found.setdefault(int(path.stem.split("-")[0]), []).extend(row.tobytes() for row in np.load(path))
    return {step: sorted(rows) for step, rows in found.items()}


class Ranks:
    """What the ranks of one process group save and load among themselves."""

    def __init__(self, run_dir: str, world: World):
        self.run_dir, self.world = run_dir, world
        self.execution = override(RECIPE, SMALL).execution
        self.saver = Saver(run_dir, world, self.execution)

    def engine(self, *, after: int = 0, **changes: Any) -> Engine:
        """An engine, loaded with the checkpoint of a step."""
        engine = Engine(override(RECIPE, {**SMALL, **changes}), TOKENIZER, self.world)
        if after:
            restore(Path(checkpoint.checkpoint_uri(self.run_dir, after)), engine)
        return engine

    def losses(self, engine: Engine, *steps: int) -> list[float]:
        """Train some steps."""
        return [float(engine.train_step(blocks_of(s, self.world), step=s, total_steps=9)[0]) for s in steps]

    def save(self, engine: Engine, step: int, saver: Saver | None = None) -> None:
        """Save and wait for it."""
        passport = passport_of(step, override(RECIPE, SMALL)) if self.world.is_main else None
        saver = saver or self.saver
        saver.save(step, capture(engine), passport)
        saver.wait()

    def facts(self, bucket: str) -> dict[str, Any]:
        """Losses of steps 4 and 5, and 6 and 7, undisturbed and loaded from steps 3 and 5; errors of failing saves.

        Step 7 is also saved in a bucket.
        """
        ddp = self.engine()
        self.losses(ddp, 1, 2, 3)
        self.save(ddp, 3)
        found: dict[str, Any] = {
            "ddp": self.losses(ddp, 4, 5),
            "ddp from ddp": self.losses(self.engine(after=3), 4, 5),
        }
        fsdp = self.engine(after=3, **FSDP)
        found["fsdp from ddp"] = self.losses(fsdp, 4, 5)
        with fsdp.evaluating():
            fsdp.loss(blocks_of(9, self.world))  # leaves the outermost weights together on every rank
        self.save(fsdp, 5)
        found |= {
            "fsdp": self.losses(fsdp, 6, 7),
            "fsdp from fsdp": self.losses(self.engine(after=5, **FSDP), 6, 7),
            "ddp from fsdp": self.losses(self.engine(after=5), 6, 7),
        }
        found["full"] = self.failure(lambda: self.save(fsdp, 7), full_on=1)
        elsewhere = Saver(self.run_dir + ("-elsewhere" if self.world.rank == 2 else ""), self.world, self.execution)
        found["elsewhere"] = self.failure(lambda: self.save(fsdp, 7, elsewhere))
        self.save(fsdp, 7)  # and after all that, saving works
        self.save(fsdp, 7, Saver(bucket, self.world, self.execution))
        with fsdp.evaluating():
            found["evaluated"] = float(self.world.sum(fsdp.loss(blocks_of(9, self.world))))
        return found

    def failure(self, save: Callable[[], None], full_on: int | None = None) -> str:
        """What a save reports, with the disk full on one rank."""

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "VISIBLE_SECONDS", 0)
            if self.world.rank == full_on:
                patch.setattr(checkpoint, "write_file", full)
            with pytest.raises(CheckpointError) as caught:
                save()
        return str(caught.value)


def main(program: str, *arguments: str) -> int:
    """One of the programs, on this rank."""
    if program == "run":
        return run_until(read_spec(arguments[0]), int(arguments[1]), Path(arguments[2]))
    torch.manual_seed(0)
    with join_world() as world:
        facts = Ranks(arguments[0], world).facts(arguments[1])
        Path(arguments[0], f"facts-{world.rank}.json").write_text(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
