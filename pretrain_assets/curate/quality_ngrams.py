"""Repeated n-grams of words, compiled: the characters in the most frequent 2-, 3- and 4-gram and in duplicated 5- to
10-grams of every text.

Invariant: an n-gram is its words, compared exactly. One can occur twice only where the shorter ones it begins and ends
with do, so each length looks at what is left of the one before: on prose the whole costs little more than the words.
Memory: 44 bytes per word of the text being read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pretrain_assets.compiled import compiled
from pretrain_assets.curate.characters import HALF, MIX, first_equal

SHORTEST, LONGEST_TOP, LONGEST = 2, 4, 10
"""Lengths of n-grams: of 2 to 4 words the most frequent one counts, of 5 to 10 every duplicate."""


@compiled
def ngram_characters(data: Any, starts: Any, stops: Any, firsts: Any, lengths: Any) -> Any:
    """Characters in repeated n-grams, int64 (texts, 9): n = 2 to 10.

    Args:
        data: uint8, UTF-8 bytes of all texts.
        starts: Where words begin.
        stops: Where they end.
        firsts: (texts + 1,): text t has the words firsts[t] to firsts[t + 1].
        lengths: Characters of each word.

    Returns:
        For n up to 4: length of the most frequent n-gram, joined by spaces, times its occurrences; the earliest of
        several. From 5 on: characters in n-grams that occurred before, none counted twice (Gopher, table A1).
    """
    found = np.zeros((len(firsts) - 1, LONGEST - SHORTEST + 1), np.int64)
    for text in range(len(firsts) - 1):
        first, last = firsts[text], firsts[text + 1]
        if last - first >= SHORTEST:
            _of_text(data, starts[first:last], stops[first:last], lengths[first:last], found[text])
    return found


@compiled
def _of_text(data: Any, starts: Any, stops: Any, lengths: Any, found: Any) -> None:
    words = len(starts)
    slots = np.full(2 * words, -1, np.int32)
    ids = np.empty(words, np.int32)  # the first word equal to each
    counts = np.zeros(words, np.int32)
    for word in range(words):
        ids[word] = first_equal(data, starts, stops, slots, word)
        counts[ids[word]] += 1
    positions = np.empty(words, np.int32)  # of the n-grams that occur more than once, in order
    grams = np.empty(words, np.int32)  # which of them are equal: the same number
    kept = 0
    for word in range(words):
        if counts[ids[word]] > 1:
            positions[kept], grams[kept] = word, ids[word]
            kept += 1
    same = np.empty(words, np.int32)
    for size in range(SHORTEST, min(LONGEST, words) + 1):
        kept = _longer(ids, positions, grams, same, counts, slots, kept, size)
        if size <= LONGEST_TOP:
            found[size - SHORTEST] = _most_frequent(lengths, positions, grams, counts, kept, size)
        elif kept == 0:
            return
        kept = _repeated(positions, grams, counts, kept)
        if size > LONGEST_TOP:
            found[size - SHORTEST] = _duplicated(lengths, positions, grams, counts, kept, size)


@compiled
def _longer(ids: Any, positions: Any, grams: Any, same: Any, counts: Any, slots: Any, kept: int, size: int) -> int:
    """From repeated n-grams of `size` - 1 words to those of `size` that can repeat: number them, count the equal."""
    used = slots[: max(1, 2 * kept)]
    used[:] = -1
    longer = 0
    for k in range(kept - 1):
        begin = positions[k]
        if positions[k + 1] != begin + 1:
            continue
        shorter, word = grams[k], ids[begin + size - 1]
        positions[longer], grams[longer], counts[longer] = begin, shorter, 0
        code = (np.uint64(shorter) << HALF | np.uint64(word)) * MIX
        slot: Any = np.int64(((code >> HALF) * np.uint64(len(used))) >> HALF)
        equal: Any = longer
        while used[slot] >= 0:
            other = used[slot]
            if grams[other] == shorter and ids[positions[other] + size - 1] == word:
                equal = np.int64(other)
                break
            slot += 1
            if slot == len(used):
                slot = 0
        if equal == longer:
            used[slot] = longer
        same[longer] = equal
        counts[equal] += 1
        longer += 1
    grams[:longer] = same[:longer]
    return longer


@compiled
def _repeated(positions: Any, grams: Any, counts: Any, kept: int) -> int:
    """Leave out the n-grams that occur once."""
    repeated = 0
    for k in range(kept):
        if counts[grams[k]] > 1:
            positions[repeated], grams[repeated] = positions[k], grams[k]
            repeated += 1
    return repeated


@compiled
def _most_frequent(lengths: Any, positions: Any, grams: Any, counts: Any, kept: int, size: int) -> Any:
    begin, top = 0, 1
    for k in range(kept):
        if grams[k] == k and counts[k] > top:
            begin, top = positions[k], counts[k]
    return (np.int64(lengths[begin : begin + size].sum()) + size - 1) * top


@compiled
def _duplicated(lengths: Any, positions: Any, grams: Any, counts: Any, kept: int, size: int) -> int:
    """Characters of n-grams met before, reading on behind each; one that is read over is not met."""
    total, free = 0, 0
    for k in range(kept):
        begin = positions[k]
        if begin < free:
            continue
        if counts[grams[k]] == 0:  # met
            total += lengths[begin : begin + size].sum()
            free = begin + size
        counts[grams[k]] = 0
    return total
