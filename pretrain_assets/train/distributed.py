"""The ranks of a run: who am I, which device is mine, and the few things that ranks must agree on.

Invariant: one rank needs no process group, and all code above this module is the same for one rank and for many.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain_assets.errors import ConfigError, WorkerError
from pretrain_assets.launch.contract import EXIT_FAILED
from pretrain_assets.train.pulse import Pulse

HANG_ENV = "PRETRAIN_HANG_SECONDS"
"""Environment variable: seconds without progress of a rank after which the run counts as hanging."""

DEFAULT_HANG_SECONDS = 600.0
"""As long as NCCL gives a collective: longer than any step, evaluation or save should take, shorter than a night."""


@dataclass(frozen=True, kw_only=True)
class World:
    """This process's place among the ranks."""

    rank: int
    """Number of this rank, from 0."""
    size: int
    """Number of ranks."""
    local_size: int
    """Number of ranks on this machine."""
    device: torch.device
    """Device of this rank."""
    control: dist.ProcessGroup | None
    """Group for small decisions on the host, so that they never wait for the device."""
    pulse: Pulse = field(default_factory=Pulse)
    """How far this rank is."""

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and reports."""
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """Sum of a tensor over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def any(self, flag: bool) -> bool:
        """Whether any rank says so; a point that all ranks pass together."""
        return self._reduce(int(flag), dist.ReduceOp.MAX) > 0

    def from_main(self, value: int) -> int:
        """The main rank's value of an integer."""
        return self._reduce(value if self.is_main else 0, dist.ReduceOp.SUM)

    def new_host_group(self) -> dist.ProcessGroup | None:
        """Another group of all ranks on the host, for a thread of its own; all ranks must ask for it together."""
        return dist.new_group(backend="gloo") if self.size > 1 else None

    def _reduce(self, value: int, operation: dist.ReduceOp.RedOpType) -> int:
        if self.size == 1:
            return value
        shared = torch.tensor(value)
        dist.all_reduce(shared, operation, group=self.control)
        return int(shared)


@contextmanager
def join_world(environment: Mapping[str, str] = os.environ) -> Iterator[World]:
    """Join the ranks that torchrun started; without torchrun, a world of one."""
    size, local_size = int(environment.get("WORLD_SIZE", 1)), int(environment.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(environment.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in environment:
        torch.set_num_threads(max(1, _num_cores() // local_size))
    rank = int(environment.get("RANK", 0))
    if size == 1:
        yield World(rank=rank, size=size, local_size=local_size, device=device, control=None)
        return
    control = _meet(rank, size, device)
    try:
        yield World(rank=rank, size=size, local_size=local_size, device=device, control=control)
    except SystemExit:  # a failure that was reported: nothing can be closed in good order any more
        end_process()
    dist.destroy_process_group()


def end_process() -> NoReturn:
    """End this process as failed and now: whatever waits for other ranks would wait for ever."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(EXIT_FAILED)


def hang_seconds(environment: Mapping[str, str] = os.environ) -> float:
    """Seconds without progress after which a run counts as hanging.

    Raises:
        ConfigError: the environment variable is not a positive number.
    """
    text = environment.get(HANG_ENV, "")
    try:
        seconds = float(text or DEFAULT_HANG_SECONDS)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e7:
        raise ConfigError(f"{HANG_ENV}={text!r} is not a positive number of seconds")
    return seconds


def _meet(rank: int, size: int, device: torch.device) -> dist.ProcessGroup | None:
    """Make the process group; its own timeout is only the backstop of `liveness`, which names the rank.

    Raises:
        WorkerError: not all ranks came.
    """
    timeout = timedelta(seconds=hang_seconds() + 60)
    with mortal():
        try:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
            return dist.new_group(backend="gloo", timeout=timeout) if device.type == "cuda" else None
        except dist.DistError as error:
            raise WorkerError(
                f"Rank {rank} waited {timeout.seconds} s for all {size} ranks to meet: {error}. See the log of the "
                f"ranks that did not come, and whether {os.environ.get('MASTER_ADDR')} can be reached from them."
            ) from error


@contextmanager
def mortal() -> Iterator[None]:
    """Inside, SIGTERM ends the process: it may wait in C++, where no Python handler runs, and has nothing to save."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
