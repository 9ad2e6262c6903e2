"""Receipts on real tables and runs: who holds a document, who saw it, and whether it is gone once it was taken out."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from pretrain_assets import recipes
from pretrain_assets.cli import cli
from pretrain_assets.config import (
    DedupConfig,
    EngineConfig,
    IndexConfig,
    IngestConfig,
    NearDedupConfig,
    Recipe,
    RunSpec,
    TokenizeConfig,
    TokenizerIdentity,
    override,
    to_dict,
)
from pretrain_assets.curate.dedup import dedup
from pretrain_assets.curate.near_dedup import near_dedup
from pretrain_assets.errors import ConfigError, FilterError, InputError, TableError
from pretrain_assets.forensics.chosen import Chosen, choose
from pretrain_assets.forensics.exposure import schedule_of
from pretrain_assets.forensics.indexes.index import build_index
from pretrain_assets.forensics.receipts.absence import Check
from pretrain_assets.forensics.receipts.documents import Asked, find_documents
from pretrain_assets.forensics.receipts.erasure import erase
from pretrain_assets.forensics.receipts.needles import Needles, find_in_bytes
from pretrain_assets.forensics.receipts.receipt import Receipt, receipt, receipt_of
from pretrain_assets.forensics.receipts.traces import digests, traces_of
from pretrain_assets.ingest.append import ingest
from pretrain_assets.launch.contract import write_spec
from pretrain_assets.loader import entries
from pretrain_assets.loader.exposure import documents as documents_of_step
from pretrain_assets.loader.prefetch import mirror
from pretrain_assets.loader.store import cache_folder
from pretrain_assets.report.receipt_text import receipt_text
from pretrain_assets.table import advance
from pretrain_assets.table.delete import Request, delete
from pretrain_assets.table.filler.fill import fill
from pretrain_assets.table.filler.spec import BatchFunction, Fill, RowColumns, Worker
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.schema import computed_field
from pretrain_assets.table.storage import Location, filesystem, open_dataset
from pretrain_assets.table.tags import protect_run, release
from pretrain_assets.table.versions import latest_record, records
from pretrain_assets.tokenize.columns import tokenize
from pretrain_assets_tests.conftest import S3Server
from pretrain_assets_tests.tables import append, make_table, newest, values

HERE = EngineConfig(workers=1)
SECRET = "The zanzibarian xyzzysecret of Ms Quuxley lies under the third plinth from the left, she wrote."
WORDS = ("river", "mountain", "harbour", "forest", "meadow", "valley", "island", "desert")
TEXTS = [f"A {WORDS[i % 8]} numbered {i} stands here quite alone, and nobody ever asks it why." for i in range(30)]
PLANTED = 12
RECIPE = override(
    recipes.demo(),
    {
        "data.filter": "NOT is_dup",
        "data.held_out_filter": "is_dup",
        "data.seq_len": 32,
        "data.num_splits": 2,
        "train.global_batch_tokens": 64,
        "train.max_steps": 30,
    },
)


def _vectors(worker: Worker) -> BatchFunction:
    """Four numbers of a text's digest: distinct texts, distinct vectors."""
    del worker

    def vectors(batch: pa.RecordBatch) -> list[pa.Array]:
        drawn = [list(hashlib.sha256(text.encode()).digest()[:4]) for text in batch.column(0).to_pylist()]
        flat = pa.array(np.array(drawn, np.float16).reshape(-1))
        return [pa.FixedSizeListArray.from_arrays(flat, 4)]

    return vectors


def embed(location: Location) -> None:
    made: dict[str, Any] = {"stage": "embedded", "code_version": "1", "parameters": {}}
    outputs = pa.schema([computed_field("embedding", pa.list_(pa.float16(), 4), **made)])
    groups = (RowColumns(outputs=outputs, inputs=("text",), make=_vectors),)
    spec = Fill(groups=groups, batch_bytes=1 << 20, **made)
    fill(location, spec, input_pin=newest(location), engine=HERE)


def curate(location: Location) -> Pin:
    """Every stage up to the tokens; the pin of the version to train on."""
    dedup(location, DedupConfig(), input_pin=newest(location), engine=HERE)
    return tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=newest(location), engine=HERE).pin


def start_run(runs: Path, location: Location, pin: Pin, recipe: Recipe = RECIPE, *, name: str = "demo-v3-1a2b") -> Path:
    """A run as its launcher leaves it: a run.json, no checkpoint yet."""
    spec = RunSpec(
        recipe=recipe,
        database_uri=location.database_uri,
        table_name=location.table_name,
        pin=str(pin),
        tag="tokenized-v3",
        tokenizer=TokenizerIdentity(name="byte", fingerprint="f", vocab_size=257, eos_id=256, pad_id=257),
        run_dir=str(runs / name),
    )
    write_spec(spec)
    return runs / name


def save(run: Path, step: int) -> None:
    """A checkpoint, as far as names, sizes and the passport go."""
    folder = run / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    spec = json.loads((run / "run.json").read_text())
    files = {
        "passport.json": json.dumps({"pin": spec["pin"], "recipe": spec["recipe"], "step": step}),
        "model.safetensors": "w",
    }
    for name, content in files.items():
        (folder / name).write_text(content)
    marker = {name: {"bytes": len(content), "sha256": "0"} for name, content in files.items()}
    (folder / "COMPLETE").write_text(json.dumps(marker))


def write_metrics(run: Path, steps: int) -> None:
    lines = [{"step": step, "loss": 1.0, "tok_per_s": 640.0, "total_steps": 30} for step in range(1, steps + 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def take_out(location: Location, runs: Path, *docs: str, purge: bool = True, **asked: Any) -> Receipt:
    request = Asked(docs=docs, **asked)
    documents = find_documents(location, request)
    found = receipt_of(location, str(runs), request, documents)
    return erase(location, str(runs), documents, found, purge=purge, project=str(runs.parent))


def holding(done: Receipt) -> dict[str, Check]:
    """What still holds a document, by place."""
    assert done.erasure is not None
    absence = done.erasure.absence
    return {check.place: check for check in (*absence.newest, *absence.stored) if check.found}


def bytes_with(folder: Path | str, *needles: bytes) -> set[str]:
    """Files under a folder whose plain bytes hold one of them."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {path.name for path in files if any(needle in path.read_bytes() for needle in needles)}


def columns_with(location: Location, text: str) -> set[str]:
    """Data files of which a decoded column holds the text or its bytes as tokens: without the code that is tested."""
    from lance.file import LanceFileReader

    found, tokens = set(), list(text.encode())
    for path in Path(location.uri).glob("data/*.lance"):
        for column in LanceFileReader(str(path)).read_all().to_table().columns:
            rows = column.to_pylist()
            found |= {path.name for row in rows if row == tokens or (isinstance(row, str) and text in row)}
    return found


@pytest.fixture
def location(tmp_path: Path) -> Location:
    """31 documents, one of them the secret."""
    return make_table(tmp_path / "db", [*TEXTS[:PLANTED], SECRET, *TEXTS[PLANTED:]])


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


# --- the whole story -------------------------------------------------------------------------------------------------


def test_a_document_is_taken_out_of_everything_that_nothing_pins(location: Location, runs: Path) -> None:
    _tell(location, runs, 30)


@pytest.mark.slow
def test_a_document_is_taken_out_of_near_duplicates_vectors_and_their_index(tmp_path: Path, runs: Path) -> None:
    texts = [f"{text} The {word} is {word}." for text in TEXTS for word in map(str, range(40))]
    _tell(make_table(tmp_path / "db", [*texts[:PLANTED], SECRET, *texts[PLANTED:]]), runs, 1_200, every=True)


def _tell(location: Location, runs: Path, others: int, *, every: bool = False) -> None:
    """A document among others is deleted while a run pins a version with it; then the run goes as well."""
    dedup(location, DedupConfig(), input_pin=newest(location), engine=HERE)
    if every:
        near_dedup(location, NearDedupConfig(ngram_words=3, min_words=3), input_pin=newest(location), engine=HERE)
    pin = tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=newest(location), engine=HERE).pin
    run = start_run(runs, location, pin)
    protect_run(location, pin, str(run))
    if every:
        embed(location)
    build_index(location, IndexConfig(exact_below=1_000), input_pin=newest(location))
    assert len(open_dataset(location).describe_indices()) == 1 + every
    assert columns_with(location, SECRET), "else there is nothing to show"

    done = take_out(location, runs, str(PLANTED))
    assert done.erasure is not None and done.erasure.rows == 1 and not done.erasure.done
    assert done.erasure.absence.in_newest and not done.erasure.waiting
    dataset = open_dataset(location)
    assert dataset.count_rows() == others and dataset.count_rows("text LIKE '%xyzzysecret%'") == 0
    for query in ("xyzzysecret", '"third plinth from"'):
        assert len(dataset.scanner(columns=["id", "_score"], full_text_query=query).to_table()) == 0
    assert [(one.version, one.rows) for one in done.versions] == [(pin.version, 1)], "only what the run pins is left"
    held = holding(done)
    assert f"version {pin.version} has 1 row, kept by: run demo-v3-1a2b; tag run.demo-v3-1a2b" in str(held)
    assert "`pretrain release run.demo-v3-1a2b`" in held["older versions"].remedy
    still = {found.split(" ")[0].rpartition("/")[2] for found in held["files of the table"].found}
    assert columns_with(location, SECRET) < still, "and its content hash"
    assert all(f"of version {pin.version}" in found for found in held["files of the table"].found)
    assert open_dataset(location, pin.version).count_rows(f"id = {PLANTED}") == 1

    shutil.rmtree(run)
    release(location, "run.demo-v3-1a2b", pinned_by_runs={})
    done = take_out(location, runs, str(PLANTED))
    assert done.erasure is not None and done.erasure.deleted is None, "nothing was left to delete"
    assert (done.erasure.done, done.versions, holding(done)) == (True, (), {})
    assert columns_with(location, SECRET) == set()
    tokens = np.frombuffer(SECRET[:20].encode(), np.uint8).astype("<i4").tobytes()
    assert bytes_with(location.database_uri, SECRET[:20].encode(), b"xyzzysecret", tokens) == set()


def test_without_a_purge_it_is_gone_from_the_newest_version_and_everything_else_is_named(
    location: Location, runs: Path
) -> None:
    build_index(location, IndexConfig(), input_pin=curate(location))
    done = take_out(location, runs, str(PLANTED), purge=False)
    assert done.erasure is not None and done.erasure.done and not done.erasure.absence.everywhere
    assert set(holding(done)) == {"older versions", "files of the table"}
    found = " ".join(holding(done)["files of the table"].found)
    assert all(word in found for word in ("phrase in text", "tokens in input_ids", "content_hash", "row id"))
    assert done.erasure.deleted == "deleted-v5" and done.num_there == 0
    assert "STILL HELD by what is named above; --purge" in receipt_text(done)


def test_stages_that_a_deletion_leaves_work_for_keep_their_versions_and_say_so(location: Location, runs: Path) -> None:
    append(location, [SECRET])
    curate(location)
    done = take_out(location, runs, str(PLANTED))
    assert done.erasure is not None and not done.erasure.done
    assert done.erasure.waiting == ("deduped-v3: dup_of of 1 row names one that is gone; run `pretrain dedup`",)
    assert "1 document with a copy under another id" in str(holding(done)), "the copy holds the same text"
    done = take_out(location, runs, str(PLANTED), with_duplicates=True)
    assert done.erasure is not None and done.erasure.rows == 1 and values(location, "id")[-1] == 30
    assert done.erasure.done and columns_with(location, SECRET) == set()


def test_rows_that_lack_a_stages_values_keep_that_stage_where_it_is(location: Location, runs: Path) -> None:
    curate(location)
    append(location, ["a new row, not tokenized yet"])
    delete(location, Request(ids=(PLANTED,)))
    moved = advance.advance(location)
    assert moved.moved == () and [one.split(";")[1] for one in moved.waiting] == [
        " run `pretrain dedup`",
        " run `pretrain tokenize`",
    ]
    curate(location)
    assert advance.advance(location) == advance.Advance(moved=("deduped-v7",), waiting=())
    assert advance.advance(location) == advance.Advance(moved=(), waiting=()), "and again is nothing new"


def test_a_stage_moves_on_as_it_would_by_itself(tmp_path: Path) -> None:
    location, config = ingested(tmp_path, [*TEXTS, SECRET])
    curate(location)
    delete(location, Request(ids=(30,)))
    assert advance.advance(location).moved == ("ingested-v4", "deduped-v4", "tokenized-v4")
    before = [(r.stage, r.version) for r in records(open_dataset(location))]
    assert ingest(location, config).changed is False and curate(location).version == 4
    assert [(r.stage, r.version) for r in records(open_dataset(location))] == before
    (tmp_path / "src" / "more.jsonl").write_text(json.dumps({"text": "new"}) + "\n")
    assert ingest(location, config).record.rows == 1 and values(location, "id")[-2:] == [29, 31], "ids are used once"


def ingested(
    tmp_path: Path, texts: list[str], location: Location | None = None, *, doc_ids: Sequence[str] = ()
) -> tuple[Location, IngestConfig]:
    (tmp_path / "src").mkdir()
    names = doc_ids or [f"note-{i}" for i in range(len(texts))]
    rows = (json.dumps({"id": name, "text": text}) + "\n" for name, text in zip(names, texts, strict=True))
    (tmp_path / "src" / "one.jsonl").write_text("".join(rows))
    location = location or Location(database_uri=str(tmp_path / "db"))
    config = IngestConfig(sources=(f"{tmp_path}/src/*.jsonl",))
    ingest(location, config)
    return location, config


def test_what_is_said_of_the_source_file_is_true(tmp_path: Path, runs: Path) -> None:
    location, config = ingested(tmp_path, [*TEXTS, SECRET])
    done = take_out(location, runs, "note-30")
    assert done.erasure is not None and done.erasure.done
    said = next(one for one in done.erasure.absence.not_searched if "one.jsonl" in one)
    assert "skips it, so it brings nothing back; under another name" in said and "refused by that name" in said
    assert ingest(location, config).changed is False and values(location, "id") == list(range(30))
    source = tmp_path / "src" / "one.jsonl"
    shutil.copy(source, tmp_path / "src" / "two.jsonl")
    ingest(location, config)
    assert SECRET in values(location, "text"), "under another name it comes back"
    source.write_text("".join(source.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(InputError, match="changed since it was ingested"):
        ingest(location, config)


# --- places that hold copies -----------------------------------------------------------------------------------------


def test_every_place_that_may_quote_a_document_is_searched(
    location: Location, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRETRAIN_CACHE_DIR", str(tmp_path / "cache"))
    curate(location)
    kept = Path(mirror(open_dataset(location), ["input_ids"], cache_folder()).uri)
    quoted = json.dumps({"sample": f"it said: {SECRET}"})
    tokens = pa.table({"id": [PLANTED], "input_ids": [list(SECRET.encode())]}, schema=_TOKENS)
    lance.write_dataset(tokens, str(tmp_path / "other"))
    (orphan,) = (tmp_path / "other" / "data").glob("*.lance")
    shutil.copy(orphan, Path(location.uri) / "data" / "fill-0123456789abcdef-000000000.lance")
    for place in (runs / "demo" / "result.json", tmp_path / "history" / "events.db", tmp_path / "storage" / "x.out"):
        place.parent.mkdir(parents=True)
        place.write_text(quoted)
    staged = Path(location.staging_uri) / "ingest" / "0123.unit"
    staged.parent.mkdir(parents=True)
    staged.write_text(quoted)

    held = holding(take_out(location, runs, str(PLANTED), purge=False))
    assert "fill-0123456789abcdef-000000000.lance" in str(held["files of the table"].found)
    assert "of no version: left by unfinished work" in str(held["files of the table"].found)
    assert held["staged work beside the table"].found == ("ingest/0123.unit (plain bytes)",)
    assert held["runs and reports"].found == ("demo/result.json (plain bytes)",)
    assert held["Dagster's folder history"].found == ("events.db (plain bytes)",)
    assert held["Dagster's folder storage"].found == ("x.out (plain bytes)",)
    (copy,) = held["copies of columns on this machine (loader.prefetch)"].found
    os.close(entries._kept.pop(kept))  # as when the process that trains from it has ended
    held = holding(take_out(location, runs, str(PLANTED)))
    assert set(held) == {"runs and reports", "Dagster's folder history", "Dagster's folder storage"}, "not ours to edit"
    assert not (cache_folder() / copy).exists() and not staged.exists()


_TOKENS = pa.schema([("id", pa.int64()), ("input_ids", pa.list_(pa.int32()))])


def test_in_plain_files_every_document_is_looked_for_or_said_not_to_be(location: Location, runs: Path) -> None:
    said = "  Zoë said:  this is  the one line   that nobody else has said."
    append(location, ["cat", said, "dog", "Nobody quotes the first of these.", "Nor is the second one quoted."])
    for i, name in enumerate(("a.txt", "b.json.gz", "c.bz2")):
        opened = {".gz": gzip.open, ".bz2": bz2.open}.get(Path(name).suffix, open)
        with opened(runs / name, "wt") as file:
            file.write(json.dumps([" ".join(said.split()), TEXTS[11 + i]], ensure_ascii=i == 1))
    (runs / "d.gz").write_bytes(b"torn")
    (runs / "e.zip").write_bytes(b"packed")
    for number, files in ((11, ["a.txt"]), (13, ["b.json.gz"]), (14, ["c.bz2"]), (32, ["a.txt", "b.json.gz", "c.bz2"])):
        done = take_out(location, runs, str(number), purge=False)
        assert [found.split(" ")[0] for found in holding(done)["runs and reports"].found] == files
    done = take_out(location, runs, purge=True, where="id < 33")
    assert done.erasure is not None and done.num_rows == 33 and not done.erasure.done
    assert len(holding(done)["runs and reports"].found) == 3, "of 33 documents, each is looked for"
    for name in ("a.txt", "b.json.gz", "c.bz2"):
        (runs / name).unlink()
    done = take_out(location, runs, purge=True, where="id > 32")
    assert done.erasure is not None and done.erasure.done and not done.erasure.absence.everywhere
    (check,) = [check for check in done.erasure.absence.stored if check.unproven]
    assert "2 of 3 documents" in check.method and "1 of 3 documents: without a phrase" in check.unproven[0]
    assert "d.gz cannot be unpacked" in check.unproven[1] and "e.zip may be compressed" in check.unproven[2]
    assert "or for a part of a phrase" in str(done.erasure.absence.not_searched)
    assert "partly runs and reports" in receipt_text(done) and "NOT PROVEN" in receipt_text(done)


def test_a_run_that_begins_meanwhile_is_named_with_what_to_remove(
    location: Location, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = curate(location)
    append(location, ["so that the pinned version is not the newest"])

    def begun(*given: Any, **named: Any) -> Any:
        start_run(runs, location, pin)
        return delete(*given, **named)

    monkeypatch.setattr("pretrain_assets.forensics.receipts.erasure.delete", begun)
    check = holding(take_out(location, runs, str(PLANTED)))["older versions"]
    assert "kept by: newest tokenized; run demo-v3-1a2b" in str(check.found), "no tag protects it"
    assert check.remedy.endswith("; then remove the folder of run demo-v3-1a2b; then this command again")


def test_a_file_that_cannot_be_decoded_is_named(location: Location, runs: Path) -> None:
    torn = Path(location.uri) / "data" / "fill-00000000000000aa-000000000.lance"
    torn.write_bytes(b"torn")
    held = holding(take_out(location, runs, str(PLANTED), purge=False))
    assert torn.name in str(held["files of the table that cannot be decoded"].found)


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a  b", None, "", " \n", "c"]),
        pa.array([[1, 2], None, [], [3]], pa.list_(pa.int32())),
        pa.array([[9, 9], [1, 2], None, [], [3]], pa.list_(pa.int32())).slice(1),
        pa.array([[1.0, 2.0], None, [0.0, 0.0], [3.0, 4.0]], pa.list_(pa.float16(), 2)),
        pa.array([[7.0, 7.0], [1.0, 2.0], [0.0, 0.0], [3.0, 4.0]], pa.list_(pa.float16(), 2)).slice(1),
        pa.array([b"0123456789abcdef", None], pa.binary(16)),
    ],
)
def test_equal_values_have_equal_digests_and_nothing_has_none(column: pa.Array) -> None:
    found = digests(column)
    assert len(found) == len(column) and found.type == pa.binary(16)
    for value, one in zip(column.to_pylist(), found.to_pylist(), strict=True):
        alone = digests(pa.array([value], column.type))[0].as_py()
        assert one == alone and (one is None) == (not value or not (isinstance(value, bytes) or _says(value)))
    assert len(set(found.drop_null().to_pylist())) == len(found.drop_null())


def _says(value: Any) -> bool:
    return bool(value.strip()) if isinstance(value, str) else any(value)


def test_bytes_are_found_across_the_border_of_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pretrain_assets.forensics.receipts.needles.PIECE_BYTES", 7)
    path = tmp_path / "file"
    path.write_bytes(b"....needle....")
    for needles, expected in (([b"needle", b"nothing"], {b"needle"}), ([], set())):
        with path.open("rb") as file:
            assert find_in_bytes(file, Needles(needles)) == expected


def test_thousands_of_needles_are_found_wherever_they_begin() -> None:
    drawn = np.random.default_rng(0)
    content = drawn.integers(97, 101, 5_000, np.uint8).tobytes()
    there = [content[at : at + 8 + at % 40] for at in range(0, 5_000 - 48, 7)]
    others = [drawn.integers(97, 101, 30, np.uint8).tobytes() for _ in range(2_000)]
    needles = Needles([*there, content[-8:], content[:5], *others, *(needle + b"." for needle in there)])
    assert needles.found_in(content) == {needle for needle in needles.all if needle in content} >= {*there}
    assert needles.without(there).found_in(content) == needles.found_in(content) - {*there}
    assert needles.found_in(b"") == Needles([]).found_in(content) == set()


def test_what_other_rows_have_too_is_no_trace(tmp_path: Path) -> None:
    shared = "This notice stands at the end of many documents of this collection."
    texts = [f"{SECRET}\n{shared}", f"Something else.\n{shared}", "cat", "cat"]
    location = make_table(tmp_path, texts)
    dedup(location, DedupConfig(), input_pin=newest(location), engine=HERE)
    traces = traces_of(open_dataset(location), find_documents(location, Asked(docs=("0", "2"))))
    assert traces.phrases and not any(phrase in shared for phrase in traces.phrases)
    assert (len(traces.keys["text"]), traces.shared) == (1, 1)


# --- who saw it ------------------------------------------------------------------------------------------------------


def test_every_run_says_what_it_saw_and_which_checkpoint_is_clean(location: Location, runs: Path) -> None:
    pin = curate(location)
    run = start_run(runs, location, pin)
    schedule = schedule_of(location, pin, RECIPE)
    spans = [e for step in range(1, 31) for e in documents_of_step(schedule, step) if e.doc_id == PLANTED]
    first = spans[0].step
    for step in (first - 1, first, 30):
        save(run, step)
    write_metrics(run, 30)
    start_run(runs, location, pin, override(RECIPE, {"data.filter": f"id <> {PLANTED}"}), name="other")
    start_run(runs, location, replace(pin, table_id="another"), name="foreign")
    found = receipt(location, str(runs), Asked(docs=(str(PLANTED),)))
    saw, other = found.witnesses
    assert (saw.run, saw.step, saw.times, saw.num_seen) == ("demo-v3-1a2b", 30, len({e.epoch for e in spans}), 1)
    assert (saw.first_step, saw.last_step) == (first, spans[-1].step)
    assert saw.tokens == sum(e.tokens for e in spans)
    assert [(c.step, c.saw) for c in saw.checkpoints] == [(first - 1, False), (first, True), (30, True)]
    assert (saw.clean_step, saw.retrain_steps) == (first - 1, 31 - first)
    ledgers = [sum(e["tokens_trained"] for e in schedule.ledgers(step).values()) for step in (first - 1, 30)]
    assert saw.retrain_tokens == ledgers[1] - ledgers[0] and saw.retrain_seconds == saw.retrain_tokens / 640
    assert (other.run, other.saw, other.step, other.retrain_tokens) == ("other", False, 0, 0)
    text = receipt_text(found)
    assert f"pretrain replay {runs}/demo-v3-1a2b --id {PLANTED}" in text and "runs that saw none of them" in text
    assert f"last clean checkpoint: step {first - 1}" in text


def test_a_run_in_progress_counts_up_to_its_newest_record(location: Location, runs: Path) -> None:
    run = start_run(runs, location, curate(location))
    assert receipt(location, str(runs), Asked(where="true")).witnesses[0].step == 0
    write_metrics(run, 4)
    (one,) = receipt(location, str(runs), Asked(where="true")).witnesses
    assert (one.step, one.first_step, one.clean_step, one.retrain_steps) == (4, 1, 0, 4)
    assert one.tokens == 4 * 64 and "none: a replay begins at the start" in receipt_text(
        receipt(location, str(runs), Asked(where="true"))
    )


def test_a_replay_without_it_is_clean_from_where_its_holes_begin(location: Location, runs: Path) -> None:
    pin = curate(location)
    holes = {"data.without": [PLANTED]}
    first = schedule_of(location, pin, RECIPE).steps_in(0)
    start_run(runs, location, pin, override(RECIPE, holes), name="clean")
    start_run(runs, location, pin, override(RECIPE, {**holes, "data.without_from": [1, 0]}), name="later")
    for name in ("clean", "later"):
        spec = json.loads((runs / name / "run.json").read_text())
        spec["replay"] = {"run_dir": "/runs/original", "step": 30, "checkpoint": "0", "start_step": first}
        (runs / name / "run.json").write_text(json.dumps(spec))
        write_metrics(runs / name, 30)
    found = receipt(location, str(runs), Asked(docs=(str(PLANTED),)))
    clean, later = found.witnesses
    assert (clean.saw, later.saw, later.times) == (False, True, 1) and (later.last_step or 0) <= first
    assert f"a replay of original from step {first}" in receipt_text(found)


def test_runs_that_cannot_be_read_or_computed_are_named(location: Location, runs: Path) -> None:
    pin = curate(location)
    start_run(runs, location, replace(pin, version=2), name="no-tokens")
    (runs / "broken").mkdir()
    (runs / "broken" / "run.json").write_text("{")
    found = receipt(location, str(runs), Asked(docs=(str(PLANTED),)))
    assert any(note.startswith("run broken: ") for note in found.notes)
    (one,) = found.witnesses
    assert one.unknown and not one.saw and "so no checkpoint of it counts as clean" in receipt_text(found)


def test_a_damaged_passport_hides_no_run(location: Location, runs: Path) -> None:
    run = start_run(runs, location, curate(location))
    save(run, 30)
    (run / "checkpoints" / "step_00000030" / "passport.json").write_text("{")
    found = receipt(location, str(runs), Asked(docs=(str(PLANTED),)))
    assert [one.run for one in found.witnesses] == [run.name] and found.witnesses[0].checkpoints == ()
    (run / "run.json").unlink()
    assert "passport.json is not JSON" in receipt(location, str(runs), Asked(docs=("1",))).notes[0]


def test_exports_of_a_checkpoint_that_saw_it_are_named(location: Location, runs: Path) -> None:
    run = start_run(runs, location, curate(location))
    write_metrics(run, 30)
    for step in (0, 30):
        folder = run / "exports" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / "export.json").write_text("{}")
        header = json.dumps({"__metadata__": {"lineage": json.dumps({"step": step})}}).encode()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (run / "exports" / "half").mkdir()
    (one,) = receipt(location, str(runs), Asked(docs=(str(PLANTED),))).witnesses
    assert [(export.name, export.saw) for export in one.exports] == [
        ("exports/step_00000000", False),
        ("exports/step_00000030", True),
    ]


# --- the receipt -----------------------------------------------------------------------------------------------------


def test_the_same_question_gives_the_same_digest_wherever_it_is_asked(
    location: Location, runs: Path, tmp_path: Path
) -> None:
    run = start_run(runs, location, curate(location))
    write_metrics(run, 3)
    asked = Asked(docs=(str(PLANTED), "3"))
    found = receipt(location, str(runs), asked)
    shutil.copytree(tmp_path / "db", tmp_path / "copy")
    shutil.copytree(runs, tmp_path / "copied-runs")
    again = receipt(Location(database_uri=str(tmp_path / "copy")), str(tmp_path / "copied-runs"), asked)
    assert found.digest == again.digest == found.to_dict()["receipt_digest"] and found.table != again.table
    assert receipt(location, str(runs), Asked(docs=("3",))).digest != found.digest
    write_metrics(run, 4)
    assert receipt(location, str(runs), asked).digest != found.digest
    assert set(found.inputs) == {"demo-v3-1a2b/run.json"}


def test_documents_are_found_by_id_doc_id_predicate_and_words(location: Location, runs: Path) -> None:
    build_index(location, IndexConfig(), input_pin=curate(location))

    def ids(*docs: str, **asked: Any) -> list[int]:
        return [int(i) for i in find_documents(location, Asked(docs=docs, **asked)).ids]

    assert ids("3", "doc-5", "3") == [3, 5] and ids(where="NOT is_dup AND id < 2") == [0, 1]
    assert ids(search="xyzzysecret") == [PLANTED] and ids("3", search="xyzzysecret") == [3, PLANTED]
    assert ids(where="id < 0") == [] and ids(where="held_out") == [0]
    with pytest.raises(TableError, match=r"No row has the id 31.* ids given out|No row has the id 31"):
        ids("31")
    with pytest.raises(TableError, match=r"has a document 'doc-99'.*--where or --search"):
        ids("doc-99")
    with pytest.raises(TableError, match="finds nothing for these words"):
        ids(search="volcano")
    with pytest.raises(FilterError, match="neither a column nor a named filter"):
        ids(where="colour = 1")
    with pytest.raises(ConfigError, match="Which documents"):
        ids()
    append(location, ["xyzzysecret again"])
    found = find_documents(location, Asked(search="xyzzysecret"))
    assert found.ids.tolist() == [PLANTED] and "1 row added after the index" in found.notes[0]


def test_a_number_is_never_a_sources_own_id(home: Path, tmp_path: Path) -> None:
    location, _ = ingested(tmp_path, ["a", "b", "c"], doc_ids=["7001", "007", "0"])
    for request in (("--doc", "0"), ("--doc", "0"), ("--doc", "7001")):  # done, done again, mistyped
        answer = pretrain(*request, "--delete", "--purge", "--yes")
        assert values(location, "id") == [1, 2], "document '0' has another id"
    assert "No row has the id 7001" in str(answer.exception)
    assert find_documents(location, Asked(docs=("007",))).ids.tolist() == [1]
    assert choose(location, newest(location), ["007", "2", "9" * 20]) == Chosen(ids=(1, 2), unknown=("9" * 20,))
    assert find_documents(location, Asked(where="doc_id = '0'")).ids.tolist() == [2]
    with pytest.raises(ConfigError, match="more than 63 bits"):
        Asked(docs=("9" * 20,))


def test_a_row_that_is_there_is_judged_by_the_newest_version_alone(tmp_path: Path) -> None:
    location = make_table(tmp_path, ["a", "b", "c"], score=[5.0, 5.0, 5.0])
    delete(location, Request(ids=(0,)))
    open_dataset(location).update({"score": "1.0"})
    found = find_documents(location, Asked(where="score > 2"))
    assert (found.ids.tolist(), found.last.tolist()) == ([0], [1]), "1 and 2 are there, and satisfy it no more"
    found = find_documents(location, Asked(where="score < 2", docs=("0",)))
    assert (found.ids.tolist(), found.there.tolist()) == ([0, 1, 2], [1, 2])


def test_copies_and_near_copies_are_told_apart(tmp_path: Path, runs: Path) -> None:
    long = " ".join(f"word{i}" for i in range(40))
    location = make_table(tmp_path / "db", [long, "else entirely", f" {long} ", f"{long} more", "cat"])
    found = find_documents(location, Asked(docs=("0",)))
    assert (found.copies, found.unhashed) == ((), 5)
    dedup(location, DedupConfig(), input_pin=newest(location), engine=HERE)
    near_dedup(location, NearDedupConfig(), input_pin=newest(location), engine=HERE)
    found = find_documents(location, Asked(docs=("0",)))
    assert (found.copies, found.num_copies, found.near_copies, found.unhashed) == ((2,), 1, (3,), 0)
    assert find_documents(location, Asked(docs=("0",), with_duplicates=True)).ids.tolist() == [0, 2]
    assert "near duplicates, not the same text: id 3" in receipt_text(receipt(location, str(runs), Asked(docs=("0",))))


def test_deleted_rows_are_answered_for_from_older_versions_and_then_from_records(tmp_path: Path, runs: Path) -> None:
    location, _ = ingested(tmp_path, [*TEXTS, SECRET])
    delete(location, Request(ids=(30,)))
    row = receipt(location, str(runs), Asked(where="text LIKE '%xyzzysecret%'")).rows[0]
    assert (row.id, row.ingested, row.deleted, row.preview) == (30, "ingested-v1", "deleted-v2", None)
    assert receipt(location, str(runs), Asked(docs=("30",)), deleted_text=True).rows[0].preview == SECRET[:160]
    done = take_out(location, runs, "30")
    assert done.erasure is not None and done.erasure.done
    found = receipt(location, str(runs), Asked(docs=("30",)))
    assert (found.rows[0].ingested, found.rows[0].deleted) == ("ingested-v1", "deleted-v2")
    assert (found.num_rows, found.num_there, found.versions, found.rows[0].doc_id) == (1, 0, (), None)
    assert receipt(location, str(runs), Asked(where="text LIKE '%xyzzysecret%'")).num_rows == 0


def test_a_receipt_after_the_deletion_quotes_nothing(location: Location, runs: Path) -> None:
    build_index(location, IndexConfig(), input_pin=curate(location))
    for asked in ({"where": "text LIKE '%xyzzysecret%'"}, {"search": "xyzzysecret"}):
        done = take_out(location, runs, purge=False, **asked)
        assert "xyzzysecret" not in json.dumps(done.to_dict()) + receipt_text(done)
    assert done.request["search"] == "..."


# --- the command, S3 -------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.setenv("PRETRAIN_DATABASE_URI", str(tmp_path / "db"))
    monkeypatch.setenv("PRETRAIN_RUNS_URI", str(runs))
    yield tmp_path


def pretrain(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["receipt", *arguments], input=answer)


def test_the_command(home: Path, location: Location, runs: Path) -> None:
    pin = curate(location)
    protect_run(location, pin, str(start_run(runs, location, pin)))
    build_index(location, IndexConfig(), input_pin=pin)
    shown = pretrain("--doc", str(PLANTED), "--output", str(home / "r.json"), "--ids", str(home / "ids.txt"))
    assert shown.exit_code == 0 and "xyzzysecret" in shown.stdout and (home / "ids.txt").read_text() == f"{PLANTED}\n"
    written = json.loads((home / "r.json").read_text())
    assert written["receipt_digest"] in shown.stdout and written["num_there"] == 1
    assert isinstance(pretrain("--doc", "1", "--purge").exception, ConfigError)
    assert isinstance(pretrain("--search", "xyzzysecret", "--delete").exception, ConfigError)
    assert pretrain("--doc", str(PLANTED), "--delete", answer="n\n").exit_code == 1
    assert len(values(location, "id")) == 31, "nothing was confirmed"
    assert pretrain("--doc", str(PLANTED), "--delete", answer="y\n").exit_code == 0
    again = pretrain("--doc", str(PLANTED), "--delete", "--purge", "--yes", "--json")
    assert again.exit_code == 1, "the run pins a version"
    facts = json.loads(again.stdout)
    assert [one["version"] for one in facts["versions"]] == [pin.version] and facts["erasure"]["deleted"] is None
    shutil.rmtree(runs / "demo-v3-1a2b")
    release(location, "run.demo-v3-1a2b", pinned_by_runs={})
    assert pretrain("--doc", str(PLANTED), "--delete", "--purge", "--yes").exit_code == 0
    assert to_dict(RECIPE)["name"] == "demo" and latest_record(open_dataset(location), "deleted") is not None


def test_history_is_freed_only_of_what_was_asked_for_and_found(home: Path, tmp_path: Path) -> None:
    location, _ = ingested(tmp_path, [*TEXTS[:PLANTED], SECRET])
    append(location, ["more"])
    assert pretrain("--doc", str(PLANTED), "--delete", "--purge", answer="n\n").exit_code == 1
    nothing = pretrain("--where", "text IS NULL", "--delete", "--purge", "--yes")
    assert nothing.exit_code == 1 and "Nothing was deleted and nothing freed" in str(nothing.exception)
    assert _versions(location) == [1, 2]
    assert pretrain("--doc", str(PLANTED), "--delete", "--yes").exit_code == 0
    assert pretrain("--doc", str(PLANTED), "--delete", "--purge", answer="n\n").exit_code == 1
    assert _versions(location) == [1, 2, 3], "asked before history is freed, although no row is deleted any more"
    assert pretrain("--doc", str(PLANTED), "--delete", "--purge", answer="y\n").exit_code == 0
    append(location, ["one"])
    append(location, ["two"])
    before = _versions(location)
    again = pretrain("--doc", str(PLANTED), "--delete", "--purge", "--yes")
    assert again.exit_code == 0 and _versions(location) == before, "nothing holds it"
    assert "nothing to free" in again.stdout and "1 of 1 document: known by id only" in again.stdout
    assert "source files of 1 document that are not listed, or known by id only" in again.stdout
    (Path(location.uri) / "data" / "fill-0123456789abcdef-000000000.lance").write_bytes(_file_with(PLANTED))
    assert pretrain("--doc", str(PLANTED), "--delete", "--purge", "--yes").exit_code == 0
    assert not list(Path(location.uri).glob("data/fill-*")), "a file of no version had it"


def _versions(location: Location) -> list[int]:
    return [int(entry["version"]) for entry in open_dataset(location).versions()]


def _file_with(row: int) -> bytes:
    """A data file with one row, as a killed fill leaves it."""
    with tempfile.TemporaryDirectory() as folder:
        table = pa.table({"id": [row], "input_ids": [[1, 2]]}, schema=_TOKENS)
        lance.write_dataset(table, folder)
        return next(Path(folder).glob("data/*.lance")).read_bytes()


def test_hits_of_a_search_are_not_deleted_unseen(home: Path, location: Location) -> None:
    build_index(location, IndexConfig(), input_pin=curate(location))
    refused = pretrain("--search", "xyzzysecret", "--delete", "--yes")
    assert isinstance(refused.exception, ConfigError) and len(values(location, "id")) == 31, "done twice, others went"


@pytest.mark.slow
def test_on_s3(s3: S3Server, tmp_path: Path) -> None:
    location = Location(database_uri=f"{s3.bucket('receipt')}/db")
    ingested(tmp_path, [*TEXTS[:3], SECRET], location)
    dedup(location, DedupConfig(), input_pin=newest(location), engine=HERE)
    runs = f"{s3.bucket('receipt')}/runs"
    fs, path = filesystem(f"{runs}/demo/sample.txt")
    fs.pipe_file(path, SECRET.encode())
    asked = Asked(docs=("3",))
    documents = find_documents(location, asked)
    found = receipt_of(location, runs, asked, documents)
    assert [one.version for one in found.versions] == [1, 2]
    done = erase(location, runs, documents, found, purge=True, project=runs)
    assert {place: check.found for place, check in holding(done).items()} == {
        "runs and reports": ("demo/sample.txt (plain bytes)",)
    }
    assert done.versions == () and open_dataset(location).count_rows() == 3
