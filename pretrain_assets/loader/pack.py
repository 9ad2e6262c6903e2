"""Packing: the documents of a window of cycles, read in one request and laid into blocks.

Invariant: the blocks equal those of LanceDB's `StreamingDataset(pack_sequences=...)` bit for bit: documents joined by
one EOS each, cut every `seq_len` tokens, padded only where a split has run out. No Python object per token or document.
A hole (`data.without`) is a document read and packed like any other whose tokens, EOS included, then become padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pretrain_assets.errors import TableError
from pretrain_assets.loader import kernels
from pretrain_assets.loader.buffers import BufferPool
from pretrain_assets.loader.plan import EpochPlan, Int64Array
from pretrain_assets.loader.read import take_rows
from pretrain_assets.loader.store import cache_folder

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

Int32Array = npt.NDArray[np.int32]
IntArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What is made of every window besides token ids, and in which type."""

    dtype: npt.DTypeLike = np.int64
    """int64, or int32 for half the memory."""
    doc_ids: bool = True
    """Document number within the block."""
    position_ids: bool = False
    """Place within the document's part of the block."""

    @property
    def itemsize(self) -> int:
        """Bytes per token of one array."""
        return np.dtype(self.dtype).itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token of all arrays."""
        return self.itemsize * (1 + self.doc_ids + self.position_ids)


@dataclass(frozen=True, kw_only=True)
class Documents:
    """The documents read for a window: those that begin in it, split after split."""

    first: Int64Array
    """Per split, place in the plan of the first one."""
    last: Int64Array
    """Per split, place after the last one."""
    values: Int32Array
    """Tokens of all of them, in the order they were read."""
    offsets: Int32Array
    """Where each begins in `values`, and where the last ends."""
    source: Int64Array
    """For each document in plan order, its number among those read."""
    num_bytes: int
    """Bytes of Arrow data."""

    @property
    def num_rows(self) -> int:
        """Documents read."""
        return len(self.source)


@dataclass(frozen=True, kw_only=True)
class Window:
    """Blocks of consecutive cycles of the owned splits; arrays of shape (cycles, splits, seq_len)."""

    input_ids: IntArray
    """Token ids."""
    doc_ids: IntArray
    """Number of document starts so far in the block, position 0 not counted; empty if not asked for."""
    position_ids: IntArray
    """Place within the document's part of the block; empty if not asked for."""
    num_rows: int
    """Documents read for it."""


@dataclass(frozen=True, kw_only=True)
class Packer:
    """Reads and packs the windows of some splits of one epoch: reads in any order and thread, packs in order."""

    dataset: lance.LanceDataset
    """The table at its pinned version."""
    column: str
    """Column of token ids, without EOS."""
    eos_id: int
    """Put after every document."""
    pad_id: int
    """Put where a split has run out of documents, and over holes."""
    plan: EpochPlan
    """Order of the epoch."""
    splits: range
    """Splits to pack."""

    def read(self, start: int, stop: int, *, resumed: bool, retried: Callable[[], None] = lambda: None) -> Documents:
        """The documents that begin in the cycles from `start` to `stop`.

        Args:
            start: First cycle.
            stop: Cycle after the last.
            resumed: No window was packed before: what began earlier and reaches into this one is needed as well.
            retried: Called before each further try after a failure that may pass.

        Raises:
            TableError: a row is gone, cannot be read, or has no tokens.
        """
        plan, length = self.plan, self.plan.seq_len
        owned = (self.splits.start, len(self.splits))
        first, last = kernels.documents_beginning_in(
            plan.ends, plan.offsets, *owned, start * length, stop * length, resumed
        )
        rows = plan.order[kernels.places(first, last)]
        storage_order = np.argsort(rows)  # fewer and longer reads
        source = np.empty(len(rows), np.int64)
        source[storage_order] = np.arange(len(rows))
        row_ids = plan.rows.row_ids[rows[storage_order]]
        table = take_rows(self.dataset, row_ids, [self.column], retried=retried)
        column = table[self.column]
        lists = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()  # which would copy a single one
        if lists.null_count or lists.values.null_count:
            row_id = row_ids[_first_with_null(lists)]
            raise TableError(f"Column {self.column} holds NULL (row id {row_id}). Run the tokenized stage again.")
        return Documents(
            first=first,
            last=last,
            values=lists.values.to_numpy(),
            offsets=lists.offsets.to_numpy(),
            source=source,
            num_bytes=table.nbytes,
        )

    def pack(
        self, documents: Documents, carry: Carry, pool: BufferPool, outputs: Outputs, start: int, stop: int
    ) -> tuple[Window, Carry]:
        """Blocks of the cycles from `start` to `stop`, and the tokens left for the next window.

        Raises:
            TableError: a document's tokens are not those that the plan counted.
        """
        plan, shape = self.plan, (stop - start, len(self.splits), self.plan.seq_len)
        wanted = (True, outputs.doc_ids, outputs.position_ids)
        arrays = [
            pool.take(*shape, dtype=outputs.dtype) if want else np.empty((0, 0, 0), outputs.dtype) for want in wanted
        ]
        left = self._left(documents.last, stop * plan.seq_len)
        following = Carry(tokens=np.empty(int(left.sum()), np.int32), ends=np.cumsum(left))
        wrong = kernels.pack(
            plan.ends,
            plan.offsets,
            self.splits.start,
            documents.first,
            documents.last,
            documents.values,
            documents.offsets,
            documents.source,
            carry.tokens,
            carry.ends,
            following.tokens,
            start * plan.seq_len,
            self.eos_id,
            self.pad_id,
            *arrays,
        )
        if wrong == -2:
            raise TableError(
                f"The plan of epoch {plan.epoch} contradicts itself: its copy in {cache_folder()} was damaged. Remove "
                "that folder and run this again."
            )
        if wrong >= 0:
            row = plan.order[kernels.places(documents.first, documents.last)[wrong]]
            raise TableError(
                f"Column {self.column} does not hold the {plan.rows.num_tokens[row]} tokens that were counted for "
                f"document {plan.rows.doc_ids[row]} (row id {plan.rows.row_ids[row]}). Run the tokenized stage again."
            )
        ids, doc_ids, position_ids = arrays
        if len(plan.holes):
            bounds = np.searchsorted(plan.holes, plan.offsets[self.splits.start : self.splits.stop + 1])
            kernels.mask(*plan.hole_spans, bounds, start * plan.seq_len, self.pad_id, ids)
        rows = documents.num_rows
        return Window(input_ids=ids, doc_ids=doc_ids, position_ids=position_ids, num_rows=rows), following

    def _left(self, last: Int64Array, high: int) -> Int64Array:
        """Per split, tokens beyond position `high` of the documents before place `last`."""
        before = np.maximum(last - 1, 0)
        reached = np.where(last > self.plan.offsets[self.splits.start : self.splits.stop], self.plan.ends[before], 0)
        return np.asarray(np.maximum(reached - high, 0))

    def no_carry(self) -> Carry:
        """What the first window has to go on from: nothing."""
        return Carry(tokens=np.empty(0, np.int32), ends=np.zeros(len(self.splits), np.int64))


def _first_with_null(lists: pa.ListArray) -> int:
    if lists.null_count:
        return int(np.argmax(lists.is_null()))
    value = int(np.argmax(lists.values.is_null()))
    return int(np.searchsorted(lists.offsets.to_numpy(), value, side="right")) - 1


@dataclass(frozen=True, kw_only=True)
class Carry:
    """Tokens of the last document of every split that the next window begins with."""

    tokens: Int32Array
    """Tokens, EOS included, split after split."""
    ends: Int64Array
    """Per split, where its tokens end."""
