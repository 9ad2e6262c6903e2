"""A text as a model reads it: token ids, and where each of them stands in the text.

Invariant: the ids of a generation are the model's own, never those of its text encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from pretrain_assets.tokenize import Tokenizer

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Passage:
    """A text and its tokens."""

    text: str
    """The text."""
    ids: Int32s
    """Its token ids, shape (tokens,)."""
    words: Int64s
    """How many of its first tokens are more than white space, for 0 to all of them; shape (tokens + 1,)."""
    characters: Int64s | None
    """Character of `text` at which each token begins, and its length, shape (tokens + 1,); None where not known."""

    def span(self, start: int, tokens: int) -> tuple[int, int] | None:
        """First character of some tokens, and the one after their last; None where not known."""
        if self.characters is None:
            return None
        return int(self.characters[start]), int(self.characters[start + tokens])


def passage_of(codec: Tokenizer, text: str, ids: npt.ArrayLike, *, before: str = "") -> Passage:
    """A text and the ids that it was encoded as, or decoded from, with what was put `before` it."""
    tokens = np.asarray(ids, np.int32)
    distinct, which = np.unique(tokens, return_inverse=True)
    is_word = np.array([bool(codec.decode([i]).strip()) for i in distinct.tolist()], np.bool_)
    characters = characters_of(codec, before + text, tokens)
    return Passage(
        text=text,
        ids=tokens,
        words=np.concatenate([[0], np.cumsum(is_word[which])]),
        characters=None if characters is None else np.maximum(characters - len(before), 0),
    )


def passages_of(codec: Tokenizer, text: str) -> list[Passage]:
    """A text as it is, and as it would be inside another, where its first word has other ids after a space."""
    as_it_is = passage_of(codec, text, codec.encode_batch([text])[0])
    if not text or text[0].isspace():
        return [as_it_is]
    spaced = passage_of(codec, text, codec.encode_batch([f" {text}"])[0], before=" ")
    same = np.array_equal(spaced.ids[-len(as_it_is.ids) :], as_it_is.ids)
    return [as_it_is] if same else [as_it_is, spaced]


def generated(codec: Tokenizer, ids: Sequence[int], *, after: Sequence[int]) -> Passage:
    """What a model wrote after a prompt, by the ids of both."""
    before = codec.decode(after)
    return passage_of(codec, codec.decode([*after, *ids])[len(before) :], ids)


def characters_of(codec: Tokenizer, text: str, ids: Int32s) -> Int64s | None:
    """As `Passage.characters`; None where tokens are not made of the text's bytes, as behind a normaliser."""
    sizes = codec.token_bytes()
    data = np.frombuffer(text.encode(), np.uint8)
    if sizes is None or (len(ids) and int(ids.max()) >= len(sizes)):
        return None
    places = np.concatenate([[0], np.cumsum(sizes[ids])])
    if places[-1] != len(data) or codec.decode(ids.tolist()) != text:
        return None
    begun = np.concatenate([[0], np.cumsum((data & 0xC0) != 0x80)])  # a byte of this form goes on with a character
    return np.asarray(begun[places], np.int64)
