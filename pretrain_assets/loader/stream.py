"""Streaming: the blocks of one rank, read ahead on a background thread.

Invariant: `batches(epoch, start_cycle)` yields what an undisturbed stream yields from that cycle on, whatever the
number of ranks was before. Its state is that one integer. Read-ahead is bounded: one window ready, one in the making.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from pretrain_assets.loader.pack import Packer, Window
from pretrain_assets.loader.plan import EpochPlan, KeptRows, check_world_size, kept_rows, plan_epoch
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location
from pretrain_assets.table.versions import open_pin

if TYPE_CHECKING:
    import torch

WINDOW_TOKENS = 1 << 20
"""Tokens read at once by a rank: 8 MB of blocks, about a thousand documents per take."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Blocks in order, cycle-major then split; int64 tensors of shape (blocks, seq_len)."""

    input_ids: torch.Tensor
    """Token ids."""
    doc_ids: torch.Tensor
    """Document number within the block; 0 also for one continued from the block before."""


@dataclass(kw_only=True)
class LoaderStats:
    """What the reading thread has done in the current epoch, and how long the trainer waited for it."""

    rows_unread: int = 0
    """Documents of the owned splits not yet read."""
    rows_queued: int = 0
    """Documents read whose blocks were not yet handed out."""
    rows_consumed: int = 0
    """Documents whose window was handed out."""
    bytes_loaded: int = 0
    """Bytes of Arrow data read, over all epochs."""
    fetch_seconds: float = 0.0
    """Seconds spent in reading and packing, over all epochs."""
    wait_seconds: float = 0.0
    """Seconds the consumer waited for the next window, over all epochs."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self, window: Window, seconds: float) -> None:
        """Count a window that was read."""
        with self._lock:
            self.rows_unread -= window.num_rows
            self.rows_queued += window.num_rows
            self.bytes_loaded += window.num_bytes
            self.fetch_seconds += seconds

    def handed_out(self, window: Window, seconds: float) -> None:
        """Count a window that the consumer took."""
        with self._lock:
            self.rows_queued -= window.num_rows
            self.rows_consumed += window.num_rows
            self.wait_seconds += seconds


class BlockLoader:
    """Streams the blocks of one rank's splits from a pinned table version."""

    def __init__(
        self,
        location: Location,
        pin: Pin,
        *,
        filter: str,
        num_splits: int,
        seed: int,
        seq_len: int,
        eos_id: int,
        pad_id: int,
        rank: int = 0,
        world_size: int = 1,
        column: str = "input_ids",
        setting: str = "data.filter",
    ):
        check_world_size(num_splits, world_size)
        owned = num_splits // world_size
        self.num_splits, self.seed, self.seq_len = num_splits, seed, seq_len
        self.splits = range(rank * owned, (rank + 1) * owned)
        self._filter, self._setting = filter, setting
        self._packer = Packer(dataset=open_pin(location, pin), column=column, eos_id=eos_id, pad_id=pad_id)
        self._stats = LoaderStats()
        self.plan = lru_cache(maxsize=2)(self._plan)

    @cached_property
    def rows(self) -> KeptRows:
        """The rows that the filter keeps, scanned once.

        Raises:
            FilterError: as `kept_rows`.
        """
        return kept_rows(self._packer.dataset, self._filter, setting=self._setting)

    def _plan(self, epoch: int) -> EpochPlan:
        return plan_epoch(self.rows, seed=self.seed, epoch=epoch, num_splits=self.num_splits, seq_len=self.seq_len)

    def stats(self) -> LoaderStats:
        """A snapshot of the counters."""
        return replace(self._stats)

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
        step = max(1, WINDOW_TOKENS // (len(self.splits) * self.seq_len * cycles_per_batch)) * cycles_per_batch
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
                    self._stats.read(window, time.perf_counter() - began)
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
                self._stats.handed_out(item, time.perf_counter() - began)
                yield item
        finally:
            closed.set()
            thread.join()

    def _begin_epoch(self, plan: EpochPlan, cycle: int) -> None:
        consumed = plan.position(cycle).docs_consumed[self.splits.start : self.splits.stop]
        rows = plan.offsets[self.splits.stop] - plan.offsets[self.splits.start]
        self._stats.rows_unread = int(rows - consumed.sum())
        self._stats.rows_queued = self._stats.rows_consumed = 0


def _put(ready: queue.Queue[Window | BaseException], item: Window | BaseException, closed: threading.Event) -> bool:
    """Put an item unless the consumer has gone."""
    while not closed.is_set():
        try:
            ready.put(item, timeout=0.05)
            return True
        except queue.Full:
            continue
    return False
