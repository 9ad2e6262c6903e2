"""Exact duplicates and the exploratory counts."""

from __future__ import annotations

import random
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain_assets.config import DedupConfig
from pretrain_assets.curate import eda
from pretrain_assets.curate.dedup import dedup, hash_text
from pretrain_assets.table.lineage import StageResult
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets_tests.tables import append, make_table, newest, values

WHITE_SPACE = [c for c in map(chr, range(sys.maxunicode + 1)) if c.isspace()]


def run(location: Location, **config: int) -> StageResult:
    return dedup(location, DedupConfig(**config), input_pin=newest(location))


def test_field_25_only_the_second_cat_is_a_duplicate(tmp_path: Path) -> None:
    location = make_table(tmp_path, ["cat", "dog", "cat", ""])
    assert run(location).record.ledger == {"in": 4, "unique": 3, "duplicate": 1}
    assert values(location, "is_dup") == [False, False, True, False]
    assert values(location, "content_hash") == [hash_text(text) for text in ("cat", "dog", "cat", "")]


def test_null_and_blank_texts_are_one_class(tmp_path: Path) -> None:
    location = make_table(tmp_path, [None, "", " \n", "x"])
    run(location)
    assert values(location, "is_dup") == [False, True, True, False]


def test_the_white_space_of_python_is_what_is_normalised() -> None:
    assert len(WHITE_SPACE) == 29
    assert {hash_text(f"{space}a{space * 3}b{space}") for space in WHITE_SPACE} == {hash_text("a b")}


PIECES = st.lists(st.sampled_from([*WHITE_SPACE, "a", "b", "é", "\u200b", "\ufeff", "1"]), max_size=8).map("".join)


@settings(deadline=None, max_examples=300)
@given(PIECES, PIECES)
def test_classes_are_those_of_split_and_join(left: str, right: str) -> None:
    assert (hash_text(left) == hash_text(right)) == (" ".join(left.split()) == " ".join(right.split()))


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


@pytest.mark.parametrize("batches", [1, 3, 20])
def test_field_27_batches_give_the_columns_of_one_batch(tmp_path: Path, texts: list[str], batches: int) -> None:
    size = -(-len(texts) // batches)
    location = make_table(tmp_path, texts[:size])
    before: list[bool] = []
    for start in range(0, len(texts), size):
        if start:
            append(location, texts[start : start + size])
        run(location, batch_bytes=1024)
        flags = values(location, "is_dup")
        assert flags[: len(before)] == before, "an appended batch flipped an earlier row"
        before = flags
    seen: set[str] = set()
    expected = [(key := " ".join(text.split())) in seen or seen.add(key) is not None for text in texts]
    assert before == expected
    assert values(location, "content_hash") == [hash_text(text) for text in texts]


def test_field_27_every_duplicate_names_a_surviving_partner(tmp_path: Path, texts: list[str]) -> None:
    location = make_table(tmp_path, texts[:200])
    run(location)
    append(location, texts[200:])
    run(location)
    table = open_dataset(location).to_table(columns=["id", "content_hash", "is_dup"]).to_pylist()
    survivor = {row["content_hash"]: row["id"] for row in table if not row["is_dup"]}
    assert len(survivor) == len({" ".join(text.split()) for text in texts})
    assert all(survivor[row["content_hash"]] < row["id"] for row in table if row["is_dup"])


def test_the_lowest_id_survives_whatever_the_row_order(tmp_path: Path) -> None:
    location = make_table(tmp_path, ["same", "same", "same"], id=[5, 3, 4])
    run(location)
    assert values(location, "is_dup") == [True, False, True]


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
    assert dataset.schema.names[-2:] == ["content_hash", "is_dup"]
    assert (eda.score_bins(dataset), eda.duplicates_by_source(dataset)) == ([], [])
    assert sum(bin.rows for bin in eda.length_bins(dataset)) == 0
    append(location, ["a", "a"])
    run(location)
    assert values(location, "is_dup") == [False, True]
