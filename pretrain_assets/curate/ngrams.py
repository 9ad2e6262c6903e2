"""The word n-grams of passages, as flat arrays that `ngram_search` looks words of documents up in.

Invariant: as large as the passages, whatever is searched: about 60 bytes per n-gram and 10 per word of the passages.

An n-gram is `ngram` words in a row of one passage. A passage of fewer, but at least `min_words`, is one n-gram as a
whole; one of fewer still is not searched. An n-gram that more than `max_items` items have is boilerplate: it stands for
none of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pretrain_assets.compiled import compiled

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

BASE = np.uint64(0x9E3779B97F4A7C15)
"""Odd: the hash of words w1 ... wn is the sum of wi * BASE^(n-i) modulo 2^64 (Karp and Rabin 1987), so that one sum per
word gives the hash of the n-gram that ends there, for every n."""
_BITS_PER_NGRAM = 16
"""At least so many bits of the sieve per n-gram: one word in sixteen is looked up in vain, in a cache-sized table."""


class Index(NamedTuple):
    """The n-grams of all passages."""

    words: UInt64s
    """Hashes of the words of all passages, one passage after the other."""
    lengths: Int64s
    """Lengths of n-grams that there are."""
    powers: UInt64s
    """BASE to the power of each length."""
    sieve: npt.NDArray[np.uint8]
    """A bit for every value of a hash's highest bits: 0 where no n-gram has them."""
    shift: np.uint64
    """Bits of a hash below those."""
    hashes: UInt64s
    """(n-grams,): every hash once, ascending."""
    starts: Int64s
    """(n-grams,): place of an n-gram's first word in `words`."""
    sizes: Int64s
    """(n-grams,): its words."""
    holder_firsts: Int64s
    """(n-grams + 1,): n-gram g stands in the passages holders[holder_firsts[g]:holder_firsts[g + 1]]."""
    holders: Int64s
    """Numbers of passages."""
    totals: Int64s
    """(passages,): different n-grams of each that are no boilerplate."""
    items: Int64s
    """(passages,): the item that each belongs to, ascending."""
    num_windows: Int64s
    """(passages,): n-grams of each, boilerplate included; 0 where it has fewer than `min_words` words."""


def build_index(words: UInt64s, firsts: Int64s, items: Int64s, *, ngram: int, min_words: int, max_items: int) -> Index:
    """The index of passages.

    Args:
        words: Hashes of the words of all passages.
        firsts: (passages + 1,): passage p has the words firsts[p] to firsts[p + 1].
        items: (passages,): the item of each passage, ascending.
        ngram: Words per n-gram.
        min_words: Words of the shortest passage that is searched as a whole.
        max_items: An n-gram of more items is boilerplate.
    """
    counts = np.diff(firsts)
    length = np.minimum(counts, ngram)
    num_windows = np.where(counts >= min_words, counts - length + 1, 0)
    passage = np.repeat(np.arange(len(counts)), num_windows)
    within = np.arange(len(passage)) - np.repeat(np.cumsum(num_windows) - num_windows, num_windows)
    starts, sizes = firsts[passage] + within, length[passage]
    hashes, example, gram = np.unique(_hashes(words, starts, sizes), return_index=True, return_inverse=True)

    pairs = np.unique(gram * len(counts) + passage)  # every n-gram of a passage once
    gram, passage = np.divmod(pairs, max(1, len(counts)))
    new_item = np.ones(len(pairs), bool)
    new_item[1:] = (gram[1:] != gram[:-1]) | (items[passage[1:]] != items[passage[:-1]])
    kept = np.bincount(gram[new_item], minlength=len(hashes)) <= max_items
    of_kept = kept[gram]
    hashes, example, holders = hashes[kept], example[kept], passage[of_kept]
    holder_counts = np.bincount(gram[of_kept], minlength=len(kept))[kept]
    sieve, shift = _sieve(hashes)
    lengths = np.unique(sizes[example])
    return Index(
        words=words,
        lengths=lengths,
        powers=_powers(lengths),
        sieve=sieve,
        shift=shift,
        hashes=hashes,
        starts=starts[example],
        sizes=sizes[example],
        holder_firsts=np.concatenate(([0], np.cumsum(holder_counts))).astype(np.int64),
        holders=holders,
        totals=np.bincount(holders, minlength=len(counts)).astype(np.int64),
        items=items,
        num_windows=num_windows,
    )


def _powers(lengths: Int64s) -> UInt64s:
    modulus = 1 << 64
    return np.array([pow(int(BASE), int(length), modulus) for length in lengths], np.uint64)


def _hashes(words: UInt64s, starts: Int64s, sizes: Int64s) -> UInt64s:
    """Hash of every n-gram."""
    sums = _sums(words)
    lengths, which = np.unique(sizes, return_inverse=True)
    hashes: UInt64s = sums[starts + sizes] - sums[starts] * _powers(lengths)[which]
    return hashes


def _sieve(hashes: UInt64s) -> tuple[npt.NDArray[np.uint8], np.uint64]:
    """The bits of the hashes that there are, and the shift that turns a hash into the number of its bit."""
    log2_bits = max(10, (len(hashes) * _BITS_PER_NGRAM).bit_length())
    shift = np.uint64(64 - log2_bits)
    number = hashes >> shift
    sieve = np.zeros(1 << (log2_bits - 3), np.uint8)
    np.bitwise_or.at(sieve, number >> np.uint64(3), np.uint8(1) << (number & np.uint64(7)).astype(np.uint8))
    return sieve, shift


@compiled
def _sums(words: Any) -> Any:
    """The running sum before each word and after the last."""
    sums = np.zeros(len(words) + 1, np.uint64)
    for at in range(len(words)):
        sums[at + 1] = sums[at] * BASE + words[at]
    return sums
