"""Streaming: the blocks of one rank, read ahead on a background thread.

Invariant: `batches(epoch, start_cycle)` yields what an undisturbed stream yields from that cycle on, whatever the
number of ranks was before. Its state is that one integer. Read-ahead is bounded: one window ready, one in the making.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from pretrain_assets.config import DataConfig, LoaderConfig, TokenizerIdentity
from pretrain_assets.loader.pack import Packer, Window
from pretrain_assets.loader.plan import EpochPlan, KeptRows, check_world_size, kept_rows, plan_epoch
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location
from pretrain_assets.table.versions import open_pin

if TYPE_CHECKING:
    import torch

DEFAULTS = LoaderConfig()


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Blocks in order, cycle-major then split; int64 tensors of shape (blocks, seq_len)."""

    input_ids: torch.Tensor
    """Token ids."""
    doc_ids: torch.Tensor
    """Document number within the block; 0 also for one continued from the block before."""


@dataclass(kw_only=True)
class LoaderStats:
    """Where the rows of the current epoch are, and how long each stage took; seconds and bytes over all epochs."""

    rows_unread: int = 0
    """Documents of the owned splits not yet read."""
    rows_read: int = 0
    """Documents read and not yet packed."""
    rows_packed: int = 0
    """Documents packed whose blocks were not yet handed out."""
    rows_consumed: int = 0
    """Documents whose window was handed out."""
    bytes_read: int = 0
    """Bytes of Arrow data read."""
    read_seconds: float = 0.0
    """Seconds spent reading, added up over the threads that read."""
    pack_seconds: float = 0.0
    """Seconds spent packing."""
    pack_wait_seconds: float = 0.0
    """Seconds in which the packer had nothing to pack."""
    wait_seconds: float = 0.0
    """Seconds in which the consumer waited for blocks."""
    retries: int = 0
    """Reads tried again after an error that may pass."""


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
        check_world_size(data.num_splits, world_size)
        owned = data.num_splits // world_size
        self.data, self.settings = data, settings
        self.splits = range(rank * owned, (rank + 1) * owned)
        self._setting = setting
        self._packer = Packer(
            dataset=open_pin(location, pin),
            column=data.token_column,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
        )
        self._stats, self._lock = LoaderStats(), threading.Lock()
        self.plan = lru_cache(maxsize=2)(self._plan)

    @cached_property
    def rows(self) -> KeptRows:
        """The rows that the filter keeps, scanned once.

        Raises:
            FilterError: as `kept_rows`.
        """
        return kept_rows(self._packer.dataset, self.data.filter, setting=self._setting)

    def _plan(self, epoch: int) -> EpochPlan:
        data = self.data
        return plan_epoch(self.rows, seed=data.seed, epoch=epoch, num_splits=data.num_splits, seq_len=data.seq_len)

    def stats(self) -> LoaderStats:
        """A snapshot of the counters."""
        with self._lock:
            return replace(self._stats)

    def _count(self, **changes: float) -> None:
        with self._lock:
            for name, change in changes.items():
                setattr(self._stats, name, getattr(self._stats, name) + change)

    def batches(
        self, epoch: int, start_cycle: int = 0, cycles_per_batch: int = 1, *, max_batches: int | None = None
    ) -> Generator[Batch, None, None]:
        """Whole batches of an epoch from a cycle on; blocks that fill no whole batch at its end are left out.

        Nothing is read beyond `max_batches` batches (None: to the end of the epoch).
        Close the iterator (or exhaust it) to end its thread. An error of the reading thread is raised here.
        """
        import torch

        plan = self.plan(epoch)
        num_batches = max(0, plan.cycles_per_epoch - start_cycle) // cycles_per_batch
        if max_batches is not None:
            num_batches = min(num_batches, max_batches)
        stop = start_cycle + num_batches * cycles_per_batch
        batch_tokens = len(self.splits) * plan.seq_len * cycles_per_batch
        step = max(1, self.settings.window_tokens // batch_tokens) * cycles_per_batch
        for window in self._read_ahead(plan, range(start_cycle, stop, step), stop):
            ids, docs = torch.from_numpy(window.input_ids), torch.from_numpy(window.doc_ids)
            for first in range(0, len(ids), cycles_per_batch):
                chosen = slice(first, first + cycles_per_batch)
                yield Batch(
                    input_ids=ids[chosen].flatten(0, 1).to(torch.int64),
                    doc_ids=docs[chosen].flatten(0, 1).to(torch.int64),
                )

    def _read_ahead(self, plan: EpochPlan, starts: range, stop: int) -> Iterator[Window]:
        ready: queue.Queue[Window | BaseException] = queue.Queue(maxsize=1)
        closed = threading.Event()
        self._begin_epoch(plan, starts.start)

        def read() -> None:
            try:
                for start in starts:
                    began = time.perf_counter()
                    window = self._packer.window(plan, self.splits, start, min(stop, start + starts.step))
                    self._count(
                        rows_unread=-window.num_rows,
                        rows_packed=window.num_rows,
                        bytes_read=window.num_bytes,
                        read_seconds=time.perf_counter() - began,
                    )
                    if not _put(ready, window, closed):
                        return
            except BaseException as error:  # handed to the consumer, whatever it is
                _put(ready, error, closed)

        thread = threading.Thread(target=read, name="block-reader", daemon=True)
        thread.start()
        try:
            for _ in starts:
                began = time.perf_counter()
                item = ready.get()
                if isinstance(item, BaseException):
                    raise item
                rows, seconds = item.num_rows, time.perf_counter() - began
                self._count(rows_packed=-rows, rows_consumed=rows, wait_seconds=seconds)
                yield item
        finally:
            closed.set()
            thread.join()

    def _begin_epoch(self, plan: EpochPlan, cycle: int) -> None:
        consumed = plan.position(cycle).docs_consumed[self.splits.start : self.splits.stop]
        rows = plan.offsets[self.splits.stop] - plan.offsets[self.splits.start]
        self._stats.rows_unread = int(rows - consumed.sum())
        self._stats.rows_read = self._stats.rows_packed = self._stats.rows_consumed = 0


def _put(ready: queue.Queue[Window | BaseException], item: Window | BaseException, closed: threading.Event) -> bool:
    """Put an item unless the consumer has gone."""
    while not closed.is_set():
        try:
            ready.put(item, timeout=0.05)
            return True
        except queue.Full:
            continue
    return False
