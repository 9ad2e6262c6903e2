"""MinHash signatures of texts: normalised words, shingles of n words, one value per slot.

Invariant: a signature is a pure function of (text, ngram_words, min_words, number of values, seed), the same on every
machine and Python; no Python object per document, no memory beyond the signature, whatever the length of a text.

Signature: each shingle goes to one slot, and the slot holds the least rank of its shingles; a slot that gets none holds
the minimum of a hash function of its own over all shingles. That is Fast Similarity Sketching (Dahlgaard, Knudsen,
Thorup 2017, arXiv 1704.04370) with one round of buckets: as with classic MinHash (Broder 1997), two texts agree in a
slot with a probability equal to the Jaccard index of their sets of shingles, and slots are nearly independent; but a
shingle costs one hash instead of one per slot. A text of fewer than `min_words` words is one shingle, all of it. A text
without words has the largest number in all slots, and is never a candidate.

Hashes: of a word FNV-1a over its code points, of a shingle a polynomial of those mixed by MurmurHash3's `fmix64`, of
which the high bits give the slot and the low ones the rank. The functions of slots are ((a x + b) mod 2^64) >> 33 of
the high 32 bits x: strongly universal (Dietzfelbinger 1996; Thorup 2015, "High speed hashing for integers and
strings", 3.3), with a and b from SplitMix64 (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pretrain_assets.compiled import compiled
from pretrain_assets.curate.folded_words import fold_table, mix, next_word
from pretrain_assets.curate.words import text_bytes

if TYPE_CHECKING:
    import pyarrow as pa

CODE_VERSION = "1"
"""Raised when the same text gets another signature."""
EMPTY = np.uint32(0xFFFFFFFF)
"""A slot without a value: all of those of a text without words."""
FALLBACK = np.uint32(1 << 31)
"""Values from here on are of the slot's own hash function; ranks are below."""

HIGHEST = np.int64((1 << 63) - 1)
TOP_BIT = np.uint64(1 << 63)
"""Numbers with this bit flipped compare as signed ones as they did as unsigned; processors compare signed ones."""
BLOCK = 1024
"""Shingles that go through the hash functions at once: 8 KB, which stay in the nearest cache."""
POLYNOMIAL = 0x9E3779B97F4A7C15
"""Base of the polynomial over the words of a shingle: odd, 2^64 divided by the golden ratio."""


@lru_cache(maxsize=8)
def hash_functions(num_values: int, seed: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Multipliers and addends of as many hash functions, shape (num_values,) each."""
    stream = np.array([_split_mix(seed, at) for at in range(2 * num_values)], np.uint64)
    return stream[:num_values], stream[num_values:]


def _split_mix(seed: int, at: int) -> int:
    """Number `at` of the SplitMix64 stream of this seed."""
    mask = (1 << 64) - 1
    z = (seed + (at + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def signatures(
    texts: pa.Array, *, ngram_words: int, min_words: int, num_values: int, seed: int
) -> npt.NDArray[np.uint32]:
    """One signature per text, shape (len(texts), num_values); NULL is an empty text."""
    data, offsets = text_bytes(texts)
    found = np.full((len(texts), num_values), EMPTY)
    multipliers, addends = hash_functions(num_values, seed)
    signed = multipliers.view(np.int64), (addends ^ TOP_BIT).view(np.int64)
    salt = np.uint64(_split_mix(seed, 2 * num_values))
    _fill_signatures(data, offsets, fold_table(), ngram_words, min_words, salt, *signed, found)
    return found


def shingle_sets(
    texts: pa.Array, *, ngram_words: int, min_words: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """The shingles of all texts as 64-bit hashes, each text's ascending and distinct, and how many each text has."""
    data, offsets = text_bytes(texts)
    found = np.empty(len(data) // 2 + len(texts) + 1, np.uint64)  # a word and what divides it are two bytes at least
    lengths = np.zeros(len(texts), np.int64)
    count = _fill_sets(data, offsets, fold_table(), ngram_words, min_words, found, lengths)
    return found[:count], lengths


@compiled
def _next_shingles(data: Any, at: int, stop: int, fold: Any, salt: Any, state: Any, found: Any) -> Any:
    """The shingles that follow in a text, as many as fit into `found`: how many, and where to go on.

    `state` is all zero at the beginning of a text: number of words, polynomial of the last words, polynomial of all
    words, then a ring of the last words, as many as a shingle has.
    """
    ngram_words = len(state) - 3
    leaving = np.uint64(1)
    for _ in range(ngram_words):
        leaving *= np.uint64(POLYNOMIAL)
    seen, last, whole = np.int64(state[0]), state[1], state[2]
    slot: Any = seen % ngram_words
    count = 0
    while count < len(found):
        word, at = next_word(data, at, stop, fold)
        if word == 0:
            break
        last = last * np.uint64(POLYNOMIAL) + word - state[3 + slot] * leaving
        whole = whole * np.uint64(POLYNOMIAL) + word
        state[3 + slot] = word
        slot = slot + 1 if slot + 1 < ngram_words else 0
        seen += 1
        if seen >= ngram_words:
            found[count] = mix(last ^ salt)
            count += 1
    state[0], state[1], state[2] = seen, last, whole
    return count, at


@compiled
def _fill_signatures(
    data: Any,
    offsets: Any,
    fold: Any,
    ngram_words: int,
    min_words: int,
    salt: Any,
    multipliers: Any,
    addends: Any,
    found: Any,
) -> None:
    """The signature of every text into `found`, which begins as `EMPTY`."""
    state, some = np.zeros(3 + ngram_words, np.uint64), np.empty(BLOCK, np.uint64)
    empty, minima = np.empty(len(multipliers), np.int64), np.empty(len(multipliers), np.int64)
    for text in range(len(offsets) - 1):
        at, stop, count, blocks, slots = offsets[text], offsets[text + 1], BLOCK, 0, found[text]
        state[:] = 0
        while count == BLOCK:
            count, at = _next_shingles(data, at, stop, fold, salt, state, some)
            _lower_slots(slots, some[:count])
            blocks += count > 0
        if 0 < state[0] < min_words:
            slots[:] = EMPTY
            some[0], count, blocks = mix(state[2] ^ salt), 1, 1
            _lower_slots(slots, some[:1])
        num_empty = 0
        for slot in range(len(slots)):
            if slots[slot] == EMPTY:
                empty[num_empty] = slot
                num_empty += 1
        if num_empty == 0 or blocks == 0:
            continue
        minima[:] = HIGHEST
        if blocks == 1:  # all shingles are in `some` still; a full block was followed by none
            _lower_minima(minima, empty[:num_empty], some[: count if count else BLOCK], multipliers, addends)
        else:
            at, count = offsets[text], BLOCK
            state[:] = 0
            while count == BLOCK:
                count, at = _next_shingles(data, at, stop, fold, salt, state, some)
                _lower_minima(minima, empty[:num_empty], some[:count], multipliers, addends)
        for place in range(num_empty):
            value = (np.uint64(minima[place]) ^ TOP_BIT) >> np.uint64(33)
            slots[empty[place]] = FALLBACK | np.uint32(value)


@compiled
def _lower_slots(slots: Any, shingles: Any) -> None:
    """Lower the slot of each shingle to its rank."""
    num_slots = np.uint64(len(slots))
    for at in range(len(shingles)):
        slot = ((shingles[at] >> np.uint64(32)) * num_slots) >> np.uint64(32)
        rank = np.uint32(shingles[at] & np.uint64(0x7FFFFFFF))
        if rank < slots[slot]:
            slots[slot] = rank


@compiled
def _lower_minima(minima: Any, chosen: Any, shingles: Any, multipliers: Any, addends: Any) -> None:
    """Lower the minima of the chosen hash functions, all of them signed (`TOP_BIT`)."""
    for place in range(len(chosen)):
        multiplier, addend, least = multipliers[chosen[place]], addends[chosen[place]], minima[place]
        for at in range(len(shingles)):  # an index, not `for shingle in`, which is not vectorised: 3x
            least = min(least, multiplier * np.int64(shingles[at] >> np.uint64(32)) + addend)
        minima[place] = least


@compiled
def _fill_sets(data: Any, offsets: Any, fold: Any, ngram_words: int, min_words: int, found: Any, lengths: Any) -> int:
    """The distinct shingles of every text, one text after the other, into `found`; how many they are in all."""
    state, total = np.zeros(3 + ngram_words, np.uint64), 0
    for text in range(len(offsets) - 1):
        state[:] = 0
        count, _ = _next_shingles(data, offsets[text], offsets[text + 1], fold, np.uint64(0), state, found[total:])
        if 0 < state[0] < min_words:
            found[total] = mix(state[2])
            count = 1
        ordered = np.sort(found[total : total + count])
        first = total
        for at in range(count):
            if at == 0 or ordered[at] != ordered[at - 1]:
                found[total] = ordered[at]
                total += 1
        lengths[text] = total - first
    return total


@compiled
def band_hashes(signatures: Any, bands: int) -> Any:
    """One 64-bit hash per band and signature, shape (bands, rows): equal when all values of the band are."""
    rows, values = signatures.shape
    found = np.empty((bands, rows), np.uint64)
    rows_per_band = values // bands
    for row in range(rows):
        for band in range(bands):
            value = np.uint64(band)
            for at in range(band * rows_per_band, (band + 1) * rows_per_band):
                value = mix(value + np.uint64(signatures[row, at]))
            found[band, row] = value
    return found
