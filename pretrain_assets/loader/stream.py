"""Streaming: the blocks of one rank, whole batches at a time, read ahead in the background.

Invariant: `batches(epoch, start_cycle)` yields what an undisturbed stream yields from that cycle on, whatever the
number of ranks was before, and whatever the settings of the reading are. Its state is that one integer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from pretrain_assets.config import DataConfig, LoaderConfig, TokenizerIdentity
from pretrain_assets.convert import require
from pretrain_assets.errors import ConfigError, TableError
from pretrain_assets.loader.allocator import keep_freed_memory
from pretrain_assets.loader.pack import IntArray, Outputs, Packer, Window
from pretrain_assets.loader.plan import EpochPlan
from pretrain_assets.loader.planner import Planner
from pretrain_assets.loader.prefetch import mirror
from pretrain_assets.loader.read import fastest
from pretrain_assets.loader.readahead import ReadAhead
from pretrain_assets.loader.stats import Counter, LoaderStats
from pretrain_assets.loader.store import cache_folder
from pretrain_assets.loader.varlen import cu_seqlens, most_segments
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location, is_remote

if TYPE_CHECKING:
    import lance
    import torch

DEFAULTS = LoaderConfig()


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Blocks in order, cycle-major then split; tensors of shape (blocks, seq_len), valid as long as they are held."""

    input_ids: torch.Tensor
    """Token ids."""
    doc_ids: torch.Tensor | None
    """Document number within the block; 0 also for one continued from the block before."""
    position_ids: torch.Tensor | None
    """Place within the document's part of the block, from 0."""
    cu_seqlens: torch.Tensor | None
    """For attention over documents of different lengths: where each document's part begins in the flattened batch, and
    the end; int32, one shape for the whole epoch, filled up with the end."""


class BlockLoader:
    """Streams the blocks of one rank's splits from a pinned table version."""

    def __init__(
        self,
        location: Location,
        pin: Pin,
        data: DataConfig,
        tokenizer: TokenizerIdentity,
        *,
        rank: int = 0,
        world_size: int = 1,
        settings: LoaderConfig = DEFAULTS,
        setting: str = "data.filter",
    ):
        check_world_size(data.num_splits, world_size, rank)
        owned = data.num_splits // world_size
        self.pin, self.data, self.tokenizer, self.settings = pin, data, tokenizer, settings
        self.splits = range(rank * owned, (rank + 1) * owned)
        self.planner = Planner(location, pin, data, setting=setting)
        self._count = Counter()
        self._segments = lru_cache(lambda epoch, *at: most_segments(self.plan(epoch), self.splits, *at))

    def plan(self, epoch: int) -> EpochPlan:
        """The plan of an epoch, made by the first rank that asks.

        Raises:
            FilterError: as `Planner.plan`.
        """
        return self.planner.plan(epoch)

    @cached_property
    def dataset(self) -> lance.LanceDataset:
        """The pinned version as it is read: from a local copy if asked for, by io_uring where possible."""
        dataset = self.planner.dataset
        check_token_column(dataset, self.data.token_column)
        if self.settings.prefetch and is_remote(dataset.uri):
            dataset = mirror(dataset, [self.data.token_column], cache_folder())
        return fastest(dataset)

    def stats(self) -> LoaderStats:
        """A snapshot of the counters."""
        return self._count.snapshot()

    def batches(
        self,
        epoch: int,
        start_cycle: int = 0,
        cycles_per_batch: int = 1,
        *,
        max_batches: int | None = None,
        dtype: Literal["int64", "int32"] = "int64",
        doc_ids: bool = True,
        position_ids: bool = False,
        cu_seqlens: bool = False,
        pin_memory: bool = False,
    ) -> Generator[Batch, None, None]:
        """Whole batches of an epoch from a cycle on; blocks that fill no whole batch at its end are left out.

        Nothing is read beyond `max_batches` batches (None: to the end of the epoch).
        Close the iterator (or exhaust it) to end its threads. An error of theirs is raised by it.

        Raises:
            ConfigError: an argument out of range.
        """
        require(epoch >= 0, "epoch", epoch, "epochs count from 0")
        require(cycles_per_batch >= 1, "cycles_per_batch", cycles_per_batch, "use at least 1")
        require(dtype in ("int64", "int32"), "dtype", dtype, "use int64 or int32")
        keep_freed_memory()
        plan = self.plan(epoch)
        last = plan.cycles_per_epoch
        require(0 <= start_cycle <= last, "start_cycle", start_cycle, f"epoch {epoch} has the cycles from 0 to {last}")
        num_batches = max(0, plan.cycles_per_epoch - start_cycle) // cycles_per_batch
        if max_batches is not None:
            num_batches = min(num_batches, max_batches)
        outputs = Outputs(dtype=np.dtype(dtype), doc_ids=doc_ids or cu_seqlens, position_ids=position_ids)
        packer = Packer(
            dataset=self.dataset,
            column=self.data.token_column,
            eos_id=self.tokenizer.eos_id,
            pad_id=self.tokenizer.pad_id,
            plan=plan,
            splits=self.splits,
        )
        segments = self._segments(epoch, cycles_per_batch, start_cycle % cycles_per_batch) if cu_seqlens else 0
        ahead = ReadAhead(packer=packer, outputs=outputs, settings=self.settings, count=self._count, pinned=pin_memory)
        stop = start_cycle + num_batches * cycles_per_batch

        def stream() -> Generator[Batch, None, None]:
            self._begin_epoch(plan, start_cycle)
            with contextlib.closing(ahead.windows(start_cycle, stop, cycles_per_batch)) as windows:
                for window in windows:
                    yield from _batches_of(window, cycles_per_batch, segments)

        return stream()

    def _begin_epoch(self, plan: EpochPlan, cycle: int) -> None:
        consumed = plan.position(cycle)
        owned = slice(self.splits.start, self.splits.stop)
        rows = int(plan.offsets[self.splits.stop] - plan.offsets[self.splits.start])
        again = int((consumed.tail_tokens[owned] > 0).sum())  # begun before, and read once more for its tail
        self._count.begin(rows - int(consumed.docs_consumed[owned].sum()) + again)


def _batches_of(window: Window, cycles_per_batch: int, segments: int) -> Generator[Batch, None, None]:
    import torch

    cycles, splits, seq_len = window.input_ids.shape
    starts = range(0, cycles, cycles_per_batch)

    def parts(array: IntArray) -> Sequence[torch.Tensor | None]:
        if not array.size:
            return [None] * len(starts)
        return torch.split(torch.from_numpy(array).view(-1, seq_len), cycles_per_batch * splits)

    arrays = (window.input_ids, window.doc_ids, window.position_ids)
    for start, ids, docs, positions in zip(starts, *map(parts, arrays), strict=True):
        assert ids is not None
        bounds = None
        if segments:
            bounds = torch.from_numpy(cu_seqlens(window.doc_ids[start : start + cycles_per_batch], segments))
        yield Batch(input_ids=ids, doc_ids=docs, position_ids=positions, cu_seqlens=bounds)


def check_token_column(dataset: lance.LanceDataset, column: str) -> None:
    """Refuse a column that does not hold lists of token ids, or whose ids could be beyond 32 bits.

    Raises:
        TableError: it is not there (null), or of another type.
    """
    import pyarrow as pa

    kind = dataset.schema.field(column).type if column in dataset.schema.names else pa.null()
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    wide = (pa.int64(), pa.uint64(), pa.uint32())
    if not lists or not pa.types.is_integer(kind.value_type) or kind.value_type in wide:
        raise TableError(
            f"{dataset.uri} version {dataset.version}: {column} is {kind}, and not list<int32>. Run the "
            "tokenized stage and train on its version."
        )


def check_world_size(num_splits: int, world_size: int, rank: int = 0) -> None:
    """Refuse a number of ranks that cannot share the splits equally, and a rank that is none of them.

    Raises:
        ConfigError: num_splits is not a multiple of world_size, or rank is out of range.
    """
    require(world_size >= 1, "world_size", world_size, "use at least 1")
    require(0 <= rank < world_size, "rank", rank, f"ranks count from 0 to world_size - 1 = {world_size - 1}")
    if num_splits % world_size:
        fitting = ", ".join(str(n) for n in range(1, num_splits + 1) if num_splits % n == 0)
        raise ConfigError(
            f"num_splits={num_splits} cannot be shared by {world_size} ranks equally; use one of {fitting} ranks"
        )
