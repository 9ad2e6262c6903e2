"""What Gopher's quality rules ask about words and symbols, compiled.

Invariant: words are those of `str.split()`; what is counted is counted as datatrove's GopherQualityFilter does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pretrain_assets.compiled import compiled
from pretrain_assets.curate.characters import CONTENT, LETTER, code_point, width

CHARACTERS, NEWLINES, HASHES, ELLIPSES = 0, 1, 2, 3
CONTENT_WORDS, CONTENT_CHARACTERS, LETTER_WORDS, STOP_WORDS = 4, 5, 6, 7
"""Columns of what is counted per text: code points, line feeds, `#`, `...` and `…`; words with a character that is no
punctuation, their code points, words with a letter, distinct stop words."""


@compiled
def count_words(
    data: Any, offsets: Any, starts: Any, stops: Any, firsts: Any, kinds: Any, stop_data: Any, stop_offsets: Any
) -> Any:
    """Count words and symbols of every text.

    Args:
        data: uint8, UTF-8 bytes of all texts.
        offsets: (texts + 1,): where each text begins.
        starts: Where words begin.
        stops: Where they end.
        firsts: (texts + 1,): text t has the words firsts[t] to firsts[t + 1].
        kinds: Kinds of characters.
        stop_data: uint8, the stop words' bytes, at most 64 words.
        stop_offsets: Where each stop word begins in them.

    Returns:
        int64 (texts, 8) counts, and int32 (words,) code points of each word.
    """
    counts = np.zeros((len(offsets) - 1, 8), np.int64)
    lengths = np.empty(len(starts), np.int32)
    for text in range(len(offsets) - 1):
        count = counts[text]
        _symbols(data, offsets[text], offsets[text + 1], count)
        present = np.uint64(0)
        for word in range(firsts[text], firsts[text + 1]):
            at, stop = starts[word], stops[word]
            length, found = 0, 0
            while at < stop:
                first = data[at]
                if first < 0x80:
                    found |= kinds[first]
                    at += 1
                else:
                    found |= kinds[code_point(data, at)]
                    at += width(first)
                length += 1
            lengths[word] = length
            if found & CONTENT:
                count[CONTENT_WORDS] += 1
                count[CONTENT_CHARACTERS] += length
            count[LETTER_WORDS] += found & LETTER
            present |= _stop_word(data, starts[word], stop, stop_data, stop_offsets)
        while present:
            present &= present - np.uint64(1)
            count[STOP_WORDS] += 1
    return counts, lengths


@compiled
def _symbols(data: Any, at: int, stop: int, count: Any) -> None:
    while at < stop:
        byte = data[at]
        if byte == 0x2E and at + 2 < stop and data[at + 1] == 0x2E and data[at + 2] == 0x2E:
            count[ELLIPSES] += 1
            count[CHARACTERS] += 3
            at += 3
            continue
        if byte == 0xE2 and data[at + 1] == 0x80 and data[at + 2] == 0xA6:
            count[ELLIPSES] += 1
        count[HASHES] += byte == 0x23
        count[NEWLINES] += byte == 0x0A
        count[CHARACTERS] += byte & 0xC0 != 0x80
        at += 1


@compiled
def _stop_word(data: Any, start: int, stop: int, stop_data: Any, stop_offsets: Any) -> Any:
    """The bit of the stop word that a word is; 0 for others."""
    length = stop - start
    for k in range(len(stop_offsets) - 1):
        begin = stop_offsets[k]
        if stop_offsets[k + 1] - begin != length:
            continue
        same = 0
        while same < length and data[start + same] == stop_data[begin + same]:
            same += 1
        if same == length:
            return np.uint64(1) << np.uint64(k)
    return np.uint64(0)
