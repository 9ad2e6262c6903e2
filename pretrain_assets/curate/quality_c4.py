"""C4's rules on lines, and Gopher's on how lines begin and end, compiled.

Invariant: every line of a text is counted under exactly one outcome, the first of C4's rules that it meets, in the
order of C4's own code; only kept lines have sentences. Lines are those of `str.splitlines()`.
Memory: 2 bytes per byte of the longest line with a bracket.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pretrain_assets.compiled import compiled
from pretrain_assets.curate.characters import (
    DIGIT,
    break_bytes,
    code_point,
    left_strip,
    right_strip,
    width,
)
from pretrain_assets.curate.words import Bytes, Offsets

LONG_WORD, FEW_WORDS = 1000, 3
"""A line with a word of more characters, or with fewer words, is not kept."""

LINES, BULLETS, ELLIPSES, SENTENCES = 0, 1, 2, 3
LONG_WORDS, UNENDED, SHORT, LOREM_IPSUM, JAVASCRIPT, CURLY, POLICY, KEPT = 4, 5, 6, 7, 8, 9, 10, 11
ANY_LOREM_IPSUM, ANY_CURLY, ANY_SENTENCES = 12, 13, 14
"""Columns of what is counted per text: lines, those that begin with a bullet or hyphen, those that end in an ellipsis,
sentences in kept lines; then the lines of every outcome; then lines and sentences as without the rule on line ends."""

PHRASES = (
    "lorem ipsum",
    "javascript",
    "{",
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)
"""What is looked for in lines, in any case: the first three each have an outcome, the others are policies."""
PHRASE_DATA: Bytes = np.frombuffer("".join(PHRASES).encode(), np.uint8)
PHRASE_OFFSETS: Offsets = np.cumsum([0, *map(len, PHRASES)])
ANY = 0xFF


def _second_bytes() -> Bytes:
    """By a byte that begins a phrase, in any case, the second one, which those that begin alike share; else 0."""
    seconds = np.zeros(256, np.uint8)
    for phrase in PHRASES:
        for first in (phrase[0], phrase[0].upper()):
            seconds[ord(first)] = ord(phrase[1]) if len(phrase) > 1 else ANY
    return seconds


SECOND_BYTES = _second_bytes()

EDIT: Bytes = np.frombuffer(b"edit", np.uint8)
CITATION_NEEDED: Bytes = np.frombuffer(b"citation needed", np.uint8)


@compiled
def count_c4(data: Any, offsets: Any, firsts: Any, stops: Any, lengths: Any, kinds: Any) -> Any:
    """Count lines by outcome in every text.

    Args:
        data: uint8, UTF-8 bytes of all texts.
        offsets: (texts + 1,): where each text begins.
        firsts: (texts + 1,): text t has the words firsts[t] to firsts[t + 1].
        stops: Where words end.
        lengths: Characters of each word.
        kinds: Kinds of characters.

    Returns:
        int64 (texts, 15) counts.
    """
    counts = np.zeros((len(offsets) - 1, 15), np.int64)
    for text in range(len(offsets) - 1):
        count, word = counts[text], firsts[text]
        begin, end = offsets[text], offsets[text + 1]
        while begin < end:
            stop = begin
            while stop < end and (0x1E < data[stop] < 0xC2 or break_bytes(data, stop, end) == 0):
                stop += 1
            first, longest = word, 0
            while word < firsts[text + 1] and stops[word] <= stop:
                longest = max(longest, lengths[word])
                word += 1
            count[LINES] += 1
            _line(data, begin, stop, word - first, longest, kinds, count)
            begin = stop + (break_bytes(data, stop, end) if stop < end else 0)
    return counts


@compiled
def _line(data: Any, start: int, stop: int, words: int, longest: int, kinds: Any, count: Any) -> None:
    start, stop = left_strip(data, start, stop), right_strip(data, start, stop)
    if start < stop:
        count[BULLETS] += data[start] == 0x2D or _is_three(data, start, stop, start, 0xE2, 0x80, 0xA2)
        tail = stop - 3
        dots = _is_three(data, start, stop, tail, 0x2E, 0x2E, 0x2E)
        count[ELLIPSES] += dots or _is_three(data, start, stop, tail, 0xE2, 0x80, 0xA6)
    if longest > LONG_WORD:
        count[LONG_WORDS] += 1
        return
    for at in range(start, stop):
        if data[at] == 0x5B:
            data = _without_citations(data, start, stop, kinds)
            start, stop = 0, len(data)
            break
    is_ended = _is_ended(data, start, stop)
    if words < FEW_WORDS:
        count[SHORT if is_ended else UNENDED] += 1
        return
    outcome = _phrase(data, start, stop)
    sentences = _sentences(data, start, stop) if outcome == KEPT else 0
    count[outcome if is_ended else UNENDED] += 1
    count[SENTENCES] += sentences * is_ended
    count[ANY_LOREM_IPSUM] += outcome == LOREM_IPSUM
    count[ANY_CURLY] += outcome == CURLY
    count[ANY_SENTENCES] += sentences


@compiled
def _is_three(data: Any, start: int, stop: int, at: int, first: int, second: int, third: int) -> Any:
    """Whether these three bytes stand at a place of a span."""
    if at < start or at + 3 > stop:
        return False
    return data[at] == first and data[at + 1] == second and data[at + 2] == third


@compiled
def _is_ended(data: Any, start: int, stop: int) -> Any:
    """Whether a line ends in `.`, `?`, `!` or a quotation mark, and not in `...`."""
    if start >= stop:
        return False
    last = data[stop - 1]
    if last == 0x2E:
        return not (stop - start >= 3 and data[stop - 2] == 0x2E and data[stop - 3] == 0x2E)
    return last == 0x3F or last == 0x21 or last == 0x22 or last == 0x27


@compiled
def _without_citations(data: Any, start: int, stop: int, kinds: Any) -> Any:
    """The line without `[1]`, `[]`, `[edit]` and `[citation needed]`."""
    kept, length, at = np.empty(stop - start, np.uint8), 0, start
    while at < stop:
        if data[at] == 0x5B:
            behind = at + 1
            while behind < stop and kinds[code_point(data, behind)] & DIGIT:
                behind += width(data[behind])
            if behind == at + 1:
                behind = max(_behind(data, behind, stop, EDIT), _behind(data, behind, stop, CITATION_NEEDED))
            if behind < stop and data[behind] == 0x5D:
                at = behind + 1
                continue
        kept[length] = data[at]
        length += 1
        at += 1
    return kept[:length].copy()


@compiled
def _behind(data: Any, at: int, stop: int, phrase: Any) -> int:
    """The place behind a phrase, or `at` where it is not."""
    if at + len(phrase) > stop:
        return at
    for k in range(len(phrase)):
        if data[at + k] != phrase[k]:
            return at
    return at + len(phrase)


@compiled
def _phrase(data: Any, start: int, stop: int) -> int:
    """The outcome for a line that ends well and is long enough."""
    first = len(PHRASE_OFFSETS)
    for at in range(start, stop):
        second = SECOND_BYTES[data[at]]
        if second == 0 or (second != ANY and (at + 1 == stop or data[at + 1] | 0x20 != second)):
            continue
        for phrase in range(min(first, len(PHRASE_OFFSETS) - 1)):
            begin, same = PHRASE_OFFSETS[phrase], 0
            length = PHRASE_OFFSETS[phrase + 1] - begin
            while same < length and at + same < stop:
                byte = data[at + same]
                if byte + (0x20 if 0x41 <= byte <= 0x5A else 0) != PHRASE_DATA[begin + same]:
                    break
                same += 1
            if same == length:
                first = phrase
                break
    if first == len(PHRASE_OFFSETS):
        return KEPT
    return LOREM_IPSUM + min(first, POLICY - LOREM_IPSUM)


@compiled
def _sentences(data: Any, start: int, stop: int) -> int:
    """Sentences of a line: its end is one, and so is `.`, `!` or `?`, then quotation marks or brackets, then a space.

    A full stop after a single letter is an initial's, and one after another or a space is of an ellipsis. spaCy's
    rules, which datatrove uses, count the same in 98 to 99% of lines; they also end a sentence within `module.Name`.
    """
    count = 1
    for at in range(start, stop):
        if data[at] != 0x2E and data[at] != 0x21 and data[at] != 0x3F:
            continue
        if data[at] == 0x2E and not _ends_word(data, start, at):
            continue
        behind = at + 1
        while behind < stop and (
            data[behind] == 0x22 or data[behind] == 0x27 or data[behind] == 0x29 or data[behind] == 0x5D
        ):
            behind += 1
        count += behind < stop and data[behind] == 0x20
    return count


@compiled
def _ends_word(data: Any, start: int, at: int) -> Any:
    """Whether a full stop stands behind a word of more than one letter, or behind other than letters."""
    if at == start or data[at - 1] == 0x2E or data[at - 1] == 0x20:
        return False
    return not _is_letter(data[at - 1]) or (at > start + 1 and _is_letter(data[at - 2]))


@compiled
def _is_letter(byte: int) -> bool:
    return 0x41 <= byte <= 0x5A or 0x61 <= byte <= 0x7A
