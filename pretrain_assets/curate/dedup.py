"""Exact duplicates: `content_hash` of the normalised text; `dup_of` and `is_dup` for all but the first of each class.

Invariant: the first row of a class (lowest id) is never a duplicate and is named by all others; appending rows changes
no earlier row. When that row is deleted, the next run makes the one after it the first.
Policy: only white space is normalised (so CRLF equals LF). Letter case, digits, byte order marks, zero-width characters
and Unicode forms (NFC, NFD) are content: texts that differ in them are different texts. Null and blank texts are equal.
Memory: 24 bytes per row of the table (16 of hash, 8 of id) while earlier rows are compared, in temporary files past
`DedupConfig.memory_bytes`; for each part of 1/128 of the rows in turn 8 to 16 bytes per row of the part; and for what
duplicates repeat up to 8 bytes per row, or 8 per id in a temporary file when the others are in files.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from pretrain_assets.compiled import compiled
from pretrain_assets.config import DedupConfig, EngineConfig
from pretrain_assets.curate.normalise import content_hashes
from pretrain_assets.curate.partitions import Partitions, zeros
from pretrain_assets.table.filler.fill import fill
from pretrain_assets.table.filler.spec import BatchFunction, ColumnReader, Fill, RowColumns, TableColumns, Worker
from pretrain_assets.table.lineage import Pin, StageResult
from pretrain_assets.table.schema import computed_field
from pretrain_assets.table.storage import Location

if TYPE_CHECKING:
    import pyarrow as pa

CODE_VERSION = "1"
"""Raised when values of these columns change."""

PARAMETERS: dict[str, Any] = {"normalise": "white space", "hash": "xxh3_128"}
"""Recorded with the columns; exact duplicates have nothing to set."""


def dedup(
    location: Location,
    config: DedupConfig,
    *,
    input_pin: Pin,
    run_id: str | None = None,
    engine: EngineConfig | None = None,
) -> StageResult:
    """Fill `content_hash`, `dup_of` and `is_dup` for the rows that lack them: one new version, or none.

    Args:
        location: The table.
        config: Batch size, memory, and the limit of a check.
        input_pin: Version of `ingested` to work from.
        run_id: Dagster run id for the lineage record.
        engine: Where texts are hashed; None: processes on this machine.
    """
    return fill(location, _fill(config), input_pin=input_pin, run_id=run_id, engine=engine)


def hashing(worker: Worker) -> BatchFunction:
    """The function that makes `content_hash` from `text`."""
    del worker  # one thread, nothing to load
    return hash_batch


def _fill(config: DedupConfig) -> Fill:
    import pyarrow as pa

    making: dict[str, Any] = {"stage": "deduped", "code_version": CODE_VERSION, "parameters": PARAMETERS}
    return Fill(
        stage="deduped",
        groups=(
            RowColumns(
                outputs=pa.schema([computed_field("content_hash", pa.binary(16), **making)]),
                inputs=("text",),
                make=hashing,
                worker_bytes=512 << 20,  # some 300 MB/s on one core
            ),
            TableColumns(
                outputs=pa.schema(
                    [computed_field("dup_of", pa.int64(), **making), computed_field("is_dup", pa.bool_(), **making)]
                ),
                inputs=("id",),
                nullable=("dup_of",),
                make=partial(compared, memory_bytes=config.memory_bytes),
            ),
        ),
        code_version=CODE_VERSION,
        parameters=PARAMETERS,
        batch_bytes=config.batch_bytes,
        limits={"share_removed": config.max_share_removed},
        summarize=_summarize,
    )


def hash_batch(batch: pa.RecordBatch) -> list[pa.Array]:
    """`content_hash` of a batch of texts."""
    return [content_hashes(batch.column(0))]


def compared(reader: ColumnReader, *, memory_bytes: int) -> BatchFunction:
    """Finds the first row of every class; the function then gives `dup_of` and `is_dup` of any rows, by their ids.

    Args:
        reader: Reads `content_hash` and `id`.
        memory_bytes: As in `DedupConfig`.

    Raises:
        TableError: the temporary folder is full.
    """
    import numpy as np
    import pyarrow as pa

    num_ids = 0
    with Partitions(3, memory_bytes) as partitions:
        for hashes, rows in aligned(reader.batches("content_hash"), reader.batches("id")):
            if hashes.null_count:  # rows appended after the input version have no hash yet
                hashes, rows = hashes.drop_null(), rows.filter(hashes.is_valid())
            if len(rows):
                ids = rows.to_numpy()
                partitions.add(np.column_stack([_halves(hashes), ids.view(np.uint64)]))
                num_ids = max(num_ids, int(ids.max()) + 1)
        firsts = zeros(num_ids, on_disk=partitions.spilled)  # by id, plus one: 0 where the row repeats none
        for records in partitions:
            assert len(records) < 1 << 31, "more rows of one content than a slot can count"
            slots = np.zeros(1 << (2 * len(records) - 1).bit_length(), np.int32)
            _find_firsts(records.view(np.int64), slots, firsts)

    def compare(batch: pa.RecordBatch) -> list[pa.Array]:
        first = firsts[batch.column(0).to_numpy()]
        return [pa.array(first - 1, mask=first == 0), pa.array(first > 0)]

    return compare


@compiled
def _find_firsts(records: Any, slots: Any, firsts: Any) -> None:
    """Write `firsts[id]` = lowest id of its class + 1 for all rows but that lowest one.

    Args:
        records: int64 (rows, 3): two halves of the hash, and the id.
        slots: Zeros, a power of two, more than rows: a hash table of row numbers + 1.
        firsts: int64 by id, zeros.
    """
    for row in range(len(records)):
        slot = _slot_of(records, slots, row)
        if slots[slot] == 0 or records[row, 2] < records[slots[slot] - 1, 2]:
            slots[slot] = row + 1
    for row in range(len(records)):
        first = records[slots[_slot_of(records, slots, row)] - 1, 2]
        if first != records[row, 2]:
            firsts[records[row, 2]] = first + 1


@compiled
def _slot_of(records: Any, slots: Any, row: int) -> int:
    """Where the class of a row is in the hash table (open addressing), or an empty slot for it."""
    last = len(slots) - 1
    slot: int = records[row, 1] & last
    while slots[slot]:
        other = slots[slot] - 1
        if records[other, 1] == records[row, 1] and records[other, 0] == records[row, 0]:
            break
        slot = (slot + 1) & last
    return slot


def aligned(left: Iterator[pa.Array], right: Iterator[pa.Array]) -> Iterator[tuple[pa.Array, pa.Array]]:
    """Two columns that come in pieces of different lengths, in pieces of equal ones."""
    one, other = next(left, None), next(right, None)
    while one is not None and other is not None:
        length = min(len(one), len(other))
        yield one[:length], other[:length]
        one, other = one[length:] or next(left, None), other[length:] or next(right, None)


def _halves(hashes: pa.Array) -> Any:
    """Numpy view (rows, 2) of uint64 on a `fixed_size_binary[16]` array without nulls."""
    import numpy as np

    values = np.frombuffer(hashes.buffers()[1], dtype=np.uint64).reshape(-1, 2)
    return values[hashes.offset : hashes.offset + len(hashes)]


def _summarize(read: ColumnReader) -> dict[str, int]:
    import pyarrow.compute as pc

    is_dup = read("is_dup")
    duplicates = pc.sum(is_dup, min_count=0).as_py()
    return {"in": len(is_dup), "unique": len(is_dup) - duplicates, "duplicate": duplicates}
