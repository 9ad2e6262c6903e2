"""Several files read at the same time, handed on strictly in order.

Invariant: at most `in_flight` streams are open, each holds at most one finished item besides the one it works on, and
items come out in the order of the streams, so the result does not depend on timing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from queue import Full, Queue
from typing import Generic, TypeVar

T = TypeVar("T")
_POLL_SECONDS = 0.1


class Pump(Generic[T]):
    """One stream, read by its own thread. Iterate it once; an error of the stream is raised where it stood."""

    def __init__(self, stream: Callable[[], Iterable[T]], stop: threading.Event):
        self._stream, self._stop = stream, stop
        self._queue: Queue[tuple[T] | BaseException | None] = Queue(maxsize=1)
        self.thread = threading.Thread(target=self._run, name="ingest-reader", daemon=True)
        self.thread.start()

    def __iter__(self) -> Iterator[T]:
        while (item := self._queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item[0]

    def _run(self) -> None:
        try:
            for value in self._stream():
                if not self._put((value,)):
                    return
            self._put(None)
        except BaseException as error:  # handed to the consumer, who raises it
            self._put(error)

    def _put(self, item: tuple[T] | BaseException | None) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=_POLL_SECONDS)
                return True
            except Full:
                continue
        return False


def read_ahead(streams: Iterable[Callable[[], Iterable[T]]], in_flight: int) -> Generator[Pump[T], None, None]:
    """One pump per stream, in order, with up to `in_flight` of them running. Closing the iterator stops them all."""
    stop, waiting = threading.Event(), deque[Pump[T]]()
    threads: list[threading.Thread] = []
    try:
        for stream in streams:
            waiting.append(Pump(stream, stop))
            threads = [*(thread for thread in threads if thread.is_alive()), waiting[-1].thread]
            if len(waiting) == in_flight:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
