"""Characters and spans of UTF-8 for the compiled loops: kinds of characters, trimming, equal spans.

Invariant: the kinds are Python's own (`str.isalpha`, `str.isdecimal`), so that a compiled rule finds what the same rule
in Python would find; spans are compared byte by byte, so that equal means equal.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain_assets.compiled import compiled
from pretrain_assets.curate.words import space_bytes

LETTER, CONTENT, TERMINAL, DIGIT = 1, 2, 4, 8
"""Kinds of characters: a letter; none of datatrove's punctuation; one that ends a sentence; a decimal digit."""

LETTERS_END = 0x40000
"""Code points from here on are neither letters nor digits, as of Unicode 17."""

PUNCTUATION = (
    "0-8 b-1f 21-2f 3a-40 5b-60 7b-9f ab b4 bb 2013-2014 2019 201c-201e 2026 2236 2501 25ba 3001-3002 3008-300d "
    "3010-3011 ff01 ff05 ff08-ff09 ff0c ff0e ff11 ff1a-ff1b ff1f ff5e "
)
"""Code points that make no word, in hexadecimal: datatrove's (`utils.text.PUNCTUATION`), as CCNet's normalisation."""
SENTENCE_TERMINAL = (
    "21 2e 3f 589 61d-61f 6d4 700-702 7f9 837 839 83d-83e 964-965 104a-104b 1362 1367-1368 166e 1735-1736 17d4-17d6 "
    "17d9-17da 1803 1809 1944-1945 1aa8-1aab 1b5a-1b5b 1b5e-1b5f 1b7d-1b7e 1c3b-1c3c 1c7e-1c7f 203c-203d 2047-2049 "
    "2e2e 2e3c 2e53-2e54 3002 a4ff a60e-a60f a6f3 a6f7 a876-a877 a8ce-a8cf a92f a9c8-a9c9 aa5d-aa5f aaf0-aaf1 abeb "
    "fe52 fe56-fe57 ff01 ff0e ff1f ff61 10a56-10a57 10f55-10f59 10f86-10f89 11047-11048 110be-110c1 11141-11143 "
    "111c5-111c6 111cd 111de-111df 11238-11239 1123b-1123c 112a9 1144b-1144c 115c2-115c3 115c9-115d7 11641-11642 "
    "1173c-1173e 11944 11946 11a42-11a43 11a9b-11a9c 11c41-11c42 11ef7-11ef8 11f43-11f44 16a6e-16a6f 16af5 "
    "16b37-16b38 16b44 16e98 1bc9f 1da88 "
)
"""Code points that end a sentence, in hexadecimal: datatrove's (`TERMINAL_PUNCTUATION`),
Unicode's property Sentence_Terminal."""

FNV_OFFSET, FNV_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)
MIX = np.uint64(0x9E3779B97F4A7C15)
HALF = np.uint64(32)


@functools.cache
def kinds() -> npt.NDArray[np.uint8]:
    """The kinds of every code point, one byte each."""
    table = np.full(0x110000, CONTENT, np.uint8)
    for code in range(LETTERS_END):
        character = chr(code)
        table[code] |= LETTER * character.isalpha() + DIGIT * character.isdecimal()
    table[_codes(PUNCTUATION)] ^= CONTENT
    table[_codes(SENTENCE_TERMINAL)] |= TERMINAL
    return table


def _codes(ranges: str) -> list[int]:
    """Code points of ranges such as `21 61d-61f`."""
    ends = [[int(end, 16) for end in run.split("-")] for run in ranges.split()]
    return [code for run in ends for code in range(run[0], run[-1] + 1)]


@compiled
def width(first: int) -> int:
    """Bytes of the character that begins with this byte."""
    if first < 0x80:
        return 1
    if first < 0xE0:
        return 2
    return 3 if first < 0xF0 else 4


@compiled
def code_point(data: Any, at: int) -> Any:
    """The character that begins at `at`."""
    first = np.int64(data[at])
    if first < 0x80:
        return first
    if first < 0xE0:
        return (first & 0x1F) << 6 | (data[at + 1] & 0x3F)
    if first < 0xF0:
        return (first & 0x0F) << 12 | np.int64(data[at + 1] & 0x3F) << 6 | (data[at + 2] & 0x3F)
    high = (first & 0x07) << 18 | np.int64(data[at + 1] & 0x3F) << 12
    return high | np.int64(data[at + 2] & 0x3F) << 6 | (data[at + 3] & 0x3F)


@compiled
def last_character(data: Any, start: int, stop: int) -> int:
    """Where the last character of a span that is not empty begins."""
    at = stop - 1
    while at > start and data[at] & 0xC0 == 0x80:
        at -= 1
    return at


@compiled
def count_characters(data: Any, start: int, stop: int) -> int:
    """Code points in a span."""
    count = 0
    for at in range(start, stop):
        count += data[at] & 0xC0 != 0x80
    return count


@compiled
def left_strip(data: Any, start: int, stop: int) -> int:
    """Where a span begins without the white space at its beginning."""
    while start < stop:
        space = space_bytes(data, start, stop)
        if space == 0:
            break
        start += space
    return start


@compiled
def right_strip(data: Any, start: int, stop: int) -> int:
    """Where a span ends without the white space at its end."""
    while start < stop:
        at = last_character(data, start, stop)
        if space_bytes(data, at, stop) == 0:
            break
        stop = at
    return stop


@compiled
def break_bytes(data: Any, at: int, stop: int) -> int:
    """Bytes of the line break that begins at `at`, and 0 where there is none: those of Python's `str.splitlines`."""
    first = data[at]
    if first < 0x80:
        if first == 0x0D:
            return 2 if at + 1 < stop and data[at + 1] == 0x0A else 1
        return 1 if 0x0A <= first <= 0x0C or 0x1C <= first <= 0x1E else 0
    if first == 0xC2:
        return 2 if at + 1 < stop and data[at + 1] == 0x85 else 0
    if first == 0xE2 and at + 2 < stop and data[at + 1] == 0x80:
        return 3 if data[at + 2] == 0xA8 or data[at + 2] == 0xA9 else 0
    return 0


@compiled
def first_equal(data: Any, starts: Any, stops: Any, slots: Any, item: int) -> Any:
    """The earlier span with the same bytes; the span itself, from now on in the table, where there is none.

    Args:
        data: uint8 bytes.
        starts: Where spans begin.
        stops: Where they end.
        slots: Hash table of span numbers, -1 where free, larger than the number of spans (linear probing).
        item: The span's number.
    """
    start, length = starts[item], stops[item] - starts[item]
    code = FNV_OFFSET
    for at in range(start, start + length):
        code = (code ^ np.uint64(data[at])) * FNV_PRIME
    slot: Any = np.int64((((code * MIX) >> HALF) * np.uint64(len(slots))) >> HALF)
    while slots[slot] >= 0:
        other = slots[slot]
        if stops[other] - starts[other] == length:
            same, begin = 0, starts[other]
            while same < length and data[begin + same] == data[start + same]:
                same += 1
            if same == length:
                return np.int64(other)
        slot += 1
        if slot == len(slots):
            slot = 0
    slots[slot] = item
    return item
