"""How well a model predicts held-out rows: the first blocks of them, or all, in one fixed order.

Invariant: no row of a run is both trained on and held out, and the numbers are those of the same tokens at every
evaluation, bit for bit the same on any number of ranks of equal hardware. Memory is bounded, however many rows are
held out: but for a few bytes per row, blocks beyond `KEPT_BYTES` are read again each time.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Generator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from pretrain_assets.config import DataConfig, LoaderConfig, RunSpec, TokenizerIdentity
from pretrain_assets.errors import FilterError
from pretrain_assets.loader.stream import DEFAULTS, Batch, BlockLoader
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.predicate import check_predicate
from pretrain_assets.table.storage import Location
from pretrain_assets.table.versions import open_pin
from pretrain_assets.train.distributed import World
from pretrain_assets.train.engine import Blocks, Engine
from pretrain_assets.train.feed import feed
from pretrain_assets.train.origins import read_origins
from pretrain_assets.train.scores import Evaluation, Tally

KEPT_BYTES = 64 << 20
"""Memory of a rank for blocks that are kept from one evaluation to the next."""
ASKED_EVERY = 4
"""Micro-batches from one question whether to stop to the next: seconds, of the minute that a stopped run has."""

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
    """The held-out blocks, and this rank's share of them.

    They are one stream, in one split, cut into micro-batches of consecutive blocks whose size depends on the number of
    blocks alone. Every rank takes the same number of micro-batches, since a forward pass may be one that all ranks make
    together: those beyond the last block, and what is missing in the last, are padding, which counts nothing.
    """

    def __init__(
        self,
        location: Location,
        pin: Pin,
        data: DataConfig,
        tokenizer: TokenizerIdentity,
        world: World,
        *,
        num_blocks: int | None,
        micro_batch_blocks: int,
        document_mask: bool = False,
        settings: LoaderConfig = DEFAULTS,
        setting: str = "data.held_out_filter",
        tokenizer_place: str | None = None,
    ):
        """Plan what to read; nothing is read before it is evaluated.

        Args:
            location: The table.
            pin: Version to read.
            data: The rows are those of its `held_out_filter`.
            tokenizer: Tokenizer of the token column.
            world: The ranks.
            num_blocks: Blocks to evaluate at most, from the first; None for all.
            micro_batch_blocks: Blocks per forward pass at most.
            document_mask: Whether the model needs to know the document of every token.
            settings: How blocks are read.
            setting: Name of the filter, for messages.
            tokenizer_place: Where the tokenizer is, if not where its name says; for bits per byte.

        Raises:
            FilterError: the filter cannot be used, or keeps no row.
        """
        self._world, self._tokenizer, self._masked = world, tokenizer, document_mask
        alone = replace(
            data, filter=data.held_out_filter, num_splits=1, seed=0, mixture=(), without=(), without_from=(0, 0)
        )
        self._loader = BlockLoader(location, pin, alone, tokenizer, settings=settings, setting=setting)
        self.plan = self._loader.plan(0)
        there = self.plan.blocks_per_epoch
        self.num_blocks = min(num_blocks or there, there)
        """Blocks of all ranks together."""
        if num_blocks and there < num_blocks and world.is_main:
            _log.info("evaluating on all %d blocks of the held-out rows (%d asked for)", there, num_blocks)
        micro_batches = math.ceil(self.num_blocks / micro_batch_blocks)
        self._micro_batch = math.ceil(self.num_blocks / micro_batches)
        self._rounds = math.ceil(micro_batches / world.size)
        per_rank = self._rounds * self._micro_batch
        self.share = range(self.num_blocks)[world.rank * per_rank : (world.rank + 1) * per_rank]
        """Numbers of this rank's blocks."""
        self._origins = read_origins(self._loader.planner.dataset, self.plan, self.num_blocks)
        self._token_bytes = _token_bytes(tokenizer, tokenizer_place, world)
        self._kept: list[Blocks] | None = None

    @classmethod
    def of_run(cls, location: Location, spec: RunSpec, world: World) -> HeldOut:
        """Those that a run is evaluated on while it trains."""
        recipe = spec.recipe
        return cls(
            location,
            Pin.parse(spec.pin),
            recipe.data,
            spec.tokenizer,
            world,
            num_blocks=recipe.train.eval_blocks,
            micro_batch_blocks=recipe.execution.micro_batch_blocks,
            document_mask=recipe.model.document_mask,
            settings=recipe.loader,
        )

    @property
    def doc_ids(self) -> npt.NDArray[np.int64]:
        """Ids of the documents that the blocks hold something of, in order."""
        count = int(self.plan.position(self.num_blocks).docs_consumed[0])
        return self.plan.rows.doc_ids[self.plan.order[:count]]

    def evaluate(
        self,
        engine: Engine,
        *,
        progress: Callable[[int], None] = lambda blocks: None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Evaluation | None:
        """Predict every token; all ranks call it together and get the same: None where it was broken off.

        Args:
            engine: Of the model, the same on all ranks.
            progress: Told of every number of blocks that this rank is done with.
            should_stop: Asked between micro-batches, on all ranks or none; when any says yes, all break off.

        Raises:
            FilterError: there is no token to predict.
        """
        device, size = self._world.device, self._micro_batch
        tally = Tally(max(1, len(self._origins.sources)), self._tokenizer.pad_id, self._token_bytes, device)
        with engine.evaluating(), contextlib.closing(self._micro_batches()) as micro_batches:
            for number, blocks in enumerate(feed(micro_batches, device)):
                if number and number % ASKED_EVERY == 0 and should_stop and self._world.any(should_stop()):
                    return None
                done = self.share[number * size : (number + 1) * size]
                losses = engine.loss(blocks, per_token=True)
                sources = torch.from_numpy(self._origins.of(done.start, size)).to(device)
                tally.add(blocks.input_ids, losses, sources)
                self._world.pulse.at("evaluating")
                progress(len(done))
        self._world.sum(tally.sums)
        found = tally.evaluation(self.num_blocks, self._origins.sources)
        if not found.tokens:
            raise FilterError(
                f"The {len(self.plan.rows):,} rows of {self._loader.data.filter!r} hold no token to predict: their "
                "texts are empty. Hold out other rows."
            )
        return found

    def _micro_batches(self) -> Generator[Blocks, None, None]:
        """This rank's, in host memory, all of one shape: read, or kept from the evaluation before."""
        if self._kept is not None:
            yield from self._kept
            return
        wanted = self._rounds * self._micro_batch * self.plan.seq_len * 4 * (3 if self._masked else 1)
        kept: list[Blocks] | None = [] if wanted <= KEPT_BYTES else None
        with contextlib.closing(self._read()) as batches:
            for _ in range(self._rounds):
                blocks = self._filled_up(next(batches, None))
                if kept is not None:
                    kept.append(blocks)
                yield blocks
        self._kept = kept

    def _read(self) -> Generator[Batch, None, None]:
        """This rank's micro-batches that hold blocks, the last one shorter if need be."""
        size = self._micro_batch
        whole = len(self.share) // size * size
        yield from self._stream(self.share[:whole], size)
        yield from self._stream(self.share[whole:], len(self.share) - whole)

    def _stream(self, blocks: range, blocks_per_batch: int) -> Generator[Batch, None, None]:
        if not blocks:
            return
        stream = self._loader.batches(
            0,
            blocks.start,
            blocks_per_batch,
            max_batches=len(blocks) // blocks_per_batch,
            dtype="int32",
            doc_ids=self._masked,
            position_ids=self._masked,
            pin_memory=self._world.device.type == "cuda",
        )
        with contextlib.closing(stream) as batches:
            yield from batches

    def _filled_up(self, batch: Batch | None) -> Blocks:
        """A micro-batch with as many blocks as all others, what is missing being padding."""
        tensors = (None, None, None) if batch is None else (batch.input_ids, batch.doc_ids, batch.position_ids)
        if tensors[0] is not None and len(tensors[0]) == self._micro_batch:
            return Blocks(tensors[0], *tensors[1:])
        shape = self._micro_batch, self.plan.seq_len
        ids = torch.full(shape, self._tokenizer.pad_id, dtype=torch.int32)
        others = [torch.zeros(shape, dtype=torch.int32) if self._masked else None for _ in range(2)]
        for whole, part in zip((ids, *others), tensors, strict=True):
            if whole is not None and part is not None:
                whole[: len(part)] = part
        return Blocks(ids, *others)


def _token_bytes(tokenizer: TokenizerIdentity, place: str | None, world: World) -> npt.NDArray[np.int64] | None:
    """UTF-8 bytes of every token id, or None where they are not known."""
    try:
        from pretrain_assets.tokenize.pretrained import tokenizer_of

        found = tokenizer_of(tokenizer, place).token_bytes()
        reason = "its tokens are not known as bytes"
    except (ImportError, ValueError, OSError) as error:
        found, reason = None, str(error)
    if found is None and world.is_main:
        _log.info("no bits per byte for tokenizer %s: %s", tokenizer.name, reason)
    return found
