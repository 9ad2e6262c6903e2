"""Other ways to feed a trainer from the same tokens: what has to be written first, and how fast it is read.

Invariant: every peer hands over int64 batches of `BLOCKS_PER_BATCH` blocks, as a training loop takes them. Each needs
its own copy of the tokens, made by `prepare`; none gives document ids, and none but Parquet at random rows can filter,
reshuffle documents or change the block length without making that copy again.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from benchmarks import loader_table as table
from benchmarks.loader_cases import Counts, timed

if TYPE_CHECKING:
    import pyarrow as pa

BLOCKS_PER_BATCH = 16
MDS_REQUIREMENTS = "mosaicml-streaming brotli python-snappy cramjam zstd catalogue pillow"
"""What its import needs beyond this project's packages; `--no-deps`, or pip replaces torch by the one with CUDA."""
MDS_UNUSED = ("multimodal", "text", "vision")
"""Its packages for other data, which it always imports and which need torchvision."""
ROW_GROUP_ROWS = 1_000
WINDOW_ROWS = 2_000
"""Rows that the random reads of Parquet ask for at once: about the window of our loader."""
TAKE_BLOCKS = 1_024
TAKE_THREADS = 2
SCAN_BATCH_ROWS = 4_096

Int32Array = npt.NDArray[np.int32]


def prepare(peer: str, database: str, folder: str, peers_path: str | None) -> Callable[[], Any]:
    """Write a peer's copy of the tokens into an empty folder; documents in an order that does not follow the table's.

    The work returns its bytes on disk.
    """
    writers = {"mds": _write_mds, "memmap": _write_memmap, "parquet": _write_parquet, "lance_blocks": _write_blocks}
    if peer == "mds":
        import_mds(peers_path)
    target = Path(folder)

    def work() -> int:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        writers[peer](_documents(database), target)
        return sum(path.stat().st_size for path in target.rglob("*") if path.is_file())

    return work


def mds(folder: str, peers_path: str | None, seconds: float) -> Callable[[], Any]:
    """MosaicML Streaming over blocks in its own format, shuffled."""
    import torch

    streaming = import_mds(peers_path)

    def start() -> Counts:
        dataset = streaming.StreamingDataset(
            local=folder, shuffle=True, shuffle_seed=table.SEED, batch_size=BLOCKS_PER_BATCH
        )
        held: list[Any] = []
        for sample in dataset:
            held.append(sample["tokens"])
            if len(held) == BLOCKS_PER_BATCH:
                yield torch.from_numpy(np.stack(held)).to(torch.int64).numel()
                held.clear()

    return lambda: timed(start, seconds=seconds)


def memmap(folder: str, seconds: float) -> Callable[[], Any]:
    """Random blocks of one file of token ids."""
    import torch

    def start() -> Counts:
        blocks = np.memmap(Path(folder) / "tokens.bin", np.uint16, "r").reshape(-1, table.SEQ_LEN)
        order = np.random.default_rng(table.SEED).permutation(len(blocks))
        for first in range(0, len(order), BLOCKS_PER_BATCH):
            yield torch.from_numpy(blocks[order[first : first + BLOCKS_PER_BATCH]].astype(np.int64)).numel()

    return lambda: timed(start, seconds=seconds)


def parquet_sequential(folder: str, seconds: float) -> Callable[[], Any]:
    """Row groups of documents shuffled beforehand, one after the other, packed with numpy."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch

    pa.array([0]).to_numpy()  # imports pandas, which is no part of any answer

    def start() -> Counts:
        file = pq.ParquetFile(Path(folder) / "documents.parquet")
        groups = (file.read_row_group(at)["input_ids"].combine_chunks() for at in range(file.num_row_groups))
        for batch in _batches(map(_joined, groups)):
            yield torch.from_numpy(batch.astype(np.int64)).numel()

    return lambda: timed(start, seconds=seconds)


def parquet_random(folder: str, seconds: float) -> Callable[[], Any]:
    """Random documents, a window of them at a time: each row group that holds some of them is read once per window."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch

    pa.array([0]).to_numpy()  # imports pandas, which is no part of any answer

    def start() -> Counts:
        file = pq.ParquetFile(Path(folder) / "documents.parquet")
        order = np.random.default_rng(table.SEED).permutation(file.metadata.num_rows)

        def windows() -> Iterator[Int32Array]:
            for first in range(0, len(order), WINDOW_ROWS):
                rows = np.sort(order[first : first + WINDOW_ROWS])
                parts = []
                for group in np.unique(rows // ROW_GROUP_ROWS):
                    column = file.read_row_group(int(group))["input_ids"].combine_chunks()
                    parts.append(column.take(pa.array(rows[rows // ROW_GROUP_ROWS == group] % ROW_GROUP_ROWS)))
                yield _joined(pa.concat_arrays(parts))

        for batch in _batches(windows()):
            yield torch.from_numpy(batch.astype(np.int64)).numel()

    return lambda: timed(start, seconds=seconds)


def lance_blocks(folder: str, seconds: float) -> Callable[[], Any]:
    """Random takes from a Lance table of packed blocks, `TAKE_BLOCKS` at a time, two requests in flight."""
    import lance
    import torch

    def start() -> Counts:
        dataset = lance.dataset(folder)
        order = np.random.default_rng(table.SEED).permutation(dataset.count_rows())

        def take(first: int) -> npt.NDArray[np.int32]:
            chosen = order[first : first + TAKE_BLOCKS]
            by_place = np.argsort(chosen)
            column = dataset.take(chosen[by_place], columns=["input_ids"])["input_ids"].combine_chunks()
            blocks: Int32Array = column.values.to_numpy().reshape(-1, table.SEQ_LEN)
            return blocks[np.argsort(by_place)]

        for window in _two_ahead(take, range(0, len(order), TAKE_BLOCKS)):
            for first in range(0, len(window), BLOCKS_PER_BATCH):
                yield torch.from_numpy(window[first : first + BLOCKS_PER_BATCH].astype(np.int64)).numel()

    return lambda: timed(start, seconds=seconds)


def import_mds(peers_path: str | None) -> Any:
    """MosaicML Streaming, from a folder of site packages when one is given.

    Raises:
        ImportError: it is not there.
    """
    if peers_path:
        sys.path.append(peers_path)
    for name in MDS_UNUSED:
        sys.modules[f"streaming.{name}"] = types.ModuleType(f"streaming.{name}")
    return importlib.import_module("streaming")


def _documents(database: str) -> Iterator[pa.ListArray]:
    """Token lists of the rows that the filter keeps, in the plan's order, some thousand at a time."""
    from pretrain_assets.table.storage import Location, open_dataset

    dataset = open_dataset(Location(database_uri=database), table.PIN.version)
    kept = dataset.scanner(columns=[], filter=table.FILTER, with_row_id=True).to_table()["_rowid"].to_numpy()
    order = np.random.default_rng(table.SEED).permutation(kept)
    for first in range(0, len(order), SCAN_BATCH_ROWS):
        yield dataset._take_rows(order[first : first + SCAN_BATCH_ROWS], columns=["input_ids"])[
            "input_ids"
        ].combine_chunks()


def _joined(lists: pa.ListArray) -> Int32Array:
    """All tokens of some documents, an EOS after each."""
    ends = np.cumsum(np.diff(lists.offsets.to_numpy()) + 1)
    tokens = np.full(int(ends[-1]), table.EOS, np.int32)
    is_token = np.ones(len(tokens), bool)
    is_token[ends - 1] = False
    tokens[is_token] = lists.flatten().to_numpy()
    return tokens


def _batches(streams: Iterable[Int32Array]) -> Iterator[Int32Array]:
    """Cut a stream of tokens into batches of blocks, (BLOCKS_PER_BATCH, seq_len) each; the rest is left out."""
    size = BLOCKS_PER_BATCH * table.SEQ_LEN
    tail = np.empty(0, np.int32)
    for part in streams:
        tokens = np.concatenate([tail, part])
        whole = len(tokens) - len(tokens) % size
        yield from tokens[:whole].reshape(-1, BLOCKS_PER_BATCH, table.SEQ_LEN)
        tail = tokens[whole:]


def _two_ahead(read: Callable[[int], Int32Array], places: Iterable[int]) -> Iterator[Int32Array]:
    """Results of `read` in order, with `TAKE_THREADS` calls in flight and no more."""
    pending: deque[Future[Int32Array]] = deque()
    with ThreadPoolExecutor(TAKE_THREADS) as pool:
        for place in places:
            if len(pending) == TAKE_THREADS:
                done = pending.popleft().result()
                pending.append(pool.submit(read, place))
                yield done
            else:
                pending.append(pool.submit(read, place))
        while pending:
            yield pending.popleft().result()


def _write_mds(documents: Iterable[pa.ListArray], folder: Path) -> None:
    streaming = importlib.import_module("streaming")
    columns = {"tokens": f"ndarray:int32:{table.SEQ_LEN}"}
    with streaming.MDSWriter(out=str(folder), columns=columns, compression=None) as writer:
        for batch in _batches(map(_joined, documents)):
            for block in batch:
                writer.write({"tokens": block})


def _write_memmap(documents: Iterable[pa.ListArray], folder: Path) -> None:
    with (folder / "tokens.bin").open("wb") as file:
        for batch in _batches(map(_joined, documents)):
            batch.astype(np.uint16).tofile(file)


def _write_parquet(documents: Iterable[pa.ListArray], folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("input_ids", pa.list_(pa.int32()))])
    lists = pa.chunked_array(list(documents), schema.field(0).type)
    pq.write_table(pa.table([lists], schema=schema), folder / "documents.parquet", row_group_size=ROW_GROUP_ROWS)


def _write_blocks(documents: Iterable[pa.ListArray], folder: Path) -> None:
    import lance
    import pyarrow as pa

    schema = pa.schema([("input_ids", pa.list_(pa.int32(), table.SEQ_LEN))])

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in _batches(map(_joined, documents)):
            column = pa.FixedSizeListArray.from_arrays(pa.array(batch.reshape(-1)), table.SEQ_LEN)
            yield pa.record_batch([column], schema=schema)

    reader = pa.RecordBatchReader.from_batches(schema, batches())
    lance.write_dataset(reader, str(folder), schema=schema, data_storage_version="2.2")
