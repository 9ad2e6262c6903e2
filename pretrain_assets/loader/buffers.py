"""Memory for blocks, used again and again: page faults of fresh memory cost as much as packing.

Invariant: a buffer is handed out again only when nothing refers to it any more, neither array nor tensor, in whatever
thread; so a batch stays valid for as long as somebody holds it.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain_assets.errors import ConfigError


class BufferPool:
    """Buffers of one size."""

    def __init__(self, num_bytes: int, *, pinned: bool = False):
        self._num_bytes, self._pinned = num_bytes, pinned
        self._free: list[npt.NDArray[np.uint8]] = []

    def take(self, *shape: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array of the given shape, its contents undefined.

        With pinned memory, hold the batch until a copy to the device that was started from it has ended.
        """
        kind = np.dtype(dtype)
        wanted = int(np.prod(shape)) * kind.itemsize
        assert wanted <= self._num_bytes, (shape, kind, self._num_bytes)
        memory = self._free.pop() if self._free else self._allocate()
        # arrays made from `lease` refer to it, not to `memory`: numpy looks through views of one type only
        lease = np.frombuffer(memoryview(memory), np.uint8)  # type: ignore[arg-type]
        weakref.finalize(lease, self._free.append, memory).atexit = False
        return lease[:wanted].view(kind).reshape(shape)

    def _allocate(self) -> npt.NDArray[np.uint8]:
        if not self._pinned:
            return np.empty(self._num_bytes, np.uint8)
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("pin_memory=True needs a CUDA device; leave it False here")
        return torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
