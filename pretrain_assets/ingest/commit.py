"""The table before an ingest, and the one commit after it.

Invariant: all data files of an ingest become visible in one version, with the lineage record in its transaction, and
only if no other ingest gave out ids since this one began. Creation and first data are the same commit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pretrain_assets.errors import CommitError
from pretrain_assets.ingest.journal import Entry
from pretrain_assets.table.lineage import RECORD_KEY, LineageRecord
from pretrain_assets.table.query import sql_rows
from pretrain_assets.table.storage import Location, exists, storage_options
from pretrain_assets.table.versions import heal, identified, latest_record, records, table_id

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

STAGE = "ingested"
COMMIT_TRIES = 10


@dataclass(frozen=True, kw_only=True)
class Base:
    """The table as an ingest finds it."""

    dataset: lance.LanceDataset | None
    """Its newest version; None when there is no table."""
    record: LineageRecord | None
    """What the last ingest left."""
    next_id: int
    """First id that no document ever had."""
    known: dict[str, tuple[str, int]]
    """Fingerprint and version of every file ingested so far, by name."""


def find_base(location: Location) -> Base:
    """Read the newest version, and what all ingests so far recorded.

    Raises:
        TableError: the table was not made by this project.
    """
    if not exists(location):
        return Base(dataset=None, record=None, next_id=0, known={})
    dataset = heal(location)
    table_id(dataset)  # raises for a table made by something else
    found = records(dataset, STAGE)
    past = [(file["name"], file["fingerprint"], record.version) for record in found for file in record.details["files"]]
    return Base(
        dataset=dataset,
        record=found[-1] if found else None,
        next_id=max([_largest_id(dataset) + 1, *(record.details["next_id"] for record in found)]),
        known={name: (fingerprint, version) for name, fingerprint, version in past},
    )


def commit(
    location: Location, base: Base, schema: pa.Schema, entries: Sequence[Entry], record: LineageRecord
) -> lance.LanceDataset:
    """Make all data files one version: of the table, or of a new table.

    Raises:
        CommitError: another ingest committed since `base`, or the commit lost a race that cannot be merged.
    """
    from lance import FragmentMetadata, LanceOperation

    fragments = [FragmentMetadata.from_json(json.dumps(part)) for entry in entries for part in entry.fragments]
    if base.dataset is not None:
        return _append(location, base, fragments, record)
    refuse_if(exists(location), location)
    create = LanceOperation.Overwrite(identified(schema, record.table_id), fragments)
    try:
        return _commit(location, create, 0, record)
    except OSError:
        refuse_if(exists(location), location)
        raise


def refuse_if(moved: bool, location: Location) -> None:
    """Stop when the table is no longer the one this ingest began with."""
    if moved:
        raise CommitError(f"Another ingest committed to {location.uri} meanwhile and gave out ids. Run this one again.")


def _append(
    location: Location, base: Base, fragments: list[lance.FragmentMetadata], record: LineageRecord
) -> lance.LanceDataset:
    """Commit on the newest version, unless another ingest got there first.

    Why a `Merge` of all fragments and no `Append`: Lance lets two appends pass side by side, and both would carry the
    same ids. A `Merge` conflicts with every commit since the version it was made from, so each try looks again.
    """
    from lance import LanceOperation
    from lance.commit import CommitConflictError

    for _ in range(COMMIT_TRIES):
        dataset = heal(location)
        refuse_if(latest_record(dataset, STAGE) != base.record, location)
        try:
            kept = [fragment.metadata for fragment in dataset.get_fragments()]
            operation = LanceOperation.Merge([*kept, *fragments], dataset.lance_schema, preserves_nullability=True)
            return _commit(location, operation, dataset.version, record)
        except CommitConflictError as error:
            conflict = error
            if not error.retryable:
                break
    raise CommitError(f"{location.uri}: the commit lost its race: {conflict}. Written files are kept; run again.")


def _commit(
    location: Location, operation: lance.LanceOperation.BaseOperation, read_version: int, record: LineageRecord
) -> lance.LanceDataset:
    import lance

    creates = read_version == 0
    return lance.LanceDataset.commit(
        location.uri,
        lance.Transaction(
            read_version=read_version,
            operation=operation,
            transaction_properties={RECORD_KEY: record.to_json()},
        ),
        enable_stable_row_ids=True if creates else None,
        max_retries=0 if creates else 20,  # a table that appeared meanwhile must not be overwritten
        storage_options=storage_options(location.uri),
    )


def _largest_id(dataset: lance.LanceDataset) -> int:
    """-1 when the table has no row."""
    (row,) = sql_rows(dataset, "SELECT max(id) AS largest FROM dataset")
    return -1 if row["largest"] is None else int(row["largest"])
