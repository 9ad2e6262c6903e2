"""How far a rank is: written by its training loop, read by the thread that watches it.

Invariant: setting it is an assignment; nothing waits.
"""

from __future__ import annotations

import time
from typing import NamedTuple

PLACES = {
    "starting": "the table's storage, and the log of that rank",
    "waiting for data": "the table's storage (`pretrain profile-loader`), and the memory of that machine",
    "training": "that machine (`dmesg`, `nvidia-smi`) and the network between ranks (NCCL_DEBUG=INFO)",
    "evaluating": "that machine (`dmesg`, `nvidia-smi`) and the network between ranks (NCCL_DEBUG=INFO)",
    "saving": "the storage of the run's directory: its space and speed",
    "finishing": "the storage of the run's directory: its space and speed",
}
"""Where a rank can be, in the order in which it gets there within a step, and what to look at when it stays there."""


class Beat(NamedTuple):
    """A pulse as it was at one moment."""

    step: int
    """Optimizer step that the rank works on, from 1; 0 before the first."""
    place: str
    """One of PLACES."""
    seconds: float
    """How long it has been there without getting on."""

    @property
    def order(self) -> tuple[int, int]:
        """Compares how far ranks are."""
        return self.step, list(PLACES).index(self.place)

    def describe(self) -> str:
        """One phrase for people."""
        at = f" at step {self.step}" if self.step else ""
        return f"{self.place}{at} for {self.seconds:.0f} s"


class Pulse:
    """Where this rank is."""

    def __init__(self) -> None:
        self._state = (0, "starting", time.monotonic())

    @property
    def step(self) -> int:
        """Optimizer step worked on."""
        return self._state[0]

    def at(self, place: str, step: int | None = None) -> None:
        """The rank has come to a place, or gets on in it."""
        self._state = (self._state[0] if step is None else step, place, time.monotonic())

    def now(self) -> Beat:
        """The pulse at this moment."""
        step, place, since = self._state
        return Beat(step, place, time.monotonic() - since)
