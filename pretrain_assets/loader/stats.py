"""What the loader counts: where the rows of the epoch are, and how long each stage took.

Invariant: unread + read + packed + consumed rows are all rows that the rank still had before it when it began.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(kw_only=True)
class LoaderStats:
    """Rows of the current epoch by stage; seconds, bytes and tries over all epochs."""

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
    """Seconds in which the packer waited for a read."""
    wait_seconds: float = 0.0
    """Seconds in which the consumer waited for blocks."""
    retries: int = 0
    """Reads tried again after an error that may pass."""


class Counter:
    """Counts from several threads."""

    def __init__(self) -> None:
        self._stats, self._lock = LoaderStats(), threading.Lock()

    def snapshot(self) -> LoaderStats:
        """A copy of the counts."""
        with self._lock:
            return replace(self._stats)

    def begin(self, rows: int) -> None:
        """An epoch (or the rest of one) of so many rows begins."""
        with self._lock:
            self._stats = replace(self._stats, rows_unread=rows, rows_read=0, rows_packed=0, rows_consumed=0)

    def read(self, rows: int, num_bytes: int, seconds: float) -> None:
        """Rows were read."""
        self._add(rows_unread=-rows, rows_read=rows, bytes_read=num_bytes, read_seconds=seconds)

    def packed(self, rows: int, seconds: float, *, waited: float) -> None:
        """Rows were packed, after waiting for them."""
        self._add(rows_read=-rows, rows_packed=rows, pack_seconds=seconds, pack_wait_seconds=waited)

    def handed_out(self, rows: int, waited: float) -> None:
        """The consumer took blocks, after waiting for them."""
        self._add(rows_packed=-rows, rows_consumed=rows, wait_seconds=waited)

    def retried(self) -> None:
        """A read is tried again."""
        self._add(retries=1)

    def _add(self, **changes: float) -> None:
        with self._lock:
            for name, change in changes.items():
                setattr(self._stats, name, getattr(self._stats, name) + change)
