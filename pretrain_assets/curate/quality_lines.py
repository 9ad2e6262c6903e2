"""Duplicate lines and paragraphs, and how lines end, compiled: Gopher's repetition rules and FineWeb's.

Invariant: lines end at line feeds alone, as in both of datatrove's filters, so the carriage return of a CRLF file
belongs to its line.
Memory: 24 bytes per line of the text being read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pretrain_assets.compiled import compiled
from pretrain_assets.curate.characters import (
    TERMINAL,
    code_point,
    count_characters,
    first_equal,
    last_character,
    left_strip,
    right_strip,
)

SHORT_LINE = 30
"""Characters up to which a line is short (FineWeb)."""

LINES, DUP_LINES, DUP_LINE_CHARACTERS = 0, 1, 2
PARAGRAPHS, DUP_PARAGRAPHS, DUP_PARAGRAPH_CHARACTERS = 3, 4, 5
FULL_LINES, ENDED_LINES, SHORT_LINES, DUP_FULL_CHARACTERS = 6, 7, 8, 9
"""Columns of what is counted per text: lines as Gopher's repetition rule splits them, duplicates among them and the
code points of those; the same of paragraphs; lines that are not blank, those of them that end in terminal punctuation,
that are short, and the code points of duplicates among them."""


@compiled
def count_lines(data: Any, offsets: Any, kinds: Any) -> Any:
    """Count lines and paragraphs of every text.

    Args:
        data: uint8, UTF-8 bytes of all texts.
        offsets: (texts + 1,): where each text begins.
        kinds: Kinds of characters.

    Returns:
        int64 (texts, 10) counts.
    """
    counts = np.zeros((len(offsets) - 1, 10), np.int64)
    for text in range(len(offsets) - 1):
        view = data[offsets[text] : offsets[text + 1]]
        _lines(view, kinds, counts[text])
        _paragraphs(view, counts[text])
    return counts


@compiled
def _lines(data: Any, kinds: Any, count: Any) -> None:
    """Lines between runs of line feeds; before the first and behind the last is an empty one."""
    size = len(data)
    outer = (size == 0 or data[0] == 0x0A) + (size > 0 and data[size - 1] == 0x0A)
    spans = 0
    for at in range(size):
        spans += data[at] != 0x0A and (at + 1 == size or data[at + 1] == 0x0A)
    count[LINES] = outer + spans
    count[DUP_LINES] = outer > 1
    starts, stops = np.empty(spans, np.int32), np.empty(spans, np.int32)
    slots = np.full(2 * spans, -1, np.int32)
    begin = line = 0
    for at in range(size):
        if data[at] == 0x0A:
            begin = at + 1
        elif at + 1 == size or data[at + 1] == 0x0A:
            starts[line], stops[line] = begin, at + 1
            _line(data, starts, stops, slots, line, kinds, count)
            line += 1


@compiled
def _line(data: Any, starts: Any, stops: Any, slots: Any, line: int, kinds: Any, count: Any) -> None:
    start, stop = starts[line], stops[line]
    characters = count_characters(data, start, stop)
    is_duplicate = first_equal(data, starts, stops, slots, line) != line
    count[DUP_LINES] += is_duplicate
    count[DUP_LINE_CHARACTERS] += characters * is_duplicate
    if left_strip(data, start, stop) < stop:
        count[FULL_LINES] += 1
        count[SHORT_LINES] += characters <= SHORT_LINE
        count[DUP_FULL_CHARACTERS] += characters * is_duplicate
        count[ENDED_LINES] += kinds[code_point(data, last_character(data, start, stop))] & TERMINAL != 0


@compiled
def _paragraphs(data: Any, count: Any) -> None:
    """Paragraphs between runs of two or more line feeds, white space at the text's ends left out."""
    begin, end = left_strip(data, 0, len(data)), right_strip(data, 0, len(data))
    spans = 1
    for at in range(begin, end - 1):
        spans += data[at] == 0x0A and data[at + 1] == 0x0A and data[at - 1] != 0x0A
    count[PARAGRAPHS] = spans
    if spans == 1:
        return
    starts, stops = np.empty(spans, np.int32), np.empty(spans, np.int32)
    slots = np.full(2 * spans, -1, np.int32)
    paragraph, at = 0, begin
    while at <= end:
        if at < end and not (data[at] == 0x0A and data[at + 1] == 0x0A):
            at += 1
            continue
        starts[paragraph], stops[paragraph] = begin, at
        if first_equal(data, starts, stops, slots, paragraph) != paragraph:
            count[DUP_PARAGRAPHS] += 1
            count[DUP_PARAGRAPH_CHARACTERS] += count_characters(data, begin, at)
        paragraph += 1
        at += 1
        while at < end and data[at] == 0x0A:
            at += 1
        begin = at
