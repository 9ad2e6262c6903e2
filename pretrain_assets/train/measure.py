"""What a rank measures of itself: its wall time by part, and its memory.

Invariant: every second belongs to exactly one part, so the parts add up to the whole.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path

import torch

STATM = Path("/proc/self/statm")
"""Linux: sizes of this process in pages, the resident set second."""

PARTS = ("start", "training", "data_wait", "evaluation", "checkpoints", "finish")
"""Parts of a run's time. Waiting for data is no part of training here."""


class Clock:
    """Wall time since it was made, by part."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._last = time.perf_counter()

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return sum(self.seconds.values())

    @property
    def stepping(self) -> float:
        """Seconds in which steps were made or waited for."""
        return self.seconds["training"] + self.seconds["data_wait"]

    def lap(self, part: str) -> None:
        """The time since the last lap was spent on this part."""
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last = now


def memory_bytes(device: torch.device) -> int:
    """Peak of the memory that tensors took on a CUDA device; for other devices the process's resident set now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if STATM.exists():
        return int(STATM.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS counts bytes, and the peak
