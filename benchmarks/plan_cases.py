"""What `benchmarks.plan` runs in processes of its own: our plan, cold and warm, and LanceDB's of the same rows.

Invariant: a case holds nothing but what it measures, so that the peak of its process is the peak of a rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import loader_table as table
from pretrain_assets.table.storage import Location

if TYPE_CHECKING:
    import pyarrow as pa

    from pretrain_assets.loader.stream import BlockLoader

NUM_SPLITS = 128
WORLD_SIZE = 8
CHUNK_ROWS = 500_000
PERMUTATION_BYTES = 4 << 30


def write(database: str, rows: int) -> dict[str, int]:
    """A table with everything but tokens: every list is empty, for no plan reads one.

    Returns:
        Rows, bytes on disk and fragments.
    """
    import lance
    import pyarrow as pa

    schema = table.schema()
    reader = pa.RecordBatchReader.from_batches(schema, _batches(rows, schema))
    dataset = lance.write_dataset(
        reader, Location(database_uri=database).uri, data_storage_version="2.2", enable_stable_row_ids=True
    )
    fragments = dataset.get_fragments()
    files = [file for fragment in fragments for file in fragment.metadata.files]
    return {"rows": rows, "bytes": sum(int(file.file_size_bytes) for file in files), "fragments": len(fragments)}


def build(database: str, cache: str) -> Callable[[], Any]:
    """The first rank of a run on this node: scan, shuffle, store."""
    return _open(database, cache, rank=0)


def second_rank(database: str, cache: str) -> Callable[[], Any]:
    """Another rank, once the first is through."""
    return _open(database, cache, rank=1)


def streaming_dataset(database: str) -> Callable[[], Any]:
    """The constructor of LanceDB's `StreamingDataset`, which every rank calls: it builds the permutation in memory."""
    from lancedb.streaming import StreamingDataset

    from pretrain_assets.table.storage import open_lancedb

    os.environ["LANCEDB_PERM_BUILDER_MEMORY_LIMIT"] = str(PERMUTATION_BYTES)

    def work() -> int:
        dataset = StreamingDataset(
            open_lancedb(Location(database_uri=database), table.PIN.version),
            num_splits=NUM_SPLITS,
            shuffle_seed=table.SEED,
            rank=1,
            world_size=WORLD_SIZE,
            columns=["input_ids"],
            filter=table.FILTER,
            pack_sequences=table.SEQ_LEN,
            eos_id=table.EOS,
            pad_id=table.PAD,
            blocks_per_epoch=NUM_SPLITS,
        )
        return int(dataset._perm_table.count_rows())

    return work


def _open(database: str, cache: str, rank: int) -> Callable[[], Any]:
    import lance  # noqa: F401  imports are no part of the work

    from pretrain_assets.loader.stream import BlockLoader

    os.environ["PRETRAIN_CACHE_DIR"] = cache
    data = table.data(NUM_SPLITS)

    def work() -> dict[str, int]:
        location = Location(database_uri=database)
        loader = BlockLoader(location, table.PIN, data, table.TOKENIZER, rank=rank, world_size=WORLD_SIZE)
        return _answers(loader)

    return work


def _answers(loader: BlockLoader) -> dict[str, int]:
    """What a rank asks of its plan before it reads: how long the epoch is, and where every split stands half-way."""
    plan = loader.plan(0)
    position = plan.position(plan.cycles_per_epoch // 2)
    return {
        "documents": len(plan.ends),
        "blocks": plan.blocks_per_epoch,
        "tokens": int(plan.tokens_per_split.sum()),
        "documents_at_half": int(position.docs_consumed.sum()),
    }


def _batches(rows: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    for first in range(0, rows, CHUNK_ROWS):
        ids = np.arange(first, min(rows, first + CHUNK_ROWS), dtype=np.int64)
        empty = pa.ListArray.from_arrays(pa.array(np.zeros(len(ids) + 1, np.int32)), pa.array([], pa.int32()))
        lengths = (ids * 7919 % 1500 + 1).astype(np.int32)
        columns = [pa.array(ids), pa.array(ids % table.DUPLICATE_EVERY == 0), empty, pa.array(lengths)]
        yield pa.record_batch(columns, schema=schema)
