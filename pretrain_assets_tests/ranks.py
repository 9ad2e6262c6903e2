"""What an engine learns from five steps of uneven blocks, in every way of execution, on this rank's share of them.

As a program (`torchrun -m pretrain_assets_tests.ranks FILE`) it writes what all ranks learn together: every
configuration in one process group, so that the processes start only once.

Invariant: the blocks of a step depend on nothing but its number; ranks take their splits as from the loader.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pretrain_assets.config import override
from pretrain_assets.train.distributed import World, join_world
from pretrain_assets.train.engine import Blocks, Engine
from pretrain_assets.train.parallel import whole
from pretrain_assets_tests.runs import PAD, RECIPE, SEQ, TOKENIZER, VOCAB

ONE = World(rank=0, size=1, local_size=1, device=torch.device("cpu"), control=None)
STEPS, CYCLES, SPLITS = 5, 2, 4
TOKENS_PER_SPLIT = (0, 2, 20, SEQ)
"""Tokens before the padding begins, in the blocks of each split: ranks hold very different numbers of targets."""
PLAIN: dict[str, Any] = {"model.n_layer": 2, "train.grad_clip": 0.5}
FSDP, MASKED = {"execution.parallel": "fsdp"}, {"model.document_mask": True}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, one block at a time": {"execution.micro_batch_blocks": 1},
    "ddp, document mask": MASKED,
    "ddp, chunked loss": {"execution.chunked_loss": True},
    "ddp, muon": {"train.optimizer": "muon"},
    "fsdp": FSDP,
    "fsdp, one block at a time": {**FSDP, "execution.micro_batch_blocks": 1},
    "fsdp, document mask": {**FSDP, **MASKED},
    "fsdp, chunked loss": {**FSDP, "execution.chunked_loss": True},
}
"""Changes of recipe settings, by the name of what they show."""


def engine_of(changes: Mapping[str, Any], world: World = ONE) -> Engine:
    """The engine of the tiny recipe with (dotted) settings changed."""
    return Engine(override(RECIPE, {**PLAIN, **changes}), TOKENIZER, world)


@contextmanager
def exact() -> Iterator[None]:
    """Inside, new tensors are float64."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def blocks_of(step: int, world: World = ONE) -> Blocks:
    """A rank's blocks of a step, cycle-major then split; documents of ten tokens."""
    ids = torch.randint(0, VOCAB, (CYCLES, SPLITS, SEQ), generator=torch.Generator().manual_seed(step))
    for split, tokens in enumerate(TOKENS_PER_SPLIT):
        ids[:, split, tokens:] = PAD
    place = torch.arange(SEQ).expand(CYCLES, SPLITS, SEQ)
    owned = SPLITS // world.size
    mine = slice(world.rank * owned, (world.rank + 1) * owned)
    return Blocks(*(tensor[:, mine].flatten(0, 1) for tensor in (ids, place // 10, place % 10)))


def learned(changes: Mapping[str, Any], world: World = ONE) -> dict[str, Tensor]:
    """Loss and gradient norm of every step, and the weights afterwards by name.

    In float64: AdamW divides by the gradient's size, so that where a gradient is 0 but for rounding, as those of the
    keys' biases, float32 would differ by as much as it learns.
    """
    with exact():
        engine = engine_of(changes, world)
        steps = [
            engine.train_step(blocks_of(step, world), step=step, total_steps=STEPS) for step in range(1, STEPS + 1)
        ]
    loss, norm = (torch.stack([values[kind] for values in steps]) for kind in (0, 1))
    weights = {name: whole(weight.detach()).clone() for name, weight in engine.model.named_parameters()}
    return {"loss": loss, "norm": norm, **weights}


def main(path: str) -> None:
    """Write what all configurations learn, as `configuration|name`."""
    from safetensors.torch import save_file

    with join_world() as world:
        found = {
            f"{configuration}|{name}": value
            for configuration, changes in CONFIGURATIONS.items()
            for name, value in learned(changes, world).items()
        }
        if world.is_main:
            save_file(found, path)


if __name__ == "__main__":
    main(sys.argv[1])
