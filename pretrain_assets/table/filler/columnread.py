"""Reading columns of the table together with what is staged for them, and reading back what was committed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pretrain_assets.table.filler import columnfile
from pretrain_assets.table.filler.columnfile import StagedFile

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

READ_BATCH_BYTES = 8 << 20
"""Bytes per batch when a column is streamed; Lance reads some sixteen of them ahead."""
READ_BACK_FRAGMENTS = 64
"""Fragments of which a committed fill reads rows back: each file was already checked when it was staged."""


def column_batches(
    dataset: lance.LanceDataset,
    fragments: Sequence[lance.LanceFragment],
    column: pa.Field,
    *,
    staged: Mapping[int, StagedFile],
    in_table: bool,
) -> Iterator[pa.Array]:
    """The live values of one column in row order, piece by piece; NULL where it has not been computed.

    Args:
        dataset: The table.
        fragments: Fragments to read, in order.
        column: Name and type of the column.
        staged: Files that hold the values of some fragments.
        in_table: Read the other fragments from the table; otherwise their values are NULL.
    """
    import pyarrow as pa

    for fragment in fragments:
        if fragment.fragment_id in staged:
            yield from _read_staged(dataset.uri, fragment, column.name, staged[fragment.fragment_id])
        elif in_table:
            scanner = fragment.scanner(
                columns=[column.name], io_buffer_size=4 * READ_BATCH_BYTES, **_batch_size(column.type)
            )
            yield from (batch.column(0) for batch in scanner.to_batches())
        else:
            rows, most = fragment.count_rows(), columnfile.READ_BATCH_ROWS
            yield from (pa.nulls(min(most, rows - at), column.type) for at in range(0, rows, most))


def _batch_size(kind: pa.DataType) -> dict[str, int]:
    """Settings of a scanner; of values of equal size in rows, since Lance would give 8,192 whatever their size."""
    try:
        row_bytes = max(1, kind.bit_width // 8)
    except ValueError:  # values of different sizes
        return {"batch_size_bytes": READ_BATCH_BYTES}
    return {"batch_size": min(columnfile.READ_BATCH_ROWS, READ_BATCH_BYTES // row_bytes)}


def _read_staged(uri: str, fragment: lance.LanceFragment, name: str, file: StagedFile) -> Iterator[pa.Array]:
    import numpy as np

    live, position = columnfile.live_offsets(fragment), 0
    batch_rows = min(columnfile.READ_BATCH_ROWS, max(1, READ_BATCH_BYTES * file.num_rows // max(1, file.num_bytes)))
    for batch in columnfile.read_batches(uri, file.name, batch_rows, [name]):
        stop = position + batch.num_rows
        if live is None:
            yield batch.column(0)
        else:
            yield batch.column(0).take(live[np.searchsorted(live, position) : np.searchsorted(live, stop)] - position)
        position = stop


def read_back(dataset: lance.LanceDataset, fragment_ids: Sequence[int], judged: Sequence[str]) -> None:
    """Read the first and last row of filled fragments; Lance itself does not check a committed column file.

    Args:
        dataset: The version just committed.
        fragment_ids: Fragments that were filled; `READ_BACK_FRAGMENTS` of them are read.
        judged: One of these must have a value.

    Raises:
        AssertionError: a value is NULL or cannot be read.
    """
    stride = max(1, len(fragment_ids) // READ_BACK_FRAGMENTS)
    for fragment_id in fragment_ids[::stride]:
        fragment = dataset.get_fragment(fragment_id)
        rows = fragment.count_rows()
        for offset in {0, rows - 1} if rows else set():
            batch = fragment.to_table(columns=list(judged), offset=offset, limit=1)
            if batch.num_rows != 1 or all(batch.column(name).null_count for name in judged):
                raise AssertionError(
                    f"{dataset.uri} version {dataset.version}: column {judged[0]} of fragment {fragment_id} reads back "
                    f"empty at row {offset}"
                )
