"""The numbers of the published quality rules for a batch of texts, from the compiled counts.

Invariant: one array per column of the rules (`gopher_`, `c4_`, `fineweb_` in `table.quality_columns`), one value per
text; a share of nothing is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain_assets.curate import quality_c4 as c4
from pretrain_assets.curate import quality_lines as lines
from pretrain_assets.curate import quality_words as words
from pretrain_assets.curate.characters import kinds
from pretrain_assets.curate.quality_ngrams import LONGEST, LONGEST_TOP, SHORTEST, ngram_characters
from pretrain_assets.curate.words import Bytes, Offsets, word_spans

Numbers = dict[str, npt.NDArray[Any]]


def rule_numbers(data: Bytes, offsets: Offsets, stop_words: Sequence[str]) -> Numbers:
    """The columns of the rules, by name.

    Args:
        data: UTF-8 bytes of all texts.
        offsets: (texts + 1,): where each text begins.
        stop_words: At most 64 words.
    """
    starts, stops, firsts = word_spans(data, offsets)
    of_words, lengths = words.count_words(data, offsets, starts, stops, firsts, kinds(), *_packed(stop_words))
    characters, num_words = of_words[:, words.CHARACTERS], np.diff(firsts)
    of_lines, of_c4 = (
        lines.count_lines(data, offsets, kinds()),
        c4.count_c4(data, offsets, firsts, stops, lengths, kinds()),
    )
    return {
        **_gopher_quality(of_words.T, of_c4.T, num_words),
        **_gopher_repetition(of_lines.T, ngram_characters(data, starts, stops, firsts, lengths).T, characters),
        **_c4(of_c4.T),
        "fineweb_lorem_ipsum_lines": of_c4[:, c4.ANY_LOREM_IPSUM],
        "fineweb_curly_lines": of_c4[:, c4.ANY_CURLY],
        "fineweb_sentences": of_c4[:, c4.ANY_SENTENCES],
        **_fineweb(of_lines.T, characters, of_words[:, words.NEWLINES], num_words),
    }


def _share(part: npt.NDArray[Any], whole: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    shares: npt.NDArray[np.float32] = (part / np.maximum(whole, 1)).astype(np.float32)
    return shares


def _packed(stop_words: Sequence[str]) -> tuple[Bytes, Offsets]:
    encoded = [word.encode() for word in stop_words]
    return np.frombuffer(b"".join(encoded), np.uint8), np.cumsum([0, *map(len, encoded)])


def _gopher_quality(of_words: npt.NDArray[Any], of_lines: npt.NDArray[Any], num_words: npt.NDArray[Any]) -> Numbers:
    content = of_words[words.CONTENT_WORDS]
    return {
        "gopher_words": content,
        "gopher_word_length": _share(of_words[words.CONTENT_CHARACTERS], content),
        "gopher_hash_ratio": _share(of_words[words.HASHES], num_words),
        "gopher_ellipsis_ratio": _share(of_words[words.ELLIPSES], num_words),
        "gopher_bullet_lines": _share(of_lines[c4.BULLETS], of_lines[c4.LINES]),
        "gopher_ellipsis_lines": _share(of_lines[c4.ELLIPSES], of_lines[c4.LINES]),
        "gopher_alpha_words": _share(of_words[words.LETTER_WORDS], num_words),
        "gopher_stop_words": of_words[words.STOP_WORDS],
    }


def _gopher_repetition(of_lines: npt.NDArray[Any], grams: npt.NDArray[Any], characters: npt.NDArray[Any]) -> Numbers:
    return {
        "gopher_dup_lines": _share(of_lines[lines.DUP_LINES], of_lines[lines.LINES]),
        "gopher_dup_line_chars": _share(of_lines[lines.DUP_LINE_CHARACTERS], characters),
        "gopher_dup_paragraphs": _share(of_lines[lines.DUP_PARAGRAPHS], of_lines[lines.PARAGRAPHS]),
        "gopher_dup_paragraph_chars": _share(of_lines[lines.DUP_PARAGRAPH_CHARACTERS], characters),
        **{
            f"gopher_{'top' if size <= LONGEST_TOP else 'dup'}_{size}gram": _share(grams[size - SHORTEST], characters)
            for size in range(SHORTEST, LONGEST + 1)
        },
    }


def _c4(of_lines: npt.NDArray[Any]) -> Numbers:
    return {
        "c4_lines": of_lines[c4.LINES],
        "c4_long_word_lines": of_lines[c4.LONG_WORDS],
        "c4_unended_lines": of_lines[c4.UNENDED],
        "c4_short_lines": of_lines[c4.SHORT],
        "c4_lorem_ipsum_lines": of_lines[c4.LOREM_IPSUM],
        "c4_javascript_lines": of_lines[c4.JAVASCRIPT],
        "c4_curly_lines": of_lines[c4.CURLY],
        "c4_policy_lines": of_lines[c4.POLICY],
        "c4_kept_lines": of_lines[c4.KEPT],
        "c4_sentences": of_lines[c4.SENTENCES],
    }


def _fineweb(
    of_lines: npt.NDArray[Any], characters: npt.NDArray[Any], newlines: npt.NDArray[Any], num_words: npt.NDArray[Any]
) -> Numbers:
    return {
        "fineweb_ended_lines": _share(of_lines[lines.ENDED_LINES], of_lines[lines.FULL_LINES]),
        "fineweb_short_lines": _share(of_lines[lines.SHORT_LINES], of_lines[lines.FULL_LINES]),
        "fineweb_dup_line_chars": _share(of_lines[lines.DUP_FULL_CHARACTERS], characters - newlines),
        "fineweb_newlines": _share(newlines, num_words),
    }
