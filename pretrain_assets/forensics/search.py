"""Full-text search over exactly the rows of a pinned version, each hit with what a checkpoint saw of it.

Invariant: a hit is a row that the pinned version holds; rows appended since never appear in an answer about it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pretrain_assets.errors import ConfigError, TableError
from pretrain_assets.forensics.checkpoints import Checkpoint
from pretrain_assets.forensics.exposure import SeenBy, seen_by
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.predicate import check_predicate
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.versions import latest_record, open_pin

if TYPE_CHECKING:
    import lance

PREVIEW_CHARS = 160
COLUMNS = ("id", "doc_id", "source", "text", "is_dup")


@dataclass(frozen=True, kw_only=True)
class Hit:
    """One document found."""

    id: int
    """The table's row number."""
    doc_id: str
    """The source's own id."""
    source: str
    """Where the document comes from."""
    score: float
    """BM25 score; higher is nearer."""
    preview: str
    """Beginning of the text, white space folded."""
    seen: SeenBy | None
    """What the checkpoint saw of it; None when no checkpoint was asked about."""


def search(location: Location, query: str, *, pin: Pin, limit: int = 5, where: str | None = None) -> list[Hit]:
    """Rank the rows of a pinned version by BM25.

    Args:
        location: The table.
        query: Words; stemmed, stop words ignored.
        pin: Version whose rows are searched.
        limit: Number of hits.
        where: SQL predicate that hits must satisfy.

    Raises:
        TableError: there is no index yet, or it is older than the pinned version.
        FilterError: `where` is not a predicate of the table.
    """
    dataset, upto = _indexed(location, pin)
    if where is not None:
        check_predicate(dataset, where, setting="where")
    within = f"_row_created_at_version <= {upto}" + (f" AND ({where})" if where else "")
    if not query.strip():
        raise ConfigError("The query is empty: give one or more words")
    scanner = dataset.scanner(
        columns=[*COLUMNS, "_score"], full_text_query=query, limit=limit, filter=within, prefilter=True
    )
    try:
        found = scanner.to_table()
    except (ValueError, OSError) as error:
        if "position" not in str(error):
            raise
        raise TableError(
            f"{query!r} asks for a phrase, which needs word positions: build them once with `pretrain index "
            "--with-position`, or search for the words without quotes."
        ) from error
    return [
        Hit(
            id=row["id"],
            doc_id=row["doc_id"],
            source=row["source"],
            score=row["_score"],
            preview=" ".join(row["text"].split())[:PREVIEW_CHARS],
            seen=None,
        )
        for row in found.to_pylist()
    ]


def search_seen(
    location: Location, query: str, *, checkpoint: Checkpoint, limit: int = 5, where: str | None = None
) -> list[Hit]:
    """Search the rows that a checkpoint was pinned to, and say what it saw of each hit.

    Raises:
        TableError: as `search`.
    """
    hits = search(location, query, pin=checkpoint.pin, limit=limit, where=where)
    ids = [hit.id for hit in hits]
    seen = seen_by(location, pin=checkpoint.pin, recipe=checkpoint.recipe, step=checkpoint.step, ids=ids)
    return [replace(hit, seen=seen[hit.id]) for hit in hits]


def _indexed(location: Location, pin: Pin) -> tuple[lance.LanceDataset, int]:
    """The table at the newest indexed version, and the pinned version as upper bound of row creation."""
    open_pin(location, pin)
    record = latest_record(open_dataset(location), "indexed")
    if record is None or record.version < pin.version:
        have = "there is no full-text index" if record is None else f"the newest index is {record.tag}"
        raise TableError(
            f"To search version {pin.version} of {location.uri} an index of that version or later is needed; {have}. "
            "Run `pretrain index`, or materialize forensics/index."
        )
    return open_dataset(location, record.version), pin.version
