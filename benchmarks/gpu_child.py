"""What the cases of `benchmarks.gpu` share: how they report, the models they make, and batches in pinned host memory.

Invariant: standard output holds one JSON pair [name, value] a line and nothing else; all else goes to standard error.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pretrain_assets import recipes
from pretrain_assets.config import Recipe, TokenizerIdentity, override
from pretrain_assets.launch.guard import die_with_parent
from pretrain_assets.train.distributed import World, join_world
from pretrain_assets.train.engine import Engine

Report = Callable[[str, Any], None]

GPT2 = TokenizerIdentity(name="gpt2", fingerprint="benchmark", vocab_size=50_257, eos_id=50_256, pad_id=50_257)
TINY = {"model.n_layer": 1, "model.n_head": 2, "model.n_embd": 32, "data.seq_len": 32}
"""What `--smoke` makes of every recipe."""


@dataclass(frozen=True)
class HostBatch:
    """One step's blocks in host memory; int32 tensors of shape (blocks, seq_len)."""

    input_ids: Tensor
    doc_ids: Tensor | None = None
    position_ids: Tensor | None = None


def main(case: Callable[..., None]) -> None:
    """Run a case with the arguments on the command line: `case(report, world, **arguments)`."""
    die_with_parent(signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO, format="   %(message)s")
    arguments = json.loads(sys.argv[1])
    if arguments.get("smoke"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]  # no C++ compiler needed

    def report(name: str, value: Any) -> None:
        print(json.dumps([name, value]), file=answers, flush=True)

    with join_world() as world:
        case(report, world, **arguments)


def recipe_of(name: str, changes: dict[str, Any], *, smoke: bool) -> Recipe:
    """A recipe, changed, and tiny for `--smoke`; its splits are one, for there is no table here."""
    tiny = TINY if smoke else {}
    seq_len = tiny.get("data.seq_len", 1024)
    whole = {"data.num_splits": 1, "train.global_batch_tokens": seq_len}
    return override(recipes.get(name), whole | tiny | changes)


def engine_of(recipe: Recipe, world: World, tokenizer: TokenizerIdentity = GPT2) -> Engine:
    """The engine that trains, after whatever an earlier one compiled is forgotten."""
    torch._dynamo.reset()
    return Engine(recipe, tokenizer, world)


def pinned(array: Tensor) -> Tensor:
    """In pinned memory where there is a GPU."""
    return array.pin_memory() if torch.cuda.is_available() else array


def synthetic(blocks: int, seq_len: int, vocab_size: int) -> Iterator[HostBatch]:
    """Random ids without end, eight batches in turn."""
    generator = torch.Generator().manual_seed(0)
    shape = (8, blocks, seq_len)
    ids = torch.randint(0, vocab_size, shape, dtype=torch.int32, generator=generator)
    batches = [HostBatch(pinned(part)) for part in ids]
    while True:
        yield from batches
