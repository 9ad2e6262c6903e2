"""The loops of the loader, compiled by numba: which documents a window needs, and their tokens laid into blocks.

Invariant: no kernel touches a Python object, so all run with the interpreter lock released. Compiled code is kept
beside this file (numba's cache), as Python keeps its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain_assets.compiled import compiled

Int64Array = npt.NDArray[np.int64]


@compiled
def documents_beginning_in(
    ends: Int64Array, offsets: Int64Array, first_split: int, num_splits: int, low: int, high: int, resumed: bool
) -> tuple[Int64Array, Int64Array]:
    """Places in the plan of the documents that begin at a token position from `low` to `high` of some splits.

    Args:
        ends: As in `EpochPlan`.
        offsets: As in `EpochPlan`.
        first_split: First split asked about.
        num_splits: Number of splits asked about.
        low: First token position in each split.
        high: Position after the last one, above `low`.
        resumed: Whether to include the document that covers `low` but begins before it.

    Returns:
        First place and place after the last, each of shape (num_splits,).
    """
    first, last = np.empty(num_splits, np.int64), np.empty(num_splits, np.int64)
    for i in range(num_splits):
        begin, stop = offsets[first_split + i], offsets[first_split + i + 1]
        of_split = ends[begin:stop]
        last[i] = min(begin + np.searchsorted(of_split, high, "left") + 1, stop)
        if low == 0:
            first[i] = begin
        elif resumed:
            first[i] = min(begin + np.searchsorted(of_split, low, "right"), last[i])
        else:
            first[i] = min(begin + np.searchsorted(of_split, low, "left") + 1, last[i])
    return first, last


@compiled
def places(first: Int64Array, last: Int64Array) -> Int64Array:
    """All places from `first` to `last`, split after split."""
    total = 0
    for i in range(len(first)):
        total += last[i] - first[i]
    found = np.empty(total, np.int64)
    at = 0
    for i in range(len(first)):
        for place in range(first[i], last[i]):
            found[at] = place
            at += 1
    return found


@compiled
def pack(
    plan_ends: Int64Array,
    plan_offsets: Int64Array,
    first_split: int,
    first: Int64Array,
    last: Int64Array,
    values: Any,
    list_offsets: Any,
    source: Int64Array,
    carry: Any,
    carry_ends: Int64Array,
    next_carry: Any,
    low: int,
    eos_id: int,
    pad_id: int,
    input_ids: Any,
    doc_ids: Any,
    position_ids: Any,
) -> int:
    """Lay documents into blocks of shape (cycles, splits, seq_len): joined by one EOS each, cut, padded at the end.

    Args:
        plan_ends: `EpochPlan.ends`.
        plan_offsets: `EpochPlan.offsets`.
        first_split: First split of the window.
        first: Per split, place in the plan of the first document read for the window.
        last: Per split, place after the last one.
        values: Tokens of all documents read, one after the other.
        list_offsets: Where each document read begins in `values`, and where the last ends.
        source: For every place, in order, the number of its document among those read.
        carry: Tokens left by the window before, EOS included, split after split.
        carry_ends: Per split, where its tokens end in `carry`.
        next_carry: Room for what is left by this window, in the same layout; exactly as long as needed.
        low: Position of the window's first token in each split's stream.
        eos_id: Put after every document.
        pad_id: Put where a split has run out.
        input_ids: Filled.
        doc_ids: Filled with the number of document starts so far in the block, position 0 not counted; may be empty.
        position_ids: Filled with the place in the document's part of the block; may be empty.

    Returns:
        -1, or the number (in `source`) of the first document whose length is not the planned one; -2 if what is left
        does not fit `next_carry`, so that the plan contradicts itself.
    """
    num_cycles, num_splits, seq_len = input_ids.shape
    number = carry_start = left = 0
    for s in range(num_splits):
        at = doc = start = 0  # place in the window, document's number in the block, where its part of the block begins
        carried = carry[carry_start : carry_ends[s]]
        carry_start = carry_ends[s]
        at, doc, start, left = _lay(
            carried, 0, len(carried), eos_id, s, at, doc, start, input_ids, doc_ids, position_ids, next_carry, left
        )
        for place in range(first[s], last[s]):
            row = source[number]
            tokens = values[list_offsets[row] : list_offsets[row + 1]]
            begin = plan_ends[place - 1] if place > plan_offsets[first_split + s] else 0
            if plan_ends[place] - begin != len(tokens) + 1:
                return number
            number += 1
            if at % seq_len != 0:
                doc += 1
                start = at % seq_len
            skip = max(0, low - begin)  # of a document that began before a resumed window
            total = len(tokens) + 1
            at, doc, start, left = _lay(
                tokens, skip, total, eos_id, s, at, doc, start, input_ids, doc_ids, position_ids, next_carry, left
            )
        while at < num_cycles * seq_len:  # the split has run out
            cycle, offset = at // seq_len, at % seq_len
            if offset == 0:
                doc = start = 0
            input_ids[cycle, s, offset:] = pad_id
            if doc_ids.size:
                doc_ids[cycle, s, offset:] = doc
            if position_ids.size:
                _count_up(position_ids[cycle, s, offset:], offset - start)
            at += seq_len - offset
    return -1 if left == len(next_carry) else -2


@compiled
def mask(begins: Int64Array, ends: Int64Array, bounds: Int64Array, low: int, pad_id: int, input_ids: Any) -> None:
    """Lay the padding id over spans of the splits' token streams, as far as a window reaches.

    Args:
        begins: First position of every span, ascending within a split.
        ends: Position after each.
        bounds: Per split of the window the number of its first span, and of the span after the last.
        low: Position of the window's first token in each split's stream.
        pad_id: Put there.
        input_ids: The window, shape (cycles, splits, seq_len).
    """
    num_cycles, num_splits, seq_len = input_ids.shape
    high = low + num_cycles * seq_len
    for s in range(num_splits):
        of_split = ends[bounds[s] : bounds[s + 1]]
        for i in range(bounds[s] + np.searchsorted(of_split, low, "right"), bounds[s + 1]):
            if begins[i] >= high:
                break
            for at in range(max(begins[i], low) - low, min(ends[i], high) - low):
                input_ids[at // seq_len, s, at % seq_len] = pad_id


@compiled
def _lay(
    tokens: Any,
    skip: int,
    total: int,
    eos_id: int,
    s: int,
    at: int,
    doc: int,
    start: int,
    input_ids: Any,
    doc_ids: Any,
    position_ids: Any,
    next_carry: Any,
    left: int,
) -> tuple[int, int, int, int]:
    """Lay one document from its token `skip` on, with EOS if `total` is one more than its tokens; the rest is carried.

    Returns:
        `at`, `doc`, `start` and `left` after it.
    """
    num_cycles, _, seq_len = input_ids.shape
    done = skip
    while done < total and at < num_cycles * seq_len:
        cycle, offset = at // seq_len, at % seq_len
        if offset == 0:
            doc = start = 0
        count = min(total - done, seq_len - offset)
        copied = min(count, len(tokens) - done)
        _copy(input_ids[cycle, s, offset : offset + copied], tokens[done : done + copied])
        if copied < count:
            input_ids[cycle, s, offset + copied] = eos_id
        if doc_ids.size:
            doc_ids[cycle, s, offset : offset + count] = doc
        if position_ids.size:
            _count_up(position_ids[cycle, s, offset : offset + count], offset - start)
        at += count
        done += count
    for k in range(done, total):
        if left < len(next_carry):
            next_carry[left] = tokens[k] if k < len(tokens) else eos_id
        left += 1
    return at, doc, start, left


@compiled
def _copy(to: Any, source: Any) -> None:
    for k in range(len(to)):
        to[k] = source[k]


@compiled
def _count_up(to: Any, first: int) -> None:
    for k in range(len(to)):
        to[k] = first + k
