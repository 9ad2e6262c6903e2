"""One ranking each of the rows of a pinned version: by BM25, by the cosine of vectors, by a cross-encoder.

Invariant: a ranking is pairs of id and score, the nearest first, of rows that the pinned version has and that satisfy
`where` as it was there; of equal scores, the lower id comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pretrain_assets.errors import ConfigError, TableError
from pretrain_assets.forensics.indexes.searchable import Searchable
from pretrain_assets.forensics.retrieval.query import TextQuery
from pretrain_assets.forensics.retrieval.rerank import cross_scores
from pretrain_assets.forensics.retrieval.vectors import NO_ID, VectorColumn, nearest
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.lookup import rows_by_id
from pretrain_assets.table.storage import Location

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Scored = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]

Ranking = list[tuple[int, float]]


def by_text(asked: Searchable, query: TextQuery, number: int, where: str | None) -> Ranking:
    """BM25."""
    import numpy as np

    if not asked.dataset.count_rows():
        return []

    def find(limit: int) -> Scored:
        found = asked.dataset.scanner(
            columns=["id", "_score"],
            full_text_query=query.lance(),
            limit=limit,
            filter=asked.rows(where),
            prefilter=True,
        ).to_table()
        return np.asarray(found["id"], np.int64), np.asarray(found["_score"], np.float32)

    return _first(find, number, asked.allowed(where))


def by_vector(
    asked: Searchable,
    column: VectorColumn,
    vector: npt.NDArray[np.float32],
    number: int,
    where: str | None,
    *,
    but: int | None = None,
) -> Ranking:
    """Cosine with a vector, shape (1, dims); one document may be left out."""
    parts = [part for part in (asked.rows(where), f"id != {but}" if but is not None else None) if part]

    def find(limit: int) -> Scored:
        found = nearest(asked.dataset, column, vector, limit=limit, where=" AND ".join(parts) or None)
        there = found.ids[0] != NO_ID
        return found.ids[0][there], found.similarity[0][there]

    return _first(find, number, asked.allowed(where))


def vector_of(asked: Searchable, column: VectorColumn, document: int) -> npt.NDArray[np.float32]:
    """The vector of a document, shape (1, dims).

    Raises:
        TableError: there is no such document, or its vector points nowhere.
    """
    import numpy as np

    row = asked.dataset.to_table(columns=[column.name], filter=f"id = {document}")
    if not len(row):
        raise TableError(f"There is no document {document} in version {asked.dataset.version} to compare others with.")
    value = row.column(0)[0].as_py()
    if value is None or not np.any(value):
        raise TableError(f"Document {document} has no vector, or one that points nowhere, so nothing is near to it.")
    return np.asarray([value], np.float32)


def by_model(location: Location, pin: Pin, model: str, query: str, ids: list[int]) -> Ranking:
    """What a cross-encoder says of these documents.

    Raises:
        ConfigError: there is no query to read them with.
        ModelError: no such model.
    """
    if not query.strip():
        raise ConfigError("A cross-encoder reads a query with each document: give one, or search without --rerank.")
    texts = rows_by_id(location, pin, ids, ["text"])
    scores = cross_scores(model, query, [texts[one]["text"] for one in ids])
    return sorted(zip(ids, scores, strict=True), key=lambda pair: (-pair[1], pair[0]))


def _first(find: Callable[[int], Scored], number: int, allowed: npt.NDArray[np.int64] | None) -> Ranking:
    """The first so many that are allowed; where others are among them, four times as many are asked for, and again."""
    import numpy as np

    wanted = number
    while True:
        ids, scores = find(wanted)
        kept = slice(None) if allowed is None else np.isin(ids, allowed)
        if len(ids[kept]) >= number or len(ids) < wanted:
            pairs = zip(ids[kept].tolist(), scores[kept].tolist(), strict=True)
            return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:number]
        wanted *= 4
