"""Packing: the documents of a window of cycles, read in one take and laid into blocks.

Invariant: the blocks equal those of LanceDB's `StreamingDataset(pack_sequences=...)` bit for bit: documents joined by
one EOS each, cut every `seq_len` tokens, padded only where a split has run out. No Python object per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pretrain_assets.errors import TableError
from pretrain_assets.loader.plan import EpochPlan, UInt64Array

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Window:
    """Blocks of consecutive cycles of the owned splits; arrays of shape (cycles, splits, seq_len), int32."""

    input_ids: Int32Array
    """Token ids."""
    doc_ids: Int32Array
    """Number of document starts so far in the block, position 0 not counted."""
    num_rows: int
    """Documents that begin in it."""
    num_bytes: int
    """Bytes of Arrow data read for it."""


@dataclass(frozen=True, kw_only=True)
class Packer:
    """Lays documents of one table column into blocks."""

    dataset: lance.LanceDataset
    """The table at its pinned version."""
    column: str
    """Column of token ids, without EOS."""
    eos_id: int
    """Put after every document."""
    pad_id: int
    """Put where a split has run out of documents."""

    def window(self, plan: EpochPlan, splits: range, start: int, stop: int) -> Window:
        """Blocks of the cycles from `start` to `stop` of some splits.

        Raises:
            TableError: a row is gone, or its tokens are not those that the plan counted.
        """
        low, high = start * plan.seq_len, stop * plan.seq_len
        entries = [_entries(plan, split, low, high) for split in splits]
        tokens, num_bytes = self._read(plan, np.concatenate(entries))
        shape = (stop - start, len(splits), plan.seq_len)
        input_ids = np.full(shape, self.pad_id, np.int32)
        doc_ids = np.zeros(shape, np.int32)
        taken = num_rows = 0
        for place, (split, chosen) in enumerate(zip(splits, entries, strict=True)):
            begins = _begins(plan, split, chosen)
            size = int(plan.ends[chosen[-1]] - begins[0]) if len(chosen) else 0
            skip = max(0, low - int(begins[0])) if len(chosen) else 0
            stream = tokens[taken + skip : taken + min(size, skip + high - low)]
            _fill(input_ids[:, place], stream)
            starts = begins[(begins > low) & (begins % plan.seq_len != 0)] - low
            doc_ids[starts // plan.seq_len, place, starts % plan.seq_len] = 1
            taken += size
            num_rows += int((begins >= low).sum())
        np.cumsum(doc_ids, axis=2, out=doc_ids)
        return Window(input_ids=input_ids, doc_ids=doc_ids, num_rows=num_rows, num_bytes=num_bytes)

    def _read(self, plan: EpochPlan, entries: npt.NDArray[np.int64]) -> tuple[Int32Array, int]:
        """Tokens of the documents at some places of the plan, in that order, an EOS after each; and bytes read."""
        if not len(entries):
            return np.empty(0, np.int32), 0
        row_ids = plan.row_ids[entries]
        order = np.argsort(row_ids)  # sorted row ids make fewer and longer reads
        column = take_rows(self.dataset, row_ids[order], self.column)
        num_bytes = column.nbytes
        lists = column.take(np.argsort(order))
        values = lists.flatten()
        ends = np.cumsum(lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64) + 1)
        first = entries == plan.offsets[np.searchsorted(plan.offsets, entries, side="right") - 1]
        planned = plan.ends[entries] - np.where(first, 0, plan.ends[entries - 1])
        wrong = np.flatnonzero(np.diff(ends, prepend=0) != planned)
        if len(wrong) or lists.null_count or values.null_count:
            place = int(wrong[0]) if len(wrong) else 0
            raise TableError(
                f"Column {self.column} does not hold the tokens that n_tokens counts, or holds NULL (first at document "
                f"{plan.doc_ids[entries[place]]}, row id {row_ids[place]}). Run the tokenized stage again."
            )
        tokens = np.full(ends[-1], self.eos_id, np.int32)
        is_token = np.ones(len(tokens), bool)
        is_token[ends - 1] = False
        tokens[is_token] = values.to_numpy(zero_copy_only=False)
        return tokens, num_bytes


def take_rows(dataset: lance.LanceDataset, row_ids: UInt64Array, column: str) -> pa.Array:
    """One column of the rows with the given row ids, in the order given, as one Arrow array.

    Raises:
        TableError: a row is no longer there; the take itself drops missing rows silently.
    """
    table = dataset._take_rows(row_ids, columns=[column])  # the only take by stable row id that pylance 14 offers
    if table.num_rows != len(row_ids):
        raise TableError(
            f"{dataset.uri} at version {dataset.version} lacks {len(row_ids) - table.num_rows} of {len(row_ids)} "
            "planned rows: the table was not written with stable row ids. Ingest it again into a new database_uri."
        )
    return table[column].combine_chunks()


def _entries(plan: EpochPlan, split: int, low: int, high: int) -> npt.NDArray[np.int64]:
    """Places in the plan of the documents of a split that overlap its token positions from `low` to `high`."""
    ends = plan.ends_of(split)
    first = np.searchsorted(ends, low, side="right")
    last = min(len(ends), int(np.searchsorted(ends, high, side="left")) + 1)
    return np.arange(plan.offsets[split] + first, plan.offsets[split] + max(first, last))


def _begins(plan: EpochPlan, split: int, entries: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Position in the split's token stream at which each document begins."""
    return np.where(entries == plan.offsets[split], 0, plan.ends[entries - 1])


def _fill(blocks: Int32Array, stream: Int32Array) -> None:
    """Copy a token stream into blocks of shape (cycles, seq_len), from the first on."""
    whole, rest = divmod(len(stream), blocks.shape[1])
    blocks[:whole] = stream[: len(stream) - rest].reshape(whole, blocks.shape[1])
    if rest:
        blocks[whole, :rest] = stream[len(stream) - rest :]
