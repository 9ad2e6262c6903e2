"""The column filler on real tables: one version per fill, races, kills, pins, tags and lineage."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from pretrain_assets.config import DedupConfig, TokenizeConfig
from pretrain_assets.curate.dedup import dedup
from pretrain_assets.errors import ColumnError, CommitError, TableError
from pretrain_assets.table import storage
from pretrain_assets.table.filler import columnread, fill
from pretrain_assets.table.filler.spec import Fill, RowColumns
from pretrain_assets.table.lineage import RECORD_KEY, LineageRecord, Pin, StageResult
from pretrain_assets.table.schema import computed_field
from pretrain_assets.table.storage import Location, absolute, is_remote, open_dataset, storage_options
from pretrain_assets.table.versions import heal, latest_record, open_pin, record_of, records, table_id
from pretrain_assets.tokenize import columns, load_tokenizer
from pretrain_assets.tokenize.columns import tokenize
from pretrain_assets_tests.tables import append, make_table, newest, values

LOADED = functools.cache(load_tokenizer)
TEXTS = ["cat", "dog", "cat", ""]


def byte_ids(*texts: str) -> list[list[int]]:
    return [list(text.encode()) for text in texts]


def run_tokenize(location: Location, pin: Pin | None = None, tokenizer: str = "byte", **rest: Any) -> StageResult:
    return tokenize(location, TokenizeConfig(tokenizer=tokenizer), input_pin=pin or newest(location), **rest)


def run_dedup(location: Location, pin: Pin | None = None) -> StageResult:
    return dedup(location, DedupConfig(), input_pin=pin or newest(location))


def files_of(location: Location) -> dict[str, int]:
    """Data files on disk, with their modification times; not those that somebody is still writing."""
    files = (path for path in (Path(location.uri) / "data").iterdir() if not path.name.startswith("."))
    return {path.name: path.stat().st_mtime_ns for path in files}


def fragments_of(location: Location) -> list[list[str]]:
    """Data files that each fragment of the newest version refers to."""
    return [[file.path for file in f.metadata.files] for f in open_dataset(location).get_fragments()]


@pytest.fixture(autouse=True)
def load_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "load_tokenizer", LOADED)


@pytest.fixture
def location(tmp_path: Path) -> Location:
    return make_table(tmp_path, TEXTS)


# --- one fill, one version ---------------------------------------------------------------------------------------


def test_a_fill_makes_one_version_tagged_with_its_record(location: Location) -> None:
    start = newest(location)
    result = run_tokenize(location, run_id="run-1")
    dataset = open_dataset(location)
    assert (result.changed, result.pin, dataset.version) == (True, Pin(start.table_id, 2), 2)
    assert values(location, "input_ids") == byte_ids(*TEXTS)
    assert values(location, "n_tokens") == [3, 3, 3, 0]
    tag = dataset.tags.list()["tokenized-v2"]
    assert tag["version"] == 2
    assert LineageRecord.from_json(tag["metadata"][RECORD_KEY]) == result.record
    in_transaction = dataset.read_transaction(2).transaction_properties[RECORD_KEY]
    assert same_facts(LineageRecord.from_json(in_transaction, version=2), result.record)
    record = result.record
    assert (record.stage, record.inputs, record.run_id) == ("tokenized", (str(start),), "run-1")
    assert (record.columns, record.parameters["name"]) == (("input_ids", "n_tokens"), "byte")
    assert (record.rows, record.rows_total) == (4, 4)
    assert record.ledger == {"in": 4, "tokenized": 3, "empty": 1}
    new = [name for name in files_of(location) if name.startswith("fill-")]
    assert record.bytes_added == sum((Path(location.uri) / "data" / name).stat().st_size for name in new)


def same_facts(one: LineageRecord, other: LineageRecord) -> bool:
    return dataclasses.replace(one, seconds=0.0) == dataclasses.replace(other, seconds=0.0)


@pytest.mark.parametrize("stage", [run_tokenize, run_dedup])
def test_nothing_missing_makes_no_version(location: Location, stage: Callable[..., StageResult]) -> None:
    first = stage(location)
    files = files_of(location)
    for pin in (newest(location), Pin(first.pin.table_id, 1)):
        again = stage(location, pin)
        assert (again.changed, again.record) == (False, first.record)
    assert (open_dataset(location).version, files_of(location)) == (2, files)


@pytest.mark.parametrize(
    ("stage", "files", "column", "expected"),
    [
        (run_tokenize, 1, "input_ids", byte_ids(*TEXTS, "cat", "new")),
        (run_dedup, 2, "is_dup", [False, False, True, False, True, False]),
    ],
)
def test_an_append_costs_the_new_rows_only(
    location: Location, stage: Callable[..., StageResult], files: int, column: str, expected: list[Any]
) -> None:
    first = stage(location)
    old = fragments_of(location)[0]
    append(location, ["cat", "new"])
    before = files_of(location)
    result = stage(location)
    assert (result.changed, result.pin.version, result.record.rows, result.record.rows_total) == (True, 4, 2, 6)
    assert fragments_of(location)[0] == old
    after = files_of(location)
    assert {name: after[name] for name in before} == before
    assert len(after) == len(before) + files
    assert result.record.bytes_added <= first.record.bytes_added
    assert values(location, column) == expected


def test_both_stages_in_turn_each_make_one_version(location: Location) -> None:
    first = run_dedup(location)
    second = run_tokenize(location, first.pin)
    append(location, ["dog"])
    third = run_dedup(location)
    fourth = run_tokenize(location, third.pin)
    assert [r.pin.version for r in (first, second, third, fourth)] == [2, 3, 5, 6]
    assert [r.tag for r in records(open_dataset(location))] == [
        "deduped-v2",
        "tokenized-v3",
        "deduped-v5",
        "tokenized-v6",
    ]
    assert values(location, "is_dup") == [False, False, True, False, True]
    assert values(location, "n_tokens") == [3, 3, 3, 0, 3]


def test_rows_deleted_before_the_fill(location: Location) -> None:
    append(location, ["dog", "end"])
    open_dataset(location).delete("id IN (1, 5)")
    run_dedup(location)
    result = run_tokenize(location)
    assert result.record.ledger == {"in": 4, "tokenized": 3, "empty": 1}
    assert values(location, "input_ids") == byte_ids("cat", "cat", "", "dog")
    assert values(location, "is_dup") == [False, True, False, False]


def test_rows_deleted_before_the_fill_and_restored_after(location: Location) -> None:
    open_dataset(location).delete("id = 1")
    run_tokenize(location)
    open_dataset(location, 1).restore()
    run_tokenize(location)
    assert values(location, "input_ids") == byte_ids(*TEXTS)


def test_compaction_that_stored_nulls_is_filled_again(location: Location) -> None:
    run_dedup(location)
    run_tokenize(location)
    append(location, ["dog", "new"])
    open_dataset(location).optimize.compact_files(target_rows_per_fragment=100)
    assert len(fragments_of(location)) == 1
    assert values(location, "n_tokens") == [3, 3, 3, 0, None, None]
    assert run_dedup(location).changed and run_tokenize(location).changed
    assert values(location, "is_dup") == [False, False, True, False, True, False]
    assert values(location, "input_ids") == byte_ids(*TEXTS, "dog", "new")
    assert values(location, "text") == [*TEXTS, "dog", "new"]


def test_other_parameters_remake_every_row_in_one_version(location: Location, caplog: pytest.LogCaptureFixture) -> None:
    append(location, ["dog"])
    first = run_tokenize(location)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    with caplog.at_level("WARNING", "pretrain_assets"):
        other = run_tokenize(location, tokenizer="gpt2")
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "input_ids, n_tokens: every row is computed anew" in warning and 'name: "byte" -> "gpt2"' in warning
    assert (other.changed, other.pin.version, other.record.rows) == (True, first.pin.version + 1, 5)
    assert values(location, "input_ids") == [[9246], [9703], [9246], [], [9703]]
    assert values(location, "input_ids", first.record.tag) == byte_ids(*TEXTS, "dog")
    files = {name: (Path(location.uri) / "data" / name).read_bytes() for name in files_of(location)}
    back = run_tokenize(location)
    assert (back.changed, back.pin.version, back.record.rows) == (True, other.pin.version + 1, 5)
    after = {name: (Path(location.uri) / "data" / name).read_bytes() for name in files}
    assert after == files, "a committed file is never written again, nor its name given again"
    assert values(location, "input_ids", first.record.tag) == byte_ids(*TEXTS, "dog")
    assert values(location, "input_ids") == byte_ids(*TEXTS, "dog")
    assert values(location, "input_ids", other.record.tag)[0] == [9246]


def test_two_tokenizers_side_by_side(location: Location) -> None:
    first = run_tokenize(location, tokenizer="gpt2")
    config = TokenizeConfig(tokenizer="byte", beside="byte")
    beside = tokenize(location, config, input_pin=newest(location))
    assert (beside.record.tag, beside.record.columns) == ("tokenized_byte-v3", ("input_ids_byte", "n_tokens_byte"))
    assert values(location, "input_ids") == [[9246], [9703], [9246], []]
    assert values(location, "input_ids_byte") == byte_ids(*TEXTS)
    append(location, ["new"])
    assert tokenize(location, config, input_pin=newest(location)).record.rows == 1
    assert values(location, "n_tokens") == [1, 1, 1, 0, None]
    assert latest_record(open_dataset(location), "tokenized") == first.record


def test_a_remake_for_an_older_input_leaves_no_old_value_under_the_new_name(location: Location) -> None:
    start = newest(location)
    append(location, ["dog"])
    run_tokenize(location)
    run_tokenize(location, start, tokenizer="gpt2")
    assert values(location, "input_ids") == [[9246], [9703], [9246], [], None]
    run_tokenize(location, tokenizer="gpt2")
    assert values(location, "input_ids") == [[9246], [9703], [9246], [], [9703]]


@pytest.mark.parametrize(
    ("stage", "column", "old", "new"),
    [(run_tokenize, "n_tokens", [3, 3, 3, 0], 3), (run_dedup, "is_dup", [False, False, True, False], True)],
)
def test_rows_after_the_input_version_are_left_to_the_next_run(
    location: Location, stage: Callable[..., StageResult], column: str, old: list[Any], new: Any
) -> None:
    start = newest(location)
    append(location, ["dog"])
    first = stage(location, start)
    assert (first.record.rows, first.record.rows_total, values(location, column)) == (4, 5, [*old, None])
    second = stage(location)
    assert (second.record.rows, values(location, column)) == (1, [*old, new])


def test_a_column_dropped_before_leaves_field_ids_in_place(location: Location) -> None:
    open_dataset(location).drop_columns(["doc_id"])
    run_dedup(location)
    open_dataset(location).drop_columns(["is_dup"])
    run_tokenize(location)
    run_dedup(location)
    ids = {f.name(): f.id() for f in open_dataset(location).lance_schema.fields()}
    assert ids == {"id": 0, "text": 2, "source": 3, "source_file": 4, "score": 5, "n_chars": 6, "content_hash": 7} | {
        name: ids[name] for name in ("dup_of", "input_ids", "n_tokens", "is_dup")
    }
    assert (values(location, "text"), values(location, "input_ids")) == (TEXTS, byte_ids(*TEXTS))
    assert values(location, "is_dup") == [False, False, True, False]
    assert table_id(open_dataset(location)) == newest(location).table_id


def test_a_newer_input_with_nothing_missing_is_adopted(location: Location) -> None:
    run_tokenize(location)
    open_dataset(location).delete("id = 3")
    pin = newest(location)
    append(location, ["later"])
    result = run_tokenize(location, pin)
    assert (result.changed, result.pin, result.record.tag) == (False, pin, "tokenized-v3")
    assert (result.record.rows, result.record.rows_total, result.record.bytes_added) == (0, 3, 0)
    assert open_dataset(location).version == 4
    assert len(values(location, "n_tokens", "tokenized-v3")) == 3
    assert latest_record(open_dataset(location), "tokenized") == result.record


# --- other writers -----------------------------------------------------------------------------------------------


def interfere(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object], times: int = 1) -> None:
    """Run `action` between the staging and the commit of the next fills."""
    stage, left = fill.stage, [action] * times

    def staged(*arguments: Any) -> None:
        stage(*arguments)
        if left:
            left.pop()()

    monkeypatch.setattr(fill, "stage", staged)


@pytest.mark.parametrize("first", [True, False], ids=["new columns", "new rows"])
@pytest.mark.parametrize("stage", [run_tokenize, run_dedup])
def test_a_concurrent_append_is_left_to_the_next_run(
    location: Location, monkeypatch: pytest.MonkeyPatch, stage: Callable[..., StageResult], first: bool
) -> None:
    if not first:
        stage(location)
        append(location, ["x"])
    before = open_dataset(location).count_rows()
    interfere(monkeypatch, lambda: append(location, ["dog", "y"]))
    result = stage(location)
    column, tail = {run_tokenize: ("n_tokens", [3, 1]), run_dedup: ("is_dup", [True, False])}[stage]
    found = values(location, column)
    assert (found[-2:], None in found[:-2]) == ([None, None], False)
    assert (result.record.rows_total, result.record.ledger["in"]) == (before + 2, 4 if first else 1)
    again = stage(location)
    assert (again.changed, again.record.rows, values(location, column)) == (True, 2, found[:-2] + tail)


@pytest.mark.parametrize("stage", [run_tokenize, run_dedup])
@pytest.mark.parametrize("where", ["id = 0", "id = 4", "id >= 4"], ids=["old row", "new row", "whole new fragment"])
def test_a_concurrent_delete(
    location: Location, monkeypatch: pytest.MonkeyPatch, stage: Callable[..., StageResult], where: str
) -> None:
    stage(location)
    append(location, ["cat", "dog", "new"])
    interfere(monkeypatch, lambda: open_dataset(location).delete(where))
    result = stage(location)
    assert result.changed == (where != "id >= 4")
    gone = {"id = 0": [0], "id = 4": [4], "id >= 4": [4, 5, 6]}[where]
    column, full = {
        run_tokenize: ("n_tokens", [3, 3, 3, 0, 3, 3, 3]),
        run_dedup: (
            "is_dup",
            [False, False, 0 not in gone, False, True, True, False],
        ),  # the next of its class is first
    }[stage]
    assert values(location, column) == [value for i, value in enumerate(full) if i not in gone]


def test_a_concurrent_compaction_of_a_first_fill(location: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    append(location, ["dog"])
    interfere(monkeypatch, lambda: open_dataset(location).optimize.compact_files(target_rows_per_fragment=100))
    run_tokenize(location)
    assert (len(fragments_of(location)), values(location, "input_ids")) == (1, byte_ids(*TEXTS, "dog"))


def test_losing_every_race_keeps_the_work(location: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    start = newest(location)
    with monkeypatch.context() as patch:
        interfere(patch, lambda: append(location, ["x"]), times=fill.COMMIT_TRIES)
        with pytest.raises(CommitError, match=r"lost 8 commits in a row.*run the same command again"):
            run_tokenize(location, start)
    staged = {name: time for name, time in files_of(location).items() if name.startswith("fill-")}
    run_tokenize(location, start)
    assert len(staged) == 1 and staged.items() <= files_of(location).items()
    assert values(location, "n_tokens") == [3, 3, 3, 0, *[None] * 8]


# --- killed processes --------------------------------------------------------------------------------------------

CHILD = """
import sys, time
from pretrain_assets.config import TokenizeConfig
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location
from pretrain_assets.tokenize import columns, tokenizers

plain = tokenizers.ByteTokenizer.encode_batch
def slow(self, texts, num_threads):
    time.sleep(0.3)
    return plain(self, texts)
tokenizers.ByteTokenizer.encode_batch = slow
columns.tokenize(
    Location(database_uri=sys.argv[1]), TokenizeConfig(tokenizer="byte"), input_pin=Pin.parse(sys.argv[2]))
"""


def test_kill_9_in_the_middle_goes_on_from_the_finished_fragments(tmp_path: Path) -> None:
    texts = [[f"fragment {i} row {j}" for j in range(50)] for i in range(12)]
    both = [make_table(tmp_path / name, texts[0]) for name in ("killed", "undisturbed")]
    for location in both:
        for part in texts[1:]:
            append(location, part)
    killed, undisturbed = both
    pin = newest(killed)
    child = subprocess.Popen([sys.executable, "-c", CHILD, killed.database_uri, str(pin)], stderr=subprocess.DEVNULL)

    def staged() -> dict[str, int]:
        return {name: time for name, time in files_of(killed).items() if name.startswith("fill-")}

    deadline = time.monotonic() + 60
    while len(staged()) < 4:
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert open_dataset(killed).version == pin.version, "a killed fill leaves no version"
    finished = dict(sorted(staged().items(), key=lambda item: item[1])[:3])
    result = run_tokenize(killed, pin)
    assert finished.items() <= staged().items(), "finished fragments were not written again"
    assert (result.changed, result.pin.version, len(staged())) == (True, pin.version + 1, 12)
    expected = run_tokenize(undisturbed)
    assert open_dataset(killed).to_table() == open_dataset(undisturbed).to_table()
    assert result.record.ledger == expected.record.ledger == {"in": 600, "tokenized": 600, "empty": 0}


@pytest.mark.parametrize("left", ["no tag", "bare tag"])
@pytest.mark.parametrize("stage", [run_tokenize, run_dedup])
def test_a_kill_between_commit_and_tag_is_healed(
    location: Location, stage: Callable[..., StageResult], left: str
) -> None:
    result = stage(location)
    tag = result.record.tag
    tags = open_dataset(location).tags
    tags.delete(tag)
    if left == "bare tag":
        tags.create(tag, result.pin.version)
    assert latest_record(open_dataset(location), result.record.stage) is None
    healed = latest_record(heal(location), result.record.stage)
    assert healed is not None and same_facts(healed, result.record)
    again = stage(location)
    assert (again.changed, again.pin) == (False, result.pin)


def test_heal_finds_a_record_below_a_tagged_version(location: Location) -> None:
    first = run_tokenize(location)
    open_dataset(location).tags.delete(first.record.tag)
    append(location, ["x"])
    run_dedup(location)
    open_dataset(location).tags.create("paper-v9", 1)
    healed = record_of(heal(location), "tokenized", 2)
    assert same_facts(healed, first.record)
    assert [r.tag for r in records(open_dataset(location))] == ["tokenized-v2", "deduped-v4"]


def test_heal_goes_back_past_versions_that_no_stage_made(location: Location) -> None:
    result = run_tokenize(location)
    open_dataset(location).tags.delete("tokenized-v2")
    append(location, ["x"])
    heal(location)
    assert record_of(open_dataset(location), "tokenized", 2).ledger == result.record.ledger


@pytest.mark.parametrize("keep", [0, 10, -1])
def test_a_torn_column_file_is_written_again(location: Location, monkeypatch: pytest.MonkeyPatch, keep: int) -> None:
    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fill, "_commit", dies)
        with pytest.raises(KeyboardInterrupt):
            run_tokenize(location)
    (name,) = [name for name in files_of(location) if name.startswith("fill-")]
    path = Path(location.uri) / "data" / name
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    run_tokenize(location)
    assert path.stat().st_size == len(whole)
    assert values(location, "input_ids") == byte_ids(*TEXTS)


# --- a batch function that is wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            lambda n: [pa.array([1] * (n - 1), pa.int32())],
            "returned 3 values of int32 for column x; expected 4 of int32",
        ),
        (lambda n: [pa.array([1] * n, pa.int64())], "returned 4 values of int64 for column x; expected 4 of int32"),
        (lambda n: [pa.nulls(n, pa.int32())], "cannot be computed for id 0, .*returned NULL for column x"),
        (lambda n: [], "returned 0 arrays for 1 columns"),
    ],
    ids=["length", "type", "null", "no column"],
)
def test_a_wrong_answer_of_the_batch_function_is_not_committed(
    location: Location, answer: Callable[[int], list[pa.Array]], message: str
) -> None:
    def spec(function: Callable[[int], list[pa.Array]]) -> Fill:
        making: dict[str, Any] = {"stage": "x", "code_version": "1", "parameters": {}}
        group = RowColumns(
            outputs=pa.schema([computed_field("x", pa.int32(), **making)]),
            inputs=("text",),
            make=lambda worker: lambda batch: function(batch.num_rows),
        )
        return Fill(stage="x", groups=(group,), code_version="1", parameters={}, batch_bytes=1 << 20)

    with pytest.raises(ColumnError, match=message):
        fill.fill(location, spec(answer), input_pin=newest(location))
    assert open_dataset(location).version == 1
    right = fill.fill(location, spec(lambda n: [pa.array(range(n), pa.int32())]), input_pin=newest(location))
    assert (right.record.ledger, values(location, "x")) == ({"in": 4, "written": 4}, [0, 1, 2, 3])


def test_a_commit_that_cannot_be_read_back_is_noticed(location: Location) -> None:
    run_tokenize(location)
    append(location, ["x"])
    with pytest.raises(AssertionError, match="column n_tokens of fragment 1 reads back empty at row 0"):
        columnread.read_back(open_dataset(location), [0, 1], ["n_tokens"])


# --- pins, tags and what their errors say ------------------------------------------------------------------------


@pytest.mark.parametrize("versions", [1, 2], ids=["version still to come", "version there"])
def test_a_recreated_table_is_refused_by_name(tmp_path: Path, versions: int) -> None:
    location = make_table(tmp_path, TEXTS, identity="old-id")
    pin = append(location, ["x"])
    for path in sorted(Path(location.uri).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    make_table(tmp_path, TEXTS, identity="new-id")
    if versions == 2:
        append(location, ["y"])
    for opened in (lambda: open_pin(location, pin), lambda: run_tokenize(location, pin)):
        with pytest.raises(TableError, match=r"old-id@2.*new-id.*recreated.*run the stage again"):
            opened()


def test_what_is_missing_is_named_with_what_to_do(location: Location, tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"No table at .*nowhere/corpus.lance. Ingest first"):
        open_dataset(Location(database_uri=str(tmp_path / "nowhere")))
    with pytest.raises(TableError, match=r"has no version 9.*`pretrain versions` lists"):
        open_dataset(location, 9)
    with pytest.raises(TableError, match=r"has no tag 'tokenized-v9'.*`pretrain versions` lists"):
        open_dataset(location, "tokenized-v9")
    with pytest.raises(TableError, match="has no version 9"):
        open_pin(location, Pin(newest(location).table_id, 9))
    with pytest.raises(TableError, match="no version 7 made by stage 'tokenized'; it has: none"):
        record_of(open_dataset(location), "tokenized", 7)
    run_tokenize(location)
    with pytest.raises(TableError, match="it has: tokenized-v2"):
        record_of(open_dataset(location), "tokenized", 7)


def test_a_table_of_another_maker_is_refused(tmp_path: Path) -> None:
    dataset = lance.write_dataset(pa.table({"id": [1]}), str(tmp_path / "corpus.lance"))
    with pytest.raises(TableError, match=r"carries no pretrain_assets identity.*new table name"):
        table_id(dataset)


@pytest.mark.parametrize("text", ["", "abc", "abc@", "@3", "abc@x", "abc@-1"])
def test_a_pin_reads_back_and_nothing_else_does(text: str) -> None:
    assert Pin.parse("a@b@12") == Pin("a@b", 12)
    assert str(Pin("abc", 3)) == "abc@3"
    with pytest.raises(ValueError, match="expected table-id@version"):
        Pin.parse(text)


# --- places ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("database", "uri"),
    [("s3://bucket/db/", "s3://bucket/db/corpus.lance"), ("/data/db", "/data/db/corpus.lance")],
)
def test_uris_of_a_location(database: str, uri: str) -> None:
    location = Location(database_uri=database)
    assert location.uri == uri
    assert location.staging_uri == uri.replace(".lance", ".staging")
    assert is_remote(uri) == database.startswith("s3://")


def test_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert absolute("s3://bucket/db/") == "s3://bucket/db"
    assert absolute("db") == f"{tmp_path}/db"
    assert absolute("db", "/base") == "/base/db"
    assert absolute("db", "here") == f"{tmp_path}/here/db"
    assert absolute("/x/db", "/base") == absolute("file:///x/db") == "/x/db"
    assert absolute("~/db") == "/home/someone/db"


def test_storage_options_hold_the_endpoint_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*storage.STORAGE_ENV_NAMES, "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    assert storage_options("/data/db") is None
    assert storage_options("s3://b/db") == {"aws_region": "us-east-1"}
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "hush")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "hush")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    expected = {"aws_region": "eu-west-1", "aws_endpoint": "http://127.0.0.1:9000", "allow_http": "true"}
    assert storage_options("s3://b/db") == expected
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://store.example")
    assert storage_options("s3://b/db") == {"aws_region": "eu-west-1", "aws_endpoint": "https://store.example"}
