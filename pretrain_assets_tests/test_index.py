"""The two indexes: one version for both, deltas, zero rows, rows without vectors, recall, maintenance, kills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain_assets.config import EmbedConfig, EngineConfig, IndexConfig, MaintainConfig
from pretrain_assets.curate.embedding import embed
from pretrain_assets.errors import BusyError, ConfigError
from pretrain_assets.forensics.indexes import index, recall
from pretrain_assets.forensics.indexes.index import build_index, upkeep
from pretrain_assets.forensics.indexes.segments import TEXT, VECTORS, segments
from pretrain_assets.forensics.retrieval.search import search
from pretrain_assets.forensics.retrieval.vectors import has_index, nearest, vector_column
from pretrain_assets.report.search_text import index_text
from pretrain_assets.table.delete import Request, delete
from pretrain_assets.table.lease import hold
from pretrain_assets.table.lineage import LineageRecord
from pretrain_assets.table.storage import Location, filesystem, open_dataset
from pretrain_assets.table.upkeep.maintain import maintain
from pretrain_assets.table.verify import ledger_closes
from pretrain_assets.table.versions import heal
from pretrain_assets_tests.conftest import S3Server
from pretrain_assets_tests.tables import append, make_table, newest
from pretrain_assets_tests.test_search import AXES, save_static

FEW = 1_000
"""The least number of vectors that are indexed."""
NIGHTLY = MaintainConfig(older_than_seconds=0, keep_unfinished_seconds=0)


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_static(tmp_path_factory.mktemp("models") / "static")


def sentences(count: int, seed: int) -> list[str]:
    """Of five words that the model knows."""
    random = np.random.default_rng(seed)
    return [f"{' '.join(random.choice(list(AXES), 5))} number {seed}x{at}" for at in range(count)]


def filled(location: Location, model: str) -> None:
    config = EmbedConfig(model=model, library="model2vec")
    embed(location, config, input_pin=newest(location), engine=EngineConfig(workers=1))


def indexed(location: Location, **settings: Any) -> LineageRecord:
    return build_index(location, IndexConfig(**settings), input_pin=newest(location)).record


def agree(location: Location, limit: int = 10) -> None:
    """The vector index finds what reading every vector finds."""
    dataset = open_dataset(location)
    column = vector_column(dataset)
    queries = np.random.default_rng(7).normal(size=(5, column.dims)).astype(np.float32)
    found, due = (nearest(dataset, column, queries, limit=limit, exact=exact) for exact in (False, True))
    assert np.nan_to_num(found.similarity, nan=-2) == pytest.approx(np.nan_to_num(due.similarity, nan=-2), abs=2e-3)


def test_rows_that_come_while_it_is_built_are_indexed_too_or_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location, commit, coming = make_table(tmp_path, sentences(30, 0)), index.segments.commit, [1]

    def while_rows_arrive(*arguments: Any) -> Any:
        if coming:
            append(location, sentences(coming.pop(), 1))
        return commit(*arguments)

    monkeypatch.setattr(index.segments, "commit", while_rows_arrive)
    record = indexed(location)
    assert record.ledger == {"in": 31, "indexed": 31} and record.rows_total == 31
    assert record.version == open_dataset(location).version == 4  # rows, index, index
    coming += [7, 5, 3, 2]
    append(location, sentences(4, 2))
    record = indexed(location)
    assert record.ledger == {"in": 45, "indexed": 40, "came_meanwhile": 5} and ledger_closes(record).passed
    assert "text: 40 of 45 rows" in index_text(record)
    coming.clear()
    assert indexed(location).ledger == {"in": 45, "indexed": 45}


def test_both_indexes_are_one_version_and_small_appends_are_read(tmp_path: Path, static: str) -> None:
    location = make_table(tmp_path, [*sentences(1_100, 0), None, "words that mean nothing"])
    filled(location, static)
    before = open_dataset(location).version
    first = indexed(location, exact_below=FEW)
    dataset = open_dataset(location)
    assert (first.version, dataset.version) == (before + 1, before + 1) and has_index(dataset, vector_column(dataset))
    facts = first.details["vectors"]
    assert {n: facts[n] for n in ("rows", "indexed", "read", "without", "entries", "segments")} == {
        "rows": 1_102,
        "indexed": 1_100,
        "read": 0,
        "without": 2,
        "entries": 1_100,
        "segments": 1,
    }
    assert (facts["recall_at_10"], facts["queries"]) == (1.0, 64)
    assert dataset.read_transaction(dataset.version).transaction_properties, "a killed run is healed from here"
    agree(location)
    assert build_index(location, IndexConfig(exact_below=FEW), input_pin=newest(location)).changed is False
    append(location, sentences(30, 1))
    filled(location, static)
    second = indexed(location, exact_below=FEW)
    assert (second.rows, second.ledger) == (30, {"in": 1_132, "indexed": 1_132})
    assert second.details["vectors"]["read"] == 30 and second.details["vectors"]["measured_at"] == first.version
    agree(location)
    text = index_text(second)
    assert "text: 1,132 of 1,132 rows (words and phrases)" in text
    assert "vectors: 1,100 indexed, 30 compared by reading them, 2 rows without one, of 1,132 rows; recall@10" in text


def test_fewer_vectors_than_the_setting_get_no_index(tmp_path: Path, static: str) -> None:
    location = make_table(tmp_path, sentences(20, 0))
    filled(location, static)
    record = indexed(location)
    assert record.details["vectors"] == {
        "rows": 20,
        "indexed": 0,
        "read": 20,
        "without": 0,
        "segments": 0,
        "bytes": 0,
    }
    assert "fewer than 50,000 need no index" in index_text(record)
    with pytest.raises(ConfigError, match="exact_below"):
        IndexConfig(exact_below=10)


def test_the_recall_of_an_index_by_bits_is_measured(tmp_path: Path) -> None:
    location = make_table(tmp_path / "db", sentences(1_500, 0))
    filled(location, save_static(tmp_path / "wide", dims=64))
    facts = indexed(location, exact_below=FEW).details["vectors"]
    dataset = open_dataset(location)
    assert {i.index_type for i in dataset.describe_indices() if i.name == VECTORS} == {"IVF_RQ"}
    assert 0.5 < facts["recall_at_10"] <= 1 and facts["bytes"] < 1_500 * 64
    column = vector_column(dataset)
    assert recall.measure(dataset, column)["recall_at_10"] == facts["recall_at_10"], "the same rows are asked each time"
    fewer = open_dataset(location, dataset.version - 1)
    assert recall.measure(fewer, column)["recall_at_10"] == 1.0, "reading every vector misses none"


def test_vectors_made_anew_are_indexed_anew(tmp_path: Path, static: str) -> None:
    location = make_table(tmp_path, sentences(1_050, 0))
    filled(location, static)
    indexed(location, exact_below=FEW)
    text_before = segments(open_dataset(location), TEXT)
    filled(location, save_static(tmp_path / "other", seed=1))
    assert not has_index(open_dataset(location), vector_column(open_dataset(location))), "old vectors are found no more"
    agree(location)
    record = indexed(location, exact_below=FEW)
    assert record.rows == 0 and record.details["vectors"]["indexed"] == 1_050
    dataset = open_dataset(location)
    assert segments(dataset, TEXT)[0].index.uuid == text_before[0].index.uuid and len(segments(dataset, VECTORS)) == 1
    agree(location)


def test_vectors_are_not_made_anew_while_they_are_indexed(tmp_path: Path, static: str) -> None:
    location = make_table(tmp_path / "db", sentences(3, 0))
    filled(location, static)
    with hold(location, "fill embedded"), pytest.raises(BusyError, match="is in use: fill embedded"):
        indexed(location)


@pytest.mark.slow
def test_on_an_object_store(s3: S3Server, tmp_path: Path, static: str) -> None:
    local = make_table(tmp_path / "db", sentences(1_010, 0))
    filled(local, static)
    location = Location(database_uri=f"{s3.bucket('index')}/db")
    fs, path = filesystem(location.uri)
    fs.put(local.uri, path, recursive=True)
    record = indexed(location, exact_below=FEW)
    assert record.details["vectors"]["indexed"] == 1_010
    agree(location)
    assert [hit.id for hit in search(location, '"number 0x77"', pin=newest(location))] == [77]
    like = search(location, "", pin=newest(location), mode="vector", like=77)
    assert len(like) == 5 and like[0].score > 0.9


@pytest.mark.parametrize("rows", ["none were ingested", "all were deleted"])
def test_an_index_over_zero_rows(tmp_path: Path, static: str, rows: str) -> None:
    location = make_table(tmp_path, [] if rows == "none were ingested" else ["a king", "a queen"])
    if rows == "all were deleted":
        indexed(location)
        delete(location, Request(where="true"))
    record = indexed(location)
    assert record.ledger == {"in": 0, "indexed": 0}
    assert search(location, "king", pin=newest(location)) == []
    for night in range(3):
        append(location, [f"the quagga of night {night}", "still waters run deep"])
        record = indexed(location)
        assert record.ledger == {"in": 2 * night + 2, "indexed": 2 * night + 2}
        maintain(location, NIGHTLY, pinned_by_runs={}, index=upkeep(location))
        pin = newest(location)
        assert len(search(location, "quagga", pin=pin, limit=99)) == night + 1
        assert len(search(location, '"waters run deep"', pin=pin, limit=99)) == night + 1
        assert search(location, '"deep run"', pin=pin) == []
    filled(location, static)
    assert indexed(location).details["vectors"]["rows"] == 6


@pytest.mark.parametrize("which", ["not yet", "none", "some"])
def test_rows_with_null_vectors(tmp_path: Path, static: str, which: str) -> None:
    location = make_table(tmp_path, sentences(1_040, 0))
    filled(location, static)
    indexed(location, exact_below=FEW)
    append(location, sentences(20, 1) if which != "none" else ["nothing known"] * 20)
    if which != "not yet":
        filled(location, static)
    if which == "some":
        open_dataset(location).update({"embedding": "NULL"}, where="id >= 1050")
    record = indexed(location, exact_below=FEW)
    facts = record.details["vectors"]
    assert facts["rows"] == 1_060 == facts["indexed"] + facts["read"] + facts["without"]
    assert facts["without"] == {"not yet": 20, "none": 20, "some": 10}[which]
    assert record.ledger == {"in": 1_060, "indexed": 1_060}
    agree(location)
    assert build_index(location, IndexConfig(exact_below=FEW), input_pin=newest(location)).changed is False
    maintain(location, NIGHTLY, pinned_by_runs={}, index=upkeep(location))
    filled(location, static)
    agree(location)


def test_a_killed_run_is_finished_by_the_next(tmp_path: Path, static: str) -> None:
    location = make_table(tmp_path, sentences(1_020, 0))
    filled(location, static)
    done = indexed(location, exact_below=FEW)
    open_dataset(location).tags.delete(done.tag)  # killed between commit and tag
    heal(location)
    again = indexed(location, exact_below=FEW)
    assert again.version == done.version == open_dataset(location).version
    assert (again.details, again.rows, again.bytes_added) == (done.details, done.rows, done.bytes_added)
    assert build_index(location, IndexConfig(exact_below=FEW), input_pin=newest(location)).changed is False


@pytest.mark.slow
def test_fifty_appends_with_indexes_optimizes_and_deletions_between(tmp_path: Path, static: str) -> None:
    location = make_table(tmp_path, sentences(900, 0))
    filled(location, static)
    rare: dict[int, int] = {}
    rows = 900
    for night in range(1, 51):
        rare[night] = rows
        append(location, [f"quagga{night} the still waters run deep {night}", *sentences(60, night)])
        rows += 61
        if night % 3:  # the other nights' vectors come later
            filled(location, static)
        if night % 7 == 0:
            delete(location, Request(ids=(rare.pop(night - 1),)))
        record = indexed(location, exact_below=FEW)
        assert record.ledger["in"] == record.ledger["indexed"] == open_dataset(location).count_rows()
        if night % 5 == 0:
            maintain(location, NIGHTLY, pinned_by_runs={}, index=upkeep(location))
        if night % 11 == 0:
            open_dataset(location).optimize.optimize_indices()
            open_dataset(location).optimize.compact_files(target_rows_per_fragment=300)
        pin = newest(location)
        for one, row in rare.items():
            if one > night - 3:
                assert [hit.id for hit in search(location, f"quagga{one}", pin=pin)] == [row]
        found = search(location, '"still waters run deep"', pin=pin, limit=99)
        assert {hit.id for hit in found} == set(rare.values())
        agree(location)
    filled(location, static)
    facts = indexed(location, exact_below=FEW).details["vectors"]
    assert facts["rows"] == facts["indexed"] + facts["read"] + facts["without"] == open_dataset(location).count_rows()
    assert facts["entries"] >= facts["indexed"] and facts["segments"] < 6
    assert facts["recall_at_10"] > 0.9
