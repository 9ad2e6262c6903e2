"""What a replay and its original make of the documents left out: both models asked about the same blocks.

Invariant: the blocks are those of the original, token by token, and both checkpoints are of the same step.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pretrain_assets.config import DataConfig, RunSpec
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.loader.stream import BlockLoader
from pretrain_assets.plural import counted
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location
from pretrain_assets.train import checkpoint as checkpoints

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)
MAX_BLOCKS = 16
"""Blocks with holes that both models are asked about, spread evenly over all: a GPT-2 of 124 M takes some 2 s each."""


@dataclass(frozen=True, kw_only=True)
class BlocksLoss:
    """Losses of both models on blocks of the original in which documents were left out, in nats per token."""

    step: int
    """Step of both checkpoints."""
    num_blocks: int
    """Blocks asked about."""
    num_with_holes: int
    """Blocks up to that step that have tokens of documents left out."""
    tokens_left_out: int
    """Tokens predicted in them that are of documents left out."""
    left_out: tuple[float, float]
    """Loss on those: of the original, which trained on them, and of the replay, which did not."""
    tokens_others: int
    """The other tokens predicted in the same blocks."""
    others: tuple[float, float] | None
    """Loss on those, which both trained on; None where the blocks hold nothing else."""


def blocks_loss(spec: RunSpec, run_dir: str, schedule: Schedule, before: DataConfig) -> BlocksLoss | None:
    """Losses of both models on blocks with holes; None without a checkpoint of the same step after one.

    Args:
        spec: The replay.
        run_dir: Its folder.
        schedule: Its steps and plans.
        before: What the original was trained on.
    """
    assert spec.replay is not None
    step = _common_step(spec, run_dir)
    places = blocks_with_holes(schedule, step) if step else []
    if step is None or not places:
        return None
    chosen = [places[i] for i in np.unique(np.linspace(0, len(places) - 1, MAX_BLOCKS).astype(int))]
    _log.info("asking both models of step %d about %s", step, counted(len(chosen), "block"))
    blocks = [_block(spec, before, *place) for place in chosen]
    (had_out, had_rest), (has_out, has_rest) = (_losses(uri, step, blocks) for uri in (spec.replay.run_dir, run_dir))
    if not had_out.tokens:
        return None
    return BlocksLoss(
        step=step,
        num_blocks=len(blocks),
        num_with_holes=len(places),
        tokens_left_out=had_out.tokens,
        left_out=(had_out.mean, has_out.mean),
        tokens_others=had_rest.tokens,
        others=(had_rest.mean, has_rest.mean) if had_rest.tokens else None,
    )


def _common_step(spec: RunSpec, run_dir: str) -> int | None:
    """The newest step of which both runs have a whole checkpoint, after the replay's start."""
    assert spec.replay is not None
    original = spec.replay.run_dir
    for step in checkpoints.steps(run_dir):
        uris = (checkpoints.checkpoint_uri(run_dir, step), checkpoints.checkpoint_uri(original, step))
        if not any(checkpoints.find_fault(uri, digests=False) for uri in uris):
            return step
    return None


def location_of(spec: RunSpec) -> Location:
    """The table of a run."""
    return Location(database_uri=spec.database_uri, table_name=spec.table_name)


def blocks_with_holes(schedule: Schedule, last_step: int) -> list[tuple[int, int, int]]:
    """Epoch, cycle and split of every block of a run, up to a step, that has tokens in holes; in training order."""
    epoch, cycle = schedule.locate(last_step)
    found: list[tuple[int, int, int]] = []
    for e in range(epoch + 1):
        plan = schedule.plan(e)
        stop = cycle + schedule.cycles_per_step if e == epoch else schedule.steps_in(e) * schedule.cycles_per_step
        begins, ends = plan.hole_spans
        first, last = begins // plan.seq_len, np.minimum((ends - 1) // plan.seq_len, stop - 1)
        counts = np.maximum(last - first + 1, 0)
        cycles = np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        splits = np.repeat(plan.holes // (len(plan.order) // plan.num_splits), counts)
        pairs = np.unique(np.stack([cycles, splits], axis=1), axis=0)
        found += [(e, c, s) for c, s in pairs.tolist()]
    return found


@dataclass(frozen=True)
class _Block:
    """A block of the original, tensors of shape (1, seq_len)."""

    input_ids: torch.Tensor
    doc_ids: torch.Tensor
    position_ids: torch.Tensor
    is_hole: torch.Tensor


def _block(spec: RunSpec, before: DataConfig, epoch: int, cycle: int, split: int) -> _Block:
    """A block as the original has it, and which of its tokens are holes in the replay."""
    had, has = (_read(spec, data, epoch, cycle, split) for data in (before, spec.recipe.data))
    return _Block(*had, had[0] != has[0])


def _read(
    spec: RunSpec, data: DataConfig, epoch: int, cycle: int, split: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    loader = BlockLoader(
        location_of(spec),
        Pin.parse(spec.pin),
        data,
        spec.tokenizer,
        rank=split,
        world_size=data.num_splits,
        settings=spec.recipe.loader,
    )
    (batch,) = loader.batches(epoch, cycle, 1, max_batches=1, position_ids=True)
    assert batch.doc_ids is not None and batch.position_ids is not None
    return batch.input_ids, batch.doc_ids, batch.position_ids


@dataclass
class _Sum:
    """Losses added up."""

    loss: float = 0.0
    tokens: int = 0

    @property
    def mean(self) -> float:
        return self.loss / self.tokens


def _losses(run_dir: str, step: int, blocks: list[_Block]) -> tuple[_Sum, _Sum]:
    """Of the predicted tokens that are in holes, and of all others; one block at a time, for the memory of logits."""
    import torch

    from pretrain_assets.train.attention import document_mask
    from pretrain_assets.train.model import targets_of
    from pretrain_assets.train.state import load_model

    with checkpoints.open_checkpoint(run_dir, step) as folder:
        model = load_model(folder)
    in_holes, others = _Sum(), _Sum()
    with torch.inference_mode():
        for block in blocks:
            masked = model.config.document_mask
            extra = (document_mask(block.doc_ids), block.position_ids) if masked else (None, None)
            losses = model(block.input_ids, *extra, reduction="none")
            predicted = targets_of(block.input_ids, model.pad_id) != model.pad_id
            in_hole = torch.nn.functional.pad(block.is_hole[:, 1:], (0, 1))
            for found, which in ((in_holes, predicted & in_hole), (others, predicted & ~in_hole)):
                found.loss += float(losses[which].double().sum())
                found.tokens += int(which.sum())
    return in_holes, others
