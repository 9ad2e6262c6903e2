"""SQL predicates as text: their words, and the terms that a top-level AND joins.

Invariant: the tokens of a predicate, joined, are the predicate; what stands in quotes is never looked into. A predicate
that Lance cannot parse is not refused here (see table/predicate.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["quoted", "number", "word", "space", "other"]

_TOKEN = re.compile(
    r"(?P<quoted>'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`)|(?P<number>\d[\w.]*)|(?P<word>[^\W\d]\w*)"
    r"|(?P<space>\s+)|(?P<other>::|.)",
    re.DOTALL,
)
KEYWORDS = frozenset(
    re.findall(
        r"\w+",
        """
        all and any array as asc at between bigint binary bool boolean both by bytea case cast char collate date day
        days decimal desc distinct div double else end escape exists extract false float for from hour hours ilike in
        int integer interval is leading like microsecond millisecond minute minutes month months not null nulls numeric
        of or overlay placing position precision real regexp rlike second seconds similar smallint string struct
        substring then time timestamp tinyint to trailing trim true unknown unsigned varchar week weeks when with within
        without xor year years zone
        """,
    )
)
"""Words of SQL expressions, lower case, where they are not columns."""
SYSTEM_PREFIX = "_row"
"""Beginning of the columns that Lance itself has, such as `_rowid`."""


@dataclass(frozen=True)
class Token:
    """A piece of a predicate."""

    kind: Kind
    """What it is."""
    text: str
    """As it is written, quotes included."""
    is_name: bool = False
    """A word that stands where a column may: no function, type, or field of a struct."""

    @property
    def lower(self) -> str:
        """In lower case, for keywords."""
        return self.text.lower()


def tokens(predicate: str) -> list[Token]:
    """The pieces of a predicate in order; their texts joined are the predicate."""
    found = [Token(match.lastgroup, match[0]) for match in _TOKEN.finditer(predicate)]  # type: ignore[arg-type]
    solid = [place for place, token in enumerate(found) if token.kind != "space"]
    for before, place, after in zip([None, *solid], solid, [*solid[1:], None], strict=False):
        previous = found[before].lower if before is not None else ""
        following = found[after] if after is not None else Token("other", "")
        if found[place].kind == "word" and previous not in (".", "::", "as") and not _led_by(following):
            found[place] = Token("word", found[place].text, is_name=True)
    return found


def _led_by(following: Token) -> bool:
    """Whether what follows makes the word before it a function, or a literal's type as in `date '2024-01-01'`."""
    return following.text == "(" or (following.kind == "quoted" and following.text.startswith("'"))


def columns_in(predicate: str, columns: Collection[str]) -> list[str]:
    """Those of the columns that a predicate reads, in its order; like Lance, whatever the case of their letters."""
    known = {name.lower(): name for name in columns} | {name: name for name in columns}
    words = (t.text if t.is_name else t.text.strip("`") for t in tokens(predicate) if t.is_name or t.text[0] == "`")
    found = (known.get(word) or known.get(word.lower()) for word in words)
    return list(dict.fromkeys(name for name in found if name))


def and_terms(predicate: str) -> list[str]:
    """The terms whose AND the predicate is, brackets around them taken off; the predicate itself where OR joins it.

    A row is kept when all terms are true, so nested ANDs are one list.
    """
    pieces = tokens(predicate.strip())
    while _in_brackets(pieces):
        pieces = _stripped(pieces[1:-1])
    terms: list[list[Token]] = [[]]
    for token, at_top, of_between in _levels(pieces):
        if at_top and token.lower in ("or", "xor"):
            return [_text(pieces)]
        if at_top and token.lower == "and" and token.kind == "word" and not of_between:
            terms.append([])
        else:
            terms[-1].append(token)
    if len(terms) == 1:
        return [_text(pieces)]
    return [term for part in terms for term in and_terms(_text(part))]


def _levels(pieces: Sequence[Token]) -> Iterator[tuple[Token, bool, bool]]:
    """Each token, whether it stands in no bracket and no CASE, and whether it is the AND of a BETWEEN."""
    depth, betweens = 0, 0
    for token in pieces:
        depth -= token.text in (")", "]") or (token.kind == "word" and token.lower == "end")
        of_between = depth == 0 and token.lower == "and" and betweens > 0
        yield token, depth == 0, of_between
        betweens += (depth == 0 and token.lower == "between") - of_between
        depth += token.text in ("(", "[") or (token.kind == "word" and token.lower == "case")


def _in_brackets(pieces: Sequence[Token]) -> bool:
    """Whether the first token opens the bracket that the last one closes."""
    if len(pieces) < 2 or pieces[0].text != "(" or pieces[-1].text != ")":
        return False
    return not any(at_top for _, at_top, _ in list(_levels(pieces))[1:-1])


def _stripped(pieces: Sequence[Token]) -> list[Token]:
    return tokens(_text(pieces))


def _text(pieces: Sequence[Token]) -> str:
    return "".join(token.text for token in pieces).strip()
