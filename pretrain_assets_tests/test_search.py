"""Search over a pinned version: words, phrases, SQL, vectors, both, and a cross-encoder, with tiny real models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from click.testing import CliRunner

from pretrain_assets import recipes
from pretrain_assets.cli import cli
from pretrain_assets.config import (
    DedupConfig,
    EmbedConfig,
    EngineConfig,
    IndexConfig,
    TokenizeConfig,
    override,
    to_dict,
)
from pretrain_assets.curate.dedup import dedup
from pretrain_assets.curate.embedding import embed
from pretrain_assets.errors import ConfigError, FilterError, ModelError, TableError
from pretrain_assets.forensics.checkpoints import Checkpoint
from pretrain_assets.forensics.exposure import schedule_of
from pretrain_assets.forensics.indexes.index import build_index
from pretrain_assets.forensics.retrieval.query import parse, preview
from pretrain_assets.forensics.retrieval.rerank import fuse
from pretrain_assets.forensics.retrieval.search import find, search, search_seen
from pretrain_assets.forensics.retrieval.vectors import encode, nearest, vector_column
from pretrain_assets.loader.exposure import documents
from pretrain_assets.report.search_text import hits_text
from pretrain_assets.table.delete import Request, delete
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.versions import release_tags
from pretrain_assets.tokenize.columns import tokenize
from pretrain_assets_tests.tables import append, make_table, newest
from pretrain_assets_tests.test_embedding import save_bert

AXES = {"king": 0, "queen": 0, "throne": 0, "ship": 1, "sailor": 1, "sea": 1, "bread": 2, "oven": 2}
TEXTS = [
    "The king sat upon the throne of France and nobody asked why.",
    "A queen of France, a king in France.",
    "The ship and the sailor sailed the sea to France.",
    "Bread from the oven",
    "To be, or not to be: that is the question.",
    "Nothing that the model knows",
    None,
]


def save_static(folder: Path, seed: int = 0, dims: int = 8) -> str:
    """A model2vec model whose first dimensions are royalty, the sea, the kitchen; other words are nothing."""
    from model2vec import StaticModel

    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0} | {word: at for at, word in enumerate(AXES, 1)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    vectors = np.zeros((len(AXES) + 1, dims), np.float32)
    vectors[1:] = np.random.default_rng(seed).normal(0, 0.05, (len(AXES), dims))
    for at, axis in enumerate(AXES.values(), 1):
        vectors[at, axis] += 1
    StaticModel(vectors, tokenizer, {}).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_static(tmp_path_factory.mktemp("models") / "static")


def filled(location: Location, model: str) -> Pin:
    config = EmbedConfig(model=model, library="model2vec")
    return embed(location, config, input_pin=newest(location), engine=EngineConfig(workers=1)).pin


def indexed(location: Location, **settings: Any) -> Pin:
    return build_index(location, IndexConfig(**settings), input_pin=newest(location)).pin


def ids(hits: list[Any]) -> list[int]:
    return [hit.id for hit in hits]


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[Location, Pin]:
    """Seven documents, indexed; the pin of the version before the index."""
    location = make_table(tmp_path, TEXTS)
    pin = newest(location)
    indexed(location)
    return location, pin


def test_phrases_must_occur_and_words_rank(corpus: tuple[Location, Pin]) -> None:
    location, pin = corpus
    assert ids(search(location, '"throne of france"', pin=pin)) == [0]
    assert ids(search(location, '"king in france" queen', pin=pin)) == [1]
    assert ids(search(location, '"to be or not to be"', pin=pin)) == [4], "of words that nearly every text has"
    assert ids(search(location, '"france of queen"', pin=pin)) == []
    assert set(ids(search(location, "kings FRANCE", pin=pin))) == {0, 1, 2}
    hit = search(location, '"throne of france"', pin=pin)[0]
    assert [hit.preview[start:stop] for start, stop in hit.matches] == ["throne of France"]
    assert (hit.doc_id, hit.source, hit.scores, hit.ranks) == ("doc-0", "test", {"bm25": hit.score}, {"bm25": 1})


def test_what_cannot_be_asked_says_why(corpus: tuple[Location, Pin]) -> None:
    location, pin = corpus
    for query, settings, kind, message in (
        ("", {}, ConfigError, "query is empty"),
        (" ...", {}, ConfigError, "no words"),
        ('the "king', {}, ConfigError, "a quote that is not closed"),
        ("king", {"limit": 0}, ConfigError, "limit=0: give a number from 1 to 10,000"),
        ("king", {"limit": 10_001}, ConfigError, "limit=10001"),
        ("king", {"mode": "fuzzy"}, ConfigError, "use one of text, vector, hybrid"),
        ("king", {"where": "nosuch"}, FilterError, "neither a column nor a named filter"),
        ("king", {"mode": "vector"}, TableError, r"no column embedding: make it with `pretrain embed"),
        ("king", {"like": 3}, TableError, "no column embedding"),
    ):
        with pytest.raises(kind, match=message):
            search(location, query, pin=pin, **settings)


def test_an_index_older_than_the_pin_is_refused(corpus: tuple[Location, Pin]) -> None:
    location, _ = corpus
    pin = append(location, ["A king of later days"])
    with pytest.raises(TableError, match=r"of that version or later.*newest index is indexed-v2.*pretrain index"):
        search(location, "king", pin=pin)
    indexed(location)
    assert 7 in ids(search(location, "king", pin=pin))


def test_sql_alone_lists_rows_in_table_order_and_knows_named_filters(corpus: tuple[Location, Pin]) -> None:
    location, pin = corpus
    found = find(location, "", pin=pin, where="held_out OR id >= 5", limit=2)
    assert (found.mode, ids(found.hits), found.hits[0].scores) == ("sql", [0, 5], {})
    assert ids(search(location, "france", pin=pin, where="training")) == ids(
        search(location, "france", pin=pin, where="id % 100 != 0")
    )


def test_rows_deleted_since_are_searched_in_the_version_before_or_counted(corpus: tuple[Location, Pin]) -> None:
    location, pin = corpus
    before = open_dataset(location).version
    delete(location, Request(ids=(1,)))
    indexed(location)
    found = find(location, "france", pin=pin)
    assert set(ids(found.hits)) == {0, 1, 2} and found.missing == 0 and found.searched == {"bm25": before}
    dataset = open_dataset(location)
    release_tags(dataset, [f"indexed-v{before}"])
    dataset.cleanup_old_versions(versions=[before], error_if_tagged_old_versions=False)
    found = find(location, "france", pin=pin)
    assert set(ids(found.hits)) == {0, 2} and found.missing == 1
    assert "1 row of version 1 cannot be searched" in found.notes[0]


def test_rows_that_the_judge_of_a_predicate_lost_are_counted(corpus: tuple[Location, Pin]) -> None:
    location, pin = corpus
    delete(location, Request(ids=(1,)))
    made = dedup(location, DedupConfig(), input_pin=newest(location)).pin.version
    for query in ("", "france"):
        found = find(location, query, pin=pin, where="(is_dup OR NOT is_dup) AND id < 3")
        assert set(ids(found.hits)) == {0, 2} and found.missing == 1
        assert found.notes == [
            f"1 row of version 1 cannot be searched: deleted since, before version {made}, which is asked."
        ]
    assert find(location, "", pin=pin, where="id < 3").missing == 0, "the pinned version judges, and has all rows"


def test_what_steers_a_terminal_is_shown_and_a_source_takes_one_line(tmp_path: Path) -> None:
    location = make_table(tmp_path, ["Rise \x1b]0;pwned\x07 \u202eking"], source=["a\nb\x1b[2J" + "c" * 3_000])
    pin = newest(location)
    indexed(location)
    text = hits_text(search(location, "king pwned", pin=pin), mark=True)
    assert "\\x1b]0;\x1b[1mpwned\x1b[0m" in text and "\\u202e\x1b[1mking\x1b[0m" in text
    assert text.count("\x1b") == 4 and not set("\x07\u202e") & set(text)
    head = text.splitlines()[0]
    assert head.startswith("1. id 0 (a b\\x1b[2Jcc") and "c...c" in head and len(head) < 120


def test_where_means_what_it_meant_at_the_pin(tmp_path: Path) -> None:
    location = make_table(tmp_path, ["king one", "king", "king two"], score=[0.1, 0.9, 0.2])
    pin = newest(location)
    indexed(location)
    assert ids(search(location, "king", pin=pin, where="score > 0.5")) == [1]
    open_dataset(location).update({"score": "1 - score"})
    indexed(location)
    release_tags(open_dataset(location), ["indexed-v2"])
    open_dataset(location).cleanup_old_versions(versions=[2], error_if_tagged_old_versions=False)
    for limit in (1, 5):
        assert ids(search(location, "king", pin=pin, where="score < 0.5", limit=limit)) == [0, 2][:limit]


def test_vectors_of_later_versions_answer_for_the_pinned_rows(corpus: tuple[Location, Pin], static: str) -> None:
    location, pin = corpus
    append(location, ["king queen throne"])
    filled(location, static)
    found = find(location, "throne", pin=pin, mode="vector", model=static, limit=10)
    assert found.mode == "vector" and found.hits[0].id in (0, 1) and 7 not in ids(found.hits)
    assert not {4, 5, 6} & set(ids(found.hits)), "a vector that points nowhere is near to nothing"
    assert [hit.score for hit in found.hits] == sorted((hit.score for hit in found.hits), reverse=True)
    alike = find(location, "", pin=pin, mode="vector", like=0)
    assert alike.hits[0].id == 1 and 0 not in ids(alike.hits) and alike.hits[0].score > 0.9
    with pytest.raises(TableError, match="Document 5 has no vector"):
        search(location, "", pin=pin, like=5)
    with pytest.raises(TableError, match="There is no document 99"):
        search(location, "", pin=pin, like=99)


def test_rows_without_vectors_are_counted(corpus: tuple[Location, Pin], static: str) -> None:
    location, _ = corpus
    filled(location, static)
    pin = append(location, ["king queen throne", "queen"])
    found = find(location, "throne", pin=pin, mode="vector", model=static)
    assert not {7, 8} & set(ids(found.hits)) and found.without_vectors == 2
    assert "2 rows of version 4 have no vector yet: `pretrain embed` makes them." in found.notes
    filled(location, static)
    found = find(location, "throne", pin=pin, mode="vector", model=static)
    assert 7 in ids(found.hits) and found.notes == [] and found.searched == {"cosine": 5}


def test_hybrid_fuses_ranks(corpus: tuple[Location, Pin], static: str) -> None:
    location, pin = corpus
    filled(location, static)
    hits = search(location, "queen sea", pin=pin, mode="hybrid", model=static, limit=10)
    assert {"bm25", "cosine", "rrf"} == set(hits[0].scores)
    for hit in hits:
        due = sum(1 / (60 + hit.ranks[kind]) for kind in ("bm25", "cosine") if kind in hit.ranks)
        assert hit.score == hit.scores["rrf"] == pytest.approx(due)
    assert fuse({"a": [1, 2], "b": [2, 3]})[0][0] == 2


def test_a_model_that_is_another_or_not_there_is_refused(tmp_path: Path, static: str) -> None:
    location = make_table(tmp_path / "db", TEXTS)
    filled(location, static)
    column = vector_column(open_dataset(location))
    assert (column.model, column.dims) == ("static", 8)
    with pytest.raises(ModelError, match=r"made by static, which is not found here.*--model FOLDER"):
        encode(column, ["king"])
    with pytest.raises(ModelError, match="their vectors cannot be compared"):
        encode(column, ["king"], model=save_static(tmp_path / "other", seed=1))
    vectors = encode(column, ["king", "", "nothing"], model=static)
    assert vectors.shape == (3, 8) and np.linalg.norm(vectors, axis=1) == pytest.approx([1, 0, 0], abs=1e-3)
    assert (nearest(open_dataset(location), column, vectors[1:], limit=2).ids == -1).all()
    with pytest.raises(ModelError, match="Nothing says which model"):
        encode(replace(column, parameters={}), ["king"])


@pytest.mark.slow
def test_a_cross_encoder_orders_the_best_anew(corpus: tuple[Location, Pin], tmp_path: Path) -> None:
    location, pin = corpus
    model = save_bert(tmp_path / "graded", "BertForSequenceClassification", num_labels=1)
    three = save_bert(tmp_path / "three", "BertForSequenceClassification", num_labels=3)
    plain = search(location, "king queen", pin=pin)
    hits = search(location, "king queen", pin=pin, rerank=model)
    assert set(ids(hits)) == set(ids(plain)) and len({hit.score for hit in hits}) > 1
    assert [hit.score for hit in hits] == sorted((hit.scores["reranker"] for hit in hits), reverse=True)
    assert {hit.id: hit.scores["bm25"] for hit in hits} == {hit.id: hit.score for hit in plain}
    with pytest.raises(ModelError, match="3 outputs; reranking takes a cross-encoder with one"):
        search(location, "king", pin=pin, rerank=three)
    with pytest.raises(ModelError, match="No model /nowhere"):
        search(location, "king", pin=pin, rerank="/nowhere")


def test_the_verb_searches_a_table_without_runs(corpus: tuple[Location, Pin], tmp_path: Path) -> None:
    location, pin = corpus
    options = ["--database", location.database_uri, "--runs", str(tmp_path / "none"), "search"]

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(cli, [*options, *arguments], catch_exceptions=True)

    answer = json.loads(run("queen", "--version", "1", "--json").stdout)
    assert (answer["checkpoint"], answer["pin"], answer["hits"][0]["id"]) == (None, str(pin), 1)
    assert answer["hits"][0]["seen"] is None and answer["searched"] == {"bm25": 2}
    shown = run("queen", "--tag", "indexed-v2").stdout
    assert shown.startswith(f"{pin.table_id}@2\n1. id 1 (test), score") and "A queen of France" in shown
    assert run("--where", "id = 3", "--version", "v1").stdout.endswith("\n1. id 3 (test)\n   Bread from the oven\n")
    assert "names its version itself" in str(run("king", "--version", "1", "--checkpoint", "demo").exception)
    assert "No complete checkpoint" in str(run("king").exception)


def test_hits_say_when_the_run_comes_to_them(tmp_path: Path) -> None:
    location = make_table(tmp_path, [f"meadow number {at}" for at in range(60)])
    config, engine = TokenizeConfig(tokenizer="byte"), EngineConfig(workers=1)
    pin = tokenize(location, config, input_pin=newest(location), engine=engine).pin
    indexed(location)
    changes = {"data.seq_len": 32, "data.num_splits": 4, "train.global_batch_tokens": 128, "train.max_steps": 6}
    recipe = override(recipes.demo(), {**changes, "data.filter": "id > 5", "data.held_out_filter": "id <= 5"})
    passport = {"pin": str(pin), "recipe": to_dict(recipe)}
    checkpoint = Checkpoint(run_dir="r", step=3, passport=passport)
    hits = search_seen(location, "meadow", checkpoint=checkpoint, limit=60)
    schedule = schedule_of(location, pin, recipe)
    steps: dict[int, list[int]] = {hit.id: [] for hit in hits}
    for step in range(1, 7):
        for span in documents(schedule, step):
            steps[span.doc_id].append(step)
    for hit in hits:
        assert hit.seen is not None
        assert hit.seen.first_step == next((step for step in steps[hit.id] if step <= 3), None)
        assert hit.next_step == next((step for step in steps[hit.id] if step > 3), None)
    coming = [hit for hit in hits if hit.next_step]
    assert coming and f"the run comes to it at step {coming[0].next_step}" in hits_text(coming)
    plain, marked = hits_text(hits[:1]), hits_text(hits[:1], mark=True)
    assert "\x1b[1mmeadow\x1b[0m number" in marked and "\x1b" not in plain


def test_a_preview_shows_the_words_where_they_stand() -> None:
    text = "filler " * 100 + "Here the Photosynthesis of carbon\n dioxide is taken up. " + "filler " * 100
    shown = preview(text, parse("photosynthesis carbon dioxide"))
    assert [shown.text[start:stop] for start, stop in shown.matches] == ["Photosynthesis", "carbon", "dioxide"]
    assert shown.text.startswith("... filler") and shown.text.endswith(" ...")
    phrase = preview(text, parse('"carbon dioxide" carbon'))
    assert [phrase.text[start:stop] for start, stop in phrase.matches] == ["carbon dioxide"]
    assert preview("x" * 500, None).text == "x" * 200 + " ..." and preview(None, None).text == ""
