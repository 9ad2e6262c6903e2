"""Words for comparing texts that may be set differently: case, accents, punctuation and line breaks do not count.

Invariant: text and its words are one pass over UTF-8 bytes; a word is a 64-bit hash of its letters, and no Python
object is made per document, word or letter.

The policy, for every script: compatibility forms are resolved (Unicode NFKD) and case is folded, so that full-width,
upper and lower case letters are one, and so are composed and decomposed ones. Accents and other marks, apostrophes, and
invisible characters (soft hyphens, zero-width spaces, byte order marks) are as if not there: "naïve" is "naive",
"Janet's" is "janets". A word is a run of letters and digits; everything else divides. In scripts written without spaces
(Han, kana, Thai, Lao, Burmese, Khmer) every letter is a word of its own. The tables are those of Python's
`unicodedata`.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pretrain_assets.compiled import compiled
from pretrain_assets.curate.characters import code_point, width

APOSTROPHES = "'\u2018\u2019\u02bc"
UNSPACED = (
    *((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3005, 0x3007), (0x3041, 0x30FF), (0x31F0, 0x31FF)),
    *((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0x20000, 0x3347F)),
)
"""First and last code points of the scripts written without spaces."""
NUM_CODES = 0x33480
"""Code points that the tables know; those above, private and invisible ones, are as if not there."""
SEPARATOR, NOTHING = 0, -1
"""What stands in the tables for a character that divides words, and for one that is as if not there."""

_SEED, _PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)
"""Of FNV-1a (Fowler, Noll, Vo), here over code points."""
_MIX, _HALF = np.uint64(0xFF51AFD7ED558CCD), np.uint64(32)
"""Of MurmurHash3's finalizer (Appleby), so that all bits of a word's hash depend on all of its letters."""


class Letters(NamedTuple):
    """What each character counts as."""

    ascii: npt.NDArray[np.int32]
    """The letter, `SEPARATOR` or `NOTHING`, by ASCII code."""
    firsts: npt.NDArray[np.int32]
    """(NUM_CODES + 1,): code point c counts as values[firsts[c]:firsts[c + 1]]."""
    values: npt.NDArray[np.int32]
    """Letters (their code points) and separators."""


@lru_cache(maxsize=1)
def letters() -> Letters:
    """The tables, made once per process (0.4 s, 2.6 MB)."""
    counted = [_counted(code) for code in range(NUM_CODES)]
    by_ascii = [values[0] if values else NOTHING for values in counted[:128]]
    return Letters(
        ascii=np.array(by_ascii, np.int32),
        firsts=np.array([0, *accumulate(map(len, counted))], np.int32),
        values=np.array([value for values in counted for value in values], np.int32),
    )


def _counted(code: int) -> list[int]:
    """What one character counts as."""
    if 0x4E00 <= code < 0xA000 or 0x20000 <= code < 0x2F800 or code >= 0x30000:  # Han: most of all, and none composed
        return [SEPARATOR, code, SEPARATOR]
    values: list[int] = []
    plain = unicodedata.normalize("NFKD", chr(code)).casefold()
    for letter in unicodedata.normalize("NFKD", plain):
        category = unicodedata.category(letter)
        if category[0] == "M" or category in ("Cf", "Cs") or letter in APOSTROPHES:
            continue
        if not letter.isalnum():
            values.append(SEPARATOR)
        elif any(first <= ord(letter) <= last for first, last in UNSPACED):
            values += [SEPARATOR, ord(letter), SEPARATOR]
        else:
            values.append(ord(letter))
    return values


class Place(NamedTuple):
    """Where a reader stands in a text."""

    at: int
    """Byte to go on from."""
    part: int
    """Values of the character there that were read already: one character may hold several words."""
    character: int
    """Number of that character in the text."""


@compiled
def read_words(data: Any, stop: int, place: Any, table: Any, words: Any, firsts: Any, lasts: Any) -> Any:
    """Read on until the text ends or the arrays are full.

    Args:
        data: uint8, UTF-8 bytes.
        stop: End of the text in them.
        place: Where to go on.
        table: `letters()`.
        words: uint64, (n,): gets the hashes of the words.
        firsts: int64, (n,): gets the characters (Unicode code points) of the text before each word.
        lasts: int64, (n,): gets the characters of the text up to the end of each word.

    Returns:
        The number of words read, fewer than n only at the end of the text, and the `Place` after them.
    """
    at, part, character = place
    count, begun, word = 0, False, _SEED
    first, last = character, character
    while at < stop and count < len(words):
        here = character
        if data[at] < 0x80:
            value = table.ascii[data[at]]
            at += 1
            character += 1
        else:
            code = code_point(data, at)
            value, left = NOTHING, 0
            if code < NUM_CODES:
                left = table.firsts[code + 1] - table.firsts[code] - part
                if left > 0:
                    value = table.values[table.firsts[code] + part]
                    part += 1
            if left <= 1:
                at += width(data[at])
                character += 1
                part = 0
        if value > 0:
            if not begun:
                begun, first = True, here
            word = (word ^ np.uint64(value)) * _PRIME
            last = here + 1
        elif begun:
            if value == SEPARATOR:
                words[count], firsts[count], lasts[count] = _mixed(word), first, last
                count, begun, word = count + 1, False, _SEED
            else:
                last = here + 1
    if begun:
        words[count], firsts[count], lasts[count] = _mixed(word), first, last
        count += 1
    return count, Place(at, part, character)


@compiled
def _mixed(word: Any) -> Any:
    mixed = (word ^ (word >> _HALF)) * _MIX
    return mixed ^ (mixed >> _HALF)


@compiled
def plain_words(data: Any, offsets: Any, table: Any) -> Any:
    """Hashes of the words of all texts, and which is the first of each text.

    Args:
        data: uint8, UTF-8 bytes of all texts.
        offsets: int64, (texts + 1,): where each text begins in them.
        table: `letters()`.

    Returns:
        uint64 (words,) and int64 (texts + 1,): text t has the words firsts[t] to firsts[t + 1].
    """
    words, read = np.empty(1024, np.uint64), np.empty((2, 1024), np.int64)
    found, firsts = np.empty(1024, np.uint64), np.zeros(len(offsets), np.int64)
    total = 0
    for text in range(len(offsets) - 1):
        place, count = Place(offsets[text], 0, 0), len(words)
        while count == len(words):
            count, place = read_words(data, offsets[text + 1], place, table, words, read[0], read[1])
            if total + count > len(found):
                more = np.empty(2 * len(found), np.uint64)
                more[:total] = found[:total]
                found = more
            found[total : total + count] = words[:count]
            total += count
        firsts[text + 1] = total
    return found[:total], firsts
