"""Documents that may stand behind a text: by its words, and by vectors where the table has them.

Invariant: every part of the text is asked with, whatever its length; every candidate is a row of the pinned version.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pretrain_assets.forensics.indexes.searchable import for_text, for_vectors
from pretrain_assets.forensics.retrieval.query import TextQuery
from pretrain_assets.forensics.retrieval.rankings import by_text
from pretrain_assets.forensics.retrieval.vectors import NO_ID, encode, nearest
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location

PIECE_WORDS, MOST_PIECES = 32, 16
"""Words of a query, while the text has no more than so many queries' worth; a longer text has longer queries."""
PER_PIECE = 20
"""Documents that each query may bring."""


def pieces_of(text: str) -> list[str]:
    """The text's words in order, cut into queries."""
    words = text.split()
    size = max(PIECE_WORDS, -(-len(words) // MOST_PIECES))
    return [" ".join(words[at : at + size]) for at in range(0, len(words), size)]


def by_words(
    location: Location, pin: Pin, pieces: Sequence[str], *, among: Collection[int] | None = None
) -> dict[int, float]:
    """Documents by BM25, with the sum of their scores over the pieces; of those `among` some ids, all that have one.

    Raises:
        TableError: there is no index, or it is older than the pinned version.
    """
    asked, scores = for_text(location, pin), dict[int, float]()
    for piece in pieces:
        query = TextQuery(words=tuple(piece.split()), phrases=())
        for i, score in by_text(asked, query, PER_PIECE if among is None else len(among), _within(among)):
            scores[i] = scores.get(i, 0.0) + score
    return scores


def by_vectors(
    location: Location,
    pin: Pin,
    pieces: Sequence[str],
    *,
    among: Collection[int] | None = None,
    model: str | None = None,
) -> dict[int, float]:
    """Documents by the cosine of their vector with the nearest piece's; `model` as `vectors.encode` takes it.

    Raises:
        TableError: the table has no vectors.
        ModelError: the model that made them is not found.
    """
    asked, column = for_vectors(location, pin)
    found = nearest(
        asked.dataset,
        column,
        encode(column, pieces, model=model),
        limit=PER_PIECE if among is None else len(among),
        where=asked.rows(_within(among)),
        exact=among is not None,
    )
    scores: dict[int, float] = {}
    for i, similarity in zip(found.ids.ravel().tolist(), found.similarity.ravel().tolist(), strict=True):
        if i != NO_ID:
            scores[i] = max(similarity, scores.get(i, -1.0))
    return scores


def _within(ids: Collection[int] | None) -> str | None:
    return None if ids is None else f"id IN ({', '.join(map(str, sorted(ids))) or 'NULL'})"
