"""Ingest: every format gives the same documents, once, in one commit; faults are named, and nothing stays half-done."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pretrain_assets.config import IngestConfig
from pretrain_assets.errors import BusyError, CommitError, ConfigError, InputError, TableError
from pretrain_assets.ingest import append, commit, jsonl, parquet, synthetic, write
from pretrain_assets.ingest.append import ingest
from pretrain_assets.ingest.documents import Layout, Tally
from pretrain_assets.ingest.readahead import read_ahead
from pretrain_assets.ingest.sources import list_files, sources_fingerprint
from pretrain_assets.table.lineage import StageResult
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.versions import latest_record, table_id

ROWS: list[dict[str, Any]] = [
    {"id": f"doc-{n}", "text": f"text {n} é Ω\x00\n😀" * (n % 7), "score": n / 4, "source": "wiki", "url": f"u{n}"}
    for n in range(50)
]


@pytest.fixture
def location(tmp_path: Path) -> Location:
    return Location(database_uri=str(tmp_path / "db"))


def write_parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return str(path)


def write_lines(path: Path, lines: list[Any]) -> str:
    """Lines as given (bytes or str), or as JSON; compressed as the file's ending says."""
    raw = b"".join((line if isinstance(line, bytes) else _json(line)) + b"\n" for line in lines)
    if path.suffix == ".gz":
        raw = gzip.compress(raw)
    elif path.suffix == ".zst":
        with pa.CompressedOutputStream(pa.OSFile(str(path), "w"), "zstd") as stream:
            stream.write(raw)
        return str(path)
    path.write_bytes(raw)
    return str(path)


def _json(line: Any) -> bytes:
    return (line if isinstance(line, str) else json.dumps(line)).encode()


def run(location: Location, *sources: str, **settings: Any) -> StageResult:
    return ingest(location, IngestConfig(sources=sources, **settings))


def rows_of(location: Location, *columns: str) -> list[dict[str, Any]]:
    table = open_dataset(location).to_table(columns=list(columns) or None)
    return table.sort_by("id").to_pylist() if "id" in table.schema.names else table.to_pylist()


def refused(location: Location, *sources: str, **settings: Any) -> str:
    """The error of an ingest that must be refused and leave nothing behind."""
    before = open_dataset(location).version if Path(location.uri, "_versions").exists() else None
    with pytest.raises(InputError) as caught:
        run(location, *sources, **settings)
    after = open_dataset(location).version if Path(location.uri, "_versions").exists() else None
    assert before == after
    return str(caught.value)


# --- formats and columns ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst", "ndjson", "json"])
def test_every_format_gives_the_same_documents(tmp_path: Path, ending: str) -> None:
    of_parquet, of_lines = (Location(database_uri=str(tmp_path / name)) for name in ("p", "l"))
    run(of_parquet, write_parquet(tmp_path / "a.parquet", ROWS))
    run(of_lines, write_lines(tmp_path / f"a.{ending}", ROWS))
    columns = ("id", "doc_id", "text", "source", "score", "n_chars")
    assert rows_of(of_lines, *columns) == rows_of(of_parquet, *columns)
    assert rows_of(of_lines, "id", "text") == [{"id": n, "text": row["text"]} for n, row in enumerate(ROWS)]
    assert [row["n_chars"] for row in rows_of(of_lines, "id", "n_chars")] == [len(row["text"]) for row in ROWS]


def test_columns_of_one_row(location: Location, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "é"}, {"text": "", "id": 7, "score": 3, "source": "web"}])
    result = run(location, path)
    assert rows_of(location) == [
        {
            "id": 0,
            "doc_id": "sha256:" + sha256("é".encode()).hexdigest()[:32],
            "text": "é",
            "source": path,
            "source_file": path,
            "score": None,
            "n_chars": 1,
        },
        {"id": 1, "doc_id": "7", "text": "", "source": "web", "source_file": path, "score": 3.0, "n_chars": 0},
    ]
    types = {field.name: str(field.type) for field in open_dataset(location).schema}
    assert types["score"] == "float" and types["n_chars"] == "int32" and types["id"] == "int64"
    assert result.record.ledger == {"in": 2, "written": 2}


def test_other_column_names_and_parquet_types(location: Location, tmp_path: Path) -> None:
    table = pa.table(
        {
            "content": pa.array(["a", "b", "a"], pa.large_string()).dictionary_encode(),
            "key": pa.array([2**63 + 1, 5, None], pa.uint64()),
            "quality": pa.array([1, 2, 3], pa.int64()),
            "origin": pa.array(["x", None, "z"], pa.string()),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    names = {"text_column": "content", "id_column": "key", "score_column": "quality", "source_column": "origin"}
    run(location, str(tmp_path / "a.parquet"), **names)
    rows = rows_of(location)
    assert [row["text"] for row in rows] == ["a", "b", "a"]
    assert [row["doc_id"] for row in rows] == [str(2**63 + 1), "5", "sha256:" + sha256(b"a").hexdigest()[:32]]
    assert [row["source"] for row in rows] == ["x", str(tmp_path / "a.parquet"), "z"]
    assert [row["score"] for row in rows] == [1.0, 2.0, 3.0]


def test_types_that_vary_between_blocks_do_not_drift(
    location: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 64)
    odd = [{"score": 1}, {"score": 1.5}, {}, {"score": None}, {"id": 5}, {"id": "x"}, {"id": 2**64 - 1}]
    rows = [{"text": f"{n}" * 20, **row} for n, row in enumerate(odd * 3)]
    run(location, write_lines(tmp_path / "a.jsonl", rows))
    found = rows_of(location)
    assert [row["score"] for row in found[:4]] == [1.0, 1.5, None, None]
    assert [row["doc_id"] for row in found[4:7]] == ["5", "x", str(2**64 - 1)]
    assert len(found) == 21


def test_bundled_makes_version_1_with_identity_and_stable_rows(location: Location) -> None:
    result = run(location, "bundled")
    dataset = open_dataset(location)
    assert (dataset.version, dataset.count_rows(), dataset.has_stable_row_ids) == (1, 4361, True)
    assert dataset.data_storage_version == "2.2"
    assert table_id(dataset) == result.record.table_id and len(result.record.table_id) == 32
    assert latest_record(dataset, "ingested") == result.record
    assert dataset.tags.list()["ingested-v1"]["version"] == 1
    assert {row["source_file"] for row in rows_of(location, "source_file")} == {"bundled:public_domain_docs.parquet"}
    assert [row["id"] for row in rows_of(location, "id")] == list(range(4361))
    assert result.record.bytes_added == sum(file.stat().st_size for file in Path(location.uri, "data").iterdir())
    assert dataset.count_rows("n_chars = character_length(text)") == 4361
    assert str(Path.home()) not in result.record.to_json() and "/work" not in result.record.to_json()


def test_extra_columns_keep_their_types(location: Location, tmp_path: Path) -> None:
    rows = [{"text": "a", "lang": "en", "year": 1999, "tags": ["x"]}, {"text": "b", "lang": None, "year": 2000}]
    names = ("lang", "year", "tags")
    run(location, write_parquet(tmp_path / "a.parquet", rows), extra_columns=names)
    run(
        location,
        write_lines(tmp_path / "b.jsonl", [{"text": "c", "lang": "fr", "year": 1, "tags": []}]),
        extra_columns=names,
    )
    assert [(row["lang"], row["year"], row["tags"]) for row in rows_of(location)] == [
        ("en", 1999, ["x"]),
        (None, 2000, None),
        ("fr", 1, []),
    ]
    missing = write_parquet(tmp_path / "c.parquet", [{"text": "d", "lang": "en"}])
    assert "c.parquet" in refused(location, missing, extra_columns=("year",))
    other_type = write_parquet(tmp_path / "d.parquet", [{"text": "d", "year": "1999"}])
    assert "must be int64 as in the table; the file has it as string" in refused(
        location, other_type, extra_columns=("year",)
    )
    no_key = write_lines(tmp_path / "e.jsonl", [{"text": "d"}])
    assert "no row has extra column 'year'" in refused(location, no_key, extra_columns=("year",))
    wrong = write_lines(tmp_path / "f.jsonl", [{"text": "d", "year": 1}, {"text": "e", "year": "x"}])
    assert "f.jsonl, line 2" in refused(location, wrong, extra_columns=("year",))
    for name, owner in (("is_dup", "deduped"), ("text", "ingested"), ("nope", "no column")):
        with pytest.raises(ConfigError, match=owner):
            run(location, wrong, extra_columns=(name,))
    assert open_dataset(location).version == 2


def test_extra_column_of_json_lines_gets_the_type_of_its_first_values(location: Location, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a", "day": "2020-01-01"}, {"text": "b", "day": None}])
    run(location, path, extra_columns=("day",))
    assert str(open_dataset(location).schema.field("day").type) == "string"


# --- appending --------------------------------------------------------------------------------------------------------


def test_append_is_one_version_with_dense_ids_and_old_files_untouched(location: Location, tmp_path: Path) -> None:
    first = run(location, write_parquet(tmp_path / "a.parquet", ROWS))
    before = {file.name: file.stat().st_mtime_ns for file in Path(location.uri, "data").iterdir()}
    open_dataset(location).add_columns(pa.schema([pa.field("n_tokens", pa.int32())]))
    files = [write_parquet(tmp_path / f"b{n}.parquet", ROWS[:10]) for n in range(3)]
    files.append(write_lines(tmp_path / "c.jsonl", ROWS[10:13]))
    result = run(location, *files)
    assert (first.record.version, result.record.version, open_dataset(location).version) == (1, 3, 3)
    assert [row["id"] for row in rows_of(location, "id")] == list(range(83))
    after = {file.name: file.stat().st_mtime_ns for file in Path(location.uri, "data").iterdir()}
    assert before.items() <= after.items()
    assert {row["n_tokens"] for row in rows_of(location, "n_tokens")} == {None}
    assert (result.record.rows, result.record.rows_total, result.record.table_id) == (33, 83, first.record.table_id)
    assert not any(result.record.details["files"][n]["rows"] != rows for n, rows in enumerate((10, 10, 10, 3)))
    assert [row["source_file"] for row in rows_of(location, "id", "source_file")][50::10] == files


def test_files_are_read_in_listing_order_whatever_their_speed(location: Location, tmp_path: Path) -> None:
    for n in (3, 1, 2, 0):
        write_lines(tmp_path / f"part-{n}.jsonl", [{"text": f"{n}-{row}"} for row in range(2000 if n == 0 else 2)])
    config = {"batch_bytes": 1024, "files_in_flight": 3}
    run(location, str(tmp_path / "part-2.jsonl"), str(tmp_path / "*.jsonl"), **config)
    texts = [row["text"] for row in rows_of(location, "id", "text")]
    assert texts == ["2-0", "2-1", *(f"0-{row}" for row in range(2000)), "1-0", "1-1", "3-0", "3-1"]


def test_nothing_new_makes_no_version(location: Location, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_lines(tmp_path / "a.jsonl", ROWS)
    first = run(location, str(tmp_path / "*.jsonl"))
    with caplog.at_level("INFO"):
        again = run(location, str(tmp_path / "a.jsonl"))
    assert (again.changed, again.record, open_dataset(location).version) == (False, first.record, 1)
    assert "nothing new" in caplog.text
    write_lines(tmp_path / "b.jsonl", ROWS[:1])
    more = run(location, str(tmp_path))
    assert (more.changed, more.record.rows, more.record.version) == (True, 1, 2)
    empty = write_lines(tmp_path / "c.jsonl", [])
    assert run(location, empty).changed is False


def test_a_file_that_grew_is_refused_with_the_remedy(location: Location, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ROWS[:5])
    run(location, path)
    write_lines(tmp_path / "a.jsonl", ROWS[:6])
    message = refused(location, path)
    assert f"{path} changed since it was ingested in version 1" in message and "as a new file" in message


def test_ids_are_never_reused(location: Location, tmp_path: Path) -> None:
    run(location, write_lines(tmp_path / "a.jsonl", ROWS[:5]))
    open_dataset(location).delete("id >= 3")
    result = run(location, write_lines(tmp_path / "b.jsonl", ROWS[5:7]))
    assert [row["id"] for row in rows_of(location, "id")] == [0, 1, 2, 5, 6]
    assert result.record.details["next_id"] == 7


def test_a_tag_that_was_not_written_is_restored(location: Location, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ROWS[:5])
    first = run(location, path)
    open_dataset(location).tags.delete("ingested-v1")
    assert run(location, path).changed is False
    restored = latest_record(open_dataset(location), "ingested")
    assert restored is not None and restored.details == first.record.details


@pytest.mark.parametrize(
    ("table_exists", "module", "step"),
    [
        (False, append, "_write"),
        (False, append, "commit"),
        (False, commit, "_commit"),
        (True, append, "_write"),
        (True, append, "commit"),
    ],
)
def test_two_ingests_at_once_cannot_give_out_the_same_ids(
    location: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table_exists: bool, module: Any, step: str
) -> None:
    """Another ingest, one that the lease did not stop, commits just before one step of this one."""
    mine, theirs = (write_lines(tmp_path / f"{name}.jsonl", ROWS[:5]) for name in "ab")
    if table_exists:
        run(location, "synthetic:20")
    original = getattr(module, step)

    def late(*arguments: Any) -> Any:
        monkeypatch.undo()
        with pytest.raises(BusyError, match="in use: ingest"):
            run(location, theirs)
        append._ingest(location, IngestConfig(sources=(theirs,)), None)
        return original(*arguments)

    monkeypatch.setattr(module, step, late)
    with pytest.raises(CommitError, match="gave out ids"):
        run(location, mine)
    assert open_dataset(location).count_rows() == 5 + 20 * table_exists
    assert [row["source_file"] for row in rows_of(location, "id", "source_file")][-5:] == [theirs] * 5
    assert run(location, mine).record.rows == 5


def test_a_table_made_by_something_else_is_refused(location: Location, tmp_path: Path) -> None:
    import lance

    lance.write_dataset(pa.table({"id": [1]}), location.uri)
    with pytest.raises(TableError, match="carries no pretrain_assets identity"):
        run(location, write_lines(tmp_path / "a.jsonl", ROWS))


def test_a_creation_killed_before_its_commit_leaves_no_table(location: Location, tmp_path: Path) -> None:
    Path(location.uri, "_versions").mkdir(parents=True)
    assert run(location, write_lines(tmp_path / "a.jsonl", ROWS)).record.version == 1


# --- interruption -----------------------------------------------------------------------------------------------------

CHILD = """
import sys, time
from pretrain_assets.config import IngestConfig
from pretrain_assets.ingest import journal
from pretrain_assets.ingest.append import ingest
from pretrain_assets.table.storage import Location

journal.UNIT_BYTES = 1
slow = journal.Journal.save
def save(self, key, entry):
    slow(self, key, entry)
    time.sleep(0.3)
journal.Journal.save = save
ingest(Location(database_uri=sys.argv[1]), IngestConfig(sources=(sys.argv[2],)))
"""


@pytest.mark.parametrize("table_exists", [False, True])
def test_a_killed_ingest_goes_on_without_duplicates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table_exists: bool
) -> None:
    killed, calm = (Location(database_uri=str(tmp_path / name)) for name in ("killed", "calm"))
    if table_exists:
        for location in (killed, calm):
            run(location, "synthetic:20")
    for n in range(6):
        write_lines(tmp_path / f"{n}.jsonl", [{**row, "id": f"{n}-{row['id']}"} for row in ROWS])
    source = str(tmp_path / "*.jsonl")
    child = subprocess.Popen([sys.executable, "-c", CHILD, killed.database_uri, source])
    journal = Path(killed.staging_uri, "ingest")
    while len(list(journal.glob("*.unit"))) < 2:
        assert child.poll() is None
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    finished = {path.name: path.read_text() for path in journal.glob("*.unit")}
    assert 2 <= len(finished) < 6
    read: list[str] = []
    original = write.read_documents
    monkeypatch.setattr(write, "read_documents", lambda file, *rest: (read.append(file.name), original(file, *rest))[1])
    monkeypatch.setattr("pretrain_assets.ingest.journal.UNIT_BYTES", 1)
    result = run(killed, source)
    assert len(read) == 6 - len(finished)
    run(calm, source)
    assert rows_of(killed) == rows_of(calm)
    assert len({row["id"] for row in rows_of(killed, "id")}) == 300 + 20 * table_exists
    assert result.record.version == 1 + table_exists and not journal.exists()
    assert {json.loads(text)["table_id"] for text in finished.values()} == {result.record.table_id}


def test_a_journaled_unit_whose_data_file_is_gone_is_written_again(
    location: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "a.jsonl", ROWS)
    with monkeypatch.context() as patch:
        patch.setattr("pretrain_assets.ingest.append.commit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(location, path)
    (data,) = Path(location.uri, "data").iterdir()
    data.unlink()
    assert run(location, path).record.rows == 50
    assert len(rows_of(location)) == 50


def test_reading_ahead_keeps_order_and_hands_errors_on() -> None:
    def numbers(first: int) -> Any:
        yield from range(first, first + 5)
        if first == 20:
            raise InputError("boom")

    seen: list[int] = []
    with pytest.raises(InputError, match="boom"):
        for pump in read_ahead([lambda first=first: numbers(first) for first in (0, 10, 20, 30)], 3):
            seen.extend(pump)
    assert seen == [*range(5), *range(10, 15), *range(20, 25)]


# --- bad input --------------------------------------------------------------------------------------------------------


def test_sources_that_cannot_be_found(location: Location, tmp_path: Path) -> None:
    assert "does not exist" in refused(location, str(tmp_path / "nope.parquet"))
    assert "matches no file" in refused(location, str(tmp_path / "*.parquet"))
    assert "matches no file" in refused(location, str(tmp_path))
    (tmp_path / "a.csv").write_text("text\n")
    assert "a.csv is in a format that cannot be read" in refused(location, str(tmp_path / "a.csv"))
    assert "a.csv is in a format that cannot be read" in refused(location, str(tmp_path / "*.csv"))
    assert "synthetic[:rows[:seed]]" in refused(location, "synthetic:many")
    assert "'foo://x'" in refused(location, "foo://x")
    assert not Path(location.uri, "_versions").exists()


GOOD = {"text": "fine"}
BAD_LINES = [
    ("malformed_json", b'{"text": "a"'),
    ("malformed_json", b'{"text": "a"} {"text": "b"}'),
    ("malformed_json", b'{"text": "tab\there"}'),
    ("not_an_object", b"null"),
    ("not_an_object", b'["text"]'),
    ("missing_text", b'{"txet": "a"}'),
    ("null_text", b'{"text": null}'),
    ("text_not_a_string", b'{"text": 5}'),
    ("text_not_a_string", b'{"text": {"a": "b"}}'),
    ("lone_surrogate", rb'{"text": "a\ud800b"}'),
    ("invalid_utf8", b'{"text": "a\xffb"}'),
    ("invalid_utf8", b'{"text": "a\xed\xa0\x80b"}'),
    ("bad_id", b'{"text": "a", "id": 1.5}'),
    ("bad_score", b'{"text": "a", "score": "high"}'),
    ("bad_source", b'{"text": "a", "source": 1}'),
    ("bad_value", rb'{"text": "a", "source": "\udc00"}'),
]


@pytest.mark.parametrize(("reason", "line"), BAD_LINES)
@pytest.mark.parametrize("first", [True, False])
def test_a_bad_line_is_named_or_left_out(
    location: Location, tmp_path: Path, reason: str, line: bytes, first: bool
) -> None:
    lines = [line, GOOD, GOOD] if first else [GOOD, b"", line, GOOD]
    path = write_lines(tmp_path / "a.jsonl", lines)
    message = refused(location, path)
    assert f"a.jsonl, line {1 if first else 3}" in message and f"left_out:{reason}" in message
    assert "on_bad_row='skip'" in message
    result = run(location, path, on_bad_row="skip")
    assert result.record.ledger == {"in": 3, "written": 2, f"left_out:{reason}": 1}
    assert [row["text"] for row in rows_of(location)] == ["fine", "fine"]


def test_odd_but_good_lines_are_kept(location: Location, tmp_path: Path) -> None:
    lines = [
        b'\xef\xbb\xbf{"text": "bom"}\r',
        b'  {"text": "indented"}',
        rb'{"text": "elsewhere", "other": "\ud800"}',
        b'{"text": "twice", "text": "last"}',
        rb'{"text": "nul\u0000 \/ \ud83d\ude00"}',
        b'{"text": "infinite", "score": NaN}',
    ]
    run(location, write_lines(tmp_path / "a.jsonl", lines))
    texts = [row["text"] for row in rows_of(location, "id", "text")]
    assert texts == ["bom", "indented", "elsewhere", "last", "nul\0 / 😀", "infinite"]


def test_null_text_in_parquet_is_named_or_left_out(
    location: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "ROWS_PER_BATCH", 4)
    rows = [{"text": None if n in (9, 10) else f"t{n}"} for n in range(12)]
    path = write_parquet(tmp_path / "a.parquet", rows, row_group_size=7)
    assert "a.parquet, row 10, column 'text': the text is null" in refused(location, path)
    result = run(location, path, on_bad_row="skip")
    assert result.record.ledger == {"in": 12, "written": 10, "left_out:null_text": 2}
    assert [row["text"] for row in rows_of(location)] == [f"t{n}" for n in range(12) if n not in (9, 10)]


def test_invalid_utf8_in_parquet_is_named_or_left_out(location: Location, tmp_path: Path) -> None:
    raw = pa.array([b"good", b"b\xffd", b"also good"], pa.binary())
    text = pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2])
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    message = refused(location, str(tmp_path / "a.parquet"))
    assert "a.parquet, row 2, column 'text'" in message and "b'b\\xffd'" in message
    result = run(location, str(tmp_path / "a.parquet"), on_bad_row="skip")
    assert result.record.ledger == {"in": 3, "written": 2, "left_out:invalid_utf8": 1}


@pytest.mark.parametrize(
    ("reason", "row"),
    [
        ("missing_text", {"txet": "x"}),
        ("text_not_a_string", {"text": 5}),
        ("bad_score", {"text": "x", "score": "high"}),
        ("bad_id", {"text": "x", "id": [1]}),
    ],
)
def test_one_parquet_file_of_ten_has_a_wrong_schema(
    location: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, row: dict[str, Any]
) -> None:
    for n in range(10):
        write_parquet(tmp_path / f"{n}.parquet", [row] * 3 if n == 7 else ROWS[:2])
    with monkeypatch.context() as patch:
        patch.setattr(write, "read_documents", None)  # the check comes before any reading
        assert f"{tmp_path}/7.parquet, all 3 rows" in refused(location, str(tmp_path / "*.parquet"))
    result = run(location, str(tmp_path / "*.parquet"), on_bad_row="skip")
    assert result.record.ledger == {"in": 21, "written": 18, f"left_out:{reason}": 3}
    assert [file["rows"] for file in result.record.details["files"]] == [2] * 7 + [0] + [2] * 2


@pytest.mark.parametrize("ending", ["parquet", "jsonl.gz", "jsonl.zst"])
@pytest.mark.parametrize("fault", ["truncated", "flipped"])
def test_a_broken_file_is_named_and_nothing_is_committed(
    location: Location, tmp_path: Path, ending: str, fault: str
) -> None:
    rows = [{"text": sha256(bytes([n])).hexdigest() * 20} for n in range(200)]
    good = write_parquet(tmp_path / "good.parquet", rows)
    run(location, good)
    bad = tmp_path / f"bad.{ending}"
    write_parquet(bad, rows, compression="zstd") if ending == "parquet" else write_lines(bad, rows)
    content = bytearray(bad.read_bytes())
    if fault == "truncated":
        content = content[: len(content) * 2 // 3]
    else:
        content[len(content) // 2 : len(content) // 2 + 40] = bytes(40)
    bad.write_bytes(content)
    message = refused(location, good, str(bad))
    assert f"bad.{ending}" in message and ("fetch it again" in message or "line" in message or "row" in message)
    assert open_dataset(location).count_rows() == 200


def test_files_without_rows(location: Location, tmp_path: Path) -> None:
    schema = pa.schema([("text", pa.string())])
    pq.write_table(schema.empty_table(), tmp_path / "a-zero-rows.parquet")
    with pq.ParquetWriter(tmp_path / "b-no-groups.parquet", schema):
        pass
    assert "No source has a usable row" in refused(location, str(tmp_path / "*.parquet"))
    with pq.ParquetWriter(tmp_path / "c-empty-group.parquet", schema) as writer:
        for texts in (["x"], [], ["y"]):
            writer.write_table(pa.table({"text": pa.array(texts, pa.string())}))
    (tmp_path / "d.jsonl").write_bytes(b"")
    result = run(location, str(tmp_path))
    assert [row["text"] for row in rows_of(location)] == ["x", "y"]
    assert [file["rows"] for file in result.record.details["files"]] == [0, 0, 2, 0]


# --- size -------------------------------------------------------------------------------------------------------------


def test_a_line_of_50_mb(location: Location, tmp_path: Path) -> None:
    big = "word " * 10_000_000
    path = write_lines(tmp_path / "a.jsonl", [GOOD, {"text": big}, GOOD])
    run(location, path)
    assert [row["n_chars"] for row in rows_of(location, "id", "n_chars")] == [4, 50_000_000, 4]
    assert open_dataset(location).count_rows("text LIKE 'word word %word '") == 1


def test_a_file_without_line_ends_is_refused(
    location: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 3 << 20)
    (tmp_path / "a.jsonl").write_bytes(b"x" * (5 << 20))
    assert "a.jsonl: line 1 is longer than" in refused(location, str(tmp_path / "a.jsonl"))


@pytest.mark.slow
def test_past_2_gib_of_text_batches_stay_small(tmp_path: Path) -> None:
    """120 documents of 20 MB: string offsets must not overflow, and memory must follow batch_bytes."""
    path, table = tmp_path / "a.parquet", pa.table({"text": ["x" * 20_000_000] * 2, "id": ["a", "b"]})
    with pq.ParquetWriter(
        path, table.schema, compression="zstd", use_dictionary=False, write_batch_size=1, write_statistics=False
    ) as writer:
        for _ in range(60):
            writer.write_table(table)
    (file,) = list_files(IngestConfig(sources=(str(path),)))
    layout = Layout(config=IngestConfig())
    tally = Tally(file, layout.config)
    peak = pa.total_allocated_bytes()
    characters, largest = 0, 0
    for batch in parquet.read_parquet(file, layout, tally):
        characters += int(np.sum(batch["n_chars"].to_numpy().astype(np.int64)))
        largest = max(largest, pa.total_allocated_bytes() - peak)
    assert (characters, tally.rows_in) == (2_400_000_000, 120)
    assert largest < 200_000_000


# --- sources ----------------------------------------------------------------------------------------------------------


def test_synthetic_documents_have_their_planted_duplicates(location: Location) -> None:
    result = run(location, "synthetic:2000:7")
    rows = rows_of(location)
    texts = [row["text"] for row in rows]
    kinds = Counter(synthetic.kind(row) for row in range(2000))
    assert kinds == {"original": 1700, "copy": 200, "near_copy": 100}
    assert len(set(texts)) == 1700 + len({text for n, text in enumerate(texts) if synthetic.kind(n) == "near_copy"})
    for n, text in enumerate(texts):
        original = synthetic.original_of(n, 7)
        words, of_original = text.split(), texts[original].split()
        changed = sum(a != b for a, b in zip(words, of_original, strict=True))
        assert original < n or synthetic.kind(n) == "original"
        assert changed == (len(words) + 49) // 100 if synthetic.kind(n) == "near_copy" else changed == 0
    assert {row["source"] for row in rows} == {"synthetic"}
    assert rows[5]["doc_id"] == "synthetic-7-5" and result.record.details["files"][0]["name"] == "synthetic:2000:7"


def test_synthetic_documents_are_a_function_of_row_and_seed() -> None:
    assert synthetic.text_of(18, 3) == synthetic.text_of(18, 3) == synthetic.text_of(synthetic.original_of(18, 3), 3)
    assert synthetic.text_of(0, 3) != synthetic.text_of(0, 4)
    config = IngestConfig()
    few, many = (pa.Table.from_batches(synthetic.read_synthetic(f"{rows}:3", config)) for rows in (40, 1100))
    assert few == many.slice(0, 40) and many.num_rows == 1100


def test_fingerprint_follows_content(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ROWS)
    config = IngestConfig(sources=(str(tmp_path), "bundled", "synthetic:10"))
    before = sources_fingerprint(config)
    assert before == sources_fingerprint(config) and before[1] == 3
    content = bytearray(Path(path).read_bytes())
    content[20] += 1
    stat = Path(path).stat()
    Path(path).write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert sources_fingerprint(config)[0] != before[0]
    write_lines(tmp_path / "b.jsonl", ROWS)
    assert sources_fingerprint(config)[1] == 4


def test_directories_list_documents_only(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "_deep").mkdir()
    for name in ("deep/b.jsonl", "a.parquet", "README.md", "_SUCCESS", ".hidden.jsonl", "c.JSONL.GZ", "_deep/d.jsonl"):
        (tmp_path / name).write_bytes(b"x")
    names = [file.name for file in list_files(IngestConfig(sources=(str(tmp_path), str(tmp_path / "a.parquet"))))]
    assert names == [str(tmp_path / name) for name in ("a.parquet", "c.JSONL.GZ", "deep/b.jsonl")]


def test_hugging_face_goes_through_its_fsspec_filesystem(
    location: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HfFileSystem with only its calls to the hub replaced: facts about a repository's files, and a range of one."""
    from huggingface_hub import hf_file_system

    content = Path(write_parquet(tmp_path / "000.parquet", ROWS)).read_bytes()
    folder = "datasets/HuggingFaceFW/fineweb-edu/sample/10BT"
    entry = {"name": f"{folder}/000.parquet", "size": len(content), "type": "file", "blob_id": "abc123"}
    ranges: list[int] = []

    def resolve_path(self: Any, path: str, revision: str | None = None) -> Any:
        return hf_file_system.HfFileSystemResolvedRepositoryPath(
            "dataset", "HuggingFaceFW/fineweb-edu", "main", path.split("fineweb-edu")[1].strip("/")
        )

    def info(self: Any, path: str, **_: Any) -> dict[str, Any]:
        if path.endswith(".parquet"):
            return entry
        return {"name": path, "size": 0, "type": "directory"}

    def fetch_range(self: Any, start: int, end: int) -> bytes:
        ranges.append(end - start)
        return content[start:end]

    monkeypatch.setattr(hf_file_system.HfFileSystem, "resolve_path", resolve_path)
    monkeypatch.setattr(hf_file_system.HfFileSystem, "info", info)
    monkeypatch.setattr(hf_file_system.HfFileSystem, "find", lambda self, path, **_: {entry["name"]: entry})
    monkeypatch.setattr(hf_file_system.HfFileSystemFile, "_fetch_range", fetch_range)
    uri = "hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT"
    run(location, uri)
    assert [row["text"] for row in rows_of(location)] == [row["text"] for row in ROWS]
    assert {row["source_file"] for row in rows_of(location)} == {f"{uri}/000.parquet"}
    assert ranges and run(location, uri).changed is False


def test_s3_source_and_s3_table(s3: Any, tmp_path: Path) -> None:
    import fsspec

    bucket = s3.bucket("ingest")
    fs = fsspec.filesystem("s3")
    fs.put_file(write_parquet(tmp_path / "a.parquet", ROWS), f"{bucket}/raw/a.parquet")
    remote = Location(database_uri=f"{bucket}/db")
    first = run(remote, f"{bucket}/raw/*")
    assert (first.record.version, first.record.rows, open_dataset(remote).has_stable_row_ids) == (1, 50, True)
    assert {row["source_file"] for row in rows_of(remote)} == {f"{bucket}/raw/a.parquet"}
    assert run(remote, f"{bucket}/raw/*").changed is False
    import boto3

    boto3.client("s3").put_object(  # by another client: the listing must not come from a cache
        Bucket="ingest", Key="raw/b.jsonl.gz", Body=Path(write_lines(tmp_path / "b.jsonl.gz", ROWS[:7])).read_bytes()
    )
    second = run(remote, f"{bucket}/raw")
    assert (second.record.version, second.record.rows, second.record.rows_total) == (2, 7, 57)
    assert [row["id"] for row in rows_of(remote, "id")] == list(range(57))
    assert fs.find(f"{bucket}/db/corpus.staging") == []
    boto3.client("s3").put_object(Bucket="ingest", Key="raw/b.jsonl.gz", Body=gzip.compress(b'{"text": "x"}\n'))
    with pytest.raises(InputError, match=r"raw/b.jsonl.gz changed since it was ingested in version 2"):
        run(remote, f"{bucket}/raw")
