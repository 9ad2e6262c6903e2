"""The ranks of a run: who am I, which device is mine, and the few things that ranks must agree on.

Invariant: one rank needs no process group, and all code above this module is the same for one rank and for many.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


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
    control = None
    if size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        control = dist.new_group(backend="gloo") if device.type == "cuda" else None
    try:
        rank = int(environment.get("RANK", 0))
        yield World(rank=rank, size=size, local_size=local_size, device=device, control=control)
    finally:
        if size > 1:
            dist.destroy_process_group()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
