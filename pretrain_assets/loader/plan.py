"""The plan of an epoch: which row stands at which place of which split, and what that makes of blocks and tokens.

Invariant: a plan is a pure function of (pin, filter, mixture, seed, epoch, num_splits, clump size), and every number
derived from it is exact. Nothing here reads a token or a table, and nothing needs torch.

Memory is O(rows), on purpose: with `ends` in hand every question about an epoch (tokens per split, the position at any
block, where a document lands) is a binary search instead of a pass over the table. The arrays are memory-mapped files
shared by all ranks of a node: 20 bytes per kept row (row id 8, document id 8, token count 4), once for all epochs, and
12 per planned row and epoch (place in table order 4, end 8), so 560 MB for 17.5 M rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain_assets.config import MixtureComponent
from pretrain_assets.loader.parts import ledger_by_part

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
_CHUNK_ROWS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class KeptRows:
    """The rows that a filter keeps, in table order: all that plans of any epoch need."""

    row_ids: UInt64Array
    """Stable row ids, shape (rows,)."""
    doc_ids: Int64Array
    """The `id` column, shape (rows,)."""
    num_tokens: npt.NDArray[np.int32]
    """Tokens per document without EOS, shape (rows,)."""
    parts: npt.NDArray[np.uint8] | None
    """Number of the mixture's part that each row belongs to, shape (rows,); None without a mixture."""
    mixture: tuple[MixtureComponent, ...]
    """The mixture's parts; empty without one."""
    tokens: int
    """Tokens of all rows, one EOS each included."""

    def __len__(self) -> int:
        return len(self.row_ids)

    def places_of(self, doc_ids: Iterable[int]) -> Int64Array:
        """Places among the kept rows of the documents with the given ids, ascending; none for those not kept."""
        wanted = np.unique(np.fromiter(doc_ids, np.int64))
        found = [np.empty(0, np.int64)]
        for start in range(0, len(self) if len(wanted) else 0, _CHUNK_ROWS):
            ids = self.doc_ids[start : start + _CHUNK_ROWS]  # which need not ascend: compaction may move fragments
            nearest = wanted[np.minimum(np.searchsorted(wanted, ids), len(wanted) - 1)]
            found.append(start + np.flatnonzero(nearest == ids))
        return np.concatenate(found)


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
    rows: KeptRows
    """The rows that the order refers to."""
    order: npt.NDArray[np.uint32]
    """Places in `rows` in reading order, split-major, shape (planned rows,)."""
    ends: Int64Array
    """Position in its split's token stream just after each document and its EOS, in the same order."""
    holes: Int64Array
    """Places in the order, ascending, of the documents whose tokens are masked (`data.without`), one for every draw."""
    holes_from: int
    """Cycle from which on they are: what lies before it of a document is trained on."""
    drawn: Int64Array | None
    """What the mixture draws from each part, as `parts.tally` counts it; None without a mixture."""
    digest: str
    """Digest of the order, the lengths and the row ids: equal for equal streams of documents."""

    @cached_property
    def offsets(self) -> Int64Array:
        """Split s owns the entries from `offsets[s]` to `offsets[s + 1]`; shape (num_splits + 1,)."""
        return np.arange(self.num_splits + 1, dtype=np.int64) * (len(self.order) // self.num_splits)

    @property
    def row_ids(self) -> UInt64Array:
        """Row ids in reading order: a new array of shape (planned rows,)."""
        return self.rows.row_ids[self.order]

    @property
    def doc_ids(self) -> Int64Array:
        """Document ids in reading order: a new array of shape (planned rows,)."""
        return self.rows.doc_ids[self.order]

    @cached_property
    def tokens_per_split(self) -> Int64Array:
        """Tokens of every split, EOS included, shape (num_splits,)."""
        return np.asarray(self.ends[self.offsets[1:] - 1])

    @cached_property
    def blocks_per_epoch(self) -> int:
        """Blocks of the whole epoch: as many as the planned tokens fill, rounded down to whole cycles, at least one."""
        blocks = int(self.tokens_per_split.sum()) // self.seq_len
        return max(self.num_splits, blocks - blocks % self.num_splits)

    @property
    def cycles_per_epoch(self) -> int:
        """Rounds over all splits, one block each."""
        return self.blocks_per_epoch // self.num_splits

    @cached_property
    def hole_spans(self) -> tuple[Int64Array, Int64Array]:
        """First token position of every hole in its split's stream, and the position after its EOS."""
        at_start = self.holes % (len(self.order) // self.num_splits) == 0
        begins = np.where(at_start, 0, self.ends[self.holes - 1])
        return np.maximum(begins, self.holes_from * self.seq_len), self.ends[self.holes]

    def ends_of(self, split: int) -> Int64Array:
        """`ends` of one split (a view)."""
        return self.ends[self.offsets[split] : self.offsets[split + 1]]

    def places_of(self, doc_ids: Iterable[int]) -> Int64Array:
        """Places in the order of the documents with the given ids, ascending; none for those not planned."""
        return places_of(doc_ids, self.rows, self.order)

    def position(self, cycle: int) -> Position:
        """Where every split stands when `cycle` blocks of it have been emitted."""
        reached = cycle * self.seq_len
        consumed = np.array([_docs_to_fill(self.ends_of(split), reached) for split in range(self.num_splits)], np.int64)
        last = self.ends[np.maximum(self.offsets[:-1] + consumed - 1, 0)]
        return Position(docs_consumed=consumed, tail_tokens=np.where(consumed > 0, np.maximum(last - reached, 0), 0))

    def ledger(self, *, cycles_per_step: int = 1, cycles: int | None = None) -> dict[str, Any]:
        """What became of every row and token that the filter keeps, after `cycles` cycles (default: the whole epoch).

        Closes three ways: `rows_in` is the sum of the other rows, `tokens_in` of trained, not reached and left out
        tokens, and blocks * seq_len is trained + padded. Holes that were passed are `tokens_in_holes`, beside trained
        in both sums. With a mixture, `rows_repeated` and `tokens_repeated` come in as well, and `parts` has the same
        lines for each part.
        """
        usable = self.cycles_per_epoch - self.cycles_per_epoch % cycles_per_step
        done = usable if cycles is None else cycles
        reached = [n * self.seq_len for n in (done, usable, self.cycles_per_epoch)]
        lines = self._lines(reached) if self.drawn is None else self._lines_by_part(self.drawn, reached)
        return {
            **lines,
            "tokens_padded": done * self.num_splits * self.seq_len
            - lines["tokens_trained"]
            - lines.get("tokens_in_holes", 0),
            "blocks": done * self.num_splits,
        }

    def _lines(self, reached: list[int]) -> dict[str, Any]:
        per_split = self.tokens_per_split
        planned = int(per_split.sum())
        within = [int(np.minimum(per_split, tokens).sum()) for tokens in reached]
        hidden = int(self._hidden(reached[0]).sum())
        return {
            "rows_in": len(self.rows),
            "rows_planned": len(self.order),
            "rows_left_out_beyond_splits": len(self.rows) - len(self.order),
            "tokens_in": self.rows.tokens,
            "tokens_trained": within[0] - hidden,
            **({"tokens_in_holes": hidden} if len(self.holes) else {}),
            "tokens_not_reached": within[1] - within[0],
            "tokens_left_out_partial_step": within[2] - within[1],
            "tokens_left_out_end_of_split": planned - within[2],
            "tokens_left_out_beyond_splits": self.rows.tokens - planned,
        }

    def _hidden(self, reached: int) -> Int64Array:
        """Tokens of every hole before a position of each split's stream."""
        begins, ends = self.hole_spans
        return np.clip(np.minimum(ends, reached) - begins, 0, None)

    def _lines_by_part(self, drawn: Int64Array, reached: list[int]) -> dict[str, Any]:
        assert self.rows.parts is not None
        by_split = (self.num_splits, -1)
        places, ends = self.order.reshape(by_split), self.ends.reshape(by_split)
        hidden = None
        if len(self.holes):
            of_holes, tokens = self.rows.parts[self.order[self.holes]], self._hidden(reached[0])
            hidden = np.bincount(of_holes, weights=tokens, minlength=len(self.rows.mixture)).astype(np.int64)
        parts = ledger_by_part(self.rows.mixture, drawn, self.rows.parts, places, ends, reached, hidden)
        lines = [line for line in next(iter(parts.values())) if line != "weight_share"]
        return {**{line: sum(part[line] for part in parts.values()) for line in lines}, "parts": parts}


def places_of(doc_ids: Iterable[int], rows: KeptRows, order: npt.NDArray[np.uint32]) -> Int64Array:
    """Places in an order of the documents with the given ids, ascending; none for those that it lacks.

    Memory is a byte for every kept row and planned place, beside the ids.
    """
    named = rows.places_of(doc_ids)
    if not len(named):
        return named
    wanted = np.zeros(len(rows), bool)
    wanted[named] = True
    return np.flatnonzero(wanted[order])


def _docs_to_fill(ends: Int64Array, tokens: int) -> int:
    return min(len(ends), int(np.searchsorted(ends, tokens, side="left")) + 1) if tokens > 0 else 0
