"""From batches in host memory to blocks on the device, copied while the device still computes the step before.

Invariant: a batch's host memory is held until its copy has ended, so that pinned buffers can be used again then.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from pretrain_assets.train.engine import Blocks


class HostBatch(Protocol):
    """What a source of blocks hands out: `loader.stream.Batch`, or anything with these tensors of (blocks, seq_len)."""

    @property
    def input_ids(self) -> Tensor:
        """Token ids, int32 or int64."""

    @property
    def doc_ids(self) -> Tensor | None:
        """Document number within the block."""

    @property
    def position_ids(self) -> Tensor | None:
        """Place within the document's part of the block."""


def feed(batches: Iterable[HostBatch], device: torch.device) -> Generator[Blocks, None, None]:
    """The blocks of every batch on the device, widened to int64 there.

    On CUDA each batch is copied by one asynchronous copy per tensor on a stream of its own. The host asks for a batch
    as soon as it has launched the step before, so the copy takes place while that step is computed; the host memory
    should be pinned. Closing it does not close `batches`.
    """
    if device.type != "cuda":
        for batch in batches:
            yield _widened(_tensors(batch))
        return
    copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    for batch in batches:
        with torch.cuda.stream(copying):
            moved = [tensor if tensor is None else tensor.to(device, non_blocking=True) for tensor in _tensors(batch)]
            done = copying.record_event()
        current = torch.cuda.current_stream(device)
        current.wait_event(done)
        for tensor in moved:
            if tensor is not None:
                tensor.record_stream(current)  # allocated on the copying stream, used and freed on this one
        yield _widened(moved)
        done.synchronize()  # over long ago: only now may the host memory go


def _widened(tensors: Iterable[Tensor | None]) -> Blocks:
    widened: list[Any] = [None if tensor is None else tensor.to(torch.int64) for tensor in tensors]
    return Blocks(*widened)


def _tensors(batch: HostBatch) -> tuple[Tensor | None, ...]:
    return batch.input_ids, batch.doc_ids, batch.position_ids
