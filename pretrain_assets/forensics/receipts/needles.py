"""Many byte strings looked for at once.

Invariant: what is found is exactly what `needle in content` finds; the time hardly depends on how many needles there
are, so that hundreds of documents can be looked for in every file of a project.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

PIECE_BYTES = 16 << 20
WORD = 8
"""Bytes of a word: of each needle its first, and the last that all needles reach to, are looked for before the rest."""
HASH_BITS = 16
UInt64Array = npt.NDArray[np.uint64]


class Needles:
    """Byte strings to look for, each once."""

    def __init__(self, needles: Iterable[bytes]) -> None:
        """Prepare to look for them."""
        self.all = tuple(dict.fromkeys(needles))
        self._short = [needle for needle in self.all if len(needle) < WORD]
        long = [needle for needle in self.all if len(needle) >= WORD]
        self._width = min(map(len, long), default=WORD)
        self._by_key: dict[int, list[bytes]] = {}
        for needle in long:
            self._by_key.setdefault(int(_keys(needle[: self._width], 0, self._width)[0]), []).append(needle)
        self._keys = np.array(sorted(self._by_key), np.uint64)
        self._hashed = np.zeros(1 << HASH_BITS, np.bool_)
        self._hashed[_hashes(self._keys)] = True

    def without(self, found: Collection[bytes]) -> Needles:
        """The others."""
        return Needles(needle for needle in self.all if needle not in found)

    def found_in(self, content: bytes) -> set[bytes]:
        """Which of them stand in some content."""
        found = {needle for needle in self._short if needle in content}
        for start in range(min(WORD, len(content) - self._width + 1) if self._by_key else 0):
            keys = _keys(content, start, self._width)
            places = np.flatnonzero(self._hashed[_hashes(keys)])
            places = places[is_in(keys[places], self._keys)]
            for at, key in zip((start + WORD * places).tolist(), keys[places].tolist(), strict=True):
                found.update(needle for needle in self._by_key[key] if content.startswith(needle, at))
        return found


def _keys(content: bytes, start: int, width: int) -> UInt64Array:
    """Keys of the parts of so many bytes that begin at `start` and every eight bytes after it: of two words of each."""
    last = start + width - WORD
    count = (len(content) - last) // WORD
    first, end = (np.frombuffer(content, np.uint64, count, at) for at in (start, last))
    return np.asarray(first * np.uint64(0x9E3779B97F4A7C15) + end * np.uint64(0xC2B2AE3D27D4EB4F))


def _hashes(keys: UInt64Array) -> UInt64Array:
    """The upper bits of keys, which are sums of products with large odd numbers (Knuth, TAOCP 3, 6.4)."""
    return np.asarray(keys >> np.uint64(64 - HASH_BITS))


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
