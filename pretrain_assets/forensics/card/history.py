"""A run's history for its card: losses, learning rate, evaluations, speed, and where it was stopped, from its metrics.

Invariant: nothing is smoothed or guessed. A long curve is thinned to its extremes, so that no spike is lost, and what a
record does not say is None.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pretrain_assets.forensics.card.lineage import public
from pretrain_assets.train.metrics import Record, data_wait

MAX_POINTS = 800
"""Points of a curve that are kept: more cannot be told apart on a page."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One training record."""

    step: int
    """Optimizer step, from 1."""
    loss: float
    """Training loss of that step, in nats per token."""
    learning_rate: float | None
    """Its learning rate."""


@dataclass(frozen=True, kw_only=True)
class Spike:
    """A step whose loss jumped; see `train.spikes`."""

    step: int
    """Optimizer step."""
    loss: float
    """Its loss."""
    expected: float
    """Median loss of the steps before it."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """One validation pass."""

    step: int
    """Optimizer step that it came after."""
    loss: float
    """Loss on the held-out rows, in nats per token."""
    bits_per_byte: float | None
    """The same per byte of text, whatever the tokenizer."""
    by_source: Mapping[str, float]
    """Loss by source of the held-out rows; empty where the record has none."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast a run was, and what it waited for."""

    tok_per_s: float | None
    """Tokens per second over all ranks, the median of its records."""
    data_wait: float | None
    """Share of the training time in which the main rank waited for data."""
    mfu: float | None
    """Share of the device's peak FLOP/s, the median of its records; None where the peak is not known."""
    memory_bytes: int | None
    """Most memory of a record."""
    seconds: float | None
    """Seconds from start to end of the last attempt; None unless its result is of this checkpoint's step."""
    seconds_by_part: Mapping[str, float]
    """The same by what they were spent on."""
    goodput_tok_per_s: float | None
    """Tokens of that attempt per second of all of it."""


@dataclass(frozen=True, kw_only=True)
class History:
    """The records of a run up to a checkpoint."""

    points: tuple[Point, ...]
    """Training records, thinned to `MAX_POINTS`."""
    num_points: int
    """How many there are."""
    evaluations: tuple[Evaluated, ...]
    """Validation passes, oldest first."""
    spikes: tuple[Spike, ...]
    """Losses that jumped."""
    ranks: tuple[tuple[int, int], ...]
    """Number of ranks from a step on: the first record's, then every change, which is a resume."""
    interruptions: tuple[int, ...]
    """Other steps at which the history shows that the run was stopped or resumed. One that ends in step with the
    records leaves no trace, so there may have been more."""
    epochs: tuple[int, ...]
    """First recorded step of the second epoch and of each after it."""
    speed: Speed
    """How fast it was."""


def history_of(
    records: Sequence[Record], result: Mapping[str, Any] | None, *, step: int, log_every: int, total_steps: int
) -> History:
    """What the records say.

    Args:
        records: Of `metrics.jsonl`, oldest first.
        result: The run's result, where there is one.
        step: Step of the checkpoint; later records are left out.
        log_every: Steps between records, by the recipe.
        total_steps: Steps of the whole run.
    """
    there = [record for record in records if record["step"] <= step]
    trained = [record for record in there if _finite(record.get("loss")) is not None]
    points = [
        Point(step=record["step"], loss=float(record["loss"]), learning_rate=_finite(record.get("lr")))
        for record in trained
    ]
    ranks = _changes(trained, "ranks")
    steps = [point.step for point in points]
    resumed = {at for at, _ in ranks}
    return History(
        points=tuple(_thinned(points)),
        num_points=len(points),
        evaluations=tuple(_evaluated(record) for record in there if _finite(record.get("val_loss")) is not None),
        spikes=tuple(
            Spike(step=spike["step"], loss=spike["loss"], expected=spike["expected"])
            for record in trained
            for spike in record.get("spikes", ())
            if all(_finite(spike.get(name)) is not None for name in ("step", "loss", "expected"))
        ),
        ranks=ranks,
        interruptions=tuple(at for at in _out_of_turn(steps, log_every, total_steps) if at not in resumed),
        epochs=tuple(at for at, _ in _changes(trained, "epoch")[1:]),
        speed=_speed(trained, result if result and result.get("step") == step else {}),
    )


def _evaluated(record: Record) -> Evaluated:
    by_source = record.get("val_loss_by_source") or {}
    return Evaluated(
        step=record["step"],
        loss=float(record["val_loss"]),
        bits_per_byte=_finite(record.get("val_bits_per_byte")),
        by_source={public(name): loss for name, loss in by_source.items() if _finite(loss) is not None},
    )


def _speed(trained: Sequence[Record], result: Mapping[str, Any]) -> Speed:
    def known(name: str) -> list[float]:
        return [value for record in trained if (value := _finite(record.get(name))) is not None]

    rates, shares, memory = known("tok_per_s"), known("mfu"), known("memory_bytes")
    return Speed(
        tok_per_s=statistics.median(rates) if rates else None,
        data_wait=data_wait(trained),
        mfu=statistics.median(shares) if shares else None,
        memory_bytes=int(max(memory)) if memory else None,
        seconds=_finite(result.get("seconds")),
        seconds_by_part=dict(result.get("seconds_by_part") or {}),
        goodput_tok_per_s=_finite(result.get("goodput_tok_per_s")),
    )


def _changes(records: Sequence[Record], name: str) -> tuple[tuple[int, int], ...]:
    """First step and value, then those of every change."""
    found: list[tuple[int, int]] = []
    for record in records:
        value = record.get(name)
        if isinstance(value, int) and (not found or found[-1][1] != value):
            found.append((record["step"], value))
    return tuple(found)


def _out_of_turn(steps: Sequence[int], log_every: int, total_steps: int) -> list[int]:
    """Steps recorded although they were not due, sooner after the record before than that was after its own.

    The trainer records a step out of turn when it is told to stop, and after the first step of every start. Two such
    records in a row are one stop and the start after it.
    """
    found: list[int] = []
    for place in range(1, len(steps)):
        step, gap = steps[place], steps[place] - steps[place - 1]
        before = steps[place - 1] - (steps[place - 2] if place > 1 else 0)
        if step % log_every and step != total_steps and gap < before and steps[place - 1] not in found:
            found.append(step)
    return found


def _thinned(points: Sequence[Point]) -> list[Point]:
    """The lowest and the highest loss of every stretch, and both ends."""
    if len(points) <= MAX_POINTS:
        return list(points)
    kept = {0, len(points) - 1}
    for number in range(MAX_POINTS // 2 - 1):
        start, stop = (len(points) * (number + more) // (MAX_POINTS // 2 - 1) for more in (0, 1))
        stretch = range(start, stop)
        kept |= {min(stretch, key=lambda i: points[i].loss), max(stretch, key=lambda i: points[i].loss)}
    return [points[place] for place in sorted(kept)]


def _finite(value: Any) -> float | None:
    """A number that can be drawn; None for everything else."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None
