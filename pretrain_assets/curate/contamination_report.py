"""What the contamination columns of a version say: documents by eval set and by source, items found, best matches.

Invariant: it reads the columns of contaminated rows, and the text of the few matches that it shows; memory is that of
the evaluation items, whatever the table.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pretrain_assets.errors import TableError
from pretrain_assets.table.query import sql_rows
from pretrain_assets.table.schema import PARAMETERS_KEY

if TYPE_CHECKING:
    import lance

READ_ROWS = 8192
EXCERPT_CHARACTERS = 300
MATCH_COLUMNS = ("item", "items", "overlap", "start", "stop")


@dataclass(frozen=True, kw_only=True)
class SetFound:
    """One eval set in the corpus."""

    name: str
    """Its name."""
    items: int
    """Items that it has."""
    searched: int
    """Of these, searched for."""
    too_short: int
    """Not searched for: no text of `min_words` words."""
    boilerplate: int
    """Not searched for: every n-gram stands in more than `max_items` items."""
    items_found: int
    """Items that stand in at least one document."""
    documents: int
    """Documents that hold at least one of its items."""


@dataclass(frozen=True, kw_only=True)
class SourceFound:
    """One source of documents."""

    source: str
    """Value of the `source` column."""
    rows: int
    """Documents of it that were searched."""
    contaminated: int
    """Of these, contaminated."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """A document and the item of which most stands in it."""

    id: int
    """Row."""
    doc_id: str
    """The source's own id."""
    source: str
    """Where it comes from."""
    item: str
    """Evaluation item."""
    items: int
    """Number of all items that stand in it."""
    overlap: float
    """Share of the item's n-grams that the document has."""
    start: int
    """First character of the longest run."""
    stop: int
    """The character after its last."""
    excerpt: str
    """The run's text as it stands in the document, its first `EXCERPT_CHARACTERS`."""


@dataclass(frozen=True, kw_only=True)
class ContaminationReport:
    """What was found in a version of the table."""

    version: int
    """The version."""
    parameters: dict[str, Any]
    """How it was searched."""
    rows: int
    """Documents searched."""
    contaminated: int
    """Of these, contaminated."""
    sets: tuple[SetFound, ...]
    """Every eval set, in their order."""
    sources: tuple[SourceFound, ...]
    """Every source, most contaminated documents first."""
    matches: tuple[Match, ...]
    """The largest matches: by overlap, then by length of the run."""


def contamination_report(dataset: lance.LanceDataset, *, limit: int = 20) -> ContaminationReport:
    """Count what the columns say.

    Args:
        dataset: A version that has the columns.
        limit: Matches shown.

    Raises:
        TableError: it has not.
    """
    if "contaminated" not in dataset.schema.names:
        raise TableError(
            f"{dataset.uri} version {dataset.version} was not searched for evaluation items: run `pretrain "
            "decontaminate`, or materialize corpus/decontaminated."
        )
    parameters = json.loads(dataset.schema.field("contaminated").metadata[PARAMETERS_KEY])
    documents, items = _count(dataset)
    names = _set_of_items(items, [one["name"] for one in parameters["eval_sets"]])
    sources = _sources(dataset)
    return ContaminationReport(
        version=dataset.version,
        parameters=parameters,
        rows=sum(source.rows for source in sources),
        contaminated=sum(source.contaminated for source in sources),
        sets=tuple(
            SetFound(
                **{name: one[name] for name in ("name", "items", "searched", "too_short", "boilerplate")},
                items_found=names[one["name"]],
                documents=documents[one["name"]],
            )
            for one in parameters["eval_sets"]
        ),
        sources=sources,
        matches=tuple(_matches(dataset, limit)),
    )


def _count(dataset: lance.LanceDataset) -> tuple[Counter[str], set[str]]:
    """Documents by set, and all items found."""
    documents: Counter[str] = Counter()
    found: set[str] = set()
    for batch in dataset.scanner(["contamination_items"], filter="contaminated", batch_size=READ_ROWS).to_batches():
        for items in batch.column(0).to_pylist():
            found.update(items)
            documents.update({item.partition("/")[0] for item in items})
    return documents, found


def _set_of_items(items: set[str], names: list[str]) -> Counter[str]:
    return Counter({name: 0 for name in names}) + Counter(item.partition("/")[0] for item in items)


def _sources(dataset: lance.LanceDataset) -> tuple[SourceFound, ...]:
    query = (
        "SELECT source, count(*) AS n, sum(CASE WHEN contaminated THEN 1 ELSE 0 END) AS found FROM dataset "
        "WHERE contaminated IS NOT NULL GROUP BY source ORDER BY found DESC, source"
    )
    rows = sql_rows(dataset, query)
    return tuple(SourceFound(source=row["source"], rows=row["n"], contaminated=row["found"]) for row in rows)


def _matches(dataset: lance.LanceDataset, limit: int) -> list[Match]:
    query = (
        "SELECT id, contamination_stop - contamination_start AS length FROM dataset WHERE contaminated "
        f"ORDER BY contamination_overlap DESC, length DESC, id LIMIT {limit}"
    )
    ids = [row["id"] for row in sql_rows(dataset, query)]
    if not ids:
        return []
    columns = ["id", "doc_id", "source", "text", *(f"contamination_{name}" for name in MATCH_COLUMNS)]
    wanted = f"id IN ({', '.join(map(str, ids))})"
    batches = dataset.scanner(columns, filter=wanted, batch_size=1).to_batches()  # one by one: a text may be large
    found = {row["id"]: _match(row) for batch in batches for row in batch.to_pylist()}
    return [found[row_id] for row_id in ids]


def _match(row: dict[str, Any]) -> Match:
    start, stop = row["contamination_start"], row["contamination_stop"]
    return Match(
        id=row["id"],
        doc_id=row["doc_id"],
        source=row["source"],
        item=row["contamination_item"],
        items=len(row["contamination_items"]),
        overlap=row["contamination_overlap"],
        start=start,
        stop=stop,
        excerpt=row["text"][start:stop][:EXCERPT_CHARACTERS],
    )
