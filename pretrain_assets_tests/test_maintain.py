"""Maintenance, retention and deletes on real tables: what is rewritten, what is freed, what stays, and every kill."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from click.testing import CliRunner
from lance.dataset import Tags

from pretrain_assets.cli import cli
from pretrain_assets.config import (
    DedupConfig,
    EngineConfig,
    IndexConfig,
    IngestConfig,
    MaintainConfig,
    TokenizeConfig,
)
from pretrain_assets.curate.dedup import dedup
from pretrain_assets.errors import BusyError, CheckpointError, CommitError, ConfigError, FilterError, TableError
from pretrain_assets.forensics import maintenance
from pretrain_assets.forensics.indexes.index import build_index, upkeep
from pretrain_assets.ingest.append import ingest
from pretrain_assets.ingest.commit import find_base
from pretrain_assets.report.text import deletion_text, maintain_text
from pretrain_assets.table import delete, lease, versions
from pretrain_assets.table.delete import Request
from pretrain_assets.table.lease import MAINTENANCE, hold
from pretrain_assets.table.lineage import LineageRecord, StageResult
from pretrain_assets.table.storage import Location, filesystem, open_dataset
from pretrain_assets.table.tags import protect_run, release
from pretrain_assets.table.upkeep import compaction, leftovers, retention
from pretrain_assets.table.upkeep import maintain as table_maintain
from pretrain_assets.table.upkeep.maintain import MaintainReport, maintain
from pretrain_assets.table.versions import (
    HISTORY_TAG,
    heal,
    latest_record,
    record_of,
    records,
    release_tags,
    tag_version,
)
from pretrain_assets.tokenize.columns import tokenize
from pretrain_assets_tests.conftest import S3Server
from pretrain_assets_tests.tables import append, make_table, newest, values

HERE = EngineConfig(workers=1)
NOW = MaintainConfig(older_than_seconds=0, keep_unfinished_seconds=0, keep_last=1)
EVERYTHING = ("_rowid", "_row_created_at_version")


def contents(location: Location, version: int | str | None = None) -> pa.Table:
    """All columns in row order, with row ids and the versions that created the rows."""
    dataset = open_dataset(location, version)
    return dataset.to_table(columns=[*dataset.schema.names, *EVERYTHING])


def run(location: Location, config: MaintainConfig = NOW, **rest: Any) -> MaintainReport:
    return maintain(location, config, **{"pinned_by_runs": {}, **rest})


def curate(location: Location) -> list[StageResult]:
    """Every computing stage, from the newest version."""
    first = dedup(location, DedupConfig(), input_pin=newest(location), engine=HERE)
    second = tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=first.pin, engine=HERE)
    return [first, second, build_index(location, IndexConfig(), input_pin=second.pin)]


def write_source(folder: Path, name: str, texts: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.jsonl"
    if not path.exists():  # written again it would be a changed file
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def night(location: Location, sources: Path, number: int, rows: int = 4) -> list[StageResult]:
    """A nightly re-curation: new rows, then every stage."""
    write_source(sources, f"{number:03}", [f"night {number} row {row} word{row}" for row in range(rows)])
    first = ingest(location, IngestConfig(sources=(f"{sources}/*.jsonl",)))
    second = dedup(location, DedupConfig(), input_pin=first.pin, engine=HERE)
    third = tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=second.pin, engine=HERE)
    return [first, second, third, build_index(location, IndexConfig(), input_pin=third.pin)]


def files_of(location: Location) -> dict[str, int]:
    return {f.name: f.num_bytes for f in leftovers.listing(location.uri)}


def fragments_of(location: Location, version: int | None = None) -> list[tuple[int, int, int]]:
    """Id, rows and deletions of every fragment."""
    found = open_dataset(location, version).get_fragments()
    return [(f.fragment_id, f.count_rows(), f.num_deletions) for f in found]


def search(location: Location, word: str) -> list[int]:
    scanner = open_dataset(location).scanner(columns=["id", "_score"], full_text_query=word)
    return sorted(scanner.to_table().column("id").to_pylist())


def reasons(report: MaintainReport) -> dict[int, tuple[str, ...]]:
    return {kept.version: kept.reasons for kept in report.versions_kept}


@pytest.fixture
def location(tmp_path: Path) -> Location:
    return make_table(tmp_path / "db", ["cat", "dog", "cat", ""])


# --- what is rewritten -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([5], []),
        ([1, 1, 1], []),
        ([1, 1, 1, 1], [(0, 4)]),
        ([100, 1, 1, 1, 1], [(1, 5)]),
        ([1, 1, 1, 1, 100, 1, 1, 1, 1], [(0, 4), (5, 9)]),
        ([16, 4, 4, 4, 4, 1, 1], [(1, 7)]),
        ([64, 16, 16, 16, 4, 4, 4, 1, 1, 1], []),
        ([0, 0, 0], [(0, 3)]),
    ],
)
def test_only_neighbours_of_similar_size_are_merged(sizes: list[int], expected: list[tuple[int, int]]) -> None:
    assert [(run.start, run.stop) for run in compaction.size_tiers(sizes, 4)] == expected


@pytest.mark.parametrize("nights", [64, 256, 1024])
@pytest.mark.parametrize("bulk", [0, 10_000])
def test_nightly_appends_rewrite_n_log_n_bytes(nights: int, bulk: int) -> None:
    draw = random.Random(7)
    sizes, appended, rewritten, most = [bulk] if bulk else [], 0, 0, 0
    for _ in range(nights):
        sizes.append(draw.randint(50, 150))
        appended += sizes[-1]
        for part in reversed(compaction.size_tiers(sizes, 4)):
            rewritten += sum(sizes[part])
            sizes[part] = [sum(sizes[part])]
        most = max(most, len(sizes))
    levels = 1
    while 4**levels * 50 < appended:
        levels += 1
    assert appended <= rewritten + most * 10_000 and rewritten <= (appended + bulk) * levels
    assert bulk == 0 or rewritten < appended * levels + bulk * 2
    assert most <= 8 * levels


def test_forty_nightly_appends_stay_few_fragments_and_intact(location: Location) -> None:
    first, rewritten, most = files_of(location), 0, 0
    config = dataclasses.replace(NOW, keep_last=1_000)
    for number in range(40):
        append(location, [f"night {number}", "x" * 50])
        report = run(location, config)
        rewritten += report.bytes_rewritten
        most = max(most, report.fragments_after)
    one = sum(size for name, size in first.items() if name.startswith("data/"))
    assert most <= 10
    assert rewritten < 40 * 3 * one < sum(range(40)) * one / 6, "log4 of 40 is below 3; all of it nightly is 780"
    assert values(location, "id") == list(range(84)) and values(location, "text")[4::2][7] == "night 7"


def test_thirty_small_appends_then_pinned_versions_are_identical(location: Location) -> None:
    for number in range(30):
        append(location, [f"text {number}"] * 3)
    open_dataset(location).tags.create("mine", 12)
    before = {version: contents(location, version) for version in (12, 20, 31)}
    report = run(location, pinned_by_runs={20: ["run demo-v20 (step 3)"]})
    assert (report.fragments_before, report.fragments_after) == (31, 1)
    data = sum(size for name, size in files_of(location).items() if name.startswith("data/"))
    assert 0 < report.bytes_rewritten < data
    assert report.versions_freed == (*range(1, 12), *range(13, 20), *range(21, 32))
    assert reasons(report) == {12: ("tag mine",), 20: ("run demo-v20 (step 3)",), 32: ("newest version",)}
    assert report.bytes_after == sum(files_of(location).values()) < report.bytes_before
    for version, old in before.items():
        if version != 31:
            assert contents(location, version) == old
    assert contents(location) == before[31]
    assert [v["version"] for v in open_dataset(location).versions()] == [12, 20, 32]
    again = run(location, pinned_by_runs={20: ["run demo-v20 (step 3)"]})
    assert (again.changed, again.version, again.bytes_after) == (False, 32, again.bytes_before)


def test_a_compaction_in_the_middle_keeps_values_order_row_ids_deletions_and_indexes(location: Location) -> None:
    for number in range(4):
        append(location, [f"small {number}", "word"])
    append(location, [f"large {number} " + "x" * 200 for number in range(400)])
    append(location, ["last word", "gone", "word"])
    curate(location)
    open_dataset(location).delete("id IN (5, 13)")
    before, hits = contents(location), search(location, "word")
    report = run(location, index=upkeep(location))
    assert fragments_of(location) == [(7, 11, 0), (8, 399, 1), (9, 3, 0)], "in row order; later ones were renumbered"
    assert contents(location) == before and search(location, "word") == hits
    assert open_dataset(location).stats.index_stats("text_fts")["num_unindexed_rows"] == 0
    assert [kept for kept in reasons(report)][-1] == report.version
    open_dataset(location).delete("id = 412")
    append(location, ["fresh"])
    assert values(location, "id") == [i for i in range(416) if i not in (5, 13, 412)]
    assert fragments_of(location)[-1][0] == 10


def test_many_deletions_rewrite_a_fragment_alone_and_few_do_not(location: Location) -> None:
    append(location, [f"{number} " + "x" * 100 for number in range(100)])
    open_dataset(location).delete("id >= 4 AND id < 12")
    assert run(location).bytes_rewritten == 0
    assert fragments_of(location) == [(0, 4, 0), (1, 92, 8)]
    report = run(location, dataclasses.replace(NOW, max_deleted_share=0.0))
    assert fragments_of(location) == [(0, 4, 0), (2, 92, 0)] and report.bytes_rewritten > 0
    open_dataset(location).delete("id >= 12 AND id < 24")
    run(location)
    assert fragments_of(location) == [(0, 4, 0), (3, 80, 0)] and values(location, "id")[3:5] == [3, 24]


def test_large_fragments_are_left_alone(location: Location) -> None:
    for _ in range(7):
        append(location, ["x", "y", "z", "w"])
    largest = files_of_data(location)[-1]
    config = dataclasses.replace(NOW, merge_factor=2, target_bytes=2 * files_of_data(location)[0])
    assert run(location, config).bytes_rewritten == 0
    report = run(location, dataclasses.replace(config, target_bytes=3 * largest + 1))
    assert [rows for _, rows, _ in fragments_of(location)] == [16, 16], "closed once they hold the target"
    assert report.fragments_before == 8


def files_of_data(location: Location) -> list[int]:
    return sorted(size for name, size in files_of(location).items() if name.startswith("data/"))


def test_rows_that_have_a_column_are_not_merged_with_rows_that_lack_it(location: Location) -> None:
    for number in range(6):
        append(location, [f"a {number}"])
    curate(location)
    for number in range(5):
        append(location, [f"b {number}"])
    report = run(location)
    assert (report.fragments_before, report.fragments_after) == (12, 2)
    assert fragments_of(location) == [(12, 10, 0), (13, 5, 0)]
    again = [result.record.rows for result in curate(location)]
    assert again == [5, 5, 5], "what had its values was not computed again"
    assert values(location, "n_tokens") == [3, 3, 3, 0, *[3] * 11]
    assert values(location, "is_dup") == [False, False, True, *[False] * 12]


def test_a_column_that_only_some_rows_have_does_not_stop_compaction(location: Location) -> None:
    tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=newest(location), engine=HERE)
    for number in range(5):
        append(location, [f"x {number}"])
    dedup(location, DedupConfig(), input_pin=newest(location), engine=HERE)
    assert run(location).fragments_after == 2
    assert values(location, "n_tokens") == [3, 3, 3, 0, *[None] * 5]
    result = tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=newest(location), engine=HERE)
    assert result.record.rows == 5 and values(location, "n_tokens") == [3, 3, 3, 0, *[3] * 5]
    assert values(location, "input_ids")[-1] == list(b"x 4")


def test_nulls_that_somebody_elses_compaction_stored_count_as_lacking(location: Location) -> None:
    curate(location)
    append(location, ["new"])
    open_dataset(location).drop_index("text_fts")
    open_dataset(location).optimize.compact_files(target_rows_per_fragment=100)
    columns_of = compaction._computed_columns(open_dataset(location))
    (fragment,) = open_dataset(location).get_fragments()
    assert columns_of(fragment) == {"input_ids"}
    curate(location)
    columns_of = compaction._computed_columns(open_dataset(location))
    (fragment,) = open_dataset(location).get_fragments()
    assert columns_of(fragment) == {"input_ids", "n_tokens", "content_hash", "dup_of", "is_dup"}


def test_segments_of_the_index_merge_with_the_fragments(tmp_path: Path) -> None:
    location = Location(database_uri=str(tmp_path / "db"))
    for number in range(5):
        night(location, tmp_path / "src", number)
    before, hits = contents(location), search(location, "word2")
    assert len(open_dataset(location).describe_indices()[0].segments) == 5
    alone = run(location, dataclasses.replace(NOW, keep_last=99))
    assert alone.fragments_after == 5, "Lance does not rewrite across segments"
    report = run(location, dataclasses.replace(NOW, keep_last=99), index=upkeep(location))
    assert (report.segments_merged, report.rows_indexed, report.fragments_after) == (5, 0, 1)
    (segment,) = open_dataset(location).describe_indices()[0].segments
    assert list(segment.fragment_ids) == [5]
    assert contents(location) == before and search(location, "word2") == hits
    assert [r.tag for r in records(open_dataset(location))][-2:] == ["indexed-v21", "maintained-v22"]


def test_rows_that_no_index_has_are_indexed_first(location: Location) -> None:
    curate(location)
    append(location, ["needle"])
    dry = run(location, index=upkeep(location), dry_run=True)
    assert dry.rows_indexed == 1
    assert run(location, index=upkeep(location)).rows_indexed == 1
    record = latest_record(open_dataset(location), "indexed")
    assert record is not None and (record.rows, record.ledger) == (1, {"in": 5, "indexed": 5})
    assert search(location, "needle") == [4]


@pytest.mark.parametrize("step", ["rewrite", "_largest_fragment_id"])
def test_somebody_who_appends_without_a_lease_makes_compaction_fail_and_nothing_else(
    location: Location, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    for number in range(5):
        append(location, [f"x {number}"])
    plain = getattr(compaction, step)

    def sneaks_in(*arguments: Any) -> Any:
        found = plain(*arguments)
        append(location, ["sneaked in"])
        return found

    with monkeypatch.context() as patch:
        patch.setattr(compaction, step, sneaks_in)
        with pytest.raises(CommitError, match=r"somebody else committed.*run it again"):
            run(location)
    assert values(location, "text")[-1] == "sneaked in"
    report = run(location)
    assert report.fragments_after == 1 and report.leftovers_removed >= 1
    assert values(location, "id") == list(range(10))


# --- downstream --------------------------------------------------------------------------------------------------


def test_after_maintenance_every_stage_has_nothing_to_do(tmp_path: Path) -> None:
    location, sources = Location(database_uri=str(tmp_path / "db")), tmp_path / "src"
    for number in range(4):
        made = night(location, sources, number)
    open_dataset(location).drop_index("text_fts")
    made[3] = build_index(location, IndexConfig(), input_pin=made[2].pin)  # one segment for all
    report = run(location, dataclasses.replace(NOW, merge_factor=2))
    assert (report.fragments_after, report.version) == (1, 19)
    again = night(location, sources, 3)
    assert [(a.changed, a.pin) for a in again] == [(False, m.pin) for m in made]
    assert open_dataset(location).version == 19
    fresh = night(location, sources, 4)
    assert [(f.changed, f.record.rows) for f in fresh] == [(True, 4)] * 4
    assert values(location, "id") == list(range(20))
    record = record_of(open_dataset(location), "maintained", 19)
    assert record.ledger == {"in": 16, "rewritten": 16, "left": 0} and record.details == {
        "fragments_rewritten": 4,
        "fragments_written": 1,
    }


# --- what stays --------------------------------------------------------------------------------------------------


def test_every_reason_to_keep_a_version(tmp_path: Path) -> None:
    location, sources = Location(database_uri=str(tmp_path / "db")), tmp_path / "src"
    for number in range(5):
        night(location, sources, number, rows=1)
    append(location, ["by somebody"])
    open_dataset(location).tags.create("thesis", 2)
    config = dataclasses.replace(NOW, keep_last=2, merge_factor=100)
    report = run(location, config, pinned_by_runs={3: ["run a (step 1)"], 99: ["run of a version long gone"]})
    assert reasons(report) == {
        2: ("tag thesis",),
        3: ("run a (step 1)",),
        13: ("among the last 2 ingested",),
        14: ("among the last 2 deduped",),
        15: ("among the last 2 tokenized",),
        16: ("among the last 2 indexed",),
        17: ("newest ingested",),
        18: ("newest deduped",),
        19: ("newest tokenized",),
        20: ("newest indexed", "full-text index"),
        21: ("newest version",),
    }
    assert report.versions_freed == (1, *range(4, 13))
    young = run(location, dataclasses.replace(config, older_than_seconds=3600))
    assert young.versions_freed == () and all(r[-1] == "younger than 1h" for r in reasons(young).values())


def test_field_6_a_tagged_version_outlives_rewrites_and_clean_up(location: Location) -> None:
    curate(location)
    dataset = open_dataset(location)
    pinned = record_of(dataset, "tokenized", 3)
    dataset.tags.create("keep", 3)
    old = contents(location, "keep")
    for tokenizer in ("gpt2", "byte", "gpt2"):
        tokenize(location, TokenizeConfig(tokenizer=tokenizer), input_pin=pinned.pin, engine=HERE)
    for number in range(3):
        append(location, [f"more {number}"])
    curate(location)
    report = run(location)
    assert report.bytes_after is not None and report.bytes_after < report.bytes_before
    assert contents(location, "keep") == old == contents(location, 3)
    for tag in ("keep", "tokenized-v3"):
        open_dataset(location).tags.delete(tag)
    report = run(location, pinned_by_runs={3: ["run demo (step 100)"]})
    assert (reasons(report)[3], contents(location, 3)) == (("run demo (step 100)",), old)
    lance.dataset(location.uri).cleanup_old_versions(retain_versions=1, error_if_tagged_old_versions=False)
    assert contents(location, 3) == old, "it has a tag of its own now, so nobody's clean-up takes it"
    assert "tokenized-v3" in open_dataset(location).tags.list(), "the stage's own was restored"
    run(location)
    with pytest.raises(TableError, match="has no version 3"):
        open_dataset(location, 3)


def test_records_outlive_their_tags(tmp_path: Path) -> None:
    location, sources = Location(database_uri=str(tmp_path / "db")), tmp_path / "src"
    for number in range(4):
        night(location, sources, number)
    dataset = open_dataset(location)
    before, base = records(dataset), find_base(location)
    run(location)
    dataset = open_dataset(location)
    assert [r for r in records(dataset) if r.stage != "maintained"] == before
    assert "ingested-v1" not in dataset.tags.list() and dataset.tags.list()[HISTORY_TAG]["version"] == dataset.version
    assert record_of(dataset, "tokenized", 3) == before[2]
    after = find_base(location)
    assert (after.known, after.next_id, after.record) == (base.known, base.next_id, base.record)
    heal(location)
    assert "ingested-v1" not in open_dataset(location).tags.list()
    night(location, sources, 4)
    run(location)
    assert [r for r in records(open_dataset(location)) if r.version <= 16] == before


def test_a_released_tag_is_not_healed_from_a_version_that_is_still_there(location: Location) -> None:
    result = dedup(location, DedupConfig(), input_pin=newest(location), engine=HERE)
    open_dataset(location).tags.create("deduped-v99", 2)  # a bare tag makes `heal` look at the version
    release_tags(open_dataset(location), [result.record.tag])
    heal(location)
    assert "deduped-v2" not in open_dataset(location).tags.list()
    assert latest_record(open_dataset(location), "deduped") == result.record


# --- tags of runs and people -------------------------------------------------------------------------------------


def test_a_launched_run_protects_its_version_until_released(location: Location, tmp_path: Path) -> None:
    curate(location)
    pin = record_of(open_dataset(location), "tokenized", 3).pin
    for _ in range(2):
        protect_run(location, pin, f"{tmp_path}/runs/demo-v3-1a2b/")
    assert open_dataset(location).tags.list()["run.demo-v3-1a2b"]["version"] == 3
    append(location, ["x"])
    curate(location)
    assert reasons(run(location))[3] == ("tag run.demo-v3-1a2b",)
    there = {3: ["run demo-v3-1a2b (steps 1, 2)"]}
    with pytest.raises(TableError, match=r"names version 3, and so does run demo-v3-1a2b \(steps 1, 2\).*--force"):
        release(location, "run.demo-v3-1a2b", pinned_by_runs=there)
    for tag in ("tokenized-v3", HISTORY_TAG):
        with pytest.raises(TableError, match=r"not released by hand|has no tag"):
            release(location, tag, pinned_by_runs={}, force=True)
    with pytest.raises(TableError, match=r"has no tag 'nope'; it has: run.demo-v3-1a2b"):
        release(location, "nope", pinned_by_runs={})
    assert release(location, "run.demo-v3-1a2b", pinned_by_runs=there, force=True) == 3
    assert 3 not in reasons(run(location))


def test_a_reader_without_write_access_is_warned(
    location: Location, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def denied(*_: Any) -> None:
        raise OSError("AccessDenied")

    monkeypatch.setattr(Tags, "create", denied)
    protect_run(location, newest(location), "/runs/a")
    assert "could not be tagged run.a (AccessDenied): keep the run's folder" in caplog.text


# --- leftovers ---------------------------------------------------------------------------------------------------


def litter(location: Location) -> list[Path]:
    """What killed processes leave behind."""
    table = Path(location.uri)
    names = [
        "data/fill-0123456789abcdef.lance",
        "data/.tmpAbCdEf",
        "data/101100010010000001110101c8b6a34d29bb61ff3bd0a8f2a3.lance",
        "_indices/11111111-2222-4333-8444-555555555555/tokens.lance",
        "_deletions/0-1-1234567890.arrow",
        "_versions/.tmp_7.manifest",
        "../corpus.staging/ingest/abc.unit",
    ]
    for path in (table / name for name in names):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 1000)
    return [(table / name).resolve() for name in names]


def test_shared_plans_go_once_they_are_old(location: Location) -> None:
    curate(location)
    for name, age in (("old", 7200), ("new", 0)):
        path = Path(location.plans_uri) / f"plan-{name}" / "order"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * 100)
        os.utime(path, (time.time() - age,) * 2)
    report = run(location, dataclasses.replace(NOW, keep_unfinished_seconds=3600))
    assert (report.leftovers_removed, report.leftover_bytes, report.waiting) == (1, 100, ())
    assert [path.parent.name for path in Path(location.plans_uri).glob("*/order")] == ["plan-new"]


def test_leftovers_go_once_they_are_old(location: Location) -> None:
    curate(location)
    append(location, ["new"])
    before, mine = contents(location), litter(location)
    kept = run(location, dataclasses.replace(NOW, keep_unfinished_seconds=3600))
    assert kept.leftovers_removed == 0 and all(path.exists() for path in mine)
    assert kept.waiting[0] == "7 files of unfinished work, younger than 1h, stay"
    two_hours_ago = time.time() - 7200
    for path in mine[:3]:
        os.utime(path, (two_hours_ago, two_hours_ago))
    assert run(location, dataclasses.replace(NOW, keep_unfinished_seconds=3600)).leftovers_removed == 3
    assert [path.exists() for path in mine] == [False] * 3 + [True] * 4
    report = run(location)
    assert (report.leftovers_removed, report.leftover_bytes) == (4, 4000)
    assert not any(path.exists() for path in mine) and contents(location) == before


def test_an_unfinished_fill_keeps_its_work_and_compaction_waits(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pretrain_assets.table.filler import fill

    for number in range(4):
        append(location, [f"x {number}"])
    first = tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=newest(location), engine=HERE)

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fill, "_commit", dies)
        with pytest.raises(KeyboardInterrupt):
            tokenize(location, TokenizeConfig(tokenizer="gpt2"), input_pin=first.pin, engine=HERE)
    staged = {name for name in files_of(location) if name.startswith("data/fill-")}
    report = run(location, dataclasses.replace(NOW, keep_unfinished_seconds=3600))
    assert report.bytes_rewritten == 0 and any(text.startswith("compaction") for text in report.waiting)
    assert staged <= set(files_of(location))
    report = run(location, dataclasses.replace(NOW, merge_factor=2))
    assert report.leftovers_removed == 5 and report.fragments_after == 1


# --- plans, leases, reports --------------------------------------------------------------------------------------


def test_a_dry_run_changes_nothing_and_shows_the_same_plan(tmp_path: Path) -> None:
    location, sources = Location(database_uri=str(tmp_path / "db")), tmp_path / "src"
    for number in range(5):
        night(location, sources, number)
    litter(location)
    files = files_of(location)
    dry = run(location, index=upkeep(location), dry_run=True)
    assert files_of(location) == files and dry.bytes_after is None and dry.changed
    done = run(location, index=upkeep(location))
    same = ("bytes_before", "fragments_before", "fragments_after", "rows_indexed", "segments_merged", "versions_freed")
    same += ("leftovers_removed", "leftover_bytes", "waiting")
    assert {name: getattr(dry, name) for name in same} == {name: getattr(done, name) for name in same}
    assert done.versions_kept[: len(dry.versions_kept)] == dry.versions_kept, "then the versions just made"
    text = maintain_text(done)
    assert "5 -> 1" in text and "v1-v16" in text and "newest indexed; full-text index" in text


def test_nobody_works_during_maintenance_and_maintenance_waits_for_nobody(
    location: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "TRIES", 1)
    write_source(tmp_path / "src", "a", ["x"])
    config = IngestConfig(sources=(f"{tmp_path}/src/*.jsonl",))
    pin = newest(location)
    work: list[Callable[[], object]] = [
        lambda: ingest(location, config),
        lambda: build_index(location, IndexConfig(), input_pin=pin),
        lambda: delete.delete(location, Request(ids=(1,))),
        lambda: dedup(location, DedupConfig(), input_pin=pin, engine=HERE),
    ]
    with hold(location, MAINTENANCE):
        for does in work:
            with pytest.raises(BusyError, match="maintenance"):
                does()
    for name in ("ingest", "fill tokenized", "index", "delete"):
        with hold(location, name), pytest.raises(BusyError, match=f"in use: {name}"):
            run(location)
    assert run(location, dry_run=True).dry_run and newest(location) == pin


# --- kills -------------------------------------------------------------------------------------------------------

WRITES = [
    (Tags, "create"),
    (Tags, "update"),
    (Tags, "replace_metadata"),
    (Tags, "delete"),
    (lance.LanceDataset, "commit"),
    (lance.LanceDataset, "cleanup_old_versions"),
    (table_maintain, "remove"),
    (retention, "release_tags"),
    (versions, "tag_version"),
]


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.slow)])
@pytest.mark.parametrize("write", range(len(WRITES)), ids=lambda at: WRITES[at][1])
def test_a_kill_at_any_write_loses_nothing(
    location: Location, monkeypatch: pytest.MonkeyPatch, write: int, when: str
) -> None:
    curate(location)
    for number in range(6):
        append(location, [f"x {number}"])
    dedup(location, DedupConfig(), input_pin=newest(location), engine=HERE)
    tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=newest(location), engine=HERE)
    run(location, dataclasses.replace(NOW, merge_factor=100, keep_last=3))  # there is a history already
    litter(location)
    before, known = contents(location), records(open_dataset(location))
    pins: dict[str, Any] = {"pinned_by_runs": {4: ["run a"]}}
    owner, name = WRITES[write]
    plain, calls = getattr(owner, name), []

    def dies(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        if when == "after":
            plain(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, staticmethod(dies) if name == "commit" else dies)
        if name == "tag_version":
            patch.setattr(table_maintain, name, dies)
        with pytest.raises(KeyboardInterrupt):
            run(location, index=upkeep(location), **pins)
    assert calls
    assert contents(location) == before
    made = [r for r in records(heal(location)) if r.version <= known[-1].version]
    assert made == known
    report = run(location, index=upkeep(location), **pins)
    assert report.fragments_after == 2 and contents(location) == before, "one fragment for each segment of the index"
    assert [r for r in records(open_dataset(location)) if r.version <= known[-1].version] == known
    assert {r.stage for r in records(open_dataset(location))} >= {"maintained"}
    assert run(location, index=upkeep(location), **pins).changed is False


CHILD = """
import sys, time
from pretrain_assets.config import MaintainConfig
from pretrain_assets.forensics.indexes.index import upkeep
from pretrain_assets.table.upkeep.maintain import maintain
from pretrain_assets.table.storage import Location
location = Location(database_uri=sys.argv[1])
print("ready", flush=True)
config = MaintainConfig(older_than_seconds=0, keep_unfinished_seconds=0, keep_last=1)
maintain(location, config, pinned_by_runs={3: ["run a"]}, index=upkeep(location))
"""


@pytest.mark.slow
def test_kill_9_at_random_moments(tmp_path: Path) -> None:
    location, draw = Location(database_uri=str(tmp_path / "db")), random.Random(3)
    for number in range(4):
        night(location, tmp_path / "src", number, rows=200)
    pinned, killed = contents(location, 3), 0
    for number in range(4, 16):
        night(location, tmp_path / "src", number, rows=200)
        before, known = contents(location), records(open_dataset(location))
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, location.database_uri], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        time.sleep(draw.uniform(0.0, 0.5))
        child.send_signal(signal.SIGKILL)
        killed += child.wait() == -signal.SIGKILL
        child.stdout.close()
        assert contents(location) == before and contents(location, 3) == pinned
        assert [r for r in records(heal(location)) if r.version <= known[-1].version] == known
    assert killed >= 6
    for _ in range(3):  # the first makes a new version for the index, which lets the second free the last one
        report = run(location, pinned_by_runs={3: ["run a"]}, index=upkeep(location))
    assert report.changed is False
    dataset = open_dataset(location)
    there = set(files_of(location))
    named = {f"data/{file.path}" for v in dataset.versions() for file in files_at(location, v["version"])}
    assert {name for name in there if name.startswith("data/")} == named
    assert not [name for name in there if ".tmp" in name]


def files_at(location: Location, version: int) -> Iterator[Any]:
    return (file for f in open_dataset(location, version).get_fragments() for file in f.metadata.files)


# --- deletes -----------------------------------------------------------------------------------------------------


def test_delete_by_id_makes_one_version_with_its_record(location: Location) -> None:
    append(location, ["x", "y"])
    start = newest(location)
    done = delete.delete(location, Request(ids=(1, 4, 77)), run_id="run-1")
    dataset = open_dataset(location)
    assert (dataset.version, values(location, "id")) == (3, [0, 2, 3, 5])
    assert (done.rows, done.ids, done.missing_ids, done.unhashed) == (2, (1, 4), (77,), 6)
    record = done.record
    assert record is not None and (record.tag, record.inputs, record.rows, record.rows_total, record.run_id) == (
        "deleted-v3",
        (str(start),),
        2,
        4,
        "run-1",
    )
    assert record.ledger == {"in": 6, "deleted": 2, "kept": 4} and record.details["ids"] == [1, 4]
    assert record.parameters == {"predicate": "id IN (1, 4, 77)", "with_duplicates": False}
    assert latest_record(dataset, "deleted") == record
    text = dataset.read_transaction(3).transaction_properties["pretrain.record"]
    assert dataclasses.replace(LineageRecord.from_json(text, version=3), seconds=record.seconds) == record
    assert values(location, "id", 2) == [0, 1, 2, 3, 4, 5]


def test_delete_by_predicate_and_nothing_matched(location: Location) -> None:
    append(location, ["x", "y"], source=["other", None])
    assert delete.preview(location, Request(where="source = 'other'")).rows == 1
    assert delete.delete(location, Request(where="source = 'other'")).rows == 1
    again = delete.delete(location, Request(where="source = 'other'"))
    assert (again.rows, again.record, newest(location).version) == (0, None, 3)
    assert deletion_text(again) == "0 rows match; nothing to do, no new version"
    both = delete.delete(location, Request(ids=(0,), where="source IS NULL"))
    assert (both.rows, values(location, "id")) == (2, [1, 2, 3])
    for where, error in (("true; drop", FilterError), ("nope = 1", FilterError), (None, ConfigError)):
        with pytest.raises(error):
            delete.delete(location, Request(where=where))
    assert delete.delete(location, Request(where="true")).rows == 3 and values(location, "id") == []


def test_copies_of_a_deleted_row_are_counted_and_go_when_asked(location: Location) -> None:
    append(location, ["dog", "cat "])
    with pytest.raises(TableError, match=r"6 rows .* were not compared yet.*`pretrain dedup` first"):
        delete.delete(location, Request(ids=(0,), with_duplicates=True))
    dedup(location, DedupConfig(), input_pin=newest(location), engine=HERE)
    done = delete.delete(location, Request(ids=(0,)))
    assert (done.rows, done.copies, done.unhashed) == (1, 2, 0)
    assert "2 other rows have the same text and stay; --with-duplicates" in deletion_text(done)
    assert "until the next `pretrain dedup`" in deletion_text(done)
    done = delete.delete(location, Request(where="text = 'cat'", with_duplicates=True))
    assert (done.rows, done.copies, done.ids, values(location, "text")) == (2, 1, (2, 5), ["dog", "", "dog"])


def test_ids_of_deleted_rows_are_never_used_again(tmp_path: Path) -> None:
    location, sources = Location(database_uri=str(tmp_path / "db")), tmp_path / "src"
    for number in range(2):
        night(location, sources, number)
    delete.delete(location, Request(where="id >= 4"))
    run(location)
    night(location, sources, 2)
    assert values(location, "id") == [0, 1, 2, 3, 8, 9, 10, 11]


@pytest.mark.parametrize("meanwhile", ["append", "fill", "new columns", "delete"])
def test_others_may_commit_while_rows_are_deleted(
    location: Location, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    if meanwhile == "fill":
        tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=newest(location), engine=HERE)
    append(location, ["x", "y", "z"])
    does: dict[str, Callable[[], object]] = {
        "append": lambda: append(location, ["late"]),
        "fill": lambda: tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=newest(location), engine=HERE),
        "new columns": lambda: dedup(location, DedupConfig(), input_pin=newest(location), engine=HERE),
        "delete": lambda: open_dataset(location).delete("id = 6"),
    }
    plain, left = delete._commit, [does[meanwhile]]

    def commit(*arguments: Any) -> Any:
        if left:
            left.pop()()
        return plain(*arguments)

    monkeypatch.setattr(delete, "_commit", commit)
    done = delete.delete(location, Request(ids=(0, 4, 5)))
    assert (done.rows, done.record and done.record.rows_total) == (3, {"append": 5, "delete": 3}.get(meanwhile, 4))
    gone = {0, 4, 5, *([6] if meanwhile == "delete" else [])}
    assert values(location, "id") == [i for i in range(8 if meanwhile == "append" else 7) if i not in gone]
    if meanwhile == "fill":
        assert values(location, "n_tokens") == [3, 3, 0, 1]
    if meanwhile == "new columns":
        assert values(location, "is_dup") == [False, True, False, False]


def test_a_kill_between_the_delete_and_its_tag_is_healed(location: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(delete, "tag_version", dies)
        with pytest.raises(KeyboardInterrupt):
            delete.delete(location, Request(ids=(1,)))
    assert latest_record(open_dataset(location), "deleted") is None
    record = latest_record(heal(location), "deleted")
    assert record is not None and (record.version, record.rows) == (2, 1)
    tag_version(open_dataset(location), record)


def test_an_opt_out_ends_with_the_bytes_gone(tmp_path: Path) -> None:
    location, sources = Location(database_uri=str(tmp_path / "db")), tmp_path / "src"
    write_source(sources, "000", ["plain", "xyzzysecret of somebody", "other"])
    config, purge = IngestConfig(sources=(f"{sources}/*.jsonl",)), dataclasses.replace(NOW, max_deleted_share=0.0)

    def stages() -> list[StageResult]:
        first = ingest(location, config)
        second = dedup(location, DedupConfig(), input_pin=first.pin, engine=HERE)
        return [
            first,
            second,
            tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=second.pin, engine=HERE),
        ]

    def holding() -> list[str]:
        return [p.name for p in Path(location.uri).rglob("*.lance") if b"xyzzysecret" in p.read_bytes()]

    stages()
    protect_run(location, newest(location), "/runs/a")
    done = delete.delete(location, Request(where="text LIKE '%xyzzysecret%'"))
    assert [kept.version for kept in done.still_in] == [1, 2, 3] and "tag run.a" in done.still_in[-1].reasons
    assert "pretrain release run.a" in deletion_text(done)
    run(location, purge)
    moved = stages()
    assert [(m.changed, m.pin.version, m.record.rows_total) for m in moved] == [(False, 5, 2)] * 3
    run(location, purge)
    assert holding() and values(location, "id", 3) == [0, 1, 2], "the run still pins version 3"
    release(location, "run.a", pinned_by_runs={})
    report = run(location, purge)
    assert holding() == [] and list(reasons(report)) == [5]
    assert stages()[0].record == moved[0].record and find_base(location).next_id == 3
    write_source(sources, "001", ["new"])
    assert [s.changed for s in stages()] == [True] * 3 and values(location, "id") == [0, 2, 3]


def test_a_purge_builds_the_index_anew_without_the_words_of_deleted_rows(tmp_path: Path) -> None:
    location = make_table(tmp_path, ["plain words", "xyzzysecret of somebody", "other"])
    build_index(location, IndexConfig(), input_pin=newest(location))
    purge = dataclasses.replace(NOW, max_deleted_share=0.0)
    delete.delete(location, Request(ids=(1,)))
    assert run(location, index=upkeep(location)).rows_indexed == 0, "without a purge the index stays as it is"
    assert run(location, purge, index=upkeep(location)).rows_indexed == 2
    record = latest_record(open_dataset(location), "indexed")
    assert record is not None and record.details == {"anew": True} and record.ledger == {"in": 2, "indexed": 2}
    moved = build_index(location, IndexConfig(), input_pin=newest(location))
    assert (moved.changed, moved.pin) == (False, newest(location))
    run(location, purge, index=upkeep(location))
    files = [path for path in Path(location.uri).rglob("*") if path.is_file()]
    assert not any(b"xyzzysecret" in path.read_bytes() for path in files)
    assert not run(location, purge, index=upkeep(location)).changed


def test_a_record_keeps_none_of_the_words_that_were_to_go(location: Location) -> None:
    done = delete.delete(location, Request(where="text = 'it''s xyzzy' OR (id = 1 AND source <> 'nobody')"))
    assert done.record is not None
    assert done.record.parameters["predicate"] == "(text = '...' OR (id = 1 AND source <> '...'))"
    stored = [path.read_bytes() for path in Path(location.uri).rglob("*") if path.is_file()]
    assert not any(b"xyzzy" in content or b"nobody" in content for content in stored)


@pytest.mark.parametrize("predicate", ["rand() < 0.5", "source < CURRENT_DATE"])
def test_a_predicate_that_changes_its_mind_is_refused(location: Location, predicate: str) -> None:
    with pytest.raises(FilterError, match="gives another answer each time"):
        delete.preview(location, Request(where=predicate))


def test_an_emptied_table_is_the_same_table(tmp_path: Path) -> None:
    location, sources = Location(database_uri=str(tmp_path / "db")), tmp_path / "src"
    write_source(sources, "000", ["one", "two"])
    first = ingest(location, IngestConfig(sources=(f"{sources}/*.jsonl",)))
    dedup(location, DedupConfig(), input_pin=first.pin)
    delete.delete(location, Request(where="true"))
    write_source(sources, "001", ["three"])
    second = ingest(location, IngestConfig(sources=(f"{sources}/*.jsonl",)))
    assert second.pin.table_id == first.pin.table_id
    dedup(location, DedupConfig(), input_pin=second.pin)
    assert (values(location, "id"), values(location, "is_dup")) == ([2], [False])


def test_nothing_is_freed_while_a_run_cannot_be_read(location: Location, tmp_path: Path) -> None:
    (tmp_path / "runs" / "broken").mkdir(parents=True)
    (tmp_path / "runs" / "broken" / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"broken/run.json cannot be read.*none is freed. Mend it, or remove"):
        maintenance.maintain(location, str(tmp_path / "runs"), NOW)


# --- the command, S3, Dagster ------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.setenv("PRETRAIN_DATABASE_URI", str(tmp_path / "db"))
    monkeypatch.setenv("PRETRAIN_RUNS_URI", str(tmp_path / "runs"))
    return tmp_path


def pretrain(*arguments: str, answer: str | None = None, code: int = 0) -> str:
    result = CliRunner().invoke(cli, arguments, input=answer)
    assert result.exit_code == code, result.output
    return result.stdout


def test_the_command(home: Path, location: Location) -> None:
    curate(location)
    for number in range(6):
        append(location, [f"x {number}"])
    (home / "runs" / "demo-v3-1a2b").mkdir(parents=True)
    pin = record_of(open_dataset(location), "tokenized", 3).pin
    (home / "runs" / "demo-v3-1a2b" / "run.json").write_text(json.dumps({"pin": str(pin)}))
    plan = pretrain("maintain", "--dry-run", "--older-than", "0s", "--keep-last", "1")
    assert "plan, nothing was changed" in plan and "run demo-v3-1a2b" in plan
    curate(location)
    done = json.loads(pretrain("maintain", "--older-than", "0s", "--keep-last", "1", "--json"))
    assert (done["versions_kept"][0]["version"], done["fragments_after"]) == (3, 2)
    assert "nothing to do" in pretrain("maintain")
    assert "rows match" in pretrain("delete", "--id", "3", "--dry-run") and len(values(location, "id")) == 10
    pretrain("delete", "--id", "3", answer="n\n", code=1)
    assert len(values(location, "id")) == 10
    assert pretrain("delete", "--id", "3", answer="y\n").startswith("deleted-v")
    assert json.loads(pretrain("delete", "--where", "id = 4", "--yes", "--json"))["rows"] == 1
    assert "0 rows match" in pretrain("delete", "--where", "id = 4", "--yes")
    open_dataset(location).tags.create("run.demo-v3-1a2b", 3)
    assert "pretrain release run.demo-v3-1a2b" in pretrain("delete", "--id", "1", "--yes")
    assert isinstance(CliRunner().invoke(cli, ["release", "run.demo-v3-1a2b"]).exception, TableError)
    (home / "runs" / "demo-v3-1a2b" / "run.json").unlink()
    assert "released; version 3 goes with `pretrain maintain`" in pretrain("release", "run.demo-v3-1a2b")
    assert "is not a time such as" in CliRunner().invoke(cli, ["maintain", "--older-than", "3x"]).output
    assert "v3 " not in pretrain("maintain", "--purge", "--keep-unfinished", "0s")


def test_on_s3(s3: S3Server, tmp_path: Path) -> None:
    location = Location(database_uri=f"{s3.bucket('maintain')}/db")
    for number in range(3):
        write_source(tmp_path / "src", str(number), [f"x {number}", "word"])
        ingest(location, IngestConfig(sources=(f"{tmp_path}/src/*.jsonl",)))
    assert delete.delete(location, Request(where="id = 3")).rows == 1
    open_dataset(location).tags.create("mine", 2)
    pinned, before = contents(location, 2), contents(location)
    fs, path = filesystem(f"{location.uri}/data/fill-0123456789abcdef.lance")
    fs.pipe_file(path, b"x" * 10)
    config = dataclasses.replace(NOW, merge_factor=2, max_deleted_share=0.0)
    report = maintenance.maintain(location, f"{s3.bucket('maintain')}/runs", config)
    assert fragments_of(location) == [(3, 5, 0)] and report.versions_freed == (1, 4)
    assert (report.leftovers_removed, report.leftover_bytes) == (1, 10)
    assert report.bytes_after == sum(files_of(location).values())
    assert contents(location) == before and contents(location, 2) == pinned
    assert list(reasons(report)) == [2, 3, 5]


def dagster_project(tmp_path: Path, patch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    from pretrain_assets_tests.pipeline import open_project

    opened = open_project(tmp_path / "home", str(tmp_path / "storage"), patch)
    project = next(opened)
    request.addfinalizer(opened.close)
    for number in range(4):
        project.add_source(f"{number}.parquet", 20 * number, 20)
        project.cli("ingest")
    return project


KEEP_NONE = {"ops": {"corpus__maintenance": {"config": {"older_than_seconds": 0, "keep_last": 1}}}}


def test_the_asset_reports_what_it_did(location: Location, tmp_path: Path) -> None:
    import dagster as dg

    from pretrain_assets.assets.keys import MAINTENANCE as ASSET
    from pretrain_assets.assets.maintenance import maintenance as asset
    from pretrain_assets.assets.resources import CorpusResource, LauncherResource

    append(location, ["x"])
    resources = {
        "corpus": CorpusResource(database_uri=location.database_uri),
        "launcher": LauncherResource(runs_uri=str(tmp_path / "runs")),
    }
    result = dg.materialize([asset], resources=resources, run_config=KEEP_NONE)
    (event,) = result.asset_materializations_for_node(ASSET.to_python_identifier())
    found = {name: value.value for name, value in event.metadata.items()}
    assert (found["versions_freed"], found["lance/version"], found["dry_run"]) == ([1], 2, False)
    assert "| v2     | newest version |" in found["versions_kept"]
    assert found["bytes_before"] > found["bytes_after"] > 0
    assert (event.tags or {})["dagster/data_version"] == str(newest(location)) == found["lance/pin"]


@pytest.mark.slow
def test_maintenance_makes_no_asset_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    from pretrain_assets.assets.keys import DEDUPED, INDEX, INGESTED, TOKENIZED

    project = dagster_project(tmp_path, monkeypatch, request)

    def data_versions() -> list[str]:
        keys = (INGESTED, DEDUPED, TOKENIZED, INDEX)
        return [(project.materialization(key).tags or {})["dagster/data_version"] for key in keys]

    assert project.run("recurate").success
    before, rows = data_versions(), contents(project.location)
    made = run(project.location, dataclasses.replace(NOW, merge_factor=2))
    assert made.fragments_after == 1
    assert project.run("maintenance", config=KEEP_NONE).success
    version = open_dataset(project.location).version
    assert project.run("recurate").success
    assert data_versions() == before and open_dataset(project.location).version == version
    assert contents(project.location) == rows


def test_the_schedule_is_delivered_stopped() -> None:
    import dagster as dg

    from pretrain_assets.definitions import defs

    schedule = defs.resolve_schedule_def("weekly_maintenance")
    assert schedule.default_status == dg.DefaultScheduleStatus.STOPPED and schedule.job_name == "maintenance"
