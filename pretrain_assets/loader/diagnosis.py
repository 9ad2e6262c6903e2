"""From measurements of the loader to words: which stage is the bottleneck, and which setting to change.

Invariant: a pure function of the numbers it is given. A setting is called better only when it is so by more than
measurements of the same setting differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pretrain_assets.loader.profile import Measurement, Pace
from pretrain_assets.loader.variants import GRID

NOISE = 0.1
"""Relative difference between two measurements that means nothing."""
MOST_WAIT = 0.02
"""Share of its time that a trainer may wait for data and still count as never waiting."""
MOSTLY = 0.5
"""Share of its time that a consumer waits at least, unless it takes batches more slowly than they are made."""
CACHED = 0.1
"""Share of the bytes from disk below which the system's memory was measured, not the disk."""

Pattern = Literal["storage", "packer", "ahead"]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the measurements say."""

    pattern: Pattern
    """`storage`: the packer waits for reads. `packer`: reads are there before they can be packed. `ahead`: the loader
    is faster than the trainer."""
    finding: str
    """The bottleneck, with the numbers that show it."""
    advice: tuple[str, ...]
    """What to change, the most promising first."""
    notes: tuple[str, ...]
    """What limits the worth of these numbers."""
    best: int
    """Place of the best measurement among those that keep the order."""
    changes: Mapping[str, int]
    """Settings to change for the best, by dotted name; empty where there is nothing to gain."""
    headroom: float | None
    """How many ranks like the trainer's the recipe's own settings could feed; None when its speed is not known."""


def diagnose(
    measurements: Sequence[Measurement], *, remote: bool, trainer: float | None = None, pace: Pace | None = None
) -> Diagnosis:
    """Say what the measurements mean.

    Args:
        measurements: Of the recipe's own settings first.
        remote: Whether the table is on an object store.
        trainer: Tokens/s that a rank of the trainer takes when it never waits, if known.
        pace: That trainer acted out on the recipe's own settings, if that was done.
    """
    own = measurements[0]
    best = _best(measurements)
    headroom = own.tokens_per_second / trainer if trainer else None
    waits = pace is not None and pace.wait_seconds > MOST_WAIT * pace.seconds
    if trainer and headroom and headroom > 1 + NOISE and not waits:
        pattern: Pattern = "ahead"
        finding, advice = _ahead(own, trainer, headroom, pace), ["Nothing to change."]
    elif not trainer and own.wait_seconds < MOSTLY * own.seconds:
        pattern, finding, advice = "ahead", _ahead_of_anybody(own), ["Nothing to change."]
    else:
        pattern = "storage" if own.pack_wait_seconds > own.pack_seconds else "packer"
        finding = " ".join((_bottleneck(own, pattern), _what_it_means(own, trainer, pace)))
        advice = [*_gains(measurements, best), *_ways(measurements, pattern, remote=remote)]
    return Diagnosis(
        pattern=pattern,
        finding=finding,
        advice=tuple(advice),
        notes=tuple(_notes(measurements, remote=remote)),
        best=best,
        changes={} if pattern == "ahead" else measurements[best].variant.changes,
        headroom=headroom,
    )


def _best(measurements: Sequence[Measurement]) -> int:
    """The fastest that keeps the order; the recipe's own settings unless another is clearly faster.

    An epoch so short that it was read again and again says nothing about settings for long ones.
    """
    if any(m.restarts for m in measurements):
        return 0
    rates = [0.0 if m.variant.changes_order else m.tokens_per_second for m in measurements]
    fastest = max(range(len(rates)), key=rates.__getitem__)
    return fastest if rates[fastest] > rates[0] * (1 + NOISE) else 0


def _bottleneck(own: Measurement, pattern: Pattern) -> str:
    settings = own.variant.recipe.loader
    packing, waiting = own.pack_seconds / own.seconds, own.pack_wait_seconds / own.seconds
    at = f"{own.bytes_per_second / 1e6:,.0f} MB/s with io_threads={settings.io_threads}"
    if pattern == "storage":
        return (
            f"Reading is the bottleneck: the packer waited for it {waiting:.0%} of the time and packed {packing:.0%} "
            f"({at}, window_tokens={settings.window_tokens})."
        )
    return (
        f"The packer is the bottleneck: it packed {packing:.0%} of the time and waited for reads {waiting:.0%}: they "
        f"were there before it ({at}, window_tokens={settings.window_tokens})."
    )


def _what_it_means(own: Measurement, trainer: float | None, pace: Pace | None) -> str:
    rate = own.tokens_per_second
    if trainer is None:
        return (
            f"A rank may take up to {rate:,.0f} tokens/s before it waits; say how fast yours is with "
            "--tokens-per-second to learn whether that is enough."
        )
    if rate < trainer:
        return f"The loader gives {rate:,.0f} tokens/s, a rank takes {trainer:,.0f}: it waits {1 - rate / trainer:.0%}."
    met = f", and waited {pace.wait_seconds / pace.seconds:.1%} of the time when acted out" if pace else ""
    return f"The loader gives {rate:,.0f} tokens/s, a rank takes {trainer:,.0f}{met}: too close."


def _ahead(own: Measurement, trainer: float, headroom: float, pace: Pace | None) -> str:
    met = (
        f"waited {pace.wait_seconds / pace.seconds:.1%} of the time"
        if pace
        else "would not wait (computed: its steps are too long to act out here)"
    )
    return (
        f"The loader is ahead: a rank that takes {trainer:,.0f} tokens/s {met}. The loader gives "
        f"{own.tokens_per_second:,.0f} tokens/s, {headroom:,.1f} times as much: it could feed {int(headroom):,} "
        f"rank{'s' if headroom >= 2 else ''} like this one."
    )


def _ahead_of_anybody(own: Measurement) -> str:
    return (
        f"The loader is ahead: a consumer that did nothing but take its {own.tokens // own.batches:,} tokens at a time "
        f"waited {own.wait_seconds / own.seconds:.0%} of the time, at {own.tokens_per_second:,.0f} tokens/s."
    )


def _gains(measurements: Sequence[Measurement], best: int) -> Iterator[str]:
    own, found = measurements[0], measurements[best]
    if best:
        ratio = found.tokens_per_second / own.tokens_per_second
        yield f"Set {found.variant.name}: {ratio:.1f} times the tokens/s of the recipe's own settings."
    elif len(measurements) > 1:
        yield f"No other setting of the grid was faster by more than {NOISE:.0%}."
    for name in GRID:
        tried = {getattr(m.variant.recipe.loader, name) for m in measurements if not m.variant.changes_order}
        value = getattr(found.variant.recipe.loader, name)
        if best and f"loader.{name}" in found.variant.changes and value == max(tried):
            yield f"{value} was the largest {name} tried; go on with --grid {name}={value},{2 * value},{4 * value}."


def _ways(measurements: Sequence[Measurement], pattern: Pattern, *, remote: bool) -> Iterator[str]:
    own, recipe = measurements[0], measurements[0].variant.recipe
    if pattern == "storage" and remote:
        if not recipe.loader.prefetch:
            yield "If the token column fits on a local disk: --set loader.prefetch=true copies it there first."
        yield (
            f"More reads in flight: raise loader.read_ahead_bytes (now {recipe.loader.read_ahead_bytes}), which bounds "
            "them on object stores."
        )
    if pattern == "packer":
        yield "Run more ranks on this node: each packs on a thread of its own."
        yield (
            "In a loop of your own, ask for dtype='int32' and doc_ids=False as the trainer and this profile do: the "
            "less is written, the faster it is packed."
        )
    others = [m for m in measurements if m.variant.changes_order]
    for other in others:
        ratio = other.tokens_per_second / own.tokens_per_second
        if ratio > 1 + NOISE:
            yield f"{other.variant.name} gave {ratio:.1f} times the tokens/s, but it changes the order: another run."
    if pattern == "storage" and not others:
        clump = recipe.data.shuffle_clump_size
        yield (
            f"Longer reads: data.shuffle_clump_size={4 * clump} or {16 * clump} (now {clump}) keeps neighbours "
            "together and changes the order; measure it with --order."
        )


def _notes(measurements: Sequence[Measurement], *, remote: bool) -> Iterator[str]:
    if any(m.restarts for m in measurements):
        again = sum(m.restarts for m in measurements)
        yield (
            f"The epoch is short: its end was reached {again:,} times, and the same rows were read again, from memory "
            "and with the start of each pass in the numbers."
        )
    read = sum(m.bytes_read for m in measurements if m.disk_bytes is not None)
    from_disk = sum(m.disk_bytes or 0 for m in measurements)
    if read and from_disk < CACHED * read and not remote:
        yield (
            f"Of {read / 1e6:,.0f} MB read, {from_disk / 1e6:,.0f} MB came from a disk and the rest from the system's "
            "memory; a table larger than memory reads slower."
        )
    retries = sum(m.retries for m in measurements)
    if retries:
        yield f"{retries:,} reads failed and were tried again; the log says why."
