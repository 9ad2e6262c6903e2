"""Search over a pinned version, and what a checkpoint saw, on a small table without any training."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pretrain_assets import recipes
from pretrain_assets.config import DedupConfig, IndexConfig, IngestConfig, TokenizeConfig, override
from pretrain_assets.curate.dedup import dedup
from pretrain_assets.errors import CheckpointError, FilterError, TableError
from pretrain_assets.forensics.checkpoints import Checkpoint, find_checkpoint
from pretrain_assets.forensics.exposure import schedule_of, seen_by
from pretrain_assets.forensics.indexes.index import build_index
from pretrain_assets.forensics.lineage import lineage_of
from pretrain_assets.forensics.retrieval.search import search
from pretrain_assets.ingest.append import ingest
from pretrain_assets.loader.exposure import documents
from pretrain_assets.report.text import lineage_text
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.tokenize.columns import tokenize
from pretrain_assets_tests.tables import append, make_table, newest

WORDS = ("river", "mountain", "harbour", "forest", "meadow", "valley", "island", "desert")
TEXTS = [f"A {WORDS[i % 8]} number {i} stands here alone, and nobody asks why." for i in range(60)]
RECIPE = override(
    recipes.demo(),
    {
        "data.filter": "NOT is_dup AND id % 10 != 0",
        "data.held_out_filter": "NOT is_dup AND id % 10 = 0",
        "data.seq_len": 32,
        "data.num_splits": 4,
        "train.global_batch_tokens": 128,
    },
)


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[Location, Pin]:
    """60 documents, one of them a copy, tokenized by bytes; the pin of the tokenized version."""
    location = make_table(tmp_path, [*TEXTS[:-1], TEXTS[1]])
    dedup(location, DedupConfig(), input_pin=newest(location))
    return location, tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=newest(location)).pin


def test_index_is_one_version_and_then_a_delta(corpus: tuple[Location, Pin]) -> None:
    location, pin = corpus
    first = build_index(location, IndexConfig(), input_pin=pin)
    assert (first.changed, first.record.version, first.record.ledger) == (True, 4, {"in": 60, "indexed": 60})
    again = build_index(location, IndexConfig(), input_pin=pin)
    assert (again.changed, again.pin) == (False, first.pin)
    append(location, ["A volcano, quite new."])
    delta = build_index(location, IndexConfig(), input_pin=newest(location))
    assert (delta.changed, delta.record.rows, delta.record.version) == (True, 1, 6)
    assert delta.record.bytes_added < first.record.bytes_added


def test_an_interrupted_index_run_leaves_a_version_that_the_next_one_adopts(corpus: tuple[Location, Pin]) -> None:
    location, pin = corpus
    built = build_index(location, IndexConfig(), input_pin=pin)
    open_dataset(location).tags.delete(built.record.tag)  # killed between commit and tag
    healed = build_index(location, IndexConfig(), input_pin=pin)
    assert open_dataset(location).tags.list()[healed.record.tag]["version"] == healed.record.version


def test_search_finds_rows_of_the_pinned_version_only(corpus: tuple[Location, Pin]) -> None:
    location, pin = corpus
    with pytest.raises(TableError, match=r"no full-text index.*pretrain index"):
        search(location, "harbour", pin=pin)
    append(location, ["A harbour that the pinned version never had. Harbour, harbour."])
    build_index(location, IndexConfig(), input_pin=newest(location))
    found = {hit.id for hit in search(location, "harbour", pin=pin, limit=50)}
    assert found == {i for i in range(60) if "harbour" in ([*TEXTS[:-1], TEXTS[1]])[i]}
    assert {hit.id for hit in search(location, "harbours", pin=pin, limit=50, where="id > 30")} == {
        i for i in found if i > 30
    }
    assert search(location, "volcano", pin=pin) == []


def test_seen_by_equals_the_plan_step_by_step(corpus: tuple[Location, Pin]) -> None:
    location, pin = corpus
    steps = 5
    seen = seen_by(location, pin=pin, recipe=RECIPE, step=steps, ids=range(60))
    schedule = schedule_of(location, pin, RECIPE)
    first_step: dict[int, int] = {}
    tokens: dict[int, int] = {}
    for step in range(1, steps + 1):
        for span in documents(schedule, step):
            first_step.setdefault(span.doc_id, step)
            tokens[span.doc_id] = tokens.get(span.doc_id, 0) + span.tokens
    assert sum(tokens.values()) == steps * 128
    for i, answer in seen.items():
        assert (answer.first_step, answer.tokens) == (first_step.get(i), tokens.get(i, 0))


def test_seen_by_says_why_not(corpus: tuple[Location, Pin]) -> None:
    location, pin = corpus
    narrow = dataclasses.replace(RECIPE, data=dataclasses.replace(RECIPE.data, filter="NOT is_dup AND id % 10 > 1"))
    seen = seen_by(location, pin=pin, recipe=narrow, step=3, ids=[0, 1, 59, 999])
    assert seen[0].describe() == "not seen: held out for validation"
    assert seen[1].describe() == "not seen: left out by term 2 of the filter, 'id % 10 > 1' (id is 1)"
    assert seen[59].describe() == "not seen: a copy of row 1; left out by term 1 of the filter, 'NOT is_dup'"
    assert seen[999].describe() == "not seen: version 3 has no row 999: nor has the newest one"


def test_an_unknown_checkpoint_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"No complete checkpoint of 'gpt2_124m' .*pretrain train RECIPE"):
        find_checkpoint("gpt2_124m", str(tmp_path))


def test_a_phrase_without_positions_says_how_to_get_them(corpus: tuple[Location, Pin]) -> None:
    location, pin = corpus
    build_index(location, IndexConfig(with_position=False), input_pin=pin)
    with pytest.raises(TableError, match=r"a phrase needs word positions.*--with-position"):
        search(location, '"stands here"', pin=pin)
    assert build_index(location, IndexConfig(), input_pin=pin).record.details["anew"] is True
    assert len(search(location, '"stands here"', pin=pin, limit=100)) == 60
    assert search(location, '"here stands"', pin=pin) == []


def test_where_cannot_reach_past_the_pinned_rows(corpus: tuple[Location, Pin]) -> None:
    location, pin = corpus
    append(location, ["zyzzyva"])
    build_index(location, IndexConfig(), input_pin=newest(location))
    with pytest.raises(FilterError, match="unbalanced parentheses"):
        search(location, "zyzzyva", pin=pin, where="false) OR (true")
    assert search(location, "zyzzyva", pin=pin, where="true OR true") == []


def test_lineage_names_every_ingest_behind_a_checkpoint(corpus: tuple[Location, Pin], tmp_path: Path) -> None:
    source = tmp_path / "more.jsonl"
    source.write_text("".join(f'{{"text": "document {i}"}}\n' for i in range(7)))
    location = Location(database_uri=str(tmp_path / "db"))
    for name in ("synthetic:30", str(source)):
        pin = ingest(location, IngestConfig(sources=(name,))).pin
    pin = dedup(location, DedupConfig(), input_pin=pin).pin
    record = tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=pin).record
    passport = {"pin": str(record.pin), "tag": record.tag, "filter": "true", "tokens_seen": 0, "recipe": {"name": "x"}}
    found = lineage_of(location, Checkpoint(run_dir="r", step=1, passport=passport))
    assert [(r.tag, r.rows, r.inputs) for r in found.ingests] == [
        ("ingested-v1", 30, ("synthetic:30",)),
        ("ingested-v2", 7, (str(source),)),
    ]
    assert "30 rows from synthetic:30  (tag ingested-v1)" in lineage_text(found)
