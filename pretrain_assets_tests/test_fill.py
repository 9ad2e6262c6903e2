"""The filler's finer promises: resumable parts, failing rows, deleted rows, leases, and other writers at any moment."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import lance
import pyarrow as pa
import pytest

from pretrain_assets.config import DedupConfig, IngestConfig
from pretrain_assets.curate.dedup import dedup
from pretrain_assets.errors import BusyError, ColumnError, ConfigError
from pretrain_assets.ingest.append import ingest
from pretrain_assets.table import lease, verify
from pretrain_assets.table.filler import fill, tasks
from pretrain_assets.table.filler.spec import BatchFunction, Fill, RowColumns, Worker
from pretrain_assets.table.lease import Holder, holders
from pretrain_assets.table.lineage import StageResult
from pretrain_assets.table.schema import computed_field
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets_tests.tables import append, make_table, newest, values

TEXTS = [f"document number {i} " * (1 + i % 7) for i in range(300)]
LENGTHS = [len(text) for text in TEXTS]


@pytest.fixture
def location(tmp_path: Path) -> Location:
    return make_table(tmp_path, TEXTS)


class Lengths:
    """The lengths of texts: counts the rows it was given, and fails where it is told to."""

    def __init__(self, *, fails: Callable[[str], bool] = lambda text: False):
        self.fails, self.rows, self.made = fails, 0, 0

    def make(self, worker: Worker) -> BatchFunction:
        assert worker.device == "cpu"
        self.made += 1
        return self.compute

    def compute(self, batch: pa.RecordBatch) -> list[pa.Array]:
        texts = batch.column(0).to_pylist()
        for text in texts:
            if self.fails(text):
                raise ValueError(f"no length: {text[:10]}")
        self.rows += len(texts)
        return [pa.array([len(text) for text in texts], pa.int32())]


def run(
    location: Location,
    lengths: Lengths,
    *,
    on_error: Literal["raise", "null"] = "raise",
    batch_rows: int | None = 20,
    version: str = "1",
    column: str = "length",
) -> StageResult:
    making: dict[str, Any] = {"stage": "x", "code_version": version, "parameters": {}}
    group = RowColumns(
        outputs=pa.schema([computed_field(column, pa.int32(), **making)]),
        inputs=("text",),
        make=lengths.make,
        batch_rows=batch_rows,
    )
    spec = Fill(
        stage=column, groups=(group,), code_version=version, parameters={}, batch_bytes=1 << 20, on_error=on_error
    )
    return fill.fill(location, spec, input_pin=newest(location))


def staged(location: Location) -> list[str]:
    return sorted(path.name for path in (Path(location.uri) / "data").glob("fill-*"))


@contextmanager
def cut_small(monkeypatch: pytest.MonkeyPatch, *, range_bytes: int = 2_000, seconds: float = 20.0) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(tasks, "RANGE_BYTES", range_bytes)
        patch.setattr(tasks, "PART_SECONDS", seconds)
        yield


# --- ranges and parts --------------------------------------------------------------------------------------------


def test_a_large_fragment_is_computed_in_ranges_and_joined(location: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = Lengths()
    with cut_small(monkeypatch):
        run(location, lengths, batch_rows=None)
    assert values(location, "length") == LENGTHS
    (fragment,) = open_dataset(location).get_fragments()
    assert fragment.metadata.files[-1].path in staged(location)
    assert (len(staged(location)), lengths.rows, lengths.made) == (1, 300, 1), "the parts are gone, one function made"


def test_parts_of_a_column_that_takes_no_room_are_joined(location: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    with cut_small(monkeypatch):  # a million rows of NULL take as many bytes: more rows fit than Lance can count
        dedup(location, DedupConfig(batch_bytes=1 << 44), input_pin=newest(location))
    assert values(location, "dup_of") == [None] * 300


@pytest.mark.parametrize("deleted", [None, "id % 3 = 0", "id < 150", "id >= 290"])
def test_work_is_kept_between_calls(location: Location, monkeypatch: pytest.MonkeyPatch, deleted: str | None) -> None:
    if deleted:
        open_dataset(location).delete(deleted)
    expected = [len(text) for text in values(location, "text")]
    stopped = Lengths()
    stopped.fails = lambda text: stopped.rows >= 80
    with cut_small(monkeypatch, range_bytes=1 << 20, seconds=0.0), pytest.raises(ColumnError):
        run(location, stopped)
    again = Lengths()
    run(location, again)
    assert (stopped.rows, again.rows) == (80, len(expected) - 80), "every part was kept"
    assert (values(location, "length"), len(staged(location))) == (expected, 1)


def test_a_stopped_fill_keeps_what_it_has_of_a_part(location: Location) -> None:
    stopped = Lengths()
    stopped.fails = lambda text: stopped.rows >= 80
    with pytest.raises(ColumnError):
        run(location, stopped)
    again = Lengths()
    run(location, again)
    assert (again.rows, values(location, "length")) == (220, LENGTHS)


@pytest.mark.parametrize(("first", "second"), [(1 << 20, 2_000), (2_000, 1 << 20)], ids=["finer", "coarser"])
def test_parts_of_other_cuts_are_taken_as_they_are(
    location: Location, monkeypatch: pytest.MonkeyPatch, first: int, second: int
) -> None:
    """As after a kill, when the fill goes on with another number of workers."""
    stopped, again = Lengths(), Lengths()
    stopped.fails = lambda text: stopped.rows >= 80
    with cut_small(monkeypatch, range_bytes=first, seconds=0.0), pytest.raises(ColumnError):
        run(location, stopped)
    with cut_small(monkeypatch, range_bytes=second):
        run(location, again)
    assert (again.rows, values(location, "length"), len(staged(location))) == (220, LENGTHS, 1)


@pytest.mark.parametrize("undo", ["restore", "drop"])
def test_a_committed_file_is_never_written_again(
    location: Location, monkeypatch: pytest.MonkeyPatch, undo: str
) -> None:
    open_dataset(location).delete("id = 7")
    first = run(location, Lengths())
    if undo == "restore":
        open_dataset(location, 1).restore()
    else:
        open_dataset(location).drop_columns(["length"])
    with cut_small(monkeypatch):
        run(location, Lengths(), batch_rows=None)
    assert values(location, "length", first.record.tag) == [n for i, n in enumerate(LENGTHS) if i != 7]
    open_dataset(location, first.record.tag).validate()


def test_work_staged_before_a_delete_is_used_after_it(location: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, stage = Lengths(), fill.stage

    def then_delete(*arguments: Any) -> None:
        stage(*arguments)
        if len(arguments[0].dataset.versions()) == 1:
            open_dataset(location).delete("id = 7")

    monkeypatch.setattr(fill, "stage", then_delete)
    result = run(location, lengths)
    assert (lengths.rows, result.record.rows, result.pin.version) == (300, 299, 3)
    assert values(location, "length") == [n for i, n in enumerate(LENGTHS) if i != 7]


def test_work_staged_while_a_row_was_deleted_is_done_again_once_it_is_back(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_dataset(location).delete("id = 7")
    with monkeypatch.context() as patch:
        patch.setattr(fill, "_commit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(location, Lengths())
    open_dataset(location, 1).restore()
    again = Lengths()
    run(location, again)
    assert (again.rows, values(location, "length")) == (300, LENGTHS)


# --- rows that fail ----------------------------------------------------------------------------------------------


def fails_at(*numbers: int) -> Lengths:
    return Lengths(fails=lambda text: int(text.split()[2]) in numbers)


def test_a_failing_row_is_named(location: Location) -> None:
    with pytest.raises(
        ColumnError, match=r"length cannot be computed for id 123, doc_id 'doc-123', source_file 'test.json"
    ):
        run(location, fails_at(123, 200))
    assert open_dataset(location).version == 1


def test_failing_rows_become_null_with_reasons_and_a_place_in_the_ledger(location: Location) -> None:
    result = run(location, fails_at(5, 123), on_error="null")
    assert result.record.ledger == {"in": 300, "written": 298, "failed:ValueError": 2}
    assert verify.ledger_closes(result.record).passed
    assert values(location, "length") == [None if i in (5, 123) else n for i, n in enumerate(LENGTHS)]
    found = open_dataset(location).to_table(columns=["id", "length_error"], filter="length_error IS NOT NULL")
    assert found.to_pylist() == [
        {"id": 5, "length_error": "ValueError: no length: document n"},
        {"id": 123, "length_error": "ValueError: no length: document n"},
    ]
    assert [row["id"] for row in result.record.details["failed"]] == [5, 123]
    share = verify.failed_share(result.record)
    assert (share.passed, share.description) == (False, "2 of 300 rows failed: 0.67% (limit 0.10%)")
    allowed = replace(result.record, details={**result.record.details, "max_failed_share": 0.01})
    assert verify.failed_share(allowed).passed
    assert verify.no_nulls(open_dataset(location), result.record).passed


def test_failed_rows_are_not_tried_again_until_asked(location: Location) -> None:
    first = run(location, fails_at(5), on_error="null")
    again = fails_at(5)
    assert (run(location, again, on_error="null").changed, again.rows) == (False, 0)
    append(location, ["document number 300"])
    more = run(location, fails_at(5), on_error="null")
    assert (more.record.rows, more.record.ledger) == (1, {"in": 1, "written": 1})
    with pytest.raises(ColumnError, match="id 5,"):
        run(location, fails_at(5))
    mended = run(location, Lengths())
    assert (mended.record.rows, values(location, "length")) == (300, [*LENGTHS, 19])
    assert set(values(location, "length_error")) == {None}
    assert values(location, "length", first.record.version)[5] is None


def test_counting_failures_can_begin_later(location: Location) -> None:
    run(location, Lengths())
    append(location, ["document number 300", "document number 301"])
    result = run(location, fails_at(301), on_error="null")
    assert result.record.ledger == {"in": 2, "written": 1, "failed:ValueError": 1}
    assert values(location, "length") == [*LENGTHS, 19, None]
    assert (run(location, fails_at(301), on_error="null").changed, len(staged(location))) == (False, 2)


@pytest.mark.parametrize("answer", [None, [[1, 2]], iter(())])
def test_a_wrong_kind_of_answer_is_no_fault_of_a_row(location: Location, answer: Any) -> None:
    lengths = Lengths()
    lengths.compute = lambda batch: answer  # type: ignore[method-assign]
    with pytest.raises(ColumnError, match="must return a list of Arrow arrays, not"):
        run(location, lengths, on_error="null")


def test_the_column_of_reasons_may_not_be_another(location: Location) -> None:
    open_dataset(location).add_columns(pa.schema([pa.field("length_error", pa.int32())]))
    with pytest.raises(ConfigError, match=r"wants length_error for the reasons.*another column of that name \(int32\)"):
        run(location, Lengths())


def test_an_error_of_the_machine_is_no_fault_of_a_row(location: Location) -> None:
    def full(text: str) -> bool:
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        run(location, Lengths(fails=full), on_error="null")


# --- deleted rows and duplicates ---------------------------------------------------------------------------------


def test_when_the_first_of_a_class_is_deleted_the_next_takes_its_place(tmp_path: Path) -> None:
    location = make_table(tmp_path, ["cat", "dog", "cat"])
    append(location, ["cat", "new"])
    first = dedup(location, DedupConfig(), input_pin=newest(location))
    assert values(location, "is_dup") == [False, False, True, True, False]
    open_dataset(location).delete("id = 0")
    assert not verify.one_kept_per_class(open_dataset(location)).passed
    result = dedup(location, DedupConfig(), input_pin=first.pin)
    assert values(location, "is_dup") == [False, False, True, False]
    assert values(location, "dup_of") == [None, None, 2, None]
    assert (result.changed, result.record.ledger) == (True, {"in": 4, "unique": 3, "duplicate": 1})
    assert verify.one_kept_per_class(open_dataset(location)).passed
    open_dataset(location).delete("id = 4")
    assert not dedup(location, DedupConfig(), input_pin=result.pin).changed, "no class lost its first row"


# --- other writers -----------------------------------------------------------------------------------------------


def other_writers(location: Location, round_: int) -> dict[str, Callable[[], object]]:
    return {
        "append": lambda: append(location, [f"document number {1000 + round_}"]),
        "delete": lambda: open_dataset(location).delete(f"id = {round_}"),
        "other column": lambda: run(location, Lengths(), column="other"),
        "index": lambda: open_dataset(location).create_scalar_index("text", "INVERTED", replace=True),
    }


@pytest.mark.slow
def test_twenty_rounds_with_every_other_writer_in_the_middle(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round fills new rows, or makes the column anew, while the four others commit one after the other."""
    compute = Lengths.compute
    running: list[threading.Thread] = []
    failures: list[BaseException] = []

    def interfere(round_: int) -> None:
        try:
            for write in other_writers(location, round_).values():
                write()
        except BaseException as error:
            failures.append(error)
            raise

    for round_ in range(20):
        append(location, [f"document number {400 + round_}"])
        lengths = Lengths()

        def slow(batch: pa.RecordBatch, lengths: Lengths = lengths, round_: int = round_) -> list[pa.Array]:
            if not running:
                running.append(threading.Thread(target=interfere, args=(round_,)))
                running[0].start()
                running[0].join()
            return compute(lengths, batch)

        monkeypatch.setattr(lengths, "compute", slow)
        result = run(location, lengths, version=str(round_ // 4))
        (thread,) = running
        running.clear()
        assert (failures, thread.is_alive()) == ([], False)
        assert verify.ledger_closes(result.record).passed
        dataset = open_dataset(location)
        assert result.record.rows_total == dataset.count_rows() == 300 + 2 * round_ + 2 - round_ - 1
        assert dataset.count_rows("length IS NULL") == 1, "the row appended meanwhile is left to the next run"
        rows = dataset.to_table(columns=["text", "length"], filter="length IS NOT NULL").to_pylist()
        assert all(row["length"] == len(row["text"]) for row in rows)
    assert run(location, Lengths(), version="4").record.ledger == {"in": 1, "written": 1}


def test_two_that_fill_the_same_column(location: Location) -> None:
    started, second_tried = threading.Event(), threading.Event()

    def wait(text: str) -> bool:
        started.set()
        assert second_tried.wait(30)
        return False

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run, location, Lengths(fails=wait))
        assert started.wait(30)
        with pytest.raises(BusyError, match=r"is in use: fill length \(process \d+ on .* Wait until it has ended"):
            run(location, Lengths())
        second_tried.set()
        assert first.result().changed
    late = Lengths()
    assert (run(location, late).changed, late.rows) == (False, 0)


# --- leases ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    uri = str(tmp_path) if request.param == "local" else request.getfixturevalue("s3").bucket("lease")
    return Location(database_uri=uri)


def test_maintenance_goes_with_nobody_and_others_only_mind_their_own(place: Location) -> None:
    with lease.hold(place, "fill a"), lease.hold(place, "ingest"):
        assert {holder.name for holder in holders(place)} == {"fill a", "ingest"}
        for name in ("fill a", lease.MAINTENANCE):
            with pytest.raises(BusyError, match=r"is in use: .*fill a"), lease.hold(place, name):
                pass
    assert holders(place) == []
    with (
        lease.hold(place, lease.MAINTENANCE),
        pytest.raises(BusyError, match="maintenance"),
        lease.hold(place, "ingest"),
    ):
        pass


def test_a_lease_ends_with_its_process(place: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    _, release = lease._write(f"{place.staging_uri}/leases", Holder(name="fill a", host="x", pid=1, since=""))
    assert [holder.name for holder in holders(place)] == ["fill a"]
    if "://" in place.database_uri:
        monkeypatch.setattr(lease, "DEAD_SECONDS", -1.0)  # no beat for too long
    else:
        release()
    assert holders(place) == []


def test_only_one_of_many_at_once(place: Location) -> None:
    inside, most, lock = 0, 0, threading.Lock()

    def work() -> bool:
        nonlocal inside, most
        try:
            with lease.hold(place, "fill a"):
                with lock:
                    inside += 1
                    most = max(most, inside)
                with lock:
                    inside -= 1
                return True
        except BusyError:
            return False

    with ThreadPoolExecutor(4) as pool:
        got = [future.result() for future in [pool.submit(work) for _ in range(8)]]
    assert (most, any(got)) == (1, True)


def test_facts_that_the_filler_leans_on(location: Location) -> None:
    """A range of live rows is read by offset and limit, deleted ones counted out."""
    open_dataset(location).delete("id % 10 = 3")
    (fragment,) = open_dataset(location).get_fragments()
    batch = fragment.scanner(columns=["id"], with_row_address=True, offset=9, limit=2).to_table()
    assert batch["id"].to_pylist() == [10, 11]
    assert lance.dataset(location.uri).get_fragments()[0].physical_rows == 300


def test_the_column_of_the_readme(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    code = readme.split("```python\n# my_columns.py\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    location = ingested(tmp_path, ["one line", "two\nlines", "\n\n"])
    result = names["fill_lines"](location)
    assert (values(location, "n_lines"), result.record.tag) == ([1, 2, 3], "lines-v2")
    assert not names["fill_lines"](location).changed


def ingested(tmp_path: Path, texts: list[str]) -> Location:
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    location = Location(database_uri=str(tmp_path / "db"))
    ingest(location, IngestConfig(sources=(str(tmp_path / "documents.jsonl"),)))
    return location
