"""Near duplicates by meaning: how many documents have a near neighbour, at which threshold, and which hang together.

Asked are all documents, or a sample: those whose hashed id is lowest, so that it is the same sample whatever the layout
of the table, and after an append most of it stays. Neighbours are looked for among all documents.

Invariant: nothing is written, and each number says of how many documents it is. Pairs are counted in lists of at most
`limit` neighbours; how many lists were full is stated, since beyond them there may be more.
Memory: 21 bytes per document that `where` keeps (id 8, what it is known to repeat 8, parent 4, flag 1), 420 MB for 20
million; vectors and their neighbours are held a batch at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pretrain_assets.convert import require
from pretrain_assets.curate.explain import preview
from pretrain_assets.curate.filters import checked
from pretrain_assets.errors import ConfigError, FilterError
from pretrain_assets.forensics.retrieval.cluster_curve import DECIMALS, GRID, Agreement, Point, Tally
from pretrain_assets.forensics.retrieval.cluster_rows import Float32Array, Int64Array, Rows, read_rows
from pretrain_assets.forensics.retrieval.neighbours import Method, method_of
from pretrain_assets.forensics.retrieval.vectors import VectorColumn, nearest, vector_column
from pretrain_assets.loader.read import take_rows
from pretrain_assets.progress import Progress
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.predicate import in_list
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.versions import table_id

if TYPE_CHECKING:
    import lance
    import numpy.typing as npt
    import pyarrow as pa

QUERY_ROWS = 1_024
"""Vectors looked up at once."""
EXACT_VALUES = 50_000_000
"""Numbers in all vectors up to which comparing every vector with thousands at once takes less time than an index does
(measured on 2 cores, 128 dimensions: 1.0 ms for a query among 47,482 documents, 7 to 10 ms by the index)."""
SHOWN_MEMBERS, MEASURED = 5, 200
"""Of each cluster that is shown: members listed, and members compared with each other."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A document of a cluster."""

    id: int
    """The table's row number."""
    source: str | None
    """Where it comes from."""
    preview: str
    """Beginning of its text."""
    flagged: bool
    """Whether deduplication leaves it out already."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Documents that hang together by neighbours at the threshold, perhaps over several steps."""

    size: int
    """Documents in it."""
    flagged: int
    """Of them, left out by deduplication already."""
    mean_similarity: float
    """Of its documents with each other (the first `MEASURED`): far below the threshold where they form a chain."""
    members: tuple[Member, ...]
    """The first of them, by id."""


@dataclass(frozen=True, kw_only=True)
class Clusters:
    """What the vectors of a table say of near duplicates."""

    uri: str
    """The table."""
    pin: str
    """Version that was asked."""
    where: str | None
    """Documents that took part; None: all."""
    method: Method
    """How neighbours were found."""
    threshold: float
    """Least similarity (cosine) within a cluster's links."""
    rows: int
    """Documents that took part."""
    asked: int
    """Documents whose neighbours were looked for."""
    zero: int
    """Of them, with the zero vector: a text without words that the model knows is nobody's neighbour."""
    missing: int
    """Of them, without a vector: they came after the last embedding."""
    limit: int
    """Most neighbours looked at of each."""
    curve: tuple[Point, ...]
    """By threshold, ascending."""
    num_clusters: int
    """Clusters of two documents or more, those that the sample touches."""
    clustered: int
    """Documents in them."""
    sizes: dict[str, int]
    """Clusters by size: 2, 3-4, 5-8 and so on."""
    agreement: Agreement
    """With deduplication."""
    largest: tuple[Cluster, ...]
    """The largest, largest first."""

    def at(self, threshold: float) -> Point:
        """The point of the curve at a threshold, or the next one above it."""
        return next(point for point in self.curve if point.threshold >= threshold)


def find_clusters(
    location: Location,
    *,
    sample: int | None = 10_000,
    threshold: float = 0.9,
    where: str | None = None,
    limit: int = 10,
    seed: int = 0,
    exact: bool | None = None,
    shown: int = 5,
) -> Clusters:
    """Near neighbours and clusters of the table's newest version.

    Args:
        location: The table.
        sample: Documents to ask for; None, or more than there are: all.
        threshold: Least similarity within a cluster.
        where: SQL predicate of the documents that take part, on both sides; named filters may stand in it.
        limit: Most neighbours of each document.
        seed: Of the sample.
        exact: Whether to compare every vector even where there is an index; None: where that is quicker.
        shown: Clusters to look up.

    Raises:
        ConfigError: the threshold is none, or nobody is to be asked.
        TableError: the table has no vectors.
        FilterError: `where` is not a predicate of the table, or keeps nothing.
    """
    if not GRID[0] <= threshold <= 1:
        raise ConfigError(f"--threshold {threshold:g} is no similarity between {GRID[0]} and 1, such as 0.9")
    require(sample is None or sample >= 1, "sample", sample, "use 1 or more, or None for all")
    dataset = open_dataset(location)
    column = vector_column(dataset)
    where = where and checked(dataset, where, setting="where")
    rows = read_rows(dataset, where, sample=sample, seed=seed)
    if not len(rows):
        raise FilterError(f"where={where or 'true'!r} keeps none of the {dataset.count_rows():,} rows; widen it")
    if exact is None:
        exact = len(rows) * column.dims <= EXACT_VALUES
    tally = Tally(rows, threshold, limit)
    with Progress("neighbours", total=rows.asked) as progress:
        for ids, vectors, missing in _vectors(dataset, column, rows, where):
            said = vectors.any(axis=1)
            tally.missing += missing
            tally.zero += len(ids) - int(said.sum())
            found = nearest(dataset, column, vectors[said], limit=limit + 1, where=where, exact=exact)
            tally.add(ids[said], found.ids, found.similarity)
            progress.update(len(ids) + missing)
    roots, sizes, flagged = rows.clusters()
    largest = roots[np.lexsort((roots, -sizes))[:shown]]
    return Clusters(
        uri=location.uri,
        pin=str(Pin(table_id(dataset), dataset.version)),
        where=where,
        method=method_of(dataset, column, exact=exact),
        threshold=threshold,
        rows=len(rows),
        asked=rows.asked,
        zero=tally.zero,
        missing=tally.missing,
        limit=limit,
        curve=tally.curve(),
        num_clusters=len(roots),
        clustered=int(sizes.sum()),
        sizes=_by_size(sizes),
        agreement=tally.agreement(clustered_beyond=int(np.maximum(sizes - flagged - 1, 0).sum())),
        largest=tuple(_cluster(dataset, column, rows, int(root)) for root in largest),
    )


def _vectors(
    dataset: lance.LanceDataset, column: VectorColumn, rows: Rows, where: str | None
) -> Iterator[tuple[Int64Array, Float32Array, int]]:
    """Ids and vectors of the documents asked, batch after batch, and how many more have none."""
    names = ["id", column.name]
    if rows.sample is None:
        batches = dataset.scanner(columns=names, filter=where, batch_size=QUERY_ROWS).to_batches()
    else:
        pieces = np.split(rows.sample, range(QUERY_ROWS, len(rows.sample), QUERY_ROWS))
        batches = (take_rows(dataset, piece, names).combine_chunks().to_batches()[0] for piece in pieces)
    for batch in batches:
        there = batch.filter(batch.column(1).is_valid())
        vectors = np.asarray(there.column(1).flatten(), np.float32).reshape(-1, column.dims)
        yield np.asarray(there.column(0), np.int64), vectors, len(batch) - len(there)


def _by_size(sizes: Int64Array) -> dict[str, int]:
    """Clusters by size, in ranges that double."""
    found: dict[str, int] = {}
    for size, count in zip(*np.unique(sizes, return_counts=True), strict=True):
        power = int(size - 1).bit_length()
        low, high = (1 << (power - 1)) + 1, 1 << power
        key = f"{low}-{high}" if low < high else f"{high}"
        found[key] = found.get(key, 0) + int(count)
    return found


def _cluster(dataset: lance.LanceDataset, column: VectorColumn, rows: Rows, root: int) -> Cluster:
    """A cluster with its first members looked up."""
    places = rows.members(root)
    ids = rows.ids[places[:MEASURED]]
    names = [name for name in ("source", "text") if name in dataset.schema.names]
    vectors = _looked_up(dataset, [column.name], ids)[column.name].combine_chunks()
    shown = _looked_up(dataset, names, ids[:SHOWN_MEMBERS]).to_pylist()
    return Cluster(
        size=len(places),
        flagged=int(rows.flagged[places].sum()),
        mean_similarity=_mean_similarity(np.asarray(vectors.flatten(), np.float64).reshape(-1, column.dims)),
        members=tuple(
            Member(
                id=row["id"],
                source=row.get("source"),
                preview=preview(row.get("text")),
                flagged=bool(rows.flagged[place]),
            )
            for place, row in zip(places[:SHOWN_MEMBERS], shown, strict=True)
        ),
    )


def _looked_up(dataset: lance.LanceDataset, columns: list[str], ids: Int64Array) -> pa.Table:
    """Columns of documents, in the order of their ids."""
    return dataset.to_table(columns=["id", *columns], filter=in_list("id", ids.tolist())).sort_by("id")


def _mean_similarity(vectors: npt.NDArray[np.float64]) -> float:
    """Mean cosine over all pairs, from the length of the sum: |sum|^2 = n + 2 * sum over pairs."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    whole = float(np.square(unit.sum(axis=0)).sum())
    return round((whole - len(unit)) / (len(unit) * (len(unit) - 1)), DECIMALS)
