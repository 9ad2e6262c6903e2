"""Small real tables for tests: what ingest would have made, without ingest."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa

from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.schema import ingested_schema
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.versions import identified, table_id


def make_table(
    path: Path | str, texts: Iterable[str | None], *, identity: str | None = None, **columns: list[Any]
) -> Location:
    """A table of one fragment; `columns` replaces the defaults of other ingested columns."""
    location = Location(database_uri=str(path))
    schema = identified(ingested_schema(), identity or str(uuid.uuid4()))
    lance.write_dataset(
        _rows(list(texts), 0, columns).cast(schema),
        location.uri,
        schema=schema,
        mode="overwrite",
        data_storage_version="2.2",
        enable_stable_row_ids=True,
    )
    return location


def append(location: Location, texts: Iterable[str | None], **columns: list[Any]) -> Pin:
    """Append rows (one fragment) with the next ids."""
    start = 1 + max(values(location, "id"), default=-1)
    lance.write_dataset(_rows(list(texts), start, columns), location.uri, mode="append")
    return newest(location)


def newest(location: Location) -> Pin:
    """Pin of the newest version."""
    dataset = open_dataset(location)
    return Pin(table_id(dataset), dataset.version)


def values(location: Location, column: str, version: int | str | None = None) -> list[Any]:
    """All values of a column in row order."""
    found = open_dataset(location, version).to_table(columns=[column]).column(0).to_pylist()
    return list(found)


def _rows(texts: list[str | None], start: int, columns: dict[str, list[Any]]) -> pa.Table:
    rows = {
        "id": list(range(start, start + len(texts))),
        "doc_id": [f"doc-{start + i}" for i in range(len(texts))],
        "text": texts,
        "source": ["test"] * len(texts),
        "source_file": ["test.jsonl"] * len(texts),
        "score": [None] * len(texts),
        "n_chars": [len(text or "") for text in texts],
    }
    return pa.table(rows | columns, schema=ingested_schema())
