"""From batches in host memory to blocks on the device, one batch ahead of the step that needs it.

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

    On CUDA each batch is copied by one asynchronous copy per tensor on a stream of its own, while the step before it is
    computed; the host memory should be pinned. Closing it does not close `batches`.
    """
    if device.type != "cuda":
        for batch in batches:
            yield Blocks(*(None if tensor is None else tensor.to(torch.int64) for tensor in _tensors(batch)))  # type: ignore[arg-type]
        return
    copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ahead: tuple[list[Tensor | None], torch.cuda.Event, HostBatch] | None = None
    for batch in batches:
        with torch.cuda.stream(copying):
            moved = [t if t is None else t.to(device, non_blocking=True) for t in _tensors(batch)]
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(copying)
        if ahead is not None:
            yield _arrived(*ahead[:2], device)
            ahead[1].synchronize()  # long done: only now may its host memory go
        ahead = moved, done, batch
    if ahead is not None:
        yield _arrived(*ahead[:2], device)
        ahead[1].synchronize()


def _arrived(moved: list[Tensor | None], done: torch.cuda.Event, device: torch.device) -> Blocks:
    """Tensors whose copy the device's current stream waits for, widened to int64 on the device."""
    current = torch.cuda.current_stream(device)
    current.wait_event(done)
    widened: list[Any] = []
    for tensor in moved:
        if tensor is not None:
            tensor.record_stream(current)  # allocated on the copying stream, used and freed on this one
        widened.append(None if tensor is None else tensor.to(torch.int64))
    return Blocks(*widened)


def _tensors(batch: HostBatch) -> tuple[Tensor | None, ...]:
    return batch.input_ids, batch.doc_ids, batch.position_ids
