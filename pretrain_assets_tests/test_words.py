"""Words of texts as flat arrays: those of `str.split()`."""

from __future__ import annotations

import itertools
import sys

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain_assets.curate.words import text_bytes, word_spans

WHITE_SPACE = [c for c in map(chr, range(sys.maxunicode + 1)) if c.isspace()]
PIECES = st.lists(
    st.sampled_from([*WHITE_SPACE, "a", "bc", "é", "\u200b", "\ufeff", "\u2027", "\u00a1", "\U0001d518"]), max_size=9
)


def words(texts: pa.Array) -> list[list[str]]:
    data, offsets = text_bytes(texts)
    starts, stops, firsts = word_spans(data, offsets)
    spelled = [bytes(data[a:b]).decode() for a, b in zip(starts, stops, strict=True)]
    return [spelled[a:b] for a, b in itertools.pairwise(firsts)]


@settings(deadline=None, max_examples=200)
@given(st.lists(PIECES.map("".join), max_size=5), st.integers(0, 3))
def test_words_are_those_of_split(texts: list[str], cut: int) -> None:
    assert words(pa.array(texts, pa.string())[cut:]) == [text.split() for text in texts[cut:]]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_null_is_an_empty_text(kind: pa.DataType) -> None:
    assert words(pa.array([None, "a b", None, ""], kind)) == [[], ["a", "b"], [], []]
    assert words(pa.nulls(2, kind)) == [[], []]


def test_every_white_space_character_divides() -> None:
    assert len(WHITE_SPACE) == 29
    assert words(pa.array([f"a{space}b" for space in WHITE_SPACE])) == [["a", "b"]] * 29
