"""Words of texts as two people would call them the same: what near duplicates are compared by.

Invariant: a word's hash is a pure function of its characters, the same on every machine and Python; no word is copied.

Words are those of `str.split()`, then normalised: lower case and without accents (below U+2100, by Unicode 3.2),
without punctuation, symbols, control and zero-width characters; a word of those alone is none. Digits stay, and so does
one of . , - + / : right before a digit, so that 1.5 is neither 15 nor -1.5: tables that differ in their numbers stay
apart. Han and kana characters are words each, since nothing divides them. So CRLF and LF, NFC and NFD, curly and
straight quotes, with and without byte order mark, are the same.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain_assets.compiled import compiled

FOLDED = 0x2100
"""Code points below it are normalised by a table: Latin, Greek, Cyrillic and their accents, general punctuation."""
SPACE, DROPPED = 0x20, 0
"""In the table: white space, and what is left out."""
ACCENTS = ((0x0300, 0x036F), (0x1AB0, 0x1AFF), (0x1DC0, 0x1DFF), (0x20D0, 0x20FF))
"""Unicode's blocks of combining marks for alphabets; the vowel signs of other scripts are content."""
FNV_OFFSET, FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3


@lru_cache(maxsize=1)
def fold_table() -> npt.NDArray[np.uint16]:
    """What each code point below `FOLDED` becomes, by the Unicode 3.2 that every Python carries: it never changes."""
    from unicodedata import ucd_3_2_0 as unicode

    def accent(character: str) -> bool:
        return any(first <= ord(character) <= last for first, last in ACCENTS)

    table = np.arange(FOLDED, dtype=np.uint16)
    for code in range(FOLDED):
        character = chr(code)
        kind = unicode.category(character)
        if character.isspace():
            table[code] = SPACE
        elif kind[0] in "PSZ" or kind in ("Cc", "Cf") or accent(character):
            table[code] = DROPPED
        else:
            lower = character.lower() if kind == "Lu" else character
            base = [part for part in unicode.normalize("NFD", lower) if not accent(part)]
            table[code] = ord(base[0]) if len(base) == 1 else code
    return table


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
    word: Any = np.uint64(FNV_OFFSET)
    folded: Any
    empty, mark = True, 0
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
