"""Many byte strings looked for at once.

Invariant: what is found is exactly what `needle in content` finds; the time hardly depends on how many needles there
are, so that hundreds of documents can be looked for in every file of a project.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

PIECE_BYTES = 16 << 20
ANCHOR_BYTES = 8
"""Of each needle the first bytes, as one number, are looked for first: rare enough that few are left to compare."""
HASH_BITS = 16


class Needles:
    """Byte strings to look for, each once."""

    def __init__(self, needles: Iterable[bytes]) -> None:
        """Prepare to look for them."""
        self.all = tuple(dict.fromkeys(needles))
        self._short = [needle for needle in self.all if len(needle) < ANCHOR_BYTES]
        self._by_anchor: dict[int, list[bytes]] = {}
        for needle in self.all:
            if len(needle) >= ANCHOR_BYTES:
                anchor = int.from_bytes(needle[:ANCHOR_BYTES], sys.byteorder)
                self._by_anchor.setdefault(anchor, []).append(needle)
        self._anchors = np.array(sorted(self._by_anchor), np.uint64)
        self._hashed = np.zeros(1 << HASH_BITS, np.bool_)
        self._hashed[_hashes(self._anchors)] = True

    def without(self, found: Collection[bytes]) -> Needles:
        """The others."""
        return Needles(needle for needle in self.all if needle not in found)

    def found_in(self, content: bytes) -> set[bytes]:
        """Which of them stand in some content: 200 MB/s and more, be they one or thousands."""
        found = {needle for needle in self._short if needle in content}
        for start in range(min(ANCHOR_BYTES, len(content)) if len(self._anchors) else 0):
            words = np.frombuffer(content, np.uint64, (len(content) - start) // ANCHOR_BYTES, start)
            words = words[self._hashed[_hashes(words)]]
            for anchor in np.unique(words[is_in(words, self._anchors)]).tolist():
                found |= {needle for needle in self._by_anchor[anchor] if needle in content}
        return found


def _hashes(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Fibonacci hashing (Knuth, The Art of Computer Programming 3, 6.4): the upper bits of a product."""
    return np.asarray((words * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - HASH_BITS))


def is_in(values: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which values are among some numbers in ascending order, in time that hardly depends on how many these are."""
    if not len(wanted):
        return np.zeros(len(values), np.bool_)
    places = np.minimum(np.searchsorted(wanted, values), len(wanted) - 1)
    return np.asarray(wanted[places] == values)


def find_in_bytes(file: Any, needles: Needles) -> set[bytes]:
    """Which of the needles a binary file holds, read in pieces that overlap."""
    found: set[bytes] = set()
    overlap = max((len(needle) for needle in needles.all), default=1) - 1
    before = b""
    while piece := file.read(PIECE_BYTES):
        content = before + piece
        found |= needles.found_in(content)
        before = content[-overlap:] if overlap else b""
    return found
