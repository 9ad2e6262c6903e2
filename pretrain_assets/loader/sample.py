"""A few packed blocks as a file that needs nothing but numpy to read: for benchmarks on machines without a table.

Invariant: the blocks are the first of the epoch, as a run reads them; what they are of stands in the JSON beside them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pretrain_assets.config import to_dict
from pretrain_assets.convert import require
from pretrain_assets.errors import InputError

if TYPE_CHECKING:
    from pretrain_assets.loader.stream import BlockLoader


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Blocks of a file."""

    blocks: npt.NDArray[Any]
    """Token ids, memory-mapped; (blocks, seq_len), uint16 where they fit, else int32."""
    facts: dict[str, Any]
    """Where they come from: pin, filter, seed, plan, tokenizer."""


def write_sample(loader: BlockLoader, path: str | Path, num_blocks: int) -> Sample:
    """Write the first blocks of the first epoch to `path` (`.npy`), and what they are to a JSON file beside it.

    Raises:
        ConfigError: the path does not end in `.npy`, or no block was asked for.
        FilterError: as `BlockLoader.plan`.
    """
    target = Path(path)
    require(target.suffix == ".npy", "out", str(path), "use a file name that ends in .npy")
    require(num_blocks >= 1, "blocks", num_blocks, "use at least 1")
    plan, tokenizer = loader.plan(0), loader.tokenizer
    count = min(num_blocks, plan.blocks_per_epoch)
    cycles = -(-count // plan.num_splits)
    with closing(loader.batches(0, max_batches=cycles, dtype="int32", doc_ids=False)) as batches:
        blocks = np.concatenate([batch.input_ids.numpy() for batch in batches])[:count]
    kind = np.uint16 if max(tokenizer.vocab_size - 1, tokenizer.pad_id) < 1 << 16 else np.int32
    facts = {
        "pin": str(loader.pin),
        "data": to_dict(loader.data),
        "plan_digest": plan.digest,
        "tokenizer": to_dict(tokenizer),
        "epoch": 0,
        "blocks": count,
        "seq_len": plan.seq_len,
        "dtype": np.dtype(kind).name,
        "order": "cycle after cycle, a block of every split in each",
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    _replace(target, lambda temporary: np.save(temporary, blocks.astype(kind), allow_pickle=False))
    text = json.dumps(facts, indent=2) + "\n"
    _replace(_facts_of(target), lambda temporary: temporary.write_text(text))
    return read_sample(target)


def read_sample(path: str | Path) -> Sample:
    """Open a file of packed blocks.

    Raises:
        InputError: it is not there, or is none, or its JSON is missing.
    """
    target = Path(path)
    try:
        blocks = np.load(target, mmap_mode="r", allow_pickle=False)
        facts = json.loads(_facts_of(target).read_text())
        if blocks.shape != (facts["blocks"], facts["seq_len"]):
            raise ValueError(f"it has the shape {blocks.shape}, and {facts['blocks']} x {facts['seq_len']} is expected")
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{target} cannot be read as packed blocks: {error}. Make it: `pretrain pack-sample RECIPE --out {target}`"
        ) from error
    return Sample(blocks=blocks, facts=facts)


def _replace(target: Path, write: Callable[[Path], Any]) -> None:
    """Write a file whole or not at all."""
    temporary = target.with_name(f".{target.stem}.tmp{target.suffix}")
    try:
        write(temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _facts_of(target: Path) -> Path:
    """Where the facts of a file of blocks lie."""
    return target.with_name(f"{target.name}.json")
