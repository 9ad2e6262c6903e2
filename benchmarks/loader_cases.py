"""What `benchmarks.loader` runs in processes of its own: our loader, LanceDB's, and the limits of the same reads.

Invariant: every case is a stream of token counts, one per batch handed over, and one clock (`timed`) measures them all.
Ours, the limits and every peer are timed from the request for the first block on, so that filling the read-ahead
counts; `StreamingDataset` from its first block on, so that its slow start does not. What a process does once, such as
loading compiled code, counts in the time to the first block: ours and the limits are opened once before for that.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import resource
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from benchmarks import loader_table as table
from benchmarks.s3_stub import stats
from pretrain_assets.table.storage import Location

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from pretrain_assets.loader.plan import EpochPlan
    from pretrain_assets.loader.stream import Batch, BlockLoader

Counts = Iterator[int]
"""Tokens of each batch, given out once it is there."""
EPOCH_SECONDS = 60.0
"""After so long a case that reads a whole epoch ends all the same."""
TAKE_THREADS = 2
SCAN_BATCH_ROWS = 4_096
URING = "file+uring://"
PERMUTATION_BYTES = 4 << 30
COMPARED = {"read_batch_size": 8, "io_queue_depth": 1}
"""Settings of the stream that ours is compared with; they do not change the blocks."""


def timed(
    start: Callable[[], Counts],
    *,
    seconds: float = EPOCH_SECONDS,
    from_first_block: bool = False,
    twice: bool = False,
    endpoint: str | None = None,
) -> dict[str, float | int]:
    """Open a stream and drain it.

    Args:
        start: Opens everything that the stream needs; its result is the stream.
        seconds: Stop after so long, if it has not ended by itself.
        from_first_block: The clock starts when the first batch is there, and its tokens do not count.
        twice: The stream is opened twice: for the time to the first batch, and again for the clock.
        endpoint: Stub of an object store (`benchmarks.s3_stub`) whose requests are counted while the clock runs.

    Returns:
        Tokens, seconds and processor seconds on the clock, their ratios, and seconds from `start` to the first batch;
        with an endpoint also requests and bytes per block.
    """
    opened = time.perf_counter()
    stream = start()
    if twice:
        next(stream)
        first_block_seconds = time.perf_counter() - opened
        _close(stream)
        stream = start()
    before = stats(endpoint) if endpoint else {}
    began, began_cpu = time.perf_counter(), _cpu_seconds()
    tokens = next(stream)
    if not twice:
        first_block_seconds = time.perf_counter() - opened
    if from_first_block:
        before = stats(endpoint) if endpoint else {}
        tokens, began, began_cpu = 0, time.perf_counter(), _cpu_seconds()
    for count in stream:
        tokens += count
        if time.perf_counter() - began > seconds:
            break
    took, cpu = time.perf_counter() - began, _cpu_seconds() - began_cpu
    asked = {kind: number - before.get(kind, 0) for kind, number in (stats(endpoint) if endpoint else {}).items()}
    _close(stream)
    return {
        "first_block_seconds": first_block_seconds,
        "tokens": tokens,
        "clock_seconds": took,
        "clock_cpu_seconds": cpu,
        "tokens_per_second": tokens / took,
        "tokens_per_cpu_second": tokens / cpu,
        **_per_block(asked, tokens / table.SEQ_LEN),
    }


def _close(stream: Counts) -> None:
    if isinstance(stream, Generator):
        stream.close()


def _per_block(asked: Mapping[str, int], blocks: float) -> dict[str, float]:
    if not asked:
        return {}
    requests = sum(number for kind, number in asked.items() if kind != "bytes")
    return {"requests_per_block": requests / blocks, "bytes_per_block": asked["bytes"] / blocks}


def ours(
    database: str,
    splits: int,
    dtype: Literal["int64", "int32"],
    doc_ids: bool,
    clump: int = 1,
    seconds: float = EPOCH_SECONDS,
    endpoint: str | None = None,
) -> Callable[[], Any]:
    """A whole epoch, one cycle per batch."""
    _import("lance", "torch")

    def start() -> Counts:
        loader = _loader(database, splits, clump)
        loader.plan(0)
        return (batch.input_ids.numel() for batch in loader.batches(0, dtype=dtype, doc_ids=doc_ids))

    return lambda: timed(start, seconds=seconds, twice=True, endpoint=endpoint)


def check(database: str, blocks: dict[str, int], clump: int = 1) -> Callable[[], Any]:
    """Build the plans, compile what is compiled once per machine, and compare blocks with those of `StreamingDataset`.

    Args:
        database: The table's database.
        blocks: How many blocks to compare, by number of splits.
        clump: Rows that stay together in the shuffle.

    Returns:
        What each plan holds, by number of splits.
    """
    _import("lance", "torch", "lancedb.streaming")

    def work() -> dict[str, dict[str, int]]:
        facts = {}
        for splits, wanted in ((int(splits), wanted) for splits, wanted in blocks.items()):
            loader = _loader(database, splits, clump)
            plan = loader.plan(0)
            list(loader.batches(0, dtype="int32", doc_ids=False, max_batches=1))
            batches = loader.batches(0, max_batches=max(1, wanted // splits))
            mine = _digest(pair for batch in batches for pair in _blocks(batch))
            if wanted:
                dataset = _streaming(database, splits, plan.blocks_per_epoch, clump, **COMPARED)
                blocks_of_it = islice(dataset, wanted // splits * splits)
                theirs = _digest((block["input_ids"], block["doc_ids"]) for block in blocks_of_it)
                assert mine == theirs, f"blocks at {splits} splits: ours {mine}, StreamingDataset's {theirs}"
            facts[str(splits)] = {
                "documents": len(plan.ends),
                "tokens": int(plan.tokens_per_split.sum()),
                "blocks": plan.blocks_per_epoch,
            }
        return facts

    return work


def streaming(
    database: str,
    splits: int,
    read_batch_size: int,
    io_queue_depth: int,
    transform_parallelism: int | None,
    blocks: int,
    seconds: float,
    clump: int = 1,
    endpoint: str | None = None,
) -> Callable[[], Any]:
    """LanceDB's `StreamingDataset` for some seconds after its first block."""
    _import("lance", "lancedb.streaming")
    knobs = {
        "read_batch_size": read_batch_size,
        "io_queue_depth": io_queue_depth,
        "transform_parallelism": transform_parallelism,
    }

    def start() -> Counts:
        dataset = _streaming(database, splits, blocks, clump, **knobs)
        return (block["input_ids"].numel() for block in dataset)

    return lambda: timed(start, seconds=seconds, from_first_block=True, endpoint=endpoint)


def bare_take(database: str, splits: int, clump: int = 1) -> Callable[[], Any]:
    """Take the rows of every window in turn with the reader that ours uses, and drop them."""
    _import("lance")
    loader = _loader(database, splits, clump)
    windows = list(_windows(loader.plan(0), loader.settings.window_tokens))
    dataset = loader.dataset

    def take(window: tuple[npt.NDArray[np.uint64], int]) -> int:
        rows, tokens = window
        assert dataset._take_rows(rows, columns=["input_ids"]).num_rows == len(rows)
        return tokens

    def start() -> Counts:
        with ThreadPoolExecutor(TAKE_THREADS) as pool:
            yield from pool.map(take, windows)

    return lambda: timed(start, twice=True)


def scan(database: str) -> Callable[[], Any]:
    """Read the whole column in storage order, and drop it: no order that anybody trains in, but the upper limit."""
    from pretrain_assets.loader.read import fastest
    from pretrain_assets.table.versions import open_pin

    _import("lance")
    dataset = fastest(open_pin(Location(database_uri=database), table.PIN))

    def start() -> Counts:
        for batch in dataset.scanner(columns=["input_ids"], batch_size=SCAN_BATCH_ROWS).to_batches():
            yield len(batch.column(0).values)

    return lambda: timed(start, twice=True)


def _digest(blocks: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> str:
    """Digest of token ids and document ids of blocks, and of how many there are."""
    digest, number = hashlib.blake2b(digest_size=16), 0
    for ids, docs in blocks:
        digest.update(ids.numpy().tobytes() + docs.numpy().tobytes())
        number += 1
    return f"{number} {digest.hexdigest()}"


def _blocks(batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    assert batch.doc_ids is not None
    return zip(batch.input_ids, batch.doc_ids, strict=True)


def _windows(plan: EpochPlan, window_tokens: int) -> Iterator[tuple[npt.NDArray[np.uint64], int]]:
    """Sorted row ids of the documents that begin in each window of cycles, and the tokens that they hold."""
    row_ids = plan.row_ids
    lengths = np.concatenate([np.diff(plan.ends_of(split), prepend=0) for split in range(plan.num_splits)])
    begins = np.asarray(plan.ends) - lengths
    window = begins // (max(1, window_tokens // (plan.num_splits * plan.seq_len)) * plan.seq_len)
    by_window = np.argsort(window, kind="stable")
    for chosen in np.split(by_window, np.flatnonzero(np.diff(window[by_window])) + 1):
        yield np.sort(row_ids[chosen]), int(lengths[chosen].sum())


def _loader(database: str, splits: int, clump: int) -> BlockLoader:
    from pretrain_assets.loader.stream import BlockLoader

    return BlockLoader(Location(database_uri=database), table.PIN, table.data(splits, clump), table.TOKENIZER)


def _streaming(database: str, splits: int, blocks: int, clump: int, **knobs: Any) -> Any:
    from lancedb.streaming import StreamingDataset

    from pretrain_assets.table.storage import open_lancedb

    return StreamingDataset(
        open_lancedb(Location(database_uri=database), table.PIN.version),
        num_splits=splits,
        shuffle_seed=table.SEED,
        shuffle_clump_size=clump if clump > 1 else None,
        columns=["input_ids"],
        filter=table.FILTER,
        pack_sequences=table.SEQ_LEN,
        eos_id=table.EOS,
        pad_id=table.PAD,
        blocks_per_epoch=blocks,
        **knobs,
    )


def _import(*names: str) -> None:
    """Imports are seconds of their own, once per process: no part of any answer.

    Ours tells malloc to keep freed memory; what it is compared with gets the same, which makes takes 1.5 times faster.
    """
    from pretrain_assets.loader.allocator import keep_freed_memory

    keep_freed_memory()
    for name in (*names, "pretrain_assets.loader.stream"):
        importlib.import_module(name)
    os.environ.setdefault("LANCEDB_PERM_BUILDER_MEMORY_LIMIT", str(PERMUTATION_BYTES))


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
