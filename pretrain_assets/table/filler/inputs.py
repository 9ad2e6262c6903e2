"""Reading the input of a range: batches of live rows, the next one ahead of the work on the last."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from pretrain_assets.table.filler import columnfile
from pretrain_assets.table.filler.spec import RowColumns

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

    from pretrain_assets.table.filler.columnfile import Offsets
    from pretrain_assets.table.filler.tasks import Job

NAMED_COLUMNS = ("doc_id", "source_file")
"""Columns that help a person to find a row."""


def count_live(live: Offsets | None, start: int, stop: int) -> int:
    """Rows between two physical offsets that are not deleted."""
    import numpy as np

    return stop - start if live is None else int(np.searchsorted(live, stop) - np.searchsorted(live, start))


def batches(
    job: Job, fragment: lance.LanceFragment, live: Offsets | None, start: int, stop: int
) -> Iterator[tuple[pa.RecordBatch, Offsets]]:
    """Batches of live rows from physical offset `start` to `stop`, with their offsets in the fragment."""
    before, count = count_live(live, 0, start), count_live(live, start, stop)
    if not count:
        return
    inputs = list(job.group.inputs)
    scanner = fragment.scanner(
        columns=inputs,
        with_row_address=True,
        offset=before,
        limit=count,
        batch_size_bytes=job.batch_bytes,
        io_buffer_size=4 * job.batch_bytes,
    )
    most = (job.group.batch_rows if isinstance(job.group, RowColumns) else None) or stop - start
    for batch in ahead(scanner.to_batches()):
        offsets = columnfile.offsets_of(batch)
        for at in range(0, batch.num_rows, most):
            yield batch.select(inputs).slice(at, most), offsets[at : at + most]


def ahead(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same, with the next one read while the last is worked on."""
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, batches, None)
        while (batch := following.result()) is not None:
            following = pool.submit(next, batches, None)
            yield batch


def describe(fragment: lance.LanceFragment, offset: int) -> str:
    """Words for one row: its id, and where it came from."""
    live = columnfile.live_offsets(fragment)
    names = ["id", *(name for name in NAMED_COLUMNS if name in fragment.schema.names)]
    batch: Any = fragment.to_table(columns=names, offset=count_live(live, 0, offset), limit=1)
    return ", ".join(f"{name} {value!r}" for name, value in batch.to_pylist()[0].items())
