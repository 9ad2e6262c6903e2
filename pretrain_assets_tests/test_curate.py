"""Exact duplicates and the exploratory counts."""

from __future__ import annotations

import errno
import itertools
import os
import random
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain_assets.config import DedupConfig
from pretrain_assets.curate import eda
from pretrain_assets.curate.dedup import _fill as stage
from pretrain_assets.curate.dedup import dedup
from pretrain_assets.curate.normalise import content_hashes, hash_text, normalised
from pretrain_assets.curate.partitions import Partitions, temporary_files, zeros
from pretrain_assets.curate.words import text_bytes
from pretrain_assets.errors import TableError
from pretrain_assets.table import verify
from pretrain_assets.table.filler import fill as filler
from pretrain_assets.table.filler.columnfile import leaf_ids
from pretrain_assets.table.lineage import StageResult
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.versions import record_of
from pretrain_assets_tests.tables import append, make_table, newest, values

WHITE_SPACE = [c for c in map(chr, range(sys.maxunicode + 1)) if c.isspace()]


def run(location: Location, **config: int) -> StageResult:
    return dedup(location, DedupConfig(**config), input_pin=newest(location))


def test_field_25_only_the_second_cat_is_a_duplicate(tmp_path: Path) -> None:
    location = make_table(tmp_path, ["cat", "dog", "cat", ""])
    assert run(location).record.ledger == {"in": 4, "unique": 3, "duplicate": 1}
    assert values(location, "is_dup") == [False, False, True, False]
    assert values(location, "dup_of") == [None, None, 0, None]
    assert values(location, "content_hash") == [hash_text(text) for text in ("cat", "dog", "cat", "")]


def test_field_25_short_texts_are_not_all_one_class(tmp_path: Path) -> None:
    location = make_table(tmp_path, [*"abc123.!é", "a"])
    run(location)
    assert values(location, "dup_of") == [None] * 9 + [0]


def test_null_and_blank_texts_are_one_class(tmp_path: Path) -> None:
    location = make_table(tmp_path, [None, "", " \n", "x"])
    run(location)
    assert values(location, "is_dup") == [False, True, True, False]


def test_the_white_space_of_python_is_what_is_normalised() -> None:
    assert len(WHITE_SPACE) == 29
    assert {hash_text(f"{space}a{space * 3}b{space}") for space in WHITE_SPACE} == {hash_text("a b")}


def test_hashes_of_a_batch_are_those_of_its_texts() -> None:
    texts = ["", None, " a\tb ", "b\u2003\u0085 c", "\u3000", "\U0001d518\u200b\ufeff", "e\u2027", "é\u00a0"]
    for array in (pa.array(texts), pa.array(texts, pa.large_string()), pa.array(["x", *texts, "y"])[1:-1]):
        assert content_hashes(array).to_pylist() == [hash_text(text or "") for text in texts]
    assert content_hashes(pa.array([], pa.string())).to_pylist() == []


def test_field_21_a_text_of_50_mb_and_one_of_white_space() -> None:
    texts = ["word " * 10_000_000, "\u2003" * 3_000_000, "x" * 1_000_000, "word  " * 10_000_000]
    words, blank, letters, spaced = content_hashes(pa.array(texts)).to_pylist()
    assert words == spaced == xxhash.xxh3_128_digest(("word " * 9_999_999 + "word").encode())
    assert (blank, letters) == (hash_text(""), hash_text(texts[2]))


PIECES = st.lists(st.sampled_from([*WHITE_SPACE, "a", "b", "é", "\u200b", "\ufeff", "1"]), max_size=8).map("".join)


@settings(deadline=None, max_examples=300)
@given(st.lists(PIECES, max_size=4))
def test_contents_are_those_of_split_and_join(texts: list[str]) -> None:
    content, offsets = normalised(*text_bytes(pa.array(texts, pa.string())))
    contents = [bytes(content[a:b]).decode() for a, b in itertools.pairwise(offsets)]
    assert contents == [" ".join(text.split()) for text in texts]


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("one\r\ntwo\r\n", "one\ntwo\n", True),
        ("one two", "\tone\u3000\x1ctwo ", True),
        ("\ufefftext", "text", False),
        ("zero\u200bwidth", "zerowidth", False),
        (unicodedata.normalize("NFC", "café"), unicodedata.normalize("NFD", "café"), False),
        ("1 2 3", "1 2 4", False),
        ("1 23", "12 3", False),
        ("|1|2|\n|3|4|", "|1|2|\n|3|5|", False),
        ("12", "1\u200b2", False),
        ("Cat", "cat", False),
    ],
)
def test_field_28_written_policy(tmp_path: Path, left: str, right: str, same: bool) -> None:
    location = make_table(tmp_path, [left, right])
    run(location)
    assert values(location, "is_dup") == [False, same]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    random.seed(0)
    return [f"document{' ' * random.randint(1, 3)}{random.randint(0, 150)}" for _ in range(400)]


def first_rows(texts: list[str]) -> list[int | None]:
    """What `dup_of` must be."""
    first: dict[str, int] = {}
    found = [first.setdefault(" ".join(text.split()), row) for row, text in enumerate(texts)]
    return [None if named == row else named for row, named in enumerate(found)]


@pytest.mark.parametrize(
    ("batches", "memory_bytes"),
    [(1, 1 << 20), (1, 0), (3, 0), (20, 2000), pytest.param(20, 1 << 20, marks=pytest.mark.slow)],
)
def test_field_27_batches_give_the_columns_of_one_batch(
    tmp_path: Path, texts: list[str], batches: int, memory_bytes: int
) -> None:
    size = -(-len(texts) // batches)
    location = make_table(tmp_path, texts[:size])
    before: list[int | None] = []
    for start in range(0, len(texts), size):
        if start:
            append(location, texts[start : start + size])
        run(location, batch_bytes=1024, memory_bytes=memory_bytes)
        named = values(location, "dup_of")
        assert named[: len(before)] == before, "an appended batch changed an earlier row"
        before = named
    assert before == first_rows(texts)
    assert values(location, "is_dup") == [first is not None for first in before]
    assert values(location, "content_hash") == [hash_text(text) for text in texts]


def test_field_27_every_duplicate_names_a_surviving_partner(tmp_path: Path, texts: list[str]) -> None:
    location = make_table(tmp_path, texts[:200])
    run(location)
    append(location, texts[200:])
    run(location)
    dataset = open_dataset(location)
    finding = verify.duplicates_name_survivors(dataset)
    assert (finding.passed, finding.details) == (
        True,
        {"duplicates": 400 - len({hash_text(t) for t in texts}), "wrong": 0},
    )
    first = next(first for first in values(location, "dup_of") if first is not None)
    naming = values(location, "dup_of").count(first)
    dataset.delete(f"id = {first}")
    assert verify.duplicates_name_survivors(open_dataset(location)).details["wrong"] == naming
    run(location)
    assert verify.duplicates_name_survivors(open_dataset(location)).passed


def test_killed_between_staging_and_commit_nothing_is_lost(
    tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    location = make_table(tmp_path, texts[:100])
    for start in (0, 100, 250):
        if start:
            append(location, texts[start : start + 150])
        with monkeypatch.context() as killed:
            killed.setattr(filler, "_commit", raises(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                run(location)
        run(location)
    assert values(location, "dup_of") == first_rows(texts)


def raises(error: type[BaseException]) -> Callable[..., None]:
    def kill(*arguments: object) -> None:
        raise error

    return kill


def test_a_table_of_before_dup_of_gets_it_without_hashing_again(tmp_path: Path, texts: list[str]) -> None:
    location = make_table(tmp_path, texts)
    spec = stage(DedupConfig())
    narrow = pa.schema([spec.groups[1].outputs.field("is_dup")])
    flags = replace(
        spec.groups[1], outputs=narrow, nullable=(), make=lambda read: lambda rows: spec.groups[1].make(read)(rows)[1:]
    )
    filler.fill(location, replace(spec, groups=(spec.groups[0], flags)), input_pin=newest(location))
    hashes = files_with(location, "content_hash")
    assert run(location).record.ledger["in"] == 400
    assert values(location, "dup_of") == first_rows(texts)
    assert files_with(location, "content_hash") == hashes


def test_hashes_made_otherwise_are_made_anew_and_so_is_what_was_compared_by_them(tmp_path: Path) -> None:
    location = make_table(tmp_path, ["a", "b", "a"])
    run(location)
    before = {name: files_with(location, name) for name in ("content_hash", "is_dup")}
    spec = stage(DedupConfig())
    (field,) = spec.groups[0].outputs
    otherwise = pa.schema([field.with_metadata({**field.metadata, b"pretrain.code_version": b"2"})])
    changed = replace(spec, groups=(replace(spec.groups[0], outputs=otherwise), spec.groups[1]), code_version="2")
    assert filler.fill(location, changed, input_pin=newest(location)).record.rows == 3
    assert all(not set(files_with(location, name)) & set(files) for name, files in before.items())
    assert values(location, "dup_of") == [None, None, 0]


def files_with(location: Location, column: str) -> list[str]:
    dataset = open_dataset(location)
    (leaf,) = leaf_ids(dataset.lance_schema, [column])
    files = (file for fragment in dataset.get_fragments() for file in fragment.metadata.files)
    return [file.path for file in files if leaf in file.fields]


def test_partitions_hold_the_same_in_memory_and_in_files() -> None:
    records = np.random.default_rng(0).integers(0, 1 << 63, (5000, 3), np.uint64) * np.uint64(2)
    found = {}
    for memory_bytes in (0, 50_000, 1 << 20):
        with Partitions(3, memory_bytes) as partitions:
            for start in range(0, 5000, 700):
                partitions.add(records[start : start + 700])
            assert partitions.spilled == (memory_bytes < 5000 * 24)
            found[memory_bytes] = [part.tolist() for part in partitions]
    assert found[0] == found[50_000] == found[1 << 20]
    assert len(found[0]) == 128 and sorted(row for part in found[0] for row in part) == sorted(records.tolist())


@pytest.mark.parametrize("buffering", [0, -1])
def test_a_full_temporary_folder_is_named(monkeypatch: pytest.MonkeyPatch, buffering: int) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: Path("/dev/full").open("wb", buffering))  # noqa: SIM115
    message = r"cannot be put into a temporary file in .*No space left.*TMPDIR"
    with pytest.raises(TableError, match=message), Partitions(1, 0) as partitions:
        partitions.add(np.arange(64, dtype=np.uint64).reshape(-1, 1))


def test_zeros_on_disk_have_their_room_before_they_are_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = zeros(5000, on_disk=True), list[tuple[int, int]]()
    found[4999] = 7
    assert (found.sum(), found.dtype, found.shape) == (7, np.int64, (5000,))

    def full(_: int, offset: int, length: int) -> None:
        asked.append((offset, length))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TableError, match=r"memory_bytes cannot be put into a temporary file .*No space left.*TMPDIR"):
        zeros(5000, on_disk=True)
    assert asked == [(0, 40_000)] and zeros(5000, on_disk=False).sum() == 0


def test_an_error_of_the_table_is_none_of_the_temporary_folder() -> None:
    with pytest.raises(OSError, match="of the object store"), temporary_files("what"):
        raise OSError("LanceError(IO): of the object store")


def test_field_26_the_check_alarms_above_the_share_that_was_set(tmp_path: Path) -> None:
    location = make_table(tmp_path, ["a", "a", "a", "b", "c", "d"], source=["x"] * 4 + ["y"] * 2)
    pin = newest(location)
    shares = []
    for limit in (0.49, 0.5):
        result = dedup(location, DedupConfig(max_share_removed=limit), input_pin=pin)
        dataset = open_dataset(location, result.record.version)
        finding = verify.share_removed(dataset, record_of(dataset, "deduped", result.record.version))
        shares.append((result.changed, finding.passed, finding.details["sources_over_limit"]))
    assert shares == [(True, False, ["x"]), (False, True, [])]


def test_the_lowest_id_survives_whatever_the_row_order(tmp_path: Path) -> None:
    location = make_table(tmp_path, ["same", "same", "same"], id=[5, 3, 4])
    run(location)
    assert values(location, "is_dup") == [True, False, True]
    assert values(location, "dup_of") == [3, None, 3]


def test_exploratory_counts(tmp_path: Path) -> None:
    location = make_table(
        tmp_path,
        ["a", "a", "b" * 100, "c" * 2999],
        score=[None, 0.49, 3.5, 3.99],
        source=["x", "y", "y", "y"],
    )
    run(location)
    dataset = open_dataset(location)
    scores = {(bin.label, bin.rows) for bin in eda.score_bins(dataset)}
    assert scores == {("0.0", 1), ("3.5", 2), ("none", 1)}
    lengths = {bin.label: bin.rows for bin in eda.length_bins(dataset)}
    assert lengths == dict.fromkeys(lengths, 0) | {"0+": 2, "100+": 1, "1,000+": 1}
    assert len(lengths) == 8
    assert eda.duplicates_by_source(dataset) == [
        eda.SourceShare(source="y", rows=3, duplicates=1),
        eda.SourceShare(source="x", rows=1, duplicates=0),
    ]


def test_an_empty_table_gets_the_columns_and_zero_counts(tmp_path: Path) -> None:
    location = make_table(tmp_path, [])
    result = run(location)
    assert (result.changed, result.record.ledger) == (True, {"in": 0, "unique": 0, "duplicate": 0})
    dataset = open_dataset(location)
    assert dataset.schema.names[-3:] == ["content_hash", "dup_of", "is_dup"]
    assert (eda.score_bins(dataset), eda.duplicates_by_source(dataset)) == ([], [])
    assert sum(bin.rows for bin in eda.length_bins(dataset)) == 0
    append(location, ["a", "a"])
    run(location)
    assert values(location, "is_dup") == [False, True]


BIG = """
import sys
from pathlib import Path
from pretrain_assets.config import DedupConfig, EngineConfig
from pretrain_assets.curate.dedup import dedup
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location
location, pin, here = Location(database_uri=sys.argv[1]), Pin.parse(sys.argv[2]), EngineConfig(workers=1)
dedup(location, DedupConfig(), input_pin=pin, engine=here)
print(next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line))
"""


@pytest.mark.slow
def test_field_21_past_2_gib_of_text_memory_stays_flat(tmp_path: Path) -> None:
    """120 documents of 20 MB, two of every three with the same words."""
    words = [f"{number} " * (20_000_000 // (len(str(number)) + 1)) for number in (1, 23)]
    location = make_table(tmp_path, [])
    for row in range(0, 120, 3):
        append(location, [words[0], f"{row} {words[1]}", f" {words[0]}\n"])
    command = [sys.executable, "-c", BIG, location.database_uri, str(newest(location))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert values(location, "dup_of") == [None, None, 0] + [0, None, 0] * 39
    assert int(done.stdout) < 700_000, "kB at its peak; 250,000 without any work"
