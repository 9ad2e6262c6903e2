"""Held-out loss: the first blocks of the held-out rows in one fixed order, the same on any number of ranks.

Invariant: no row is both trained on and held out, and the loss is that of the same tokens at every evaluation.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace

import torch
from torch import Tensor

from pretrain_assets.config import RunSpec
from pretrain_assets.errors import FilterError
from pretrain_assets.loader.stream import BlockLoader
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.predicate import check_predicate
from pretrain_assets.table.storage import Location
from pretrain_assets.table.versions import open_pin
from pretrain_assets.train.distributed import World
from pretrain_assets.train.engine import Blocks, Engine
from pretrain_assets.train.model import targets_of

_log = logging.getLogger(__name__)


def check_disjoint(location: Location, spec: RunSpec) -> None:
    """Refuse filters that share rows.

    Raises:
        FilterError: some rows match both, or a filter cannot be used.
    """
    dataset, data = open_pin(location, Pin.parse(spec.pin)), spec.recipe.data
    check_predicate(dataset, data.filter, setting="data.filter")
    check_predicate(dataset, data.held_out_filter, setting="data.held_out_filter")
    shared = dataset.count_rows(f"({data.filter}) AND ({data.held_out_filter})")
    if shared:
        raise FilterError(
            f"{shared:,} rows match both data.filter={data.filter!r} and data.held_out_filter="
            f"{data.held_out_filter!r}: the validation loss would be measured on trained rows. Add `AND NOT (...)` to "
            "one of them."
        )


class HeldOut:
    """The held-out blocks, read once: one split, so that any number of rows and ranks will do."""

    def __init__(self, location: Location, spec: RunSpec, world: World):
        data, self._world = spec.recipe.data, world
        self._micro_batch_blocks, self._pad_id = spec.recipe.execution.micro_batch_blocks, spec.tokenizer.pad_id
        loader = BlockLoader(
            location,
            Pin.parse(spec.pin),
            replace(data, filter=data.held_out_filter, num_splits=1, seed=0, mixture=()),
            spec.tokenizer,
            settings=spec.recipe.loader,
            setting="data.held_out_filter",
        )
        wanted = spec.recipe.train.eval_blocks
        there = loader.plan(0).blocks_per_epoch
        count = min(wanted or there, there)
        if wanted and count < wanted and world.is_main:
            _log.info("evaluating on all %d blocks of the held-out rows (eval_blocks=%d)", count, wanted)
        stream = loader.batches(0, cycles_per_batch=count, max_batches=1, dtype="int32", doc_ids=False)
        with contextlib.closing(stream) as batches:
            self.blocks = next(batches).input_ids.to(torch.int64)

    @property
    def num_tokens(self) -> int:
        """Tokens that the loss is the mean of."""
        return int((targets_of(self.blocks, self._pad_id) != self._pad_id).sum())

    def loss(self, engine: Engine) -> float:
        """Mean cross entropy over all held-out tokens, the same on all ranks."""
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        with engine.evaluating():
            for part in torch.split(self._mine(), self._micro_batch_blocks):
                total += engine.loss(Blocks(part.to(self._world.device))).double()
        return float(self._world.sum(total)) / max(1, self.num_tokens)

    def _mine(self) -> Tensor:
        return self.blocks[self._world.rank :: self._world.size]
