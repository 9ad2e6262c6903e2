"""What the pinned engine really does (lancedb 0.40.0, pylance 14.0.2): every fact that the code relies on, every trap.

A red test here after an upgrade says which assumption of `table/`, `ingest/`, `loader/` or `forensics/` no longer
holds. Nearly all tests speak to the engine alone. What this project's own code does about a trap is tested elsewhere:

| trap | answered in |
|---|---|
| a column file is committed unchecked | test_table: a_wrong_answer_of_the_batch_function..., a_torn_column_file..., |
| | a_commit_that_cannot_be_read_back_is_noticed |
| compaction before a fill stores NULLs | test_table: compaction_that_stored_nulls_is_filled_again |
| data files list leaf fields; ids after a drop | test_table: a_column_dropped_before_leaves_field_ids_in_place |
| races of column writers | test_table: a_concurrent_append..., a_concurrent_delete, a_concurrent_compaction..., |
| | losing_every_race_keeps_the_work |
| two appends both commit | test_ingest: two_ingests_at_once_cannot_give_out_the_same_ids |
| a killed job's staged files | test_table: kill_9_in_the_middle_goes_on_from_the_finished_fragments |
| a version without its tag | test_table: a_kill_between_commit_and_tag_is_healed |
| transactions disappear with their version | test_table: a_fill_makes_one_version_tagged_with_its_record |
| an index delta for new rows only | test_forensics: index_is_one_version_and_then_a_delta |
| phrases need positions | test_forensics: a_phrase_without_positions_says_how_to_get_them |
| Lance's permutation, which the loader's equals | test_loader: plan_order_is_the_permutation_of_the_real_table |
| row ids that are gone | here: the_loader_counts_what_a_take_dropped |
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import lancedb
import numpy as np
import pyarrow as pa
import pytest
from lance.commit import CommitConflictError
from lance.file import LanceFileReader, LanceFileWriter
from lance.fragment import DataFile, write_fragments
from lancedb.permutation import permutation_builder
from lancedb.query import PhraseQuery

from pretrain_assets.errors import TableError
from pretrain_assets.loader.read import take_rows
from pretrain_assets.table.filler import operations
from pretrain_assets.table.filler.columnfile import StagedFile, leaf_ids
from pretrain_assets.table.storage import storage_options

INTEGERS = pa.list_(pa.int32())


def rows(ids: list[int], text: str = "river") -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), "text": [text] * len(ids)})


def make(folder: Path, data: pa.Table | None = None, *, stable: bool = True, **options: Any) -> lance.LanceDataset:
    """Version 1 of table `facts`: ids 0 to 3 unless other data is given."""
    data = rows([0, 1, 2, 3]) if data is None else data
    return lance.write_dataset(data, str(folder / "facts.lance"), enable_stable_row_ids=stable, **options)


def append(dataset: lance.LanceDataset, data: pa.Table | None = None, **options: Any) -> lance.LanceDataset:
    """The next version with one more fragment: ids 8 and 9 unless other data is given."""
    return lance.write_dataset(rows([8, 9]) if data is None else data, dataset.uri, mode="append", **options)


def declare(dataset: lance.LanceDataset, *names: str, kind: pa.DataType | None = None) -> lance.LanceDataset:
    dataset.add_columns(pa.schema([pa.field(name, kind or pa.int32()) for name in names]))
    return newest(dataset)


def newest(dataset: lance.LanceDataset, version: int | str | None = None) -> lance.LanceDataset:
    return lance.dataset(dataset.uri, version=version)


def in_lancedb(dataset: lance.LanceDataset, version: int | None = None) -> lancedb.table.Table:
    return lancedb.connect(Path(dataset.uri).parent).open_table("facts", version=version)


def compact(dataset: lance.LanceDataset, rows_per_fragment: int = 100) -> lance.LanceDataset:
    newest(dataset).optimize.compact_files(target_rows_per_fragment=rows_per_fragment)
    return newest(dataset)


def clean_up(dataset: lance.LanceDataset, **options: Any) -> lance.LanceDataset:
    """Remove every version but the newest and the tagged ones."""
    newest(dataset).cleanup_old_versions(timedelta(0), error_if_tagged_old_versions=False, **options)
    return newest(dataset)


def ids(dataset: lance.LanceDataset | lancedb.table.Table) -> list[int]:
    return dataset.to_table(columns=["id"])["id"].to_pylist()


def data_files(dataset: lance.LanceDataset) -> list[list[tuple[str, list[int]]]]:
    """Per fragment: name and field ids of each data file."""
    return [[(file.path, file.fields) for file in f.metadata.files] for f in newest(dataset).get_fragments()]


def stage(dataset: lance.LanceDataset, column: str, array: pa.Array) -> StagedFile:
    """A column file in the table's data folder that no version refers to yet."""
    name = f"{uuid.uuid4().hex}.lance"
    path = Path(dataset.uri) / "data" / name
    schema = pa.schema([pa.field(column, array.type)])
    with LanceFileWriter(str(path), schema, version="2.2") as writer:
        writer.write_batch(pa.record_batch([array], schema=schema))
    return StagedFile(name=name, num_rows=len(array), num_bytes=path.stat().st_size)


def replacement(dataset: lance.LanceDataset, column: str, array: pa.Array) -> Any:
    """The `DataReplacement` that gives fragment 0 these values."""
    staged = {0: stage(dataset, column, array)}
    return operations.replacement_operation(dataset, pa.schema([(column, array.type)]), staged)


def merge(dataset: lance.LanceDataset, column: str, array: pa.Array) -> Any:
    """The `Merge` that gives fragment 0 these values."""
    staged = {0: stage(dataset, column, array)}
    return operations.merge_operation(dataset, [pa.schema([(column, array.type)])], [staged], remade=[False])


def commit(dataset: lance.LanceDataset, operation: Any) -> lance.LanceDataset:
    transaction = lance.Transaction(read_version=dataset.version, operation=operation)
    return lance.LanceDataset.commit(dataset.uri, transaction)


def integers(*values: int) -> pa.Array:
    return pa.array(values, pa.int32())


@pytest.fixture
def dataset(tmp_path: Path) -> lance.LanceDataset:
    return make(tmp_path)


# --- create, append, read ----------------------------------------------------------------------------------------


def test_the_engines_are_the_ones_measured() -> None:
    assert (lancedb.__version__, lance.__version__) == ("0.40.0", "14.0.2")


@pytest.mark.parametrize("asked", [True, False])
def test_lancedb_makes_file_version_2_2_and_stable_row_ids_only_if_asked(tmp_path: Path, asked: bool) -> None:
    options = {"new_table_enable_stable_row_ids": "true"} if asked else None
    lancedb.connect(tmp_path).create_table("facts", rows([1]), storage_options=options)
    made = lance.dataset(str(tmp_path / "facts.lance"))
    assert (made.has_stable_row_ids, made.data_storage_version) == (asked, "2.2")


def test_stable_row_ids_survive_delete_update_and_compaction(tmp_path: Path) -> None:
    dataset = make(tmp_path, max_rows_per_file=2)
    row_ids = dataset.to_table(with_row_id=True)["_rowid"].to_pylist()
    dataset.delete("id = 1")
    dataset.update({"text": "'sea'"}, where="id = 2")
    found = compact(dataset)._take_rows(row_ids[::-1])
    assert found.to_pydict() == {"id": [3, 2, 0], "text": ["river", "sea", "river"]}


def test_other_row_ids_return_nothing_once_rows_have_moved(tmp_path: Path) -> None:
    dataset = make(tmp_path, stable=False, max_rows_per_file=2)
    row_ids = dataset.to_table(with_row_id=True)["_rowid"].to_pylist()
    dataset.update({"text": "'sea'"}, where="id = 2")
    assert newest(dataset)._take_rows(row_ids, columns=["id"])["id"].to_pylist() == [0, 1, 3]
    dataset = compact(dataset)
    assert in_lancedb(dataset).take_row_ids(row_ids).to_arrow().num_rows == 0
    with pytest.raises(OSError, match="rowaddr 0 belongs to non-existent fragment"):
        dataset._take_rows(row_ids)


def test_tokens_take_half_their_raw_size_on_disk(tmp_path: Path) -> None:
    tokens = pa.array(np.random.default_rng(0).integers(0, 50_257, 20_000, dtype=np.int32))
    lists = pa.ListArray.from_arrays(integers(*range(0, 20_001, 500)), tokens)
    (file,) = make(tmp_path, pa.table({"input_ids": lists})).get_fragments()[0].data_files()
    assert 0.5 < file.file_size_bytes / tokens.nbytes < 0.56


def test_columns_left_out_of_an_append_read_as_null_and_take_no_place(dataset: lance.LanceDataset) -> None:
    in_lancedb(declare(dataset, "v")).add(rows([8]).select(["id"]))
    assert newest(dataset).to_table().to_pylist()[-1] == {"id": 8, "text": None, "v": None}
    assert [file[1] for file in data_files(dataset)[-1]] == [[0]]


def test_rows_since_a_version(dataset: lance.LanceDataset) -> None:
    appended = append(dataset)
    appended.update({"text": "'sea'"}, where="id = 0")
    later = compact(dataset)
    assert sorted(ids(later)) == [0, 1, 2, 3, 8, 9]
    assert later.to_table(columns=["id"], filter="_row_created_at_version > 1")["id"].to_pylist() == [8, 9]


def test_rows_since_a_version_are_unknown_without_stable_row_ids(tmp_path: Path) -> None:
    assert append(make(tmp_path, stable=False)).count_rows("_row_created_at_version > 1") == 0


def test_a_pinned_handle_reads_its_version_and_refuses_to_write(dataset: lance.LanceDataset) -> None:
    append(dataset).tags.create("both", 2)
    append(dataset)
    pinned = in_lancedb(dataset, version=1)
    assert pinned.to_arrow()["id"].to_pylist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="cannot be modified when a specific version is checked out"):
        pinned.add(rows([5]))
    pinned.checkout("both")
    assert (pinned.version, pinned.to_arrow()["id"].to_pylist()) == (2, [0, 1, 2, 3, 8, 9])


def test_a_pinned_handle_dies_with_its_files_unless_its_version_is_tagged(dataset: lance.LanceDataset) -> None:
    append(dataset).tags.create("keep", 2)
    tagged, handles = in_lancedb(dataset, version=2), [in_lancedb(dataset, version=1), in_lancedb(dataset, version=2)]
    compact(dataset)
    clean_up(dataset)
    assert tagged.to_arrow().num_rows == 6
    with pytest.raises(ValueError, match="not found"):
        newest(dataset, version=1)
    dataset.tags.delete("keep")
    clean_up(dataset)
    for handle in handles:
        with pytest.raises(RuntimeError, match=r"Not found.*/data/"):
            handle.to_arrow()


def test_takes_of_pylance_keep_order_and_duplicates_and_drop_what_is_gone(dataset: lance.LanceDataset) -> None:
    assert dataset.take([3, 1, 3], columns=["id"])["id"].to_pylist() == [3, 1, 3]
    dataset.delete("id = 2")
    assert newest(dataset)._take_rows([3, 2, 1, 99, 3], columns=["id"])["id"].to_pylist() == [3, 1, 3]


def test_takes_of_lancedb_sort(dataset: lance.LanceDataset) -> None:
    table = in_lancedb(dataset)
    assert table.take_row_ids([3, 1, 3, 99]).to_arrow()["id"].to_pylist() == [1, 3]
    assert table.take_offsets([3, 1, 3, 99]).to_arrow()["id"].to_pylist() == [1, 3, 3]


def test_the_loader_counts_what_a_take_dropped(dataset: lance.LanceDataset) -> None:
    assert take_rows(dataset, np.array([3, 1], np.uint64), ["id"])["id"].to_pylist() == [3, 1]
    with pytest.raises(TableError, match="lacks 1 of 2 planned rows"):
        take_rows(dataset, np.array([3, 99], np.uint64), ["id"])


def test_sql_aggregates(dataset: lance.LanceDataset) -> None:
    query = append(dataset).sql("SELECT sum(id) AS total, count(*) AS rows FROM dataset WHERE id > 2")
    assert query.build().to_batch_records()[0].to_pylist() == [{"total": 20, "rows": 3}]


def test_lancedb_scans_in_batches_of_1024_rows_unless_told(tmp_path: Path) -> None:
    query = in_lancedb(make(tmp_path, rows(list(range(2100))))).search().where("id >= 0")
    assert [len(batch) for batch in query.to_batches()] == [1024, 1024, 52]
    assert [len(batch) for batch in query.to_batches(batch_size=262_144)] == [2100]


def test_a_ranked_search_of_lancedb_stops_at_10_rows_and_a_plain_one_does_not(tmp_path: Path) -> None:
    vectors = pa.array([[0.0, 1.0]] * 15, pa.list_(pa.float32(), 2))
    dataset = make(tmp_path, rows(list(range(15))).append_column("vector", vectors))
    dataset.create_scalar_index("text", "INVERTED")
    table = in_lancedb(dataset)
    queries = [table.search("river", query_type="fts"), table.search([0.0, 1.0]), table.search()]
    assert [query.to_arrow().num_rows for query in queries] == [10, 10, 15]
    assert newest(dataset).scanner(full_text_query="river").to_table().num_rows == 15


def test_table_names_stops_at_10_names_and_list_tables_does_not(tmp_path: Path) -> None:
    connection = lancedb.connect(tmp_path)
    for i in range(11):
        connection.create_table(f"table{i}", rows([i]))
    with pytest.warns(DeprecationWarning, match="use list_tables"):
        assert len(connection.table_names()) == 10
    assert len(connection.list_tables().tables) == 11


# --- column files ------------------------------------------------------------------------------------------------


def test_declaring_a_column_writes_no_data(dataset: lance.LanceDataset) -> None:
    before = data_files(dataset)
    declared = declare(dataset, "v")
    assert (declared.version, data_files(declared), declared.count_rows("v IS NULL")) == (2, before, 4)


def test_a_replacement_adds_one_file_and_leaves_the_others(dataset: lance.LanceDataset) -> None:
    ((text,),) = data_files(dataset)
    declared = declare(dataset, "v")
    filled = commit(declared, replacement(declared, "v", integers(5, 6, 7, 8)))
    assert filled.to_table()["v"].to_pylist() == [5, 6, 7, 8]
    ((kept, added),) = data_files(filled)
    assert (kept, added[1]) == (text, [2])


def test_a_file_with_a_wrong_row_count_commits_and_breaks_every_later_read(dataset: lance.LanceDataset) -> None:
    declared = declare(dataset, "v")
    broken = commit(declared, replacement(declared, "v", integers(1, 2)))
    assert (broken.version, broken.count_rows()) == (3, 4)
    with pytest.raises(ValueError, match="from columns with 2 rows"):
        broken.to_table()


def test_a_file_of_a_wrong_type_commits_and_reads_as_other_values(dataset: lance.LanceDataset) -> None:
    declared = declare(dataset, "v")
    broken = commit(declared, replacement(declared, "v", pa.array([1, 2, 3, 4], pa.int64())))
    assert broken.to_table()["v"].type == pa.int32()
    assert broken.to_table()["v"].to_pylist() != [1, 2, 3, 4]


def test_a_file_that_is_not_there_is_found_at_the_first_read(dataset: lance.LanceDataset) -> None:
    declared = declare(dataset, "v")
    operation = replacement(declared, "v", integers(1, 2, 3, 4))
    (Path(dataset.uri) / "data" / operation.replacements[0].new_file.path).unlink()
    broken = commit(declared, operation)
    with pytest.raises(ValueError, match=r"Not found: .*/data/"):
        broken.to_table()


@pytest.mark.parametrize("rewrite", ["compaction", "update"])
def test_a_rewrite_before_the_fill_stores_nulls(dataset: lance.LanceDataset, rewrite: str) -> None:
    declared = declare(append(dataset), "v")
    if rewrite == "compaction":
        compact(declared)
    else:
        declared.update({"text": "'sea'"}, where="id = 0")
    assert [file[1] for file in data_files(declared)[-1]] == [[0, 1, 2]]
    (*_, last) = newest(declared).get_fragments()
    assert last.count_rows("v IS NULL") == last.count_rows() == {"compaction": 6, "update": 1}[rewrite]


def test_data_files_list_leaf_fields_only(dataset: lance.LanceDataset) -> None:
    declared = declare(dataset, "v", kind=INTEGERS)
    (field,) = [f for f in declared.lance_schema.fields() if f.name() == "v"]
    assert (field.id(), leaf_ids(declared.lance_schema, ["v"])) == (2, [3])
    append(declared, rows([8]).append_column("v", pa.array([[7]], INTEGERS)))
    assert [file[1] for file in data_files(declared)[-1]] == [[0, 1, 3]]


def test_a_file_that_lists_the_list_itself_is_refused(dataset: lance.LanceDataset) -> None:
    declared = declare(dataset, "v", kind=INTEGERS)
    name = stage(declared, "v", pa.array([[1], [2], [3], [4]], INTEGERS)).name
    group = lance.LanceOperation.DataReplacementGroup(0, DataFile(name, [2, 3], [0, 1], 2, 2))
    with pytest.raises(OSError, match="Non-leaf field 'v'"):
        commit(declared, lance.LanceOperation.DataReplacement([group]))
    assert newest(dataset).version == declared.version


def test_a_field_id_is_used_again_once_no_file_lists_it(dataset: lance.LanceDataset) -> None:
    declared = declare(dataset, "v")
    filled = commit(declared, replacement(declared, "v", integers(1, 2, 3, 4)))
    filled.drop_columns(["v"])
    assert newest(dataset).max_field_id == 1
    again = declare(newest(dataset), "w")
    assert (again.max_field_id, again.to_table()["w"].to_pylist()) == (2, [None] * 4)


def test_the_reader_panics_on_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty.lance").touch()
    with pytest.raises(BaseException, match="`None` value") as caught:
        LanceFileReader(str(tmp_path / "empty.lance"))
    assert not isinstance(caught.value, Exception)


# --- races -------------------------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[Callable[[lance.LanceDataset], object], str, str, str]] = {
    "append": (append, "passes", "retry", "retry"),
    "delete": (lambda d: d.delete("id = 1"), "passes", "retry", "retry"),
    "index build": (lambda d: d.create_scalar_index("id", "BTREE"), "passes", "passes", "passes"),
    "other column filled": (lambda d: commit(d, replacement(d, "w", integers(5, 6, 7, 8))), "passes", "retry", "retry"),
    "other column dropped": (lambda d: d.drop_columns(["w"]), "passes", "never", "never"),
    "other column declared": (lambda d: declare(d, "x"), "retry", "retry", "retry"),
    "same column filled": (lambda d: commit(d, replacement(d, "v", integers(5, 6, 7, 8))), "retry", "retry", "retry"),
    "update": (lambda d: d.update({"text": "'sea'"}, where="id = 1"), "retry", "retry", "retry"),
    "compaction": (compact, "retry", "retry", "retry"),
}
"""What another writer does meanwhile; then what becomes of a DataReplacement, a Merge, and an add_columns(function)."""


def add_computed(dataset: lance.LanceDataset, meanwhile: Callable[[], object]) -> lance.LanceDataset:
    """Add a column by a function; the other writer commits while it computes."""
    waiting = [meanwhile]

    def function(batch: pa.RecordBatch) -> pa.RecordBatch:
        if waiting:
            waiting.pop()()
        return pa.record_batch([pa.array(batch["id"].to_numpy() + 1)], names=["computed"])

    dataset.add_columns(function, read_columns=["id"])
    return newest(dataset)


def commit_late(make_operation: Callable[..., Any]) -> Callable[..., lance.LanceDataset]:
    """A writer of column `v`; the other writer commits just before it."""

    def write(dataset: lance.LanceDataset, meanwhile: Callable[[], object]) -> lance.LanceDataset:
        operation = make_operation(dataset, "v", integers(1, 2, 3, 4))
        meanwhile()
        return commit(dataset, operation)

    return write


WRITERS = {"DataReplacement": commit_late(replacement), "Merge": commit_late(merge), "add_columns": add_computed}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("other", OTHERS)
def test_which_writers_pass_each_other(dataset: lance.LanceDataset, writer: str, other: str) -> None:
    action, *outcomes = OTHERS[other]
    outcome = dict(zip(WRITERS, outcomes, strict=True))[writer]
    start = declare(append(dataset), "v", "w")
    column = "computed" if writer == "add_columns" else "v"

    def write() -> lance.LanceDataset:
        return WRITERS[writer](start, lambda: action(newest(start)))

    if outcome == "passes":
        found = write().to_table(columns=["id", column], filter="id < 4")
        kept = [0, 2, 3] if other == "delete" else [0, 1, 2, 3]
        assert found.to_pydict() == {"id": kept, column: [i + 1 for i in kept]}
    else:
        with pytest.raises(CommitConflictError) as caught:
            write()
        assert caught.value.retryable == (outcome == "retry")
        assert column == "v" or column not in newest(start).schema.names


def test_two_appends_from_the_same_version_both_commit(dataset: lance.LanceDataset) -> None:
    both = [write_fragments(rows([i]), dataset.uri, mode="append") for i in (8, 9)]
    versions = [commit(dataset, lance.LanceOperation.Append(fragments)).version for fragments in both]
    assert (versions, ids(newest(dataset))) == ([2, 3], [0, 1, 2, 3, 8, 9])


# --- maintenance -------------------------------------------------------------------------------------------------


def test_optimize_of_lancedb_rewrites_the_whole_table(dataset: lance.LanceDataset) -> None:
    before = data_files(append(dataset))
    in_lancedb(dataset).optimize()
    (after,) = data_files(dataset)
    assert len(before) == 2 and after[0] not in [*before[0], *before[1]]


def test_compaction_with_a_target_leaves_full_fragments_alone(dataset: lance.LanceDataset) -> None:
    before = data_files(append(append(dataset)))
    after = data_files(compact(dataset, rows_per_fragment=4))
    assert (len(before), len(after), after[0]) == (3, 2, before[0])


def test_cleaning_up_behind_a_tag_must_be_told_to_pass_it(dataset: lance.LanceDataset) -> None:
    dataset.tags.create("keep", 1)
    append(append(dataset))
    with pytest.warns(UserWarning, match="cleanup_older_than"), pytest.raises(RuntimeError, match="1 tagged version"):
        in_lancedb(dataset).optimize(cleanup_older_than=timedelta(microseconds=1))
    with pytest.raises(OSError, match="1 tagged version"):
        newest(dataset).cleanup_old_versions(timedelta(0))
    latest = newest(dataset).version
    assert [entry["version"] for entry in clean_up(dataset).versions()] == [1, latest]
    assert newest(dataset, version="keep").count_rows() == 4


def test_staged_files_live_7_days_unless_unverified_files_are_deleted(dataset: lance.LanceDataset) -> None:
    declared = declare(dataset, "v")
    running, orphan = (Path(dataset.uri, "data", stage(declared, "v", integers(1, 2, 3, 4)).name) for _ in range(2))
    for path, days in ((running, 6), (orphan, 8)):
        os.utime(path, (time.time() - days * 86_400,) * 2)
    clean_up(dataset)
    assert (running.exists(), orphan.exists()) == (True, False)
    clean_up(dataset, delete_unverified=True)
    assert not running.exists()


def test_transactions_go_with_their_version_and_a_tag_keeps_both(dataset: lance.LanceDataset) -> None:
    properties = {"record": '{"rows": 2, "über": "äöü"}'}
    for _ in range(2):
        last = append(dataset, transaction_properties=properties)
    last.tags.create("tokenized-v3", 3)
    last.tags.replace_metadata("tokenized-v3", properties)
    append(dataset)
    cleaned = clean_up(dataset)
    assert cleaned.read_transaction(3).transaction_properties == properties
    assert cleaned.tags.list()["tokenized-v3"]["metadata"] == properties
    with pytest.raises(OSError, match="not found"):
        cleaned.read_transaction(2)


def test_characters_of_tag_names(dataset: lance.LanceDataset) -> None:
    def allowed(name: str) -> bool:
        try:
            dataset.tags.create(name, 1)
        except OSError as error:
            assert "Ref" in str(error)
            return False
        return True

    ascii_allowed = {chr(code) for code in range(32, 127) if allowed(f"a{chr(code)}b")}
    assert {c for c in ascii_allowed if not c.isalnum()} == {".", "-", "_"} and len(ascii_allowed) == 10 + 52 + 3
    assert [allowed(name) for name in (".a", "a.", "a..b", "a.lock", "")] == [False] * 5


def test_lancedb_stays_at_its_version_until_it_checks_out_the_latest(dataset: lance.LanceDataset) -> None:
    table = in_lancedb(dataset)
    assert table.count_rows() == 4
    append(dataset)
    assert (table.version, table.count_rows()) == (1, 4)
    table.checkout_latest()
    assert (table.version, table.count_rows()) == (2, 6)


def test_pylance_inside_a_column_function_fails(dataset: lance.LanceDataset) -> None:
    batches = []

    def function(batch: pa.RecordBatch) -> pa.RecordBatch:
        batches.append(batch.num_rows)
        if batch.num_rows == 4:  # the first call, with one row, only asks for the type
            lance.dataset(dataset.uri)
        return pa.record_batch([batch["id"]], names=["v"])

    with pytest.raises(RuntimeError, match="Task was aborted"):
        dataset.add_columns(function, read_columns=["id"])
    assert (batches, newest(dataset).version) == ([1, 4], 1)


def test_branches_are_read_at_a_version_and_leave_main_alone(dataset: lance.LanceDataset) -> None:
    branch = lance.write_dataset(rows([5]), dataset.create_branch("trial", 1), mode="append")
    main = append(dataset)
    assert (ids(branch), ids(main)) == ([0, 1, 2, 3, 5], [0, 1, 2, 3, 8, 9])
    assert ids(main.checkout_version(("trial", branch.version))) == ids(branch)
    assert ids(main.checkout_version(("trial", 1))) == [0, 1, 2, 3]


# --- Lance's permutation -----------------------------------------------------------------------------------------


def test_the_permutation_builder_has_a_memory_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = in_lancedb(make(tmp_path))
    monkeypatch.setenv("LANCEDB_PERM_BUILDER_MEMORY_LIMIT", "1000")
    with pytest.raises(RuntimeError, match="Not enough memory to continue external sort"):
        permutation_builder(table).shuffle(seed=1).execute()
    monkeypatch.setenv("LANCEDB_PERM_BUILDER_MEMORY_LIMIT", "4000000000")
    assert permutation_builder(table).shuffle(seed=1).execute().count_rows() == 4


@pytest.mark.parametrize("of", ["schema", "field"])
def test_the_permutation_builder_takes_metadata_of_a_field_but_not_of_the_schema(tmp_path: Path, of: str) -> None:
    data = rows([0, 1])
    metadata = {"pretrain.table_id": "x"}
    if of == "schema":
        table = in_lancedb(make(tmp_path, data.replace_schema_metadata(metadata)))
        with pytest.raises(Exception, match="rust future panicked"):
            permutation_builder(table).shuffle(seed=1).execute()
    else:
        schema = data.schema.set(0, data.schema.field("id").with_metadata(metadata))
        table = in_lancedb(make(tmp_path, data.cast(schema)))
        assert permutation_builder(table).shuffle(seed=1).execute().count_rows() == 2


# --- indexes -----------------------------------------------------------------------------------------------------


def index_of_text(dataset: lance.LanceDataset, **options: Any) -> lance.LanceDataset:
    dataset.create_scalar_index("text", "INVERTED", name="words", replace=True, **options)
    return newest(dataset)


def indexed(dataset: lance.LanceDataset) -> dict[str, tuple[int, int]]:
    """Rows and deltas of every index."""
    return {i.name: (i.num_rows_indexed, len(i.segments)) for i in newest(dataset).describe_indices()}


def test_phrases_need_positions_and_positions_take_space(tmp_path: Path) -> None:
    texts = ["still waters run deep"] * 50 + ["waters run still"]
    dataset = make(tmp_path, pa.table({"id": range(51), "text": texts}))
    sizes = []
    for with_position in (False, True):
        dataset = index_of_text(dataset, with_position=with_position)
        sizes.append(dataset.describe_indices()[0].total_size_bytes)
        phrase = in_lancedb(dataset).search(PhraseQuery("waters run still", "text"))
        if with_position:
            assert phrase.to_arrow()["id"].to_pylist() == [50]
        else:
            with pytest.raises(ValueError, match="position is not found"):
                phrase.to_arrow()
    assert sizes[1] > sizes[0] > 0


def test_a_delta_indexes_the_new_rows_and_leaves_the_old_index_as_it_is(dataset: lance.LanceDataset) -> None:
    index_of_text(dataset)
    folder = Path(dataset.uri) / "_indices"
    old = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    append(dataset, rows([8, 9], "sea")).optimize.optimize_indices(num_indices_to_merge=0)
    assert indexed(dataset) == {"words": (6, 2)}
    assert {path: path.stat().st_mtime_ns for path in old} == old and len(list(folder.iterdir())) == 2
    assert in_lancedb(dataset).search("sea", query_type="fts").to_arrow()["id"].to_pylist() == [8, 9]


def test_full_text_finds_rows_not_indexed_yet_within_filter_and_version(dataset: lance.LanceDataset) -> None:
    index_of_text(dataset)
    version = append(dataset).version
    append(dataset, rows([5]))

    def found(where: str, at: int | None) -> list[int]:
        query = in_lancedb(dataset, at).search("rivers", query_type="fts").where(where, prefilter=True)
        return sorted(query.to_arrow()["id"].to_pylist())

    assert found("id > 2", None) == [3, 5, 8, 9]
    assert found("id > 2", version) == [3, 8, 9]


def vectors(count: int, *, null: bool = False) -> pa.Table:
    values = np.random.default_rng(0).random((count, 8), dtype=np.float32).tolist()
    return rows(list(range(count))).append_column(
        "vector", pa.array([None] * count if null else values, pa.list_(pa.float32(), 8))
    )


def test_a_pq_index_of_fewer_than_256_rows_succeeds_with_nothing_in_it(tmp_path: Path) -> None:
    dataset = make(tmp_path, vectors(255))
    for expected in (0, 256):
        newest(dataset).create_index("vector", "IVF_PQ", name="v", num_partitions=1, num_sub_vectors=2, replace=True)
        assert indexed(dataset)["v"][0] == expected
        append(dataset, vectors(1))


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("kind", ["IVF_PQ", "IVF_FLAT", "IVF_HNSW_SQ"])
def test_a_fragment_of_null_vectors_stops_optimize_of_several_partitions_and_spares_a_delta(
    tmp_path: Path, kind: str, partitions: int
) -> None:
    dataset = index_of_text(make(tmp_path, vectors(512)))
    options = {"num_sub_vectors": 2} if kind == "IVF_PQ" else {}
    dataset.create_index("vector", kind, name="v", num_partitions=partitions, **options)
    append(dataset, vectors(3, null=True))
    if partitions == 1:
        in_lancedb(dataset).optimize()
    else:
        with pytest.raises(RuntimeError, match=r"Not found: .*ivf_\d.lance"):
            in_lancedb(dataset).optimize()
        assert indexed(dataset) == {"words": (512, 1), "v": (512, 1)}, "the full-text index is held back too"
        newest(dataset).optimize.optimize_indices(num_indices_to_merge=0)
    assert {name: rows_indexed for name, (rows_indexed, _) in indexed(dataset).items()} == {"words": 515, "v": 515}


# --- S3 ----------------------------------------------------------------------------------------------------------


def test_appends_of_concurrent_threads_on_s3_all_commit(s3: Any) -> None:
    uri = f"{s3.bucket('facts')}/facts.lance"
    options = storage_options(uri)
    start = lance.write_dataset(rows([0]), uri, enable_stable_row_ids=True, storage_options=options)
    written = [write_fragments(rows([i]), uri, mode="append", storage_options=options) for i in range(1, 5)]

    def commit_from_version_1(fragments: list[lance.FragmentMetadata]) -> int:
        transaction = lance.Transaction(read_version=start.version, operation=lance.LanceOperation.Append(fragments))
        return lance.LanceDataset.commit(uri, transaction, storage_options=options).version

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(commit_from_version_1, written)) == [2, 3, 4, 5]
    assert sorted(ids(lance.dataset(uri, storage_options=options))) == [0, 1, 2, 3, 4]
