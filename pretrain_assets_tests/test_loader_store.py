"""The store of arrays that processes and nodes share, and the copies of columns on local disk."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import lance
import lance.file
import numpy as np
import psutil
import pyarrow as pa
import pytest

from pretrain_assets.errors import PretrainError, TableError
from pretrain_assets.loader import entries, prefetch
from pretrain_assets.loader.prefetch import mirror
from pretrain_assets.loader.store import ArrayStore, Stored, Writer, cache_folder
from pretrain_assets.table.storage import storage_options
from pretrain_assets.table.versions import identified, table_id


@pytest.fixture(autouse=True)
def warnings_only(caplog: pytest.LogCaptureFixture) -> None:
    """The command line, run in this process by other tests, lets through what is only for information."""
    caplog.set_level(logging.WARNING, logger="pretrain_assets")


KEY = {"pin": "t@3", "seed": 1}
DAYS = 86_400


def build(writer: Writer) -> Mapping[str, Any]:
    writer.array("row_ids", np.uint64, 1000)[:] = np.arange(1000)
    writer.array("ends", "int32", (2, 3))[:] = [[1, 2, 3], [4, 5, 6]]
    writer.array("none", np.int64, (0, 4))
    return {"rows": 1000, "shape": (1, 2)}


def never(_: Writer) -> Mapping[str, Any]:
    raise AssertionError("built again")


def check(stored: Stored) -> None:
    assert stored.facts == {"rows": 1000, "shape": [1, 2]}
    assert stored.arrays["row_ids"].dtype == np.uint64
    assert stored.arrays["row_ids"].tolist() == list(range(1000))
    assert stored.arrays["ends"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert stored.arrays["none"].shape == (0, 4)
    assert not any(array.flags.writeable for array in stored.arrays.values())
    assert stored.digest == "d9f2227efd836cb20cbe6c37bf934e32"


def entry_of(folder: Path, kind: str = "plan") -> Path:
    (found,) = (path for path in folder.iterdir() if path.name.startswith(kind) and path.is_dir())
    return found


CHILD = """
import logging, os, sys, time
from pathlib import Path
from pretrain_assets.loader.store import ArrayStore
logging.basicConfig(level=logging.INFO)
folder, mode = Path(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
while not (folder / "go").exists():
    time.sleep(0.001)
def build(writer):
    with open(folder / "built", "a") as file:
        file.write("x")
    rows = writer.array("rows", "int64", 50_000)
    rows[:] = 7
    print("building", flush=True)
    time.sleep(600 if mode == "hang" else 0.3)
    return {"sum": int(rows.sum())}
stored = ArrayStore(folder / "store").get("plan", {"seed": 1}, build)
print(stored.digest, stored.facts["sum"], stored.arrays["rows"].sum())
"""


def child(folder: Path, mode: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(folder), mode]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_opened_again_it_holds_what_was_built(tmp_path):
    store = ArrayStore(tmp_path / "deep" / "store")
    check(store.get("plan", KEY, build))
    check(ArrayStore(store.folder).get("plan", dict(reversed(KEY.items())), never))
    other = store.get("plan", {**KEY, "seed": 2}, lambda writer: {"rows": 0})
    assert other.arrays == {} and other.facts == {"rows": 0}
    assert {path.suffix for path in store.folder.iterdir()} == {"", ".lock"}


@pytest.mark.slow
def test_of_six_processes_one_builds_and_the_others_wait(tmp_path):
    processes = [child(tmp_path, "build") for _ in range(6)]
    for process in processes:
        assert process.stdout and process.stdout.readline() == "ready\n"
    (tmp_path / "go").touch()
    ended = [process.communicate(timeout=60) for process in processes]
    assert (tmp_path / "built").read_text() == "x"
    assert len({out.splitlines()[-1] for out, _ in ended}) == 1
    assert ended[0][0].splitlines()[-1].endswith(" 350000 350000")
    waiting = [error.count("waiting: ") for _, error in ended]
    assert max(waiting) == 1 and sum(waiting) >= 1


def test_a_killed_builder_lets_the_next_one_build_and_leaves_nothing(tmp_path):
    (tmp_path / "go").touch()
    process = child(tmp_path, "hang")
    assert process.stdout and [process.stdout.readline() for _ in range(2)] == ["ready\n", "building\n"]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    store = ArrayStore(tmp_path / "store")
    assert [path.name for path in store.folder.glob("*.new/*")] == ["rows"]
    check(store.get("other", KEY, build))
    assert list(store.folder.glob("*.new")) == []
    check(store.get("plan", {"seed": 1}, build))
    assert len(list(store.folder.iterdir())) == 4  # two entries and their locks


def test_a_builder_that_fails_leaves_nothing(tmp_path):
    def fail(writer: Writer) -> Mapping[str, Any]:
        writer.array("rows", np.int8, 10)
        raise RuntimeError("no such column")

    store = ArrayStore(tmp_path)
    with pytest.raises(RuntimeError, match="no such column"):
        store.get("plan", KEY, fail)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    check(store.get("plan", KEY, build))


@pytest.mark.parametrize("damage", ["short", "garbled", "empty", "gone", "other"])
def test_a_damaged_entry_is_built_again(tmp_path, caplog, damage):
    store = ArrayStore(tmp_path)
    before = store.get("plan", KEY, build)
    entry = entry_of(tmp_path)
    manifest = entry / "manifest.json"
    if damage == "short":
        os.truncate(entry / "row_ids", 7992)
    elif damage == "garbled":
        manifest.write_bytes(b"\xff{" + manifest.read_bytes()[2:])
    elif damage == "empty":
        manifest.write_text("{}")
    elif damage == "gone":
        (entry / "ends").unlink()
    else:
        manifest.write_text(manifest.read_text().replace("t@3", "t@4"))
    with caplog.at_level(logging.WARNING):
        check(store.get("plan", KEY, build))
    assert [record.message.count("is damaged and is made again") for record in caplog.records] == [1]
    assert before.arrays["ends"].tolist() == [[1, 2, 3], [4, 5, 6]]  # its map outlives the file
    check(store.get("plan", KEY, never))


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(PretrainError, match=r"file/store cannot be written: Not a directory.*PRETRAIN_CACHE_DIR"):
        ArrayStore(tmp_path / "file" / "store").get("plan", KEY, build)

    def too_large(writer: Writer) -> Mapping[str, Any]:
        writer.array("rows", np.int64, 1 << 56)
        return {}

    with pytest.raises(PretrainError, match="PRETRAIN_CACHE_DIR"):
        ArrayStore(tmp_path).get("plan", KEY, too_large)
    assert list(tmp_path.glob("*.new")) == []


def test_an_array_cannot_leave_its_folder(tmp_path):
    with pytest.raises(ValueError, match=r"'\.\./x' cannot be the name of an array"):
        ArrayStore(tmp_path).get("plan", KEY, lambda writer: {"a": writer.array("../x", "int8", 1)})


def test_entries_unused_for_a_month_go_when_another_comes(tmp_path):
    store = ArrayStore(tmp_path)
    old, used, kept = (store.get(kind, KEY, build) for kind in ("old", "used", "kept"))
    for kind, days in (("old", 31), ("used", 29), ("kept", 31)):
        lock = entry_of(tmp_path, kind).with_suffix(".lock")
        os.utime(lock, (time.time() - days * DAYS,) * 2)
    entries.keep(entry_of(tmp_path, "kept"))
    os.utime(entry_of(tmp_path, "kept").with_suffix(".lock"), (time.time() - 31 * DAYS,) * 2)
    store.get("used", KEY, never)
    assert time.time() - entry_of(tmp_path, "used").with_suffix(".lock").stat().st_mtime < 60
    store.get("new", KEY, build)
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir() if path.is_dir()) == ["kept", "new", "used"]
    assert len(list(tmp_path.glob("*.lock"))) == 3
    check(old)
    check(used)
    check(kept)


def test_opening_reads_no_array(tmp_path):
    def large(writer: Writer) -> Mapping[str, Any]:
        writer.array("rows", np.int64, 8 << 20)[:] = 3
        return {}

    ArrayStore(tmp_path).get("plan", KEY, large)
    before = psutil.Process().memory_info().rss
    rows = ArrayStore(tmp_path).get("plan", KEY, never).arrays["rows"]
    assert psutil.Process().memory_info().rss - before < 4 << 20
    assert int(rows[-1]) == 3


def test_the_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("PRETRAIN_CACHE_DIR", "/fast/cache")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/fast/cache")
    monkeypatch.delenv("PRETRAIN_CACHE_DIR")
    assert cache_folder() == Path("/xdg/pretrain_assets")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "pretrain_assets"


def test_a_second_node_fetches_and_a_damaged_copy_is_replaced(tmp_path, s3, caplog):
    shared = f"{s3.bucket('store')}/db/corpus.plans"
    check(ArrayStore(tmp_path / "a", shared).get("plan", KEY, build))
    check(ArrayStore(tmp_path / "b", shared).get("plan", KEY, never))
    assert caplog.records == []
    remote = fsspec.filesystem("s3")
    (ends,) = remote.glob(f"{shared}/plan-*/ends")
    for number, content in enumerate((b"\0" * 24, b"\0" * 23)):
        remote.pipe_file(ends, content)
        with pytest.raises(AssertionError, match="built again"):
            ArrayStore(tmp_path / f"c{number}", shared).get("plan", KEY, never)
        assert "cannot be used and is built again" in caplog.records[-1].message
        check(ArrayStore(tmp_path / f"c{number}", shared).get("plan", KEY, build))
        check(ArrayStore(tmp_path / f"d{number}", shared).get("plan", KEY, never))


def test_a_shared_folder_that_cannot_be_written_is_a_warning(tmp_path, s3, caplog):
    check(ArrayStore(tmp_path, "s3://no-such-bucket/plans").get("plan", KEY, build))
    assert [record.message.count("was not shared") for record in caplog.records] == [1]


SCHEMA = identified(
    pa.schema(
        [("id", pa.int64()), ("text", pa.string()), ("input_ids", pa.list_(pa.int32())), ("n_tokens", pa.int32())]
    ),
    "t",
)


def rows(start: int, stop: int) -> pa.Table:
    rng = np.random.default_rng(start)
    lengths = rng.integers(0, 60, stop - start)
    tokens = [rng.integers(0, 50_000, n).tolist() for n in lengths]
    texts = [rng.bytes(400).hex() for _ in lengths]
    return pa.table([range(start, stop), texts, tokens, lengths], schema=SCHEMA)


def history(uri: str) -> lance.LanceDataset:
    """Version 1: three fragments. 2: deletions. 3: rows without tokens. 4, 5: all in one file, its rows moved."""
    options = {"storage_options": storage_options(uri)}
    fresh = {"enable_stable_row_ids": True, "data_storage_version": "2.2", "max_rows_per_file": 200}
    lance.write_dataset(rows(0, 600), uri, **fresh, **options)
    lance.dataset(uri, **options).delete("id % 11 = 3")
    lance.write_dataset(rows(600, 650).select(["id", "text"]), uri, mode="append", **options)
    lance.dataset(uri, **options).optimize.compact_files(target_rows_per_fragment=10_000)
    return lance.dataset(uri, **options)


def taken(dataset: lance.LanceDataset, like: lance.LanceDataset, column: str) -> pa.Table:
    """A column of all rows of `like`, by row id and in a mixed order."""
    ids = like.to_table(columns=[], with_row_id=True)["_rowid"].to_numpy()
    return dataset._take_rows(np.random.default_rng(0).permutation(ids), columns=[column])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "SMALLEST_GAP_BYTES", 4096)
    monkeypatch.setattr(prefetch, "PIECE_BYTES", 8192)


def test_a_copy_reads_as_every_version_of_the_table_does_and_needs_no_network(tmp_path, s3, small, monkeypatch):
    newest = history(f"{s3.bucket('mirror')}/db/corpus.lance")
    versions = [newest.checkout_version(number) for number in range(1, newest.version + 1)]
    wanted = [[taken(dataset, dataset, name) for name in ("input_ids", "n_tokens")] for dataset in versions]
    for dataset in versions:
        mirror(dataset, ["input_ids", "n_tokens"], tmp_path)
    ids = [dataset.to_table(columns=[], with_row_id=True)["_rowid"] for dataset in versions]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.delattr(lance.file, "LanceFileSession")
    for dataset, values, row_ids in zip(versions, wanted, ids, strict=True):
        copy = mirror(dataset, ["n_tokens", "input_ids"], tmp_path)
        assert copy.uri.startswith(str(tmp_path)) and table_id(copy) == "t"
        assert copy.to_table(columns=[], with_row_id=True)["_rowid"] == row_ids
        assert [taken(copy, copy, name) for name in ("input_ids", "n_tokens")] == values
        with pytest.raises(ValueError, match="No field named text"):
            copy.to_table(columns=["text"])
    assert len(values[0]) == 595 and values[0]["input_ids"].null_count == 50  # compacted, rows without tokens included
    (file,) = Path(copy.uri).glob("data/*")
    assert file.stat().st_blocks * 512 < 0.3 * file.stat().st_size  # the text, most of the file, was not copied


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Name and bytes of every piece that is read from now on."""
    read: list[tuple[str, int]] = []
    original = lance.file.LanceFileSession.read_range

    def counting(self: lance.file.LanceFileSession, name: str, start: int, length: int) -> bytes:
        read.append((name, length))
        return original(self, name, start, length)

    monkeypatch.setattr(lance.file.LanceFileSession, "read_range", counting)
    return read


KILLED = """
import os, sys, time
from pathlib import Path
import lance, lance.file
from pretrain_assets.loader import prefetch
prefetch.PIECE_BYTES = 8192
uri, folder = sys.argv[1], Path(sys.argv[2])
read, calls = lance.file.LanceFileSession.read_range, []
def until_half(self, *args):
    calls.append(args)
    while len(calls) > 40 and not (list(folder.glob("*/data/*.lance")) and list(folder.glob("*/data/*.part"))):
        time.sleep(0.001)
    if len(calls) > 40:
        os.kill(os.getpid(), 9)
    return read(self, *args)
lance.file.LanceFileSession.read_range = until_half
prefetch.THREADS = 4
prefetch.mirror(lance.dataset(uri, version=2), ["input_ids", "text"], folder)
"""


@pytest.mark.slow
def test_a_killed_copy_goes_on_where_it_stopped(tmp_path, small, monkeypatch):
    table, folder = str(tmp_path / "corpus.lance"), tmp_path / "copies"
    dataset = history(table).checkout_version(2)
    killed = subprocess.run([sys.executable, "-c", KILLED, table, str(folder)], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    sizes = {path.name: path.stat().st_size for path in folder.glob("*/data/*")}
    there = sum(size if name.endswith(".lance") else max(0, size - 1) for name, size in sizes.items())
    total = sum(file.file_size_bytes for fragment in dataset.get_fragments() for file in fragment.metadata.files)
    assert {name.rsplit(".", 1)[1] for name in sizes} == {"lance", "part"} and total / 4 < there < total

    read = counted_reads(monkeypatch)
    copy = mirror(dataset, ["text", "input_ids"], folder)
    assert sum(n for name, n in read if name.startswith("data/")) == total - there
    assert taken(copy, dataset, "text") == taken(dataset, dataset, "text")
    assert list(folder.glob("*/data/*.part")) == []


def test_one_of_many_copies_while_the_others_wait(tmp_path, monkeypatch):
    dataset = history(str(tmp_path / "corpus.lance")).checkout_version(1)
    read = counted_reads(monkeypatch)
    with ThreadPoolExecutor(4) as pool:
        copies = list(pool.map(lambda _: mirror(dataset, ["n_tokens"], tmp_path / "copies"), range(4)))
    assert len({copy.uri for copy in copies}) == 1 and copies[0].count_rows() == 600
    assert sorted(name.split("/")[0] for name, _ in read) == ["_versions", "data", "data", "data"]


def test_a_damaged_copy_is_mended(tmp_path, small, caplog):
    dataset = history(str(tmp_path / "corpus.lance"))
    folder = Path(mirror(dataset, ["input_ids"], tmp_path / "copies").uri)
    (file,) = folder.glob("data/*.lance")
    os.truncate(file, 100)
    copy = mirror(dataset, ["input_ids"], tmp_path / "copies")
    assert caplog.messages == [f"{folder} is damaged, and what it lacks is copied again: data/{file.name}"]
    assert taken(copy, dataset, "input_ids") == taken(dataset, dataset, "input_ids")


def test_what_cannot_be_copied_is_refused_before_it_is_tried(tmp_path):
    dataset = history(str(tmp_path / "corpus.lance"))
    with pytest.raises(PretrainError, match=r"has 10 bytes free, and .* needs [\d,]{7,} more.*loader\.prefetch off"):
        mirror(dataset, ["input_ids"], tmp_path / "copies", free_bytes=lambda folder: 10)
    assert list((tmp_path / "copies").glob("*/*")) == []
    with pytest.raises(TableError, match="no column 'input_idz'; it has id, text, input_ids, n_tokens"):
        mirror(dataset, ["input_idz"], tmp_path / "copies")
    clone = dataset.shallow_clone(str(tmp_path / "clone.lance"), reference=dataset.version)
    with pytest.raises(TableError, match=r"refers to files of another table .*loader\.prefetch off"):
        mirror(clone, ["input_ids"], tmp_path / "copies")
    blob = pa.field("picture", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    values = pa.table([range(3), [b"x"] * 3], schema=pa.schema([SCHEMA.field("id"), blob]))
    pictures = lance.write_dataset(values, str(tmp_path / "pictures.lance"), data_storage_version="2.2")
    with pytest.raises(TableError, match="blobs in 'picture'"):
        mirror(pictures, ["picture"], tmp_path / "copies")
