"""The plan of an epoch: which row stands at which place of which split, and what that makes of blocks and tokens.

Invariant: a plan is a pure function of (pin, filter, seed, epoch, num_splits, seq_len). Its order is that of LanceDB's
`StreamingDataset`, and every number derived from it is exact. Nothing here reads a token, and nothing needs torch.

Memory is O(rows), on purpose: with `ends` in hand every question about an epoch (tokens per split, the position at any
block, where a document lands) is a binary search instead of a pass over the table. `KeptRows` holds 20 bytes per kept
row (row id 8, document id 8, token count 4) and a plan 24 (row id 8, document id 8, end 8): 440 MB for 10 M rows.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pretrain_assets.errors import ConfigError, FilterError
from pretrain_assets.table.predicate import check_predicate

if TYPE_CHECKING:
    import lance

EPOCH_SEED_STRIDE = 100_003
"""Seed of epoch e is `seed + 100003 * e`, the rule of LanceDB's StreamingDataset."""

SCAN_BATCH_ROWS = 262_144
"""Rows per scan batch: 20-80 times faster than the default of 1,024 (TABLE.md), and 5 MB."""

PERMUTATION_MEMORY_BYTES = 4 << 30
"""Limit given to LanceDB's permutation builder when the environment sets none; its own default fails at 3 M rows."""

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class KeptRows:
    """The rows that a filter keeps, in storage order: all that plans of any epoch need."""

    row_ids: UInt64Array
    """Stable row ids, shape (rows,)."""
    doc_ids: Int64Array
    """The `id` column, shape (rows,)."""
    num_tokens: npt.NDArray[np.int32]
    """Tokens per document without EOS, shape (rows,)."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where every split stands at the start of a cycle; arrays of shape (num_splits,)."""

    docs_consumed: Int64Array
    """Documents taken from the split so far, the one whose tail is still to be emitted included."""
    tail_tokens: Int64Array
    """Tokens (EOS included) of the last document taken that the next block begins with."""


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """The order of one epoch, split after split, and the block arithmetic that follows from it."""

    epoch: int
    """Epoch number, from 0."""
    seq_len: int
    """Tokens per block."""
    num_splits: int
    """Independent document streams."""
    row_ids: UInt64Array
    """Row ids in reading order, split-major, shape (planned rows,)."""
    doc_ids: Int64Array
    """Document ids in the same order."""
    ends: Int64Array
    """Position in its split's token stream just after each document and its EOS, in the same order."""
    offsets: Int64Array
    """Split s owns the entries from `offsets[s]` to `offsets[s + 1]`; shape (num_splits + 1,)."""
    rows_in: int
    """Rows that the filter keeps."""
    tokens_in: int
    """Tokens of all rows that the filter keeps, one EOS each included."""

    @cached_property
    def tokens_per_split(self) -> Int64Array:
        """Tokens of every split, EOS included, shape (num_splits,)."""
        return self.ends[self.offsets[1:] - 1]

    @cached_property
    def blocks_per_epoch(self) -> int:
        """Blocks of the whole epoch: as many as the planned tokens fill, rounded down to whole cycles, at least one."""
        blocks = int(self.tokens_per_split.sum()) // self.seq_len
        return max(self.num_splits, blocks - blocks % self.num_splits)

    @property
    def cycles_per_epoch(self) -> int:
        """Rounds over all splits, one block each."""
        return self.blocks_per_epoch // self.num_splits

    def ends_of(self, split: int) -> Int64Array:
        """`ends` of one split (a view)."""
        return self.ends[self.offsets[split] : self.offsets[split + 1]]

    def position(self, cycle: int) -> Position:
        """Where every split stands when `cycle` blocks of it have been emitted."""
        reached = cycle * self.seq_len
        consumed = np.array([_docs_to_fill(self.ends_of(split), reached) for split in range(self.num_splits)], np.int64)
        last = self.ends[np.maximum(self.offsets[:-1] + consumed - 1, 0)]
        return Position(docs_consumed=consumed, tail_tokens=np.where(consumed > 0, np.maximum(last - reached, 0), 0))

    def ledger(self, *, cycles_per_step: int = 1, cycles: int | None = None) -> dict[str, int]:
        """What became of every row and token that the filter keeps, after `cycles` cycles (default: the whole epoch).

        Closes three ways: `rows_in` is the sum of the other rows, `tokens_in` of trained, not reached and left out
        tokens, and blocks * seq_len is trained + padded.
        """
        usable = self.cycles_per_epoch - self.cycles_per_epoch % cycles_per_step
        done = usable if cycles is None else cycles
        per_split = self.tokens_per_split
        planned = int(per_split.sum())
        within = [int(np.minimum(per_split, n * self.seq_len).sum()) for n in (done, usable, self.cycles_per_epoch)]
        return {
            "rows_in": self.rows_in,
            "rows_planned": len(self.row_ids),
            "rows_left_out_beyond_splits": self.rows_in - len(self.row_ids),
            "tokens_in": self.tokens_in,
            "tokens_trained": within[0],
            "tokens_not_reached": within[1] - within[0],
            "tokens_left_out_partial_step": within[2] - within[1],
            "tokens_left_out_end_of_split": planned - within[2],
            "tokens_left_out_beyond_splits": self.tokens_in - planned,
            "tokens_padded": done * self.num_splits * self.seq_len - within[0],
            "blocks": done * self.num_splits,
        }


def kept_rows(dataset: lance.LanceDataset, filter: str, *, setting: str = "data.filter") -> KeptRows:
    """Scan row id, document id and token count of the rows that a filter keeps.

    Args:
        dataset: The table at its pinned version.
        filter: SQL predicate.
        setting: Name of the setting that the predicate comes from, for messages.

    Raises:
        FilterError: the predicate cannot be used, keeps no row, or keeps a row without a token count.
    """
    check_predicate(dataset, filter, setting=setting)
    columns = ["id", "n_tokens"]
    scanner = dataset.scanner(
        columns=columns, filter=filter, with_row_id=True, scan_in_order=True, batch_size=SCAN_BATCH_ROWS
    )
    table = scanner.to_table()
    if table.num_rows == 0:
        raise FilterError(f"{setting}={filter!r} keeps none of the {dataset.count_rows():,} rows; widen the filter")
    missing = table["n_tokens"].null_count
    if missing:
        row_id = table["_rowid"].filter(table["n_tokens"].is_null())[0].as_py()
        raise FilterError(
            f"{setting}={filter!r} keeps {missing:,} rows whose n_tokens is NULL, first row id {row_id}: they were "
            "never tokenized, or could not be (see input_ids_error). Run the tokenized stage (`pretrain tokenize`) and "
            "train on its version, or add `AND n_tokens IS NOT NULL` to the filter."
        )
    return KeptRows(
        row_ids=table["_rowid"].to_numpy(),
        doc_ids=table["id"].to_numpy(),
        num_tokens=table["n_tokens"].to_numpy(),
    )


def check_world_size(num_splits: int, world_size: int) -> None:
    """Refuse a number of ranks that cannot share the splits equally.

    Raises:
        ConfigError: num_splits is not a multiple of world_size.
    """
    if num_splits % world_size:
        fitting = ", ".join(str(n) for n in range(1, num_splits + 1) if num_splits % n == 0)
        raise ConfigError(
            f"num_splits={num_splits} cannot be shared by {world_size} ranks equally; use one of {fitting} ranks"
        )


def plan_epoch(rows: KeptRows, *, seed: int, epoch: int, num_splits: int, seq_len: int) -> EpochPlan:
    """Lay out one epoch.

    Raises:
        FilterError: fewer rows than splits.
    """
    num_rows = len(rows.row_ids)
    if num_rows < num_splits:
        raise FilterError(
            f"The filter keeps {num_rows} rows, fewer than num_splits={num_splits}: every split needs a row. "
            f"Widen the filter, or lower num_splits to {num_rows} or less."
        )
    order, offsets = _shuffle(num_rows, num_splits, seed + epoch * EPOCH_SEED_STRIDE)
    lengths = rows.num_tokens[order].astype(np.int64) + 1
    ends = np.cumsum(lengths)
    before = np.concatenate([[0], ends])[offsets[:-1]]
    return EpochPlan(
        epoch=epoch,
        seq_len=seq_len,
        num_splits=num_splits,
        row_ids=rows.row_ids[order],
        doc_ids=rows.doc_ids[order],
        ends=ends - np.repeat(before, np.diff(offsets)),
        offsets=offsets,
        rows_in=num_rows,
        tokens_in=int(rows.num_tokens.sum(dtype=np.int64)) + num_rows,
    )


def _shuffle(num_rows: int, num_splits: int, seed: int) -> tuple[Int64Array, Int64Array]:
    """LanceDB's own permutation of `num_rows` rows: positions in storage order, split-major, and the split offsets.

    The builder shuffles positions of the filtered scan, so a stand-in table of the same length gives the order of any
    table (a test holds the two together) and spares a second scan.
    """
    import lancedb
    import pyarrow as pa
    from lancedb.permutation import permutation_builder

    os.environ.setdefault("LANCEDB_PERM_BUILDER_MEMORY_LIMIT", str(PERMUTATION_MEMORY_BYTES))
    stand_in = lancedb.connect("memory://").create_table("rows", pa.table({"row": np.arange(num_rows, dtype=np.int64)}))
    permutation: Any = permutation_builder(stand_in).split_random(fixed=num_splits, seed=seed).execute().to_arrow()
    splits = permutation["split_id"].to_numpy()
    order = permutation["row_id"].to_numpy().astype(np.int64)
    by_split = np.argsort(splits, kind="stable")
    return order[by_split], np.searchsorted(splits[by_split], np.arange(num_splits + 1)).astype(np.int64)


def _docs_to_fill(ends: Int64Array, tokens: int) -> int:
    return min(len(ends), int(np.searchsorted(ends, tokens, side="left")) + 1) if tokens > 0 else 0
