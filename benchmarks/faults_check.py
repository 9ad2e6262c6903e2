"""What must hold of a table whatever was killed, told apart from the code under test: read with pylance alone.

Invariant: reads only. Contents are compared by digests of values, so that a version may be laid out in any way.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

    from pretrain_assets.table.storage import Location

SAMPLED_ROWS = 48
NULL = b"\x00NULL"


@dataclass(frozen=True)
class Facts:
    """A version in a few numbers."""

    rows: int
    """Rows."""
    sum_of_ids: int
    """Sum of `id` over all rows."""
    sampled: str
    """Digest of every column's values in `SAMPLED_ROWS` rows spread evenly over the ids."""


def facts(dataset: lance.LanceDataset) -> Facts:
    """Read a version's rows, ids and sampled values.

    Raises:
        Exception: whatever Lance raises for a version that cannot be read.
    """
    import numpy as np

    ids = dataset.to_table(columns=["id"]).column(0).to_numpy()
    order = np.argsort(ids, kind="stable")
    chosen = order[np.unique(np.linspace(0, len(ids) - 1, min(SAMPLED_ROWS, len(ids))).astype(int))] if len(ids) else []
    sample = dataset.take(list(map(int, chosen)))
    rows = {name: sample.column(name).to_pylist() for name in sorted(sample.column_names)}
    text = json.dumps(rows, default=lambda value: value.hex())
    return Facts(len(ids), int(ids.sum()), hashlib.sha256(text.encode()).hexdigest()[:16])


def digests(dataset: lance.LanceDataset, names: Sequence[str] | None = None) -> dict[str, str]:
    """Digest of all values of these columns (default: of every column), in the order of the ids."""
    import numpy as np

    order = np.argsort(dataset.to_table(columns=["id"]).column(0).to_numpy(), kind="stable")
    wanted = names or dataset.schema.names
    return {name: _digest(dataset.to_table(columns=[name]).column(0).take(order)) for name in wanted}


def _digest(column: pa.ChunkedArray) -> str:
    found = hashlib.sha256(f"{column.type} {len(column)}".encode())
    for part in _parts(column):
        found.update(part)
    return found.hexdigest()[:16]


def _parts(column: pa.ChunkedArray) -> Iterator[bytes]:
    """Bytes that stand for the values whatever the buffers look like: NULLs, lengths, contents."""
    import pyarrow as pa
    import pyarrow.compute as pc

    yield column.is_null().combine_chunks().to_numpy(zero_copy_only=False).tobytes()
    if pa.types.is_list(column.type):
        yield pc.list_value_length(column).fill_null(-1).combine_chunks().to_numpy().tobytes()
        yield pc.list_flatten(column).combine_chunks().to_numpy(zero_copy_only=False).tobytes()
    elif pa.types.is_primitive(column.type) and not pa.types.is_boolean(column.type):
        yield column.fill_null(0).combine_chunks().to_numpy().tobytes()
    else:
        for value in column.to_pylist():
            content = value if isinstance(value, bytes) else NULL if value is None else str(value).encode()
            yield len(content).to_bytes(8, "little") + content


def tagged(location: Location) -> dict[str, int]:
    """Version of every tag; the one that only carries old records moves, so it is left out."""
    from pretrain_assets.table.storage import open_dataset
    from pretrain_assets.table.versions import HISTORY_TAG

    tags = open_dataset(location).tags.list()
    return {name: int(tag["version"]) for name, tag in tags.items() if name != HISTORY_TAG}


def recorded(dataset: lance.LanceDataset) -> Counter[str]:
    """Lineage records of each stage, those of versions cleaned up included."""
    from pretrain_assets.table.versions import records

    return Counter(record.stage for record in records(dataset))


def left_behind(location: Location) -> list[str]:
    """Files beside the table's own: staged columns, temporary files, journals, data that no version names."""
    table, staging = Path(location.uri), Path(location.staging_uri)
    there = {str(path.relative_to(table)) for path in table.rglob("*") if path.is_file()}
    named = _named(location)
    found = [name for name in there if name.startswith(("data/", "_deletions/")) and name not in named]
    found += [name for name in there if ".tmp" in name]
    found += [f"staging/{path.relative_to(staging)}" for path in staging.rglob("*") if path.is_file()]
    return sorted(set(found))


def _named(location: Location) -> set[str]:
    """Data and deletion files that some version refers to."""
    from pretrain_assets.table.storage import open_dataset

    newest, named = open_dataset(location), set[str]()
    for entry in newest.versions():
        for fragment in open_dataset(location, int(entry["version"])).get_fragments():
            metadata: Any = fragment.metadata
            named.update(f"data/{file.path}" for file in metadata.files)
            if metadata.deletion_file:
                named.add(str(metadata.deletion_file.path(fragment.fragment_id)).lstrip("/"))
    return named
