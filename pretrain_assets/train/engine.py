"""One rank's model and optimizer, and the optimizer step: needs PyTorch and a recipe, no table.

Invariant: the loss of a step is the mean over all valid target tokens of all ranks, whatever the number of ranks and
the micro-batch. Nothing here waits for the device.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain_assets.config import Recipe, TokenizerIdentity
from pretrain_assets.train.attention import document_mask
from pretrain_assets.train.device import describe, prepare
from pretrain_assets.train.distributed import World
from pretrain_assets.train.model import GPT, targets_of
from pretrain_assets.train.optim import learning_rate, make_optimizers, set_learning_rate
from pretrain_assets.train.parallel import gradients_sent, replicate, shard, whole

_log = logging.getLogger(__name__)


class Blocks(NamedTuple):
    """Blocks on the device of this rank; int64 tensors of shape (blocks, seq_len)."""

    input_ids: Tensor
    """Token ids."""
    doc_ids: Tensor | None = None
    """Document number within the block, for models with a document mask."""
    position_ids: Tensor | None = None
    """Place within the document's part of the block, for the same."""

    def split(self, size: int) -> Iterator[Blocks]:
        """Parts of at most `size` blocks, in order."""
        for start in range(0, len(self.input_ids), size):
            stop = start + size
            yield Blocks(
                self.input_ids[start:stop],
                None if self.doc_ids is None else self.doc_ids[start:stop],
                None if self.position_ids is None else self.position_ids[start:stop],
            )


class Engine:
    """The model of a recipe on one rank, and its optimizer."""

    def __init__(self, recipe: Recipe, tokenizer: TokenizerIdentity, world: World):
        """Draw the initial weights, place them on the device and prepare the step.

        Raises:
            ConfigError: FlashAttention 3 is asked for and not installed.
        """
        self.config, self.execution, self.world = recipe.train, recipe.execution, world
        prepare(self.execution, world.device)
        self.model = GPT(recipe.model, tokenizer, recipe.data.seq_len, chunked_loss=self.execution.chunked_loss)
        self.model.init_weights(self.config.init_seed)
        self.num_parameters = self.model.num_parameters
        shard(self.model, world, self.execution)
        self.model.to(world.device)
        self.optimizers = make_optimizers(self.model, self.config)
        self.network = replicate(self.model, world, self.execution)
        torch.manual_seed(self.config.init_seed)
        if world.is_main:
            _log.info("%s", describe(recipe.model, recipe.data.seq_len, world.device))

    def train_step(self, blocks: Blocks, *, step: int, total_steps: int) -> tuple[Tensor, Tensor]:
        """One optimizer step; returns the global batch's mean loss and the gradient norm, scalars on the device.

        Args:
            blocks: This rank's share of the step's blocks.
            step: Number of the step, from 1.
            total_steps: Steps of the whole run.
        """
        pad_id = self.model.pad_id
        count = self.world.sum((targets_of(blocks.input_ids, pad_id) != pad_id).sum()).clamp(min=1)
        scale = self.world.size / count  # DDP and FSDP2 take the mean over ranks
        total = torch.zeros((), device=self.world.device)
        micro_batch = self.execution.micro_batch_blocks
        parts = list(blocks.split(micro_batch))
        for index, part in enumerate(parts):
            with gradients_sent(self.network, index == len(parts) - 1):
                loss = self.loss(part)
                torch.autograd.backward(loss * scale)
            total += loss.detach()
        norm = whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip))
        set_learning_rate(self.optimizers, self.config, learning_rate(self.config, step, total_steps))
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return self.world.sum(total) / count, norm

    def is_sound(self) -> bool:
        """Whether the sum of the squares of all weights is finite; waits for the device. All ranks ask together."""
        weights = self.model.state_dict().values()  # which also shares out again what a forward pass put together
        return bool(torch.isfinite(whole(torch.nn.utils.get_total_norm(weights))))

    def loss(self, blocks: Blocks, *, per_token: bool = False) -> Tensor:
        """Summed cross entropy of blocks, or that of every target, (blocks, seq_len); in bfloat16 on CUDA."""
        mask = positions = None
        if self.model.config.document_mask:
            assert blocks.doc_ids is not None
            mask, positions = document_mask(blocks.doc_ids), blocks.position_ids
        with self.autocast():
            found: Tensor = self.network(blocks.input_ids, mask, positions, reduction="none" if per_token else "sum")
        return found

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, the model neither drops out nor keeps gradients."""
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train()

    def autocast(self) -> torch.autocast:
        """Compute in bfloat16 on CUDA; weights stay float32."""
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.world.device.type == "cuda")
