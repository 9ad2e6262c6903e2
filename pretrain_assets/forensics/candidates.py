"""Documents that may stand behind a text: by its words, and by vectors where the table has them.

Invariant: every part of the text is asked with, whatever its length; every candidate is a row of the pinned version.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pretrain_assets.forensics import vectors
from pretrain_assets.forensics.search import search
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.versions import open_pin

PIECE_WORDS, MOST_PIECES = 32, 16
"""Words of a query, while the text has no more than so many queries' worth; a longer text has longer queries."""
PER_PIECE = 20
"""Documents that each query may bring."""


def pieces_of(text: str) -> list[str]:
    """The text's words in order, cut into queries; without double quotes, which would ask for a phrase."""
    words = text.replace('"', " ").split()
    size = max(PIECE_WORDS, -(-len(words) // MOST_PIECES))
    return [" ".join(words[at : at + size]) for at in range(0, len(words), size)]


def by_words(
    location: Location, pin: Pin, pieces: Sequence[str], *, among: Collection[int] | None = None
) -> dict[int, float]:
    """Documents by BM25, with the sum of their scores over the pieces; those `among` some ids are all looked at.

    Raises:
        TableError: there is no index, or it is older than the pinned version.
    """
    where = None if among is None else f"id IN ({', '.join(map(str, sorted(among))) or 'NULL'})"
    scores: dict[int, float] = {}
    for piece in pieces:
        for hit in search(location, piece, pin=pin, limit=PER_PIECE if among is None else len(among), where=where):
            scores[hit.id] = scores.get(hit.id, 0.0) + hit.score
    return scores


def by_vectors(
    location: Location,
    pin: Pin,
    pieces: Sequence[str],
    *,
    model: str | None = None,
    among: Collection[int] | None = None,
) -> dict[int, float]:
    """Documents by the cosine of their vector with the nearest piece's; `model` as `vectors.encode` takes it.

    Raises:
        TableError: the table has no vectors.
        ModelError: the model that made them is not found.
    """
    dataset, where = open_pin(location, pin), []
    if vectors.NAME not in dataset.schema.names:  # the vectors of the same rows may have been made later
        dataset, where = open_dataset(location), [f"_row_created_at_version <= {pin.version}"]
    column = vectors.vector_column(dataset)
    if among is not None:
        where.append(f"id IN ({', '.join(map(str, sorted(among))) or 'NULL'})")
    found = vectors.nearest(
        dataset,
        column,
        vectors.encode(column, pieces, model=model),
        limit=PER_PIECE if among is None else max(1, len(among)),
        where=" AND ".join(where) or None,
        exact=among is not None,
    )
    scores: dict[int, float] = {}
    for i, similarity in zip(found.ids.ravel().tolist(), found.similarity.ravel().tolist(), strict=True):
        if i != vectors.NO_ID:
            scores[i] = max(similarity, scores.get(i, -1.0))
    return scores
