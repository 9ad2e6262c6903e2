"""A query as people type it: words, and phrases in double quotes; and where they stand in a text that was found.

Invariant: what is marked in a preview stands in the text; a mark explains a hit and decides nothing, since the index,
not this module, says what matches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pretrain_assets.errors import ConfigError

if TYPE_CHECKING:
    from lance.query import FullTextQuery

ENDINGS = re.compile(r"(?:ations?|ings?|edly|ed|ies|ions?|es|ly|s|y|e)$")
"""What a stem may lack; enough to see "photosynthesise" where "photosynthesis" was asked for."""
SHORTEST_STEM, TELLING_LETTERS = 3, 4
PREVIEW_CHARS = 200
"""Characters of a text shown."""
LEAD_CHARS = 40
"""Of them, before the first word found."""
_PHRASE = re.compile(r'"([^"]*)"')


@dataclass(frozen=True, kw_only=True)
class TextQuery:
    """What is asked of the text index."""

    words: tuple[str, ...]
    """Any of these, the more the better."""
    phrases: tuple[tuple[str, ...], ...]
    """Each of these must stand in the text: these words, in any of their forms, one after the other."""

    def lance(self) -> FullTextQuery:
        """The same for Lance: words rank, phrases must occur and rank."""
        from lance.query import BooleanQuery, MatchQuery, Occur, PhraseQuery

        words = MatchQuery(" ".join(self.words), "text")
        if not self.phrases:
            return words
        parts = [(Occur.MUST, PhraseQuery(" ".join(phrase), "text")) for phrase in self.phrases]
        return BooleanQuery([*parts, (Occur.SHOULD, words)] if self.words else parts)


@dataclass(frozen=True, kw_only=True)
class Preview:
    """A piece of a text, white space folded."""

    text: str
    """The piece; `...` where the text goes on."""
    matches: tuple[tuple[int, int], ...] = ()
    """Where words that were asked for stand in it: start and stop of each."""


def parse(query: str) -> TextQuery:
    """Read a query.

    Raises:
        ConfigError: it has no words, or a quote is not closed.
    """
    if query.count('"') % 2:
        raise ConfigError(f"{query!r} has a quote that is not closed: put a phrase between two, or leave them out.")
    phrases = tuple(filter(None, (_words(phrase) for phrase in _PHRASE.findall(query))))
    words = _words(_PHRASE.sub(" ", query))
    if not words and not phrases:
        raise ConfigError(f"The query {query!r} has no words: give one or more, or only a predicate with --where.")
    return TextQuery(words=words, phrases=phrases)


def preview(text: str | None, query: TextQuery | None) -> Preview:
    """The part of a text with the most of the words that were asked for, else its beginning."""
    folded = " ".join((text or "").split())
    marks = _marks(folded, query) if query else []
    start = _start(folded, marks)
    stop = min(len(folded), start + PREVIEW_CHARS)
    if stop < len(folded) and (space := folded.rfind(" ", start + 1, stop + 1)) > 0:
        stop = space
    before, after = "... " if start else "", " ..." if stop < len(folded) else ""
    inside: list[tuple[int, int]] = []
    for left, right, _ in marks:
        if left >= start and right <= stop:
            left, right = left - start + len(before), right - start + len(before)
            if inside and left < inside[-1][1]:  # a word of a phrase that is marked already
                left, right = inside[-1][0], max(right, inside.pop()[1])
            inside.append((left, right))
    return Preview(text=f"{before}{folded[start:stop]}{after}", matches=tuple(inside))


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", text))


def _marks(text: str, query: TextQuery) -> list[tuple[int, int, int]]:
    """Start, stop and number of every word and phrase that stands in a text, in order."""
    telling = [word for word in query.words if len(word) >= TELLING_LETTERS] or query.words
    forms = [r"\W+".join(map(_form, phrase)) for phrase in [*query.phrases, *((word,) for word in telling)]]
    found = [
        (match.start(), match.end(), number)
        for number, form in enumerate(forms)
        for match in re.finditer(rf"\b{form}\b", text, re.IGNORECASE)
    ]
    return sorted(found)


def _form(word: str) -> str:
    """A pattern of a word in its forms."""
    stem = ENDINGS.sub("", word.lower())
    return re.escape(word) if len(stem) < SHORTEST_STEM else rf"{re.escape(stem)}\w{{0,6}}"


def _start(text: str, marks: list[tuple[int, int, int]]) -> int:
    """Where the piece begins that has the most different marks: a little before the first of them, at a word."""
    best, most = 0, 0
    right = 0
    for left, (begin, _, _) in enumerate(marks):
        while right < len(marks) and marks[right][1] <= begin - LEAD_CHARS + PREVIEW_CHARS:
            right += 1
        kinds = len({number for _, _, number in marks[left:right]})
        if kinds > most:
            best, most = begin, kinds
    if best <= LEAD_CHARS:
        return 0
    space = text.find(" ", best - LEAD_CHARS, best)
    return space + 1 if space >= 0 else best
