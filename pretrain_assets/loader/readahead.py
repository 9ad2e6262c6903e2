"""The road of windows from storage to the consumer: several being read, one being packed, one ready, one in use.

Invariant: windows come out in order, whichever read ends first, and hold at most `read_ahead_bytes` of memory together
(one window at least). What fails in a thread is raised to the consumer.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from pretrain_assets.config import LoaderConfig
from pretrain_assets.loader.buffers import BufferPool
from pretrain_assets.loader.pack import Documents, Outputs, Packer, Window
from pretrain_assets.loader.read import is_object_store
from pretrain_assets.loader.stats import Counter

TOKEN_BYTES = 4
"""Bytes of a token as read."""
MOST_READS = 64
RAMP = 8
"""The first window is that much smaller than the others, so that the first block comes soon."""

THREADS = "block-"
"""How the names of its threads begin."""
CLOSING_SECONDS = 10.0
"""Time given to reads under way when a stream is closed; later ones end by themselves."""

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class ReadAhead:
    """Reads and packs the windows of some cycles of one epoch."""

    packer: Packer
    """What reads and packs."""
    outputs: Outputs
    """Arrays to make."""
    settings: LoaderConfig
    """Sizes."""
    count: Counter
    """Told what happens."""
    pinned: bool = False
    """Whether blocks lie in page-locked memory."""

    def windows(self, start: int, stop: int, cycles_per_batch: int) -> Generator[Window, None, None]:
        """Windows of whole batches from cycle `start` to `stop`; close it, or exhaust it, to end its threads."""
        ready: queue.Queue[Window | BaseException | None] = queue.Queue(maxsize=1)
        closed = threading.Event()

        def produce() -> None:
            try:
                for window in self._packed(start, stop, cycles_per_batch, ready, closed):
                    if not _put(ready, window, closed):
                        return
                _put(ready, None, closed)
            except BaseException as error:  # handed to the consumer, whatever it is
                _put(ready, error, closed)

        thread = threading.Thread(target=produce, name=f"{THREADS}packer", daemon=True)
        thread.start()
        try:
            while True:
                began = time.perf_counter()
                item = ready.get()
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                self.count.handed_out(item.num_rows, time.perf_counter() - began)
                yield item
        finally:
            closed.set()
            # The collector may close a forgotten stream in any thread, also in one that the packer is waiting for; and
            # an object store that hangs must not keep a cancelled run.
            if not threading.current_thread().name.startswith(THREADS):
                thread.join(CLOSING_SECONDS)

    def _packed(
        self,
        start: int,
        stop: int,
        cycles_per_batch: int,
        ready: queue.Queue[Window | BaseException | None],
        closed: threading.Event,
    ) -> Iterator[Window]:
        cycle_tokens = len(self.packer.splits) * self.packer.plan.seq_len
        cycles = self._cycles_per_window(cycle_tokens, cycles_per_batch)
        spans = _spans(start, stop, cycles, cycles_per_batch)
        pool = BufferPool(cycles * cycle_tokens * self.outputs.itemsize, pinned=self.pinned)
        most, depth = self._most_reads(cycles * cycle_tokens), self.settings.io_threads
        carry = self.packer.no_carry()
        pending: deque[tuple[Span, Future[Documents]]] = deque()
        with ThreadPoolExecutor(most, thread_name_prefix=f"{THREADS}reader") as readers:

            def submit() -> None:
                for span in islice(spans, max(0, depth - len(pending))):
                    pending.append((span, readers.submit(self._read, span, span[0] == start)))

            try:
                submit()
                while pending and not closed.is_set():
                    span, reading = pending.popleft()
                    if self._latency_rules and not reading.done() and ready.empty():
                        depth = min(most, 2 * depth)  # the consumer waits for storage: read more at once
                    began = time.perf_counter()
                    documents = reading.result()
                    read = time.perf_counter()
                    submit()
                    window, carry = self.packer.pack(documents, carry, pool, self.outputs, *span)
                    self.count.packed(documents.num_rows, time.perf_counter() - read, waited=read - began)
                    yield window
            finally:
                for _, reading in pending:
                    reading.cancel()

    def _read(self, span: Span, resumed: bool) -> Documents:
        began = time.perf_counter()
        documents = self.packer.read(*span, resumed=resumed, retried=self.count.retried)
        self.count.read(documents.num_rows, documents.num_bytes, time.perf_counter() - began)
        return documents

    def _cycles_per_window(self, cycle_tokens: int, cycles_per_batch: int) -> int:
        """Cycles of a full window: whole batches, three windows (read, packed, in use) within `read_ahead_bytes`."""
        per_token = TOKEN_BYTES + self.outputs.bytes_per_token
        tokens = min(self.settings.window_tokens, self.settings.read_ahead_bytes // (3 * per_token))
        return max(1, tokens // (cycle_tokens * cycles_per_batch)) * cycles_per_batch

    def _most_reads(self, window_tokens: int) -> int:
        """Windows that may be read at once: what `read_ahead_bytes` leaves beside those being packed, ready, in use."""
        if not self._latency_rules:
            return self.settings.io_threads
        left = self.settings.read_ahead_bytes - 2 * window_tokens * self.outputs.bytes_per_token
        return max(self.settings.io_threads, min(MOST_READS, left // (window_tokens * TOKEN_BYTES) - 1))

    @property
    def _latency_rules(self) -> bool:
        """Whether more reads at once are faster: on an object store each takes long and costs no processor."""
        return is_object_store(self.packer.dataset.uri)


def _spans(start: int, stop: int, cycles: int, cycles_per_batch: int) -> Iterator[Span]:
    """Windows of `cycles` cycles, the first ones smaller."""
    size = max(1, cycles // (RAMP * cycles_per_batch)) * cycles_per_batch
    while start < stop:
        yield start, min(stop, start + size)
        start += size
        size = min(cycles, 2 * size)


def _put(
    ready: queue.Queue[Window | BaseException | None], item: Window | BaseException | None, closed: threading.Event
) -> bool:
    """Put an item unless the consumer has gone."""
    while not closed.is_set():
        try:
            ready.put(item, timeout=0.05)
            return True
        except queue.Full:
            continue
    return False
