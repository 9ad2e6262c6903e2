"""The rows that a question is about, wherever they still are: in the newest version, or in older ones only.

Invariant: a row is found in every version that is there, also after it was deleted; one that no version has any more is
still known by its id, from the records of deletions and ingests. Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pretrain_assets.curate.filters import checked
from pretrain_assets.errors import ConfigError, FilterError, TableError
from pretrain_assets.forensics.chosen import is_id
from pretrain_assets.forensics.receipts.copies import SCAN_ROWS, ids_where, related
from pretrain_assets.forensics.receipts.document_rows import Row, gone_row, shown_rows
from pretrain_assets.loader.plan import Int64Array, UInt64Array
from pretrain_assets.plural import counted
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.predicate import in_list, redacted
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.versions import latest_record, records, table_id

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

LISTED = 100
"""Rows that are described one by one, the ones with the smallest ids; of more, the numbers."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Which documents: by one or more of the ways."""

    docs: tuple[str, ...] = ()
    """Ids: a number is the table's `id`, anything else the source's own `doc_id`; see `chosen.is_id`."""
    where: str | None = None
    """SQL predicate; named filters may stand in it."""
    search: str | None = None
    """Words for the full-text index; the best hits."""
    limit: int = 10
    """Hits of `search`."""
    with_duplicates: bool = False
    """Rows with the same content as one of these as well."""

    def __post_init__(self) -> None:
        if not self.docs and self.where is None and self.search is None:
            raise ConfigError("Which documents? Give --doc ID, once or more, --where SQL, or --search TEXT.")
        if any(number >= 2**63 for number in self.numbers):
            raise ConfigError(f"--doc {max(self.numbers)} is the id of no row: it has more than 63 bits.")

    @property
    def numbers(self) -> set[int]:
        """Those of `docs` that are the table's ids."""
        return {int(text) for text in self.docs if is_id(text)}

    @property
    def names(self) -> list[str]:
        """The others of `docs`."""
        return [text for text in self.docs if not is_id(text)]

    @property
    def plain(self) -> dict[str, Any]:
        """As JSON values, without what stands in quotes or was searched for: it may be the very words that must go."""
        return {
            "docs": list(self.docs),
            "where": redacted(self.where) if self.where is not None else None,
            "search": "..." if self.search is not None else None,
            "limit": self.limit if self.search is not None else None,
            "with_duplicates": self.with_duplicates,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Documents:
    """All rows asked about: 32 bytes for each, so that a whole source of millions of rows may be asked about."""

    newest: Pin
    """The newest version, at which was asked."""
    ids: Int64Array
    """The rows' ids, ascending, shape (rows,)."""
    row_ids: UInt64Array
    """Lance's stable row ids, by which indexes know the rows: of those that any version has, in the order of `ids`."""
    created: Int64Array
    """Version that each row came with, shape (rows,)."""
    last: Int64Array
    """Newest version that is there and has the row; 0: none. Shape (rows,)."""
    rows: tuple[Row, ...]
    """The first `LISTED` of them."""
    copies: tuple[int, ...]
    """The first rows of the newest version with the same content that are not among these."""
    num_copies: int
    """How many those are."""
    near_copies: tuple[int, ...]
    """The first rows of the newest version that near-deduplication found to repeat one of these, or to be repeated."""
    unhashed: int
    """Rows of the newest version that deduplication has not seen: whether they are copies is not known."""
    notes: tuple[str, ...] = field(default=())
    """What could not be asked, and why."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def there(self) -> Int64Array:
        """Ids of those that the newest version has."""
        return np.asarray(self.ids[self.last == self.newest.version])

    def held_by(self, version: int) -> npt.NDArray[np.bool_]:
        """Which of them a version that is there has, shape (rows,)."""
        return np.asarray((self.created <= version) & (version <= self.last))


def find_documents(location: Location, asked: Asked, *, deleted_text: bool = False) -> Documents:
    """Find the rows in every version that is there, and by their ids those that none has any more.

    Args:
        location: The table.
        asked: Which rows.
        deleted_text: Show how they begin also where only older versions have them.

    Raises:
        TableError: no such document, or, for a search, no index.
        FilterError: `where` is not a predicate of the table.
    """
    import pyarrow as pa

    dataset = open_dataset(location)
    eras = _eras(dataset)
    notes: list[str] = []
    found = _matching(location, eras, asked, notes)
    if asked.with_duplicates and len(found):
        found = _with_copies(eras, found)
    missing = _missing_ids(asked, found)
    history = records(dataset)
    gone = [gone_row(history, i) for i in missing]
    found = found.sort_by("id")
    copies, near, unhashed = related(dataset, found)
    rows = [*shown_rows(dataset, found.slice(0, LISTED), history, deleted_text=deleted_text), *(row for row, _ in gone)]
    came = pa.table(
        {
            "id": pa.array([row.id for row, _ in gone], pa.int64()),
            "_row_created_at_version": pa.array([at for _, at in gone], pa.int64()),
            "last": pa.array([0] * len(gone), pa.int64()),
        }
    )
    ids, created, last = (
        pa.concat_tables([found.select(came.column_names).cast(came.schema), came]).sort_by("id").columns
    )
    return Documents(
        newest=Pin(table_id(dataset), dataset.version),
        ids=ids.to_numpy(),
        row_ids=found["_rowid"].to_numpy(),
        created=created.to_numpy(),
        last=last.to_numpy(),
        rows=tuple(sorted(rows, key=lambda row: row.id)),
        copies=tuple(copies[:LISTED].tolist()),
        num_copies=len(copies),
        near_copies=tuple(near[:LISTED].tolist()),
        unhashed=unhashed,
        notes=tuple(notes),
    )


def _eras(dataset: lance.LanceDataset) -> list[lance.LanceDataset]:
    """The newest version, and every version that is there after which rows were deleted; newest first.

    Together they have every row that any version has.
    """
    listed = [(int(v["version"]), int(v["metadata"].get("total_rows", 0))) for v in dataset.versions()]
    found = [dataset]
    for (older, before), (newer, after) in reversed(list(pairwise(listed))):
        alone = newer == older + 1 and after >= before  # one commit that took nothing away
        if not alone:
            opened = dataset.checkout_version(newer)
            if before + opened.count_rows(f"_row_created_at_version > {older}") > after:
                found.append(dataset.checkout_version(older))
    return found


def _matching(location: Location, eras: Sequence[lance.LanceDataset], asked: Asked, notes: list[str]) -> pa.Table:
    """The rows, each as of the newest version that has it."""
    names = asked.names
    ids = set(asked.numbers)
    if asked.search is not None:
        ids |= set(_searched(location, asked, notes))
    predicates = [in_list("id", ids)] if ids else []
    predicates += [in_list("doc_id", names)] if names else []
    found = _scan_eras(eras, predicates, asked.where, notes)
    nowhere = set(names) - set(found["doc_id"].to_pylist()) if names else ()
    if nowhere:
        raise TableError(
            f"No version of {eras[0].uri} has a document {min(nowhere)[:200]!r}. Give the table's id (a number), the "
            "source's doc_id as it stands in the table, or find it with --where or --search."
        )
    return found


def _scan_eras(
    eras: Sequence[lance.LanceDataset], predicates: Sequence[str], where: str | None, notes: list[str]
) -> pa.Table:
    parts: list[pa.Table] = []
    for at, dataset in enumerate(eras):
        terms = list(predicates)
        if where is not None:
            try:
                terms.append(f"({checked(dataset, where, setting='where')})")
            except FilterError:
                if dataset is eras[0]:
                    raise
                notes.append(f"rows deleted after version {dataset.version} are not found: it lacks columns of --where")
        if not terms:
            continue
        parts.append(_gone_from(eras[:at], _scan(dataset, " OR ".join(terms))))
    return _joined(parts)


def _gone_from(newer: Sequence[lance.LanceDataset], found: pa.Table) -> pa.Table:
    """Of rows found in a version, those that no newer one has: what these say of the others is what holds."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for dataset in newer:
        there = pa.array(ids_where(dataset, "id", found["id"].combine_chunks()))
        found = found.filter(pc.invert(pc.is_in(found["id"], value_set=there)))
    return found


def _scan(dataset: lance.LanceDataset, predicate: str) -> pa.Table:
    import pyarrow as pa

    there = [name for name in ("doc_id", "content_hash", "near_dup_of") if name in dataset.schema.names]
    scanner = dataset.scanner(
        columns=["id", *there, "_row_created_at_version"], filter=predicate, with_row_id=True, batch_size=SCAN_ROWS
    )
    table = scanner.to_table()
    return table.append_column("last", pa.array(np.full(len(table), dataset.version, np.int64)))


def _joined(parts: Sequence[pa.Table]) -> pa.Table:
    """Rows of several versions, each once; columns that a version lacks are NULL."""
    import pyarrow as pa
    import pyarrow.compute as pc

    table = pa.concat_tables(parts, promote_options="default").combine_chunks()
    _, first = np.unique(table["id"].to_numpy(), return_index=True)
    return table.take(pc.cast(pa.array(np.sort(first)), pa.int64()))


def _searched(location: Location, asked: Asked, notes: list[str]) -> list[int]:
    from pretrain_assets.forensics.retrieval.search import search

    newest = open_dataset(location)
    record = latest_record(newest, "indexed")
    if record is None:
        raise TableError(
            f"{location.uri} has no full-text index: run `pretrain index` first, or give --doc or --where."
        )
    later = newest.count_rows(f"_row_created_at_version > {record.version}")
    if later:
        notes.append(
            f"{counted(later, 'row')} added after the index ({record.tag}) were not searched: `pretrain index`"
        )
    hits = search(location, str(asked.search), pin=record.pin, limit=asked.limit)
    if not hits:
        raise TableError(f"The index ({record.tag}) finds nothing for these words: try fewer of them, or --where.")
    return [hit.id for hit in hits]


def _with_copies(eras: Sequence[lance.LanceDataset], found: pa.Table) -> pa.Table:
    import pyarrow.compute as pc

    parts = [found]
    wanted = pc.unique(found["content_hash"].drop_null()) if "content_hash" in found.column_names else []
    for at, dataset in enumerate(eras if len(wanted) else ()):
        if "content_hash" in dataset.schema.names:
            same = ids_where(dataset, "content_hash", wanted)
            parts.append(_gone_from(eras[:at], _scan(dataset, in_list("id", same.tolist()))))
    return _joined(parts)


def _missing_ids(asked: Asked, found: pa.Table) -> list[int]:
    """Numbers asked for that are the id of no row that is there."""
    return sorted(asked.numbers.difference(found["id"].to_pylist())) if asked.numbers else []
