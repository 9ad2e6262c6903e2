"""The order of an epoch: LanceDB's permutation, number for number, without building a table for it.

Invariant: `permutation(n, ...)` is what `permutation_builder(table).split_random(fixed=..., seed=..., clump_size=...)`
of lancedb 0.40 makes of a table from which the filter keeps `n` rows (a test holds the two together). It does not
depend on what is installed, so a run can be resumed after an upgrade of lancedb.

The generator is xoshiro256++ seeded by splitmix64 (Blackman & Vigna, 2018), the shuffle Fisher-Yates with several
indices drawn from one 32-bit number, as in the Rust crate rand 0.9. 10,485,760 rows and more are first dealt to files
at random, then shuffled file by file: here the files are parts of one array. 17.5 M rows take about 2 s and 4 bytes per
row (two such arrays while dealing), against 10 s and 50 bytes per row.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain_assets.compiled import compiled

UInt32Array = npt.NDArray[np.uint32]

ROWS_PER_FILE = 10 * 1024 * 1024
"""Rows that LanceDB shuffles in memory at once."""


def permutation(num_rows: int, *, seed: int, clump_size: int = 1) -> UInt32Array:
    """Positions of the kept rows, in table order, shuffled; shape (num_rows,).

    Args:
        num_rows: Rows that the filter keeps, fewer than 2**32.
        seed: From 0 to 2**64 - 1, the epoch's share already added.
        clump_size: Consecutive rows that stay together.
    """
    if num_rows >= 1 << 32:
        raise OverflowError(f"{num_rows:,} rows: a plan holds fewer than 2**32. Narrow the filter.")
    state = _seeded(np.uint64(seed))
    if num_rows < ROWS_PER_FILE:
        return np.asarray(_shuffled(np.arange(num_rows, dtype=np.uint32), clump_size, state))
    order, ends = _dealt(num_rows, -(-num_rows // ROWS_PER_FILE), clump_size, state)
    for start, end in pairwise([0, *ends.tolist()]):
        order[start:end] = _shuffled(order[start:end], clump_size, state)
    return np.asarray(order)


@compiled
def _seeded(seed: Any) -> Any:
    state = np.empty(4, np.uint64)
    for i in range(4):
        seed += np.uint64(0x9E3779B97F4A7C15)
        z = seed
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state[i] = z ^ (z >> np.uint64(31))
    return state


@compiled
def _rotated(x: Any, k: int) -> Any:
    return (x << np.uint64(k)) | (x >> np.uint64(64 - k))


@compiled
def _next(s: Any) -> Any:
    result = _rotated(s[0] + s[3], 23) + s[0]
    t = s[1] << np.uint64(17)
    s[2] ^= s[0]
    s[3] ^= s[1]
    s[1] ^= s[2]
    s[0] ^= s[3]
    s[2] ^= t
    s[3] = _rotated(s[3], 45)
    return result


@compiled
def _below_32(s: Any, bound: Any) -> Any:
    """A number below a bound of at most 32 bits, by Canon's method on 32-bit draws."""
    mask = np.uint64(0xFFFFFFFF)
    product = (_next(s) >> np.uint64(32)) * bound
    high, low = product >> np.uint64(32), product & mask
    if low > ((~bound + np.uint64(1)) & mask):
        more = ((_next(s) >> np.uint64(32)) * bound) >> np.uint64(32)
        if low + more > mask:
            high += np.uint64(1)
    return high


@compiled
def _product_high(x: Any, y: Any) -> Any:
    """Upper 64 bits of x * y, for y below 2**32."""
    mask = np.uint64(0xFFFFFFFF)
    return ((x >> np.uint64(32)) * y + (((x & mask) * y) >> np.uint64(32))) >> np.uint64(32)


@compiled
def _below_64(s: Any, bound: Any) -> Any:
    """A number below a bound, by Canon's method on 64-bit draws; the bound itself has at most 32 bits."""
    x = _next(s)
    high, low = _product_high(x, bound), x * bound
    if low > ~bound + np.uint64(1):
        more = _product_high(_next(s), bound)
        if low + more < low:
            high += np.uint64(1)
    return high


@compiled
def _shuffled(rows: Any, clump: int, s: Any) -> Any:
    """Rows in clumps, the clumps shuffled; only the last clump may be smaller."""
    count = (len(rows) + clump - 1) // clump
    clumps = np.arange(count).astype(np.uint32)
    chunk, left = np.uint64(0), 1  # the first index is 0 without a draw
    for i in range(count):
        n = np.uint64(i + 1)
        if left == 0:
            bound, left = n, 1
            while bound * (n + np.uint64(left)) <= np.uint64(0xFFFFFFFF):
                bound *= n + np.uint64(left)
                left += 1
            chunk = _below_32(s, bound)
        left -= 1
        if left == 0:
            j = np.int64(chunk)
        else:
            j = np.int64(chunk % n)
            chunk //= n
        clumps[i], clumps[j] = clumps[j], clumps[i]
    if clump == 1:
        return rows[clumps]
    out = np.empty(len(rows), np.uint32)
    at = 0
    for i in range(count):
        first = np.int64(clumps[i]) * clump
        for row in rows[first : first + clump]:
            out[at] = row
            at += 1
    return out


@compiled
def _dealt(num_rows: int, num_files: int, clump: int, s: Any) -> Any:
    """Rows dealt to files clump by clump: file after file in one array, and where each file ends."""
    count = (num_rows + clump - 1) // clump
    files = np.empty(count, np.uint16)
    ends = np.zeros(num_files, np.int64)
    for i in range(count):
        files[i] = _below_64(s, np.uint64(num_files))
        ends[files[i]] += min(clump, num_rows - i * clump)
    for i in range(1, num_files):
        ends[i] += ends[i - 1]
    at = np.zeros(num_files, np.int64)
    at[1:] = ends[:-1]
    order = np.empty(num_rows, np.uint32)
    for row in range(num_rows):
        file = files[row // clump]
        order[at[file]] = row
        at[file] += 1
    return order, ends
