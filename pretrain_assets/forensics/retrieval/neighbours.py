"""The documents nearest to one, by their vectors: what a copy detector may have missed, and whether a model saw it.

Invariant: no document is its own neighbour, and one that has no vector, or the zero vector, is said to have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pretrain_assets.curate.explain import preview
from pretrain_assets.curate.filters import checked
from pretrain_assets.errors import TableError
from pretrain_assets.forensics.checkpoints import Checkpoint
from pretrain_assets.forensics.chosen import is_id
from pretrain_assets.forensics.exposure import SeenBy, seen_by
from pretrain_assets.forensics.retrieval.vectors import NO_ID, VectorColumn, has_index, nearest, vector_column
from pretrain_assets.forensics.subject import table_of
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.lookup import rows_by_id
from pretrain_assets.table.predicate import in_list
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.versions import latest_record, table_id

if TYPE_CHECKING:
    import lance

PARTNERS = ("dup_of", "near_dup_of")
"""Columns in which deduplication names the row that a row repeats, the surer one first."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """How neighbours were found, and how sure that is."""

    column: str
    """Column of vectors."""
    model: str
    """Model that made them."""
    exact: bool
    """Whether every vector was compared; otherwise an index gave the candidates."""
    recall: float | None
    """Recall@10 of that index, measured against exact search when it was built; None: exact, or never measured."""

    def describe(self) -> str:
        """One phrase for people."""
        if self.exact:
            return f"{self.column} of {self.model}, every vector compared"
        sure = "recall not measured" if self.recall is None else f"recall@10 {self.recall:.3f}"
        return f"{self.column} of {self.model}, by the index ({sure})"


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """A document near to the one asked about."""

    id: int
    """The table's row number."""
    source: str | None
    """Where it comes from."""
    similarity: float
    """Cosine of the two vectors, at most 1."""
    known: bool
    """Whether deduplication has found the two to repeat each other, or the same third document."""
    preview: str
    """Beginning of its text, white space folded."""
    seen: SeenBy | None
    """What the checkpoint saw of it; None when no checkpoint was asked about."""


@dataclass(frozen=True, kw_only=True)
class NeighboursOf:
    """One document, and the nearest others."""

    id: int
    """The table's row number."""
    source: str | None
    """Where it comes from."""
    preview: str
    """Beginning of its text, white space folded."""
    seen: SeenBy | None
    """What the checkpoint saw of it; None when no checkpoint was asked about."""
    pin: str
    """Version that was asked."""
    checkpoint: str | None
    """Folder of the checkpoint asked about."""
    method: Method
    """How neighbours were found."""
    has_vector: bool
    """Whether its vector points anywhere: a text without words that the model knows has no neighbours."""
    neighbours: tuple[Neighbour, ...]
    """Nearest first."""


def neighbours_of(
    location: Location,
    doc: int | str,
    *,
    limit: int = 5,
    where: str | None = None,
    exact: bool = False,
    checkpoint: Checkpoint | None = None,
) -> NeighboursOf:
    """The documents nearest to one, at the table's newest version.

    Args:
        location: The table.
        doc: The document, by the table's `id`, or by the source's own `doc_id` where that is not a number.
        limit: Most neighbours.
        where: SQL predicate that neighbours must satisfy; named filters may stand in it.
        exact: Compare every vector even where there is an index.
        checkpoint: Say of each document what this one saw.

    Raises:
        TableError: no such document, several with that `doc_id`, or no vectors.
        FilterError: `where` is not a predicate of the table.
    """
    import numpy as np

    if checkpoint:
        location = table_of(checkpoint.run_dir, checkpoint.pin, location)
    dataset = open_dataset(location)
    column, pin = vector_column(dataset), Pin(table_id(dataset), dataset.version)
    where = where and checked(dataset, where, setting="where")
    columns, doc_id = ("source", "text", *PARTNERS, column.name), _id_of(dataset, doc)
    own = rows_by_id(location, pin, [doc_id], columns).get(doc_id)
    if own is None:
        raise _nothing(dataset, doc)
    vector = own[column.name]
    if vector is None:
        raise TableError(
            f"Document {doc_id} came after the last embedding of {location.uri} and has no vector: run `pretrain embed "
            f"{column.model}` again, which embeds new rows alone."
        )
    found = nearest(dataset, column, np.array([vector], np.float32), limit=limit + 1, where=where, exact=exact)
    near = [
        (int(i), float(similarity))
        for i, similarity in zip(found.ids[0], found.similarity[0], strict=True)
        if i not in (NO_ID, doc_id)
    ][:limit]
    ids = [doc_id, *(i for i, _ in near)]
    rows = rows_by_id(location, pin, ids, columns[:-1])
    rows |= rows_by_id(location, pin, {_family(i, rows) for i in ids} - rows.keys(), columns[:-1])
    seen: dict[int, SeenBy] = {}
    if checkpoint:
        seen = seen_by(location, pin=checkpoint.pin, recipe=checkpoint.recipe, step=checkpoint.step, ids=ids)
    return NeighboursOf(
        id=doc_id,
        source=own.get("source"),
        preview=preview(own.get("text")),
        seen=seen.get(doc_id),
        pin=str(pin),
        checkpoint=checkpoint.uri if checkpoint else None,
        method=method_of(dataset, column, exact=exact),
        has_vector=any(vector),
        neighbours=tuple(
            Neighbour(
                id=i,
                source=rows[i].get("source"),
                similarity=round(min(1.0, similarity), 4),
                known=_family(i, rows) == _family(doc_id, rows),
                preview=preview(rows[i].get("text")),
                seen=seen.get(i),
            )
            for i, similarity in near
        ),
    )


def method_of(dataset: lance.LanceDataset, column: VectorColumn, *, exact: bool) -> Method:
    """How `nearest` answers at this version."""
    by_index = not exact and has_index(dataset, column)
    record = latest_record(dataset, "indexed") if by_index else None
    return Method(
        column=column.name,
        model=column.model,
        exact=not by_index,
        recall=record.details.get("vectors", {}).get("recall_at_10") if record else None,
    )


def _id_of(dataset: lance.LanceDataset, doc: int | str) -> int:
    """The table's id of a document as people name it."""
    if isinstance(doc, int) or is_id(doc):
        if int(doc) < 1 << 63:
            return int(doc)
        raise _nothing(dataset, doc)
    found = []
    if "doc_id" in dataset.schema.names:
        found = dataset.to_table(columns=["id"], filter=in_list("doc_id", [doc]))["id"].to_pylist()
    if len(found) > 1:
        listed = ", ".join(map(str, found[:10]))
        raise TableError(
            f"{len(found):,} documents have the doc_id {doc[:200]!r}: give the id of one, such as {listed}."
        )
    if not found:
        raise _nothing(dataset, doc)
    return int(found[0])


def _nothing(dataset: lance.LanceDataset, doc: int | str) -> TableError:
    return TableError(
        f"{dataset.uri} version {dataset.version} has no document {str(doc)[:200]!r}. Give the table's id, or the "
        "source's own doc_id; `pretrain search WORDS` shows the ids of what it finds."
    )


def _family(doc_id: int, rows: Mapping[int, dict[str, Any]]) -> int:
    """The document that deduplication keeps of a document's copies: what it repeats, and what that one repeats."""
    while doc_id in rows and (partners := [i for name in PARTNERS if (i := rows[doc_id].get(name)) is not None]):
        doc_id = partners[0]
    return doc_id
