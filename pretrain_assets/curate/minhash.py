"""MinHash signatures of texts: normalised words, shingles of n words, one minimum per hash function.

Invariant: a signature is a pure function of (text, ngram_words, min_words, number of values, seed), the same on every
machine and Python; one pass over the bytes, no Python object per document, no memory beyond the signature.

Words are those of `str.split()`, then normalised: lower case and without accents (below U+2100, by Unicode 3.2),
without punctuation, symbols, control and zero-width characters; a word of those alone is none. Digits stay, and so does
one of . , - + / : right before a digit, so that 1.5 is neither 15 nor -1.5: tables that differ in their numbers stay
apart. Han and kana characters are words each, since nothing divides them. So CRLF and LF, NFC and NFD, curly and
straight quotes, with and without byte order mark, are the same.

Signature: of a text of at least `min_words` words, the minimum of each hash function over its shingles, so that two
texts agree in a value with a probability equal to the Jaccard index of their sets of shingles (Broder 1997, "On the
resemblance and containment of documents"). A text of fewer words is one shingle, all of it. A text without words has
the largest number in all values, and is never a candidate.

Hash functions: h(x) = ((a x + b) mod 2^64) >> 32 of 32-bit x, a and b 64-bit numbers of SplitMix64 (Steele, Lea, Flood
2014): strongly universal (Dietzfelbinger 1996; Thorup 2015, "High speed hashing for integers and strings", 3.3). x are
the high bits of a polynomial of the words' hashes (FNV-1a over code points), mixed by MurmurHash3's `fmix64`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pretrain_assets.compiled import compiled
from pretrain_assets.curate.words import text_bytes

if TYPE_CHECKING:
    import pyarrow as pa

CODE_VERSION = "1"
"""Raised when the same text gets another signature."""
EMPTY = np.uint32(0xFFFFFFFF)
"""Every value of the signature of a text without words."""

FOLDED = 0x2100
"""Code points below it are normalised by a table: Latin, Greek, Cyrillic and their accents, general punctuation."""
HIGHEST = np.int64((1 << 63) - 1)
SPACE, DROPPED = 0x20, 0
"""In the table: white space, and what is left out."""
FNV_OFFSET, FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3
TOP_BIT = np.uint64(1 << 63)
"""Numbers with this bit flipped compare as signed ones as they did as unsigned; processors compare signed ones."""
BLOCK = 1024
"""Shingles that go through the hash functions at once: 8 KB, which stay in the nearest cache."""
POLYNOMIAL = 0x9E3779B97F4A7C15
"""Base of the polynomial over the words of a shingle: odd, 2^64 divided by the golden ratio."""


@lru_cache(maxsize=1)
def fold_table() -> npt.NDArray[np.uint16]:
    """What each code point below `FOLDED` becomes, by the Unicode 3.2 that every Python carries: it never changes."""
    from unicodedata import ucd_3_2_0 as unicode

    def accent(character: str) -> bool:
        return "\u0300" <= character < "\u0370" or "\u1ab0" <= character < "\u1b00" or "\u1dc0" <= character < "\u1e00"

    table = np.arange(FOLDED, dtype=np.uint16)
    for code in range(FOLDED):
        character = chr(code)
        kind = unicode.category(character)
        if character.isspace():
            table[code] = SPACE
        elif kind[0] in "PSZ" or kind in ("Cc", "Cf") or accent(character) or "\u20d0" <= character < "\u2100":
            table[code] = DROPPED
        else:
            lower = character.lower() if kind == "Lu" else character
            base = [part for part in unicode.normalize("NFD", lower) if not accent(part)]
            table[code] = ord(base[0]) if len(base) == 1 else code
    return table


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
    _fill_signatures(data, offsets, fold_table(), ngram_words, min_words, *signed, found)
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


def detection_probability(similarity: float, *, bands: int, rows_per_band: int, threshold: float = 0.0) -> float:
    """Share of pairs of this Jaccard index that share a band and whose estimated index reaches the threshold.

    With threshold 0 it is the known 1 - (1 - s^r)^b (Leskovec, Rajaraman, Ullman, "Mining of Massive Datasets", 3.4).
    Otherwise: the number m of equal values is binomial, and given m, the equal ones lie anywhere; the chance that they
    fill no band follows by inclusion and exclusion over the bands that they fill.
    """
    values = bands * rows_per_band
    total = 0.0
    for equal in range(math.ceil(threshold * values - 1e-9), values + 1):
        ways = math.comb(values, equal)
        no_band = sum(
            (-1) ** full
            * math.comb(bands, full)
            * math.comb(values - full * rows_per_band, equal - full * rows_per_band)
            for full in range(min(bands, equal // rows_per_band) + 1)
        )
        total += ways * similarity**equal * (1 - similarity) ** (values - equal) * (1 - no_band / ways)
    return total


@compiled
def mix(x: Any) -> Any:
    """MurmurHash3's finaliser of 64 bits: every bit of the result depends on every bit of `x`."""
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


@compiled
def _code_point(data: Any, at: int, stop: int) -> Any:
    """The character that begins at `at`, and its bytes; a torn one counts as one byte."""
    first = np.int64(data[at])
    if first < 0x80:
        return first, 1
    if first < 0xE0 and at + 1 < stop:
        return (first & 0x1F) << 6 | (data[at + 1] & 0x3F), 2
    if first < 0xF0 and at + 2 < stop:
        return (first & 0x0F) << 12 | (np.int64(data[at + 1]) & 0x3F) << 6 | (data[at + 2] & 0x3F), 3
    if at + 3 < stop:
        high = (first & 0x07) << 18 | (np.int64(data[at + 1]) & 0x3F) << 12
        return high | (np.int64(data[at + 2]) & 0x3F) << 6 | (data[at + 3] & 0x3F), 4
    return np.int64(0xFFFD), 1


@compiled
def next_word(data: Any, at: int, stop: int, fold: Any) -> Any:
    """Hash of the first normalised word from `at` on, and where to go on; the hash is 0 when there is none.

    Args:
        data: uint8, UTF-8 bytes.
        at: Where to look from: a boundary of characters.
        stop: End of the text.
        fold: `fold_table()`.
    """
    word, empty, mark = np.uint64(FNV_OFFSET), True, 0
    while at < stop:
        code, size = _code_point(data, at, stop)
        alone = False
        if code < FOLDED:
            folded = np.int64(fold[code])
        elif 0x3000 <= code < 0x3040:
            folded = SPACE if code == 0x3000 else code if 0x3005 <= code <= 0x3007 else DROPPED
        else:
            folded = DROPPED if code == 0xFEFF else code
            alone = 0x3040 <= code < 0xA000 or 0xF900 <= code < 0xFB00 or 0x20000 <= code < 0x34000
        if folded == SPACE or alone:
            if not empty:
                break
            mark = 0
        at += size
        if folded == SPACE:
            continue
        if folded == DROPPED:
            if 0x2B <= code <= 0x2F or code == 0x3A:  # + , - . / :
                mark = code
            continue
        if mark != 0 and 0x30 <= folded <= 0x39:
            word = (word ^ np.uint64(mark)) * np.uint64(FNV_PRIME)
        mark = 0
        word = (word ^ np.uint64(folded)) * np.uint64(FNV_PRIME)
        empty = False
        if alone:
            break
    return (np.uint64(0) if empty else mix(word) | np.uint64(1)), at


@compiled
def _next_shingles(data: Any, at: int, stop: int, fold: Any, state: Any, found: Any) -> Any:
    """The shingles that follow in a text, as many as fit into `found`: how many, and where to go on.

    `state` is all zero at the beginning of a text: number of words, polynomial of the last words, polynomial of all
    words, then a ring of the last words, as many as a shingle has.
    """
    ngram_words = len(state) - 3
    leaving = np.uint64(1)
    for _ in range(ngram_words):
        leaving *= np.uint64(POLYNOMIAL)
    count = 0
    while count < len(found):
        word, at = next_word(data, at, stop, fold)
        if word == 0:
            break
        slot = 3 + np.int64(state[0]) % ngram_words
        state[0] += np.uint64(1)
        state[1] = state[1] * np.uint64(POLYNOMIAL) + word - state[slot] * leaving
        state[2] = state[2] * np.uint64(POLYNOMIAL) + word
        state[slot] = word
        if state[0] >= ngram_words:
            found[count] = mix(state[1])
            count += 1
    return count, at


@compiled
def _fill_signatures(
    data: Any, offsets: Any, fold: Any, ngram_words: int, min_words: int, multipliers: Any, addends: Any, found: Any
) -> None:
    """Minima of the hash functions over the shingles of every text, into `found`, which begins as `EMPTY`."""
    state, some = np.zeros(3 + ngram_words, np.uint64), np.empty(BLOCK, np.uint64)
    minima = np.empty(len(multipliers), np.int64)
    for text in range(len(offsets) - 1):
        at, stop, count = offsets[text], offsets[text + 1], BLOCK
        state[:] = 0
        minima[:] = HIGHEST
        while count == BLOCK:
            count, at = _next_shingles(data, at, stop, fold, state, some)
            _lower(minima, some[:count], multipliers, addends)
        if 0 < state[0] < min_words:
            minima[:] = HIGHEST
            some[0] = mix(state[2])
            _lower(minima, some[:1], multipliers, addends)
        for value in range(len(minima)):
            found[text, value] = (np.uint64(minima[value]) ^ TOP_BIT) >> np.uint64(32)


@compiled
def _lower(minima: Any, shingles: Any, multipliers: Any, addends: Any) -> None:
    """Lower each minimum to the least value of its hash function, all of them signed (`TOP_BIT`)."""
    for value in range(len(minima)):
        multiplier, addend, least = multipliers[value], addends[value], minima[value]
        for at in range(len(shingles)):  # an index, not `for shingle in`, which is not vectorised: 3x
            least = min(least, multiplier * np.int64(shingles[at] >> np.uint64(32)) + addend)
        minima[value] = least


@compiled
def _fill_sets(data: Any, offsets: Any, fold: Any, ngram_words: int, min_words: int, found: Any, lengths: Any) -> int:
    """The distinct shingles of every text, one text after the other, into `found`; how many they are in all."""
    state, total = np.zeros(3 + ngram_words, np.uint64), 0
    for text in range(len(offsets) - 1):
        state[:] = 0
        count, _ = _next_shingles(data, offsets[text], offsets[text + 1], fold, state, found[total:])
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
