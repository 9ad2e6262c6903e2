"""`pretrain versions` and `pretrain diff`: what each version added, who pins it, and what changed between two."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import lance
import pyarrow as pa
import pytest
from click.testing import CliRunner

from pretrain_assets.cli import cli
from pretrain_assets.config import DedupConfig, IndexConfig, TokenizeConfig
from pretrain_assets.curate.dedup import dedup
from pretrain_assets.errors import TableError
from pretrain_assets.forensics.indexes.index import build_index
from pretrain_assets.forensics.pins import pinned_by_runs
from pretrain_assets.launch.contract import write_file
from pretrain_assets.report.text import diff_text, versions_text
from pretrain_assets.table.diff import ParameterChange, diff
from pretrain_assets.table.history import VersionInfo, list_versions
from pretrain_assets.table.schema import CODE_VERSION_KEY, PARAMETERS_KEY, STAGE_KEY
from pretrain_assets.table.storage import Location, join, open_dataset
from pretrain_assets.table.versions import table_id
from pretrain_assets.tokenize.columns import tokenize
from pretrain_assets_tests.conftest import S3Server
from pretrain_assets_tests.tables import append, make_table, newest, values

TEXTS = [f"text number {i}" for i in range(10)]


@pytest.fixture
def location(tmp_path: Path) -> Location:
    return make_table(tmp_path, TEXTS)


def delete(location: Location, where: str) -> None:
    open_dataset(location).delete(where)


def compact(location: Location) -> None:
    open_dataset(location).optimize.compact_files(target_rows_per_fragment=1000)


def run_dedup(location: Location) -> None:
    dedup(location, DedupConfig(), input_pin=newest(location), run_id="run-1")


def run_tokenize(location: Location, tokenizer: str = "byte") -> None:
    tokenize(location, TokenizeConfig(tokenizer=tokenizer), input_pin=newest(location))


def history(location: Location) -> list[VersionInfo]:
    return list_versions(open_dataset(location))


def bytes_on_disk(location: Location) -> int:
    return sum(path.stat().st_size for path in (Path(location.uri) / "data").iterdir())


# --- versions ----------------------------------------------------------------------------------------------------


def test_each_version_tells_what_it_added_and_the_bytes_add_up(location: Location) -> None:
    run_dedup(location)
    append(location, ["x"] * 3)
    delete(location, "id < 2")
    open_dataset(location).add_columns(pa.schema([pa.field("extra", pa.int32())]))
    compact(location)
    listed = history(location)
    assert [(v.version, v.rows, v.columns_added) for v in listed[:5]] == [
        (1, 10, tuple(open_dataset(location, 1).schema.names)),
        (2, 10, ("content_hash", "dup_of", "is_dup")),
        (3, 13, ()),
        (4, 11, ()),
        (5, 11, ("extra",)),
    ]
    added = [v.bytes_added for v in listed]
    assert added[1] == listed[1].records[0].bytes_added > 0 and added[2] and added[3:5] == [0, 0]
    assert added[-1] == listed[-1].bytes_total, "compaction wrote everything anew"
    assert sum(size or 0 for size in added) == bytes_on_disk(location)
    assert [r.run_id for v in listed for r in v.records] == ["run-1"]


def test_a_stage_that_adopts_a_version_did_not_write_it(location: Location) -> None:
    run_dedup(location)
    append(location, TEXTS[:2])
    run_dedup(location)
    compact(location)
    run_dedup(location)  # nothing is missing: a tag on the compacted version, no commit
    adopted = history(location)[-1]
    assert adopted.tags == (f"deduped-v{adopted.version}",)
    assert (adopted.columns_added, adopted.bytes_added) == ((), adopted.bytes_total)


def test_after_a_clean_up_what_is_not_known_is_said_to_be_unknown(location: Location) -> None:
    append(location, ["x"])
    append(location, ["y"])
    open_dataset(location).cleanup_old_versions(timedelta(0))
    (only,) = history(location)
    assert (only.version, only.rows, only.columns_added, only.bytes_added) == (3, 12, None, None)
    assert versions_text([only]).count("unknown") == 2


def test_a_version_with_a_record_is_not_opened(location: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dedup(location)
    run_tokenize(location)
    dataset = open_dataset(location)
    opened = []
    checkout = lance.LanceDataset.checkout_version
    monkeypatch.setattr(
        lance.LanceDataset, "checkout_version", lambda self, version: opened.append(version) or checkout(self, version)
    )
    assert len(list_versions(dataset)) == 3
    assert opened == [1]


def test_tags_runs_and_the_newest_index_pin_a_version(location: Location) -> None:
    run_dedup(location)
    build_index(location, IndexConfig(), input_pin=newest(location))
    append(location, ["x"])
    build_index(location, IndexConfig(), input_pin=newest(location))
    dataset = open_dataset(location)
    dataset.tags.create("release-1", 2)
    listed = list_versions(dataset, {2: ["run demo-v2"]})
    assert [v.pinned_by for v in listed] == [
        (),
        ("tag deduped-v2", "tag release-1", "run demo-v2"),
        ("tag indexed-v3",),
        (),
        ("tag indexed-v5", "full-text index"),
    ]
    lines = versions_text(listed).splitlines()[2:]
    assert lines[0].split()[-3:] == ["kB", "-", "-"]
    assert "deduped-v2, release-1" in lines[1] and lines[1].endswith("tag, run demo-v2")
    assert lines[4].endswith("by hand        tag, full-text index")


# --- pins of training runs ---------------------------------------------------------------------------------------


def write_run(runs: str, name: str, pin: str, *steps: int) -> None:
    write_file(join(runs, name, "run.json"), json.dumps({"pin": pin}).encode())
    for step in steps:
        write_file(
            join(runs, name, "checkpoints", f"step_{step:08d}", "passport.json"), json.dumps({"pin": pin}).encode()
        )


@pytest.mark.parametrize("place", ["local", "s3"])
def test_runs_and_checkpoints_pin_the_version_they_name(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if place == "s3":
        server: S3Server = request.getfixturevalue("s3")
        runs = join(server.bucket("pins"), "runs")
    else:
        runs = str(tmp_path / "some [runs]")
    assert pinned_by_runs(runs, "t") == {}
    write_run(runs, "demo-v3-a", "t@3", 20, 100)
    write_run(runs, "demo-v3-b", "t@3")
    write_run(runs, "big-v12-c", "t@12", *range(10, 60, 10))
    write_run(runs, "demo-v3-d", "other@3", 5)
    write_file(join(runs, "demo-v3-a", "checkpoints", ".step_00000300.tmp", "passport.json"), b"{")
    write_file(join(runs, "demo-v3-a", "metrics.jsonl"), b"{")
    assert pinned_by_runs(runs, "t") == {
        3: ["run demo-v3-a (steps 20, 100)", "run demo-v3-b"],
        12: ["run big-v12-c (5 checkpoints, steps 10 to 50)"],
    }


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"pin": 3}', b'{"pin": "t3"}', b"\xff\xfe\xfd"])
def test_a_run_that_cannot_be_read_is_named_and_the_others_still_count(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    runs = str(tmp_path)
    write_run(runs, "good-v1-a", "t@1")
    write_run(runs, "bad-v1-b", "t@1", 7)
    (tmp_path / "bad-v1-b" / "run.json").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert pinned_by_runs(runs, "t") == {1: ["run bad-v1-b (step 7)", "run good-v1-a"]}
    (warning,) = caplog.messages
    assert f"{runs}/bad-v1-b/run.json cannot be read" in warning


# --- diff --------------------------------------------------------------------------------------------------------


def test_rows_added_and_deleted_are_right_between_any_two_versions(location: Location) -> None:
    """Against the ids themselves, through appends, deletes, compactions, updates and a fill."""
    steps: list[Callable[[], object]] = [
        lambda: append(location, ["a"] * 5),
        lambda: delete(location, "id % 4 = 1"),
        lambda: run_dedup(location),
        lambda: compact(location),
        lambda: open_dataset(location).update({"score": "0.5"}, where="id < 6"),
        lambda: append(location, ["b"] * 4),
        lambda: delete(location, "id >= 15 OR id = 0"),
        lambda: compact(location),
    ]
    for step in steps:
        step()
    ids = {v.version: set(values(location, "id", v.version)) for v in history(location)}
    for older, newer in itertools.combinations(ids, 2):
        found = diff(location, older, newer)
        assert (found.rows_older, found.rows_newer) == (len(ids[older]), len(ids[newer]))
        assert found.rows_added == len(ids[newer] - ids[older]), (older, newer)
        assert found.rows_deleted == len(ids[older] - ids[newer]), (older, newer)


def test_rows_are_right_without_stable_row_ids_and_after_a_restore(tmp_path: Path, location: Location) -> None:
    """There Lance does not say when a row was created, or a deleted row comes back."""
    delete(location, "id < 4")
    lance.dataset(location.uri, version=1).restore()
    back = diff(location, 2, 3)
    assert (back.rows_added, back.rows_deleted) == (4, 0)
    plain = Location(database_uri=str(tmp_path / "plain"))
    lance.write_dataset(open_dataset(location).to_table(), plain.uri)
    append(plain, ["x"] * 3)
    delete(plain, "id < 2")
    compact(plain)
    found = diff(plain, 1, newest(plain).version)
    assert (found.rows_added, found.rows_deleted) == (3, 2)


def test_another_tokenizer_remakes_its_columns_and_says_which_parameters(location: Location) -> None:
    run_dedup(location)
    run_tokenize(location, "byte")
    run_tokenize(location, "gpt2")
    found = diff(location, 2, 4)
    assert (found.columns_added, found.columns_removed, found.columns_remade) == (("input_ids", "n_tokens"), (), ())
    assert found.parameters_changed == ()
    found = diff(location, 3, 4)
    assert (found.columns_added, found.columns_remade) == ((), ("input_ids", "n_tokens"))
    assert ParameterChange(stage="tokenized", name="name", old="byte", new="gpt2") in found.parameters_changed
    assert len(found.parameters_changed) == len({change.name for change in found.parameters_changed})
    assert [record.tag for record in found.stages] == ["tokenized-v4"]
    assert found.bytes_added == found.stages[0].bytes_added > 0
    text = diff_text(found)
    assert "name: byte -> gpt2" in text and "vocab_size: 257 -> 50257" in text and "tokenized-v4" in text


def test_code_version_types_and_dropped_columns_are_told(location: Location) -> None:
    dataset = open_dataset(location)
    dataset.add_columns(pa.schema([pa.field("mark", pa.int32()), pa.field("gone", pa.int32())]))
    making = {STAGE_KEY.decode(): "marked", PARAMETERS_KEY.decode(): '{"k":[1]}'}
    dataset.update_field_metadata({"mark": {**making, CODE_VERSION_KEY.decode(): "1"}})
    before = dataset.version
    dataset.alter_columns({"path": "mark", "data_type": pa.int64()})  # loses the metadata
    dataset.update_field_metadata({"mark": {**making, CODE_VERSION_KEY.decode(): "2"}})
    dataset.drop_columns(["gone"])
    found = diff(location, before, dataset.version)
    assert (found.columns_removed, found.columns_remade) == (("gone",), ("mark",))
    assert found.parameters_changed == (
        ParameterChange(stage="marked", name="code version", old="1", new="2"),
        ParameterChange(stage="marked", name="type", old="int32", new="int64"),
    )


def test_settings_of_a_stage_without_columns_come_from_its_records(location: Location) -> None:
    build_index(location, IndexConfig(with_position=False), input_pin=newest(location))
    build_index(location, IndexConfig(with_position=True), input_pin=newest(location))
    found = diff(location, "indexed-v3", "indexed-v2")
    assert found.parameters_changed == (ParameterChange(stage="indexed", name="with_position", old=False, new=True),)
    assert (found.older, found.newer, found.columns_remade, found.bytes_added) == (2, 3, (), 0)
    assert "with_position: false -> true" in diff_text(found)


def test_bytes_are_those_of_files_that_only_the_newer_version_has(location: Location) -> None:
    append(location, TEXTS)
    before = bytes_on_disk(location)
    compact(location)
    found = diff(location, 2, newest(location).version)
    assert found.bytes_added == bytes_on_disk(location) - before > 0
    assert (found.rows_added, found.rows_deleted, found.stages) == (0, 0, ())
    assert diff_text(found).endswith("no stage ran in between")


@pytest.mark.parametrize(("one", "other"), [("v1", "2"), ("2", "v1"), (1, "deduped-v2"), ("deduped-v2", "1")])
def test_versions_are_named_by_number_or_tag_in_any_order(location: Location, one: int | str, other: str) -> None:
    run_dedup(location)
    found = diff(location, one, other)
    assert (found.older, found.newer, found.columns_added) == (1, 2, ("content_hash", "dup_of", "is_dup"))
    same = diff(location, other, other)
    assert same.older == same.newer and not any((same.rows_added, same.bytes_added, same.stages, same.columns_added))


def test_names_that_do_not_tell_a_version_are_refused(location: Location) -> None:
    append(location, ["x"])
    append(location, ["y"])
    open_dataset(location).tags.create("v1", 3)
    open_dataset(location).tags.create("2", 2)
    assert diff(location, "2", 3).older == 2
    with pytest.raises(TableError, match=r"'v1' is version 1 of .* and also a tag, of version 3. Say 1 or 3"):
        diff(location, "v1", 2)
    with pytest.raises(TableError, match="has no tag 'tokenized-v9'"):
        diff(location, 1, "tokenized-v9")
    for nothing in ("v0", "v99", "9" * 18, "9" * 40):
        with pytest.raises(TableError, match=r"has no (version|tag).*`pretrain versions` lists"):
            diff(location, 1, nothing)
    open_dataset(location).tags.delete("v1")
    open_dataset(location).tags.delete("2")
    open_dataset(location).cleanup_old_versions(timedelta(0))
    with pytest.raises(TableError, match="has no version 1"):
        diff(location, 1, 3)


def test_a_table_that_was_recreated_in_between_has_no_difference(tmp_path: Path, location: Location) -> None:
    make_table(tmp_path, ["other"])  # overwrites: the same place, another identity
    with pytest.raises(TableError, match="was recreated between versions 1 and 2"):
        diff(location, 1, 2)


# --- the verbs ---------------------------------------------------------------------------------------------------


def test_the_verbs_print_text_and_one_json_document(location: Location, tmp_path: Path) -> None:
    run_dedup(location)
    delete(location, "id = 3")
    runs = str(tmp_path / "runs")
    write_run(runs, "demo-v2-a", f"{table_id(open_dataset(location))}@2", 50)

    def pretrain(*arguments: str) -> str:
        done = CliRunner().invoke(cli, ["--database", str(tmp_path), "--runs", runs, *arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    lines = pretrain("versions").splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["v1", "v2", "v3"]
    assert "run-1" in lines[3] and lines[3].endswith("tag, run demo-v2-a (step 50)")
    listed = json.loads(pretrain("versions", "--json"))
    assert listed[1]["pinned_by"] == ["tag deduped-v2", "run demo-v2-a (step 50)"]
    assert listed[1]["records"][0]["run_id"] == "run-1" and listed[2]["bytes_added"] == 0
    assert json.loads(pretrain("diff", "v3", "1", "--json")) == json.loads(json.dumps(asdict(diff(location, 1, 3))))
    facts = dict(line.split("  ", 1) for line in pretrain("diff", "v1", "deduped-v2").splitlines() if "  " in line)
    assert facts["columns added"].strip() == "content_hash, dup_of, is_dup"
    text = pretrain("diff", "1", "3")
    assert "10 -> 9 (-1)" in text and "v1 -> v3" in text and "deduped-v2" in text
