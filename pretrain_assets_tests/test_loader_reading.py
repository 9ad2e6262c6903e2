"""How the loader reads: retries, rows that fail or are gone, io_uring, bounded read-ahead, reused buffers, S3."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch

from pretrain_assets.config import DataConfig, LoaderConfig
from pretrain_assets.errors import ConfigError, TableError
from pretrain_assets.loader import read
from pretrain_assets.loader.buffers import BufferPool
from pretrain_assets.loader.read import URING_SCHEME, fastest, take_rows
from pretrain_assets.loader.stream import BlockLoader
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location, storage_options
from pretrain_assets_tests.test_loader import SEQ, TOKENIZER, make_loader, mixed_lengths, stack, write_table


class FailingStore:
    """A dataset whose storage fails: for some calls, or whenever one row is read. No server can be told to do that."""

    def __init__(self, uri: str, *, calls: int = 0, bad_row: int | None = None, message: str = "Generic S3 error: 503"):
        self.uri, self.version, self.calls, self.bad_row, self.message = uri, 7, calls, bad_row, message

    def _take_rows(self, rows: np.ndarray, columns: list[str]) -> pa.Table:
        self.calls -= 1
        if self.calls >= 0 or self.bad_row in rows.tolist():
            raise OSError(self.message)
        return pa.table({"input_ids": rows})


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "FIRST_PAUSE_SECONDS", 0.0)


def take(store: Any, rows: list[int]) -> tuple[list[int], int]:
    """Rows taken and tries beyond the first."""
    tries: list[int] = []
    table = take_rows(store, np.array(rows, np.uint64), ["input_ids"], retried=lambda: tries.append(1))
    return table["input_ids"].to_pylist(), len(tries)


def test_a_store_that_fails_for_a_while_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert take(FailingStore("s3://b/t", calls=3), [1, 2]) == ([1, 2], 3)
    assert "503); try 2 of 6" in caplog.text


@pytest.mark.parametrize(
    "store", [FailingStore("s3://b/t", bad_row=13), FailingStore("/disk/t", bad_row=13, message="bad page\nbacktrace")]
)
def test_a_row_that_cannot_be_read_is_named(store: FailingStore) -> None:
    with pytest.raises(TableError, match=r"t at version 7: row id 13 cannot be read: (Generic S3|bad page).*Check"):
        take(store, list(range(100)))


@pytest.mark.parametrize("store", [FailingStore("/disk/t", calls=1), FailingStore("file+uring:///disk/t", calls=1)])
def test_a_local_disk_is_not_asked_again(store: FailingStore) -> None:
    with pytest.raises(TableError, match="cannot be read"):
        take(store, [1])


def test_a_row_that_is_gone_is_named(tmp_path: Path) -> None:
    location, _ = write_table(tmp_path, [3] * 20)
    dataset = lance.dataset(location.uri)
    dataset.delete("id = 1013")
    with pytest.raises(TableError, match="lacks 1 of 20 planned rows, the first with row id 13"):
        take_rows(lance.dataset(location.uri), np.arange(20, dtype=np.uint64), ["input_ids"])


def test_io_uring_is_used_where_the_kernel_allows_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    location, pin = write_table(tmp_path, mixed_lengths())
    with caplog.at_level(logging.INFO):
        quick = fastest(lance.dataset(location.uri))
    assert quick.version == pin.version
    assert (quick.uri == f"{URING_SCHEME}{location.uri}") != ("io_uring cannot be used here" in caplog.text)
    assert quick.to_table() == lance.dataset(location.uri).to_table()


def test_a_batch_keeps_its_memory_until_nothing_refers_to_it() -> None:
    pool = BufferPool(64)
    first = torch.from_numpy(pool.take(2, 4, dtype=np.int64))
    address, part = first.data_ptr(), first[1:].view(-1)
    del first
    second = pool.take(16, dtype=np.int32)
    assert second.ctypes.data != address
    del part
    assert pool.take(4, dtype=np.int64).ctypes.data == address
    view = second.reshape(4, 4)[:, 1:]
    del second
    assert pool.take(1, dtype=np.int64).ctypes.data != view.base.ctypes.data


def test_pinned_memory_without_a_device_is_refused(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        return
    loader = make_loader(write_table(tmp_path, mixed_lengths()))
    with pytest.raises(ConfigError, match="pin_memory=True needs a CUDA device"):
        next(loader.batches(0, pin_memory=True))


@pytest.mark.parametrize("settings", [LoaderConfig(read_ahead_bytes=1, io_threads=5), LoaderConfig(window_tokens=100)])
def test_settings_change_no_block(tmp_path: Path, settings: LoaderConfig) -> None:
    where = write_table(tmp_path, mixed_lengths())
    assert torch.equal(stack(make_loader(where, settings=settings))[0], stack(make_loader(where))[0])


def test_what_was_read_ahead_is_bounded(tmp_path: Path) -> None:
    """One batch taken: one window in use, one ready, one packed and waiting, one or two being read."""
    loader = make_loader(write_table(tmp_path, [15] * 1000), filter="true", settings=LoaderConfig(window_tokens=1))
    batches = loader.batches(0)
    next(batches)
    for _ in range(100):
        stats = loader.stats()
        assert stats.rows_consumed == 4 and stats.rows_read + stats.rows_packed <= 4 * 4
    batches.close()


def test_positions_and_boundaries_of_documents(tmp_path: Path) -> None:
    loader = make_loader(write_table(tmp_path, mixed_lengths()))
    batches = list(loader.batches(0, 0, 2, position_ids=True, cu_seqlens=True))
    assert len({batch.cu_seqlens.shape for batch in batches}) == 1
    assert max(len(batch.cu_seqlens.unique()) for batch in batches) == len(batches[0].cu_seqlens)
    for batch in batches:
        docs, place = batch.doc_ids.flatten(), 0
        begins = [0]
        for i in range(1, len(docs)):
            if i % SEQ == 0 or docs[i] != docs[i - 1]:
                begins.append(i)
        for i, position in enumerate(batch.position_ids.flatten().tolist()):
            place = 0 if i in begins else place + 1
            assert position == place
        assert batch.cu_seqlens.unique().tolist() == [*begins, len(docs)]
        assert batch.cu_seqlens.dtype == torch.int32 and batch.cu_seqlens[-1] == len(docs)


def test_int32_blocks_are_the_same(tmp_path: Path) -> None:
    loader = make_loader(write_table(tmp_path, mixed_lengths()))
    narrow = list(loader.batches(0, dtype="int32", doc_ids=False))
    assert {(b.input_ids.dtype, b.doc_ids, b.position_ids, b.cu_seqlens) for b in narrow} == {
        (torch.int32,) + (None,) * 3
    }
    wide = torch.cat([b.input_ids for b in loader.batches(0)])
    assert torch.equal(torch.cat([b.input_ids for b in narrow]).long(), wide)


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_table_on_s3_gives_the_same_blocks(tmp_path: Path, s3: Any, prefetch: bool) -> None:
    local = write_table(tmp_path, mixed_lengths())
    uri = s3.bucket(f"loader-reading-{os.getpid()}-{prefetch}".lower())
    remote = Location(database_uri=f"{uri}/db")
    lance.write_dataset(
        lance.dataset(local[0].uri).to_table(),
        remote.uri,
        enable_stable_row_ids=True,
        data_storage_version="2.2",
        storage_options=storage_options(remote.uri),
    )
    settings = LoaderConfig(prefetch=prefetch, window_tokens=64)
    data = DataConfig(filter="NOT is_dup AND id % 7 != 0", num_splits=4, seed=5, seq_len=SEQ)
    loader = BlockLoader(remote, Pin("t", 1), data, TOKENIZER, settings=settings)
    assert torch.equal(stack(loader)[0], stack(make_loader(local))[0])
    assert loader.dataset.uri.startswith("s3://") != prefetch


def test_a_negative_count_is_refused_before_anything_is_packed(tmp_path: Path) -> None:
    location, _ = write_table(tmp_path, [15] * 20)
    lance.dataset(location.uri).update({"n_tokens": "-3"}, where="id = 1004")
    with pytest.raises(TableError, match="n_tokens is negative at row id 4"):
        make_loader((location, Pin("t", 2)), filter="true").plan(0)


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.list_(pa.uint32()), pa.list_(pa.float32()), pa.int32()])
def test_a_column_that_holds_no_token_lists_is_refused(tmp_path: Path, kind: pa.DataType) -> None:
    location, _ = write_table(tmp_path, [3] * 20)
    table = lance.dataset(location.uri).to_table()
    values = [[1, 2, 3]] * 20 if pa.types.is_list(kind) else range(20)
    table = table.set_column(table.schema.names.index("input_ids"), "input_ids", pa.array(values, kind))
    lance.write_dataset(table, location.uri, mode="overwrite", enable_stable_row_ids=True)
    with pytest.raises(TableError, match=r"input_ids is .*, and not list<int32>"):
        make_loader((location, Pin("t", 2))).batches(0)


def test_boundaries_of_batches_that_begin_elsewhere_fit(tmp_path: Path) -> None:
    """Batches counted from cycle 1 hold other documents than those counted from cycle 0; there is one here."""
    loader = make_loader(write_table(tmp_path, [15] + [0] * 32 + [15]), filter="true", num_splits=1)
    (batch,) = loader.batches(0, 1, 2, cu_seqlens=True)
    assert batch.cu_seqlens is not None and batch.cu_seqlens.tolist() == batch.cu_seqlens.unique().tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1,), "epoch=-1"),
        ((0, -1), "start_cycle=-1"),
        ((0, 10**6), "start_cycle=1000000 cannot work: epoch 0 has the cycles from 0 to"),
        ((0, 0, 0), "cycles_per_batch=0"),
    ],
)
def test_places_outside_the_epoch_are_refused_at_once(tmp_path: Path, arguments: tuple[int, ...], message: str) -> None:
    loader = make_loader(write_table(tmp_path, mixed_lengths()))
    with pytest.raises(ConfigError, match=message):
        loader.batches(*arguments)
    with pytest.raises(ConfigError, match="dtype='int16'"):
        loader.batches(0, dtype="int16")  # type: ignore[arg-type]


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_is_none_is_refused(tmp_path: Path, rank: int, world_size: int) -> None:
    where = write_table(tmp_path, mixed_lengths())
    with pytest.raises(ConfigError, match=r"rank=|world_size=0"):
        make_loader(where, rank, world_size)


def test_a_stream_closed_by_its_own_thread_waits_for_nobody(tmp_path: Path) -> None:
    """The collector may close a forgotten stream in a thread that reads for it."""
    loader = make_loader(write_table(tmp_path, mixed_lengths()), settings=LoaderConfig(window_tokens=1))
    batches = loader.batches(0)
    next(batches)
    packer = next(thread for thread in threading.enumerate() if thread.name == "block-packer")
    release = threading.Event()
    closing = threading.Thread(target=lambda: (batches.close(), release.set()), name="block-reader_0")
    with mock.patch.object(packer, "join", side_effect=AssertionError("joined")):
        closing.start()
        assert release.wait(10)
    packer.join(10)
    assert not packer.is_alive()
