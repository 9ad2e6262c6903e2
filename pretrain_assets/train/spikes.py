"""Losses that jump: found among the losses of all steps, which stay on the device until somebody looks.

Invariant: adding a step never waits for the device; a look costs one copy, whatever the number of steps.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

WINDOW, LEAST = 128, 32
"""Losses that a loss is compared with, at most and at least. 128 and the six deviations below are what OLMo-core's
SkipStepOptimizer uses (rolling_interval_length=128, sigma_factor=6)."""
DEVIATIONS = 6.0
"""Standard deviations above the median that make a spike: one normal loss in 10^9 lies there."""
LEAST_RISE = 0.01
"""Share of the median below which nothing is a spike: where losses hardly differ, their deviation means little."""
DEVIATION_PER_MAD = 1.4826
"""Standard deviation of normal values per median absolute deviation; the latter is not moved by the spikes."""


class Point(NamedTuple):
    """One step."""

    step: int
    loss: float
    norm: float

    @property
    def is_finite(self) -> bool:
        """Whether training can go on from it."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class Spike(NamedTuple):
    """A step whose loss jumped."""

    step: int
    loss: float
    expected: float


class Curve:
    """Loss and gradient norm of every step since the last look."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._values: list[Tensor] = []

    def add(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """Remember a step's loss and gradient norm, scalars on the device."""
        self._steps.append(step)
        self._values += [loss, norm]

    def look(self) -> list[Point]:
        """The steps since the last look; waits for the device."""
        if not self._steps:
            return []
        values = torch.stack([value.float() for value in self._values]).view(-1, 2).tolist()
        points = [Point(step, loss, norm) for step, (loss, norm) in zip(self._steps, values, strict=True)]
        self._steps, self._values = [], []
        return points


class SpikeDetector:
    """Compares each loss with those of the steps before it."""

    def __init__(self, warmup_steps: int):
        """Nothing counts before the end of the warm-up, in which the loss falls fast and may well jump."""
        self._warmup_steps, self._window = warmup_steps, deque[float](maxlen=WINDOW)
        self._inside = False

    def find(self, points: Sequence[Point]) -> list[Spike]:
        """The first step of every spike among these."""
        found = []
        for step, loss, _ in points:
            expected, limit = self._expected()
            above = loss > limit and step > self._warmup_steps
            if above and not self._inside:
                found.append(Spike(step, loss, expected))
            self._inside = above
            self._window.append(loss)
        return found

    def _expected(self) -> tuple[float, float]:
        """The median, and the loss above which a step is a spike."""
        if len(self._window) < LEAST:
            return math.nan, math.inf
        median = statistics.median(self._window)
        deviation = DEVIATION_PER_MAD * statistics.median(abs(loss - median) for loss in self._window)
        return median, median + max(DEVIATIONS * deviation, LEAST_RISE * abs(median))
