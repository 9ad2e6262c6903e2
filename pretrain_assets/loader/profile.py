"""Measuring the loader alone, over a grid of its settings, on the table that a run would read.

Invariant: no measurement is helped by the one before: each reads a part of the epoch of its own, and begins and ends
when a window arrives, so that what is counted was read, packed and handed out within its time. Nothing is printed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import resource
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrain_assets.loader.readahead import RAMP
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.loader.stats import LoaderStats
from pretrain_assets.loader.stream import BlockLoader
from pretrain_assets.loader.variants import Variant

SECONDS = 5.0
"""Time of one measurement."""
RAMP_WINDOWS = int(math.log2(RAMP))
"""Windows before those of full size."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one way to read gave."""

    variant: Variant
    """How it was read."""
    batches: int
    """Batches handed out."""
    tokens: int
    """Tokens in them."""
    seconds: float
    """Time it took."""
    bytes_read: int
    """Bytes of Arrow data read."""
    disk_bytes: int | None
    """Bytes that came from a disk, not from memory that the system keeps of files; None where it does not say."""
    read_seconds: float
    """Time spent reading, added up over the threads that read."""
    pack_seconds: float
    """Time in which the packer packed."""
    pack_wait_seconds: float
    """Time in which the packer waited for a read."""
    wait_seconds: float
    """Time in which the consumer, which does nothing else, waited for blocks."""
    rows: Mapping[str, int]
    """Documents of the epoch by stage, at the end: unread, read, packed, consumed."""
    retries: int
    """Reads tried again."""
    restarts: int
    """Times that the epoch's end was reached, and reading went on at its beginning."""
    plan_seconds: float
    """Time before it to build or open the plan."""
    first_block_seconds: float
    """Time from asking for blocks to the first ones; the first measurement's may include compiling."""
    peak_memory_bytes: int
    """Peak of the process's memory; since its start where the system cannot forget an earlier one."""

    @property
    def tokens_per_second(self) -> float:
        """Rate of one rank alone."""
        return self.tokens / self.seconds

    @property
    def bytes_per_second(self) -> float:
        """Rate of reading."""
        return self.bytes_read / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        facts = asdict(self) | {name: getattr(self, name) for name in ("tokens_per_second", "bytes_per_second")}
        own = {"changes": dict(self.variant.changes), "changes_order": self.variant.changes_order}
        return {"name": self.variant.name, "loader": asdict(self.variant.recipe.loader), **own} | {
            name: value for name, value in facts.items() if name != "variant"
        }


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What a trainer of a given speed would have met."""

    tokens_per_second: float
    """Its speed when it never waits."""
    seconds: float
    """Time acted out."""
    wait_seconds: float
    """Time in which it waited for blocks."""


def profile(
    loader_of: Callable[[Variant], BlockLoader],
    variants: Sequence[Variant],
    *,
    seconds: float = SECONDS,
    batches: int | None = None,
    starting: Callable[[Variant], None] = lambda variant: None,
) -> list[Measurement]:
    """Measure every variant, each from a place of its own in the epoch on.

    Args:
        loader_of: Makes the loader of a variant.
        variants: Ways to read.
        seconds: Least time of each measurement.
        batches: Least number of the recipe's batches of each, instead of a time.
        starting: Called before each measurement.

    Raises:
        ConfigError: the epoch is too small for one batch.
    """
    import torch  # noqa: F401  # its import takes seconds, and is no part of the first block

    found = []
    for number, variant in enumerate(variants):
        starting(variant)
        found.append(_measure(loader_of(variant), variant, number / len(variants), seconds, batches))
    return found


def act_out(
    loader: BlockLoader, variant: Variant, tokens_per_second: float, *, seconds: float = SECONDS
) -> Pace | None:
    """Read as a trainer does that takes `tokens_per_second`; None when two of its steps take longer than `seconds`."""
    batch_seconds = variant.recipe.cycles_per_step * len(loader.splits) * loader.data.seq_len / tokens_per_second
    if 2 * batch_seconds > seconds:
        return None
    with contextlib.closing(_endless(loader, variant, 0)) as stream:
        next(stream)
        began = asked = time.perf_counter()
        waited = 0.0
        for _ in stream:
            got = time.perf_counter()
            waited += got - asked
            if got - began >= seconds:
                break
            time.sleep(max(0.0, got + batch_seconds - time.perf_counter()))
            asked = time.perf_counter()
    return Pace(tokens_per_second=tokens_per_second, seconds=got - began, wait_seconds=waited)


@dataclass(frozen=True, kw_only=True)
class _Mark:
    """A moment at which a window arrived."""

    at: float
    batches: int
    tokens: int
    restarts: int
    disk_bytes: int | None
    stats: LoaderStats


def _measure(loader: BlockLoader, variant: Variant, share: float, seconds: float, batches: int | None) -> Measurement:
    cycles = variant.recipe.cycles_per_step
    began = time.perf_counter()
    steps = Schedule(loader.plan, cycles).steps_in(0)
    planned = time.perf_counter()
    _forget_peak_memory()
    asked = time.perf_counter()
    with contextlib.closing(_marks(loader, variant, int(share * steps) * cycles)) as marks:
        begin = next(marks)
        first_block_seconds = begin.at - asked
        for window, mark in enumerate(marks, 2):
            if window == RAMP_WINDOWS + 1 and not mark.restarts:
                begin = mark
            elif (window > RAMP_WINDOWS or mark.restarts) and (
                mark.batches - begin.batches >= batches if batches else mark.at - begin.at >= seconds
            ):
                break
    return _between(begin, mark, variant, plan_seconds=planned - began, first_block_seconds=first_block_seconds)


def _marks(loader: BlockLoader, variant: Variant, start: int) -> Generator[_Mark, None, None]:
    tokens, window = 0, (-1, 0)
    with contextlib.closing(_endless(loader, variant, start)) as stream:
        for number, (restarts, count) in enumerate(stream):
            at, stats = time.perf_counter(), loader.stats()
            if (restarts, stats.rows_consumed) != window:
                window = (restarts, stats.rows_consumed)
                disk_bytes = _disk_bytes()
                yield _Mark(at=at, batches=number, tokens=tokens, restarts=restarts, disk_bytes=disk_bytes, stats=stats)
            tokens += count


def _endless(loader: BlockLoader, variant: Variant, start: int) -> Generator[tuple[int, int], None, None]:
    """(restarts so far, tokens) of every batch from a cycle on; after the end of the epoch from its beginning again."""
    for restarts in itertools.count():
        first = 0 if restarts else start
        stream = loader.batches(0, first, variant.recipe.cycles_per_step, dtype="int32", doc_ids=False)
        with contextlib.closing(stream) as batches:
            for batch in batches:
                yield restarts, batch.input_ids.numel()


def _between(begin: _Mark, end: _Mark, variant: Variant, **times: float) -> Measurement:
    def grown(name: str) -> Any:
        return getattr(end.stats, name) - getattr(begin.stats, name)

    return Measurement(
        variant=variant,
        batches=end.batches - begin.batches,
        tokens=end.tokens - begin.tokens,
        seconds=end.at - begin.at,
        bytes_read=grown("bytes_read"),
        disk_bytes=None if begin.disk_bytes is None or end.disk_bytes is None else end.disk_bytes - begin.disk_bytes,
        read_seconds=grown("read_seconds"),
        pack_seconds=grown("pack_seconds"),
        pack_wait_seconds=grown("pack_wait_seconds"),
        wait_seconds=grown("wait_seconds"),
        rows={stage: getattr(end.stats, f"rows_{stage}") for stage in ("unread", "read", "packed", "consumed")},
        retries=end.stats.retries,
        restarts=end.restarts,
        peak_memory_bytes=_peak_memory(),
        **times,
    )


def _disk_bytes() -> int | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("read_bytes: "):
                return int(line.split()[1])
    return None


def _forget_peak_memory() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_memory() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
