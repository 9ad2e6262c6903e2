"""Progress of long work: a bar on a terminal, one log line every few seconds elsewhere, with rate and time left."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType

_log = logging.getLogger("pretrain_assets.progress")


class Progress:
    """Counts units of work and shows rate and time left.

    On a terminal it draws a tqdm bar; elsewhere it logs one line every `interval_seconds` and one at the end.
    """

    def __init__(self, label: str, *, total: int | None = None, unit: str = "rows", interval_seconds: float = 5.0):
        self.label, self.total, self.unit, self.done, self.found = label, total, unit, 0, 0
        self._interval, self._bytes = interval_seconds, 0
        self._started = self._shown = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=label, unit=f" {unit}", unit_scale=True, leave=False)

    def update(self, count: int, num_bytes: int = 0) -> None:
        """Add `count` units and `num_bytes` bytes of finished work."""
        self.done += count
        self._bytes += num_bytes
        if self._bar is not None:
            if self._bytes:
                self._bar.set_postfix_str(f"{self._bytes / self._elapsed() / 1e6:.1f} MB/s", refresh=False)
            self._bar.update(count)
        elif time.monotonic() - self._shown >= self._interval:
            self._shown = time.monotonic()
            _log.info("%s", self.line())

    def _elapsed(self) -> float:
        return max(time.monotonic() - self._started, 1e-9)

    def skip(self, count: int) -> None:
        """Count units that an earlier run finished: done, and no part of the rate."""
        self.found += count
        self.update(count)

    def line(self) -> str:
        """One line: done, rate, megabytes per second, time left."""
        elapsed = self._elapsed()
        rate = (self.done - self.found) / elapsed
        parts = [f"{self.done:,}" + (f" of {self.total:,}" if self.total else "") + f" {self.unit}"]
        if self.found:
            parts.append(f"{self.found:,} of them finished earlier")
        if self.done > self.found:
            parts.append(f"{rate:,.0f} {self.unit}/s")
        if self._bytes:
            parts.append(f"{self._bytes / elapsed / 1e6:.1f} MB/s")
        if self.total and rate > 0 and self.done < self.total:
            parts.append(f"{(self.total - self.done) / rate:.0f} s left")
        return f"{self.label}: " + ", ".join(parts)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if kind is None and self.done:
            _log.info("%s", self.line())
