"""Which texts repeat an earlier one: candidates that share a band of their signatures, verified, the first one wins.

Invariant: what becomes of a text depends on it and on texts with lower ids alone, so that appending changes nothing. A
near duplicate names the most similar of the kept texts that it was compared with (of equals, the first), which has a
lower id and is itself no near duplicate: with A near B, B near C and A far from C, C stays.
Memory, while it runs: 45 bytes per text (0.9 GB at 20 million), and some 200 per candidate: a text that shares a band
with another one. Hashes of bands (8 bytes per band and text) and what candidates are verified by (a signature, or 8
bytes per shingle) are in files of a temporary folder, see TMPDIR.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain_assets.compiled import compiled
from pretrain_assets.curate.minhash import EMPTY, band_hashes

_log = logging.getLogger(__name__)

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Texts that share a value of a band with another text."""

    rows: Rows
    """Their rows, in the order of their ids, shape (candidates,)."""
    numbers: npt.NDArray[np.int32]
    """The bucket of each in each band, -1 where no other text has the same value: shape (candidates, bands)."""
    firsts: Rows
    """Where the slots of each bucket begin, as many as it has texts; shape (buckets + 1,)."""


@dataclass(frozen=True, kw_only=True)
class NearDuplicates:
    """Texts that repeat an earlier one, by row."""

    rows: Rows
    """Their rows."""
    partners: Rows
    """The row of the text that each repeats."""
    similarities: npt.NDArray[np.float32]
    """How similar the two are."""


def detection_probability(similarity: float, *, bands: int, rows_per_band: int, threshold: float = 0.0) -> float:
    """Share of pairs of this Jaccard index that share a band and whose estimated index reaches the threshold.

    With threshold 0 it is the known 1 - (1 - s^r)^b (Leskovec, Rajaraman, Ullman, "Mining of Massive Datasets", 3.4).
    Otherwise: the number m of equal values is binomial, and given m, the equal ones lie anywhere; the chance that they
    fill no band follows by inclusion and exclusion over the bands that they fill. Our slots share out the shingles, so
    that m varies less than that: the share is lower below the threshold, and higher above it.
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


def find_buckets(
    signatures: Iterable[npt.NDArray[np.uint32]],
    takes_part: npt.NDArray[np.bool_],
    ids: Rows,
    *,
    bands: int,
    scratch: Path,
) -> Buckets:
    """Texts that share a band with another one.

    Args:
        signatures: One per row, in row order and in pieces of shape (some rows, values).
        takes_part: Whether a row may be near another one, shape (rows,); one without words never is.
        ids: Of each row.
        bands: Number of bands.
        scratch: Empty folder.
    """
    rows = _write_bands(signatures, takes_part, bands, scratch)
    shared, found, total = np.zeros(len(rows), bool), [], 0
    sizes: list[npt.NDArray[np.int64]] = []
    for band in range(bands):
        path = scratch / f"band-{band}"
        members, counts = _same(np.fromfile(path, np.uint64))
        path.unlink()
        found.append((members, np.repeat(np.arange(total, total + len(counts), dtype=np.int32), counts)))
        sizes.append(counts)
        shared[members] = True
        total += len(counts)
    candidates = np.flatnonzero(shared)
    candidates = candidates[np.argsort(ids[rows[candidates]], kind="stable")]
    place = np.empty(len(rows), np.int32)
    place[candidates] = np.arange(len(candidates), dtype=np.int32)
    numbers = np.full((len(candidates), bands), -1, np.int32)
    for band, (members, bucket) in enumerate(found):
        numbers[place[members], band] = bucket
    firsts = np.concatenate([[0], *sizes]).cumsum()
    return Buckets(rows=rows[candidates], numbers=numbers, firsts=firsts)


def _write_bands(
    signatures: Iterable[npt.NDArray[np.uint32]], takes_part: npt.NDArray[np.bool_], bands: int, scratch: Path
) -> Rows:
    """Hashes of every band of the texts with words that take part, one file per band; which rows they are."""
    rows, position = [np.empty(0, np.int64)], 0
    with ExitStack() as opened:
        files = [opened.enter_context((scratch / f"band-{band}").open("wb")) for band in range(bands)]
        for some in signatures:
            chosen = takes_part[position : position + len(some)] & (some != EMPTY).any(axis=1)
            for file, hashes in zip(files, band_hashes(some[chosen], bands), strict=True):
                file.write(np.ascontiguousarray(hashes).data)  # whose errors name the cause; tofile's do not
            rows.append(position + np.flatnonzero(chosen))
            position += len(some)
    return np.concatenate(rows)


def _same(hashes: npt.NDArray[np.uint64]) -> tuple[Rows, Rows]:
    """Places of hashes that occur more than once, equal ones together, and how often each hash occurs."""
    order = np.argsort(hashes)
    ordered = hashes[order]
    same = np.zeros(len(hashes) + 1, bool)  # whether a hash equals the one before it
    same[1:-1] = ordered[1:] == ordered[:-1]
    member = same[1:] | same[:-1]
    starts = np.flatnonzero(member & ~same[:-1])
    ends = np.flatnonzero(member & ~same[1:]) + 1
    return order[member], ends - starts


def first_wins(
    buckets: Buckets,
    evidence: Iterable[tuple[npt.NDArray[Any], Rows]],
    *,
    threshold: float,
    max_compared: int,
    scratch: Path,
) -> NearDuplicates:
    """Go through the candidates in the order of their ids, and compare each with the kept ones of its buckets.

    Args:
        buckets: The candidates.
        evidence: What they are compared by, in row order and in pieces of (values of some rows one after the other,
            how many each has): uint32 signatures, which are compared value by value, or uint64 sets of shingles.
        threshold: Similarity from which a text is a near duplicate.
        max_compared: Kept texts of a bucket at most, the earliest.
        scratch: Empty folder.
    """
    order = np.argsort(buckets.rows)
    path, lengths, kind = scratch / "evidence", list[Rows](), np.dtype(np.uint32)
    with path.open("wb") as file:
        for values, each in evidence:
            file.write(np.ascontiguousarray(values).data)
            lengths.append(each)
            kind = values.dtype
    edges = np.concatenate([[0], *lengths]).cumsum()
    assert len(edges) == len(order) + 1, f"evidence of {len(edges) - 1} rows for {len(order)} candidates"
    spans = np.empty((len(order), 2), np.int64)
    spans[order, 0], spans[order, 1] = edges[:-1], edges[1:]
    values = np.asarray(np.memmap(path, kind, mode="r")) if len(order) else np.empty(0, kind)
    partners, similarities, full = _first_wins(
        buckets.numbers, buckets.firsts, values, spans, kind == np.uint64, threshold, max_compared
    )
    if full:
        _log.warning(
            "%s texts were not compared with all kept texts of their buckets: templates share bands by the thousand. "
            "Raise max_compared (%d) to compare them with more.",
            f"{full:,}",
            max_compared,
        )
    near = np.flatnonzero(partners >= 0)
    return NearDuplicates(
        rows=buckets.rows[near], partners=buckets.rows[partners[near]], similarities=similarities[near]
    )


@compiled
def _first_wins(
    numbers: Any, firsts: Any, values: Any, spans: Any, is_sets: bool, threshold: float, max_compared: int
) -> Any:
    """Partner (-1: kept) and similarity of every candidate, and how many of them met a full bucket."""
    rows, bands = numbers.shape
    partners, similarities = np.full(rows, -1, np.int64), np.zeros(rows, np.float32)
    kept, compared_for = np.empty(firsts[-1], np.int32), np.full(rows, -1, np.int32)
    num_kept = np.zeros(len(firsts) - 1, np.int32)
    full = 0
    for row in range(rows):
        best, partner, met_full = 0.0, -1, False
        for band in range(bands):
            bucket = numbers[row, band]
            if bucket < 0:
                continue
            met_full |= num_kept[bucket] >= max_compared
            for slot in range(firsts[bucket], firsts[bucket] + num_kept[bucket]):
                other = kept[slot]
                if compared_for[other] == row:
                    continue
                compared_for[other] = row
                left, right = values[spans[row, 0] : spans[row, 1]], values[spans[other, 0] : spans[other, 1]]
                similarity = jaccard(left, right) if is_sets else share_equal(left, right)
                if similarity > best or (similarity == best and other < partner):
                    best, partner = similarity, other
        full += met_full
        if best >= threshold:
            partners[row], similarities[row] = partner, best
            continue
        for band in range(bands):
            bucket = numbers[row, band]
            if bucket >= 0 and num_kept[bucket] < max_compared:
                kept[firsts[bucket] + num_kept[bucket]] = row
                num_kept[bucket] += 1
    return partners, similarities, full


@compiled
def share_equal(left: Any, right: Any) -> float:
    """Share of values in which two signatures agree: estimates the Jaccard index of the texts' shingles."""
    equal = 0
    for at in range(len(left)):
        equal += left[at] == right[at]
    return equal / len(left)


@compiled
def jaccard(left: Any, right: Any) -> float:
    """Jaccard index of two sets, each ascending without repeats, not both empty."""
    both, i, j = 0, 0, 0
    while i < len(left) and j < len(right):
        a, b = left[i], right[j]
        both += a == b
        i += a <= b
        j += b <= a
    return both / (len(left) + len(right) - both)


def chosen(pieces: Iterator[Any], rows: Rows, pick: Callable[[Any], Any]) -> Iterator[Any]:
    """`pick` of the wanted rows of each piece, pieces without any left out.

    Args:
        pieces: Arrow arrays in row order.
        rows: Rows wanted, ascending.
        pick: Takes an Arrow array.
    """
    position = 0
    for piece in pieces:
        low, high = np.searchsorted(rows, (position, position + len(piece)))
        if low < high:
            yield pick(piece.take(rows[low:high] - position))
        position += len(piece)
