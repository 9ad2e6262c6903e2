"""Search over a pinned version: words, phrases, SQL, vectors, both, and a cross-encoder, with tiny real models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from click.testing import CliRunner

from pretrain_assets.cli import cli
from pretrain_assets.config import DedupConfig, EmbedConfig, EngineConfig, IndexConfig, MaintainConfig
from pretrain_assets.curate.dedup import dedup
from pretrain_assets.curate.embedding import embed
from pretrain_assets.errors import ConfigError, FilterError, ModelError, TableError
from pretrain_assets.forensics.index import build_index, upkeep
from pretrain_assets.forensics.query import parse, preview
from pretrain_assets.forensics.rerank import fuse
from pretrain_assets.forensics.search import find, search
from pretrain_assets.forensics.vectors import encode, has_index, nearest, vector_column
from pretrain_assets.table.delete import Request, delete
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.upkeep.maintain import maintain
from pretrain_assets.table.versions import release_tags, table_id
from pretrain_assets_tests.tables import append, make_table, newest

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


def test_where_means_what_it_meant_at_the_pin(tmp_path: Path) -> None:
    location = make_table(tmp_path, ["king one", "king one", "king two"])
    pin = dedup(location, DedupConfig(), input_pin=newest(location)).pin
    indexed(location)
    assert ids(search(location, "king", pin=pin, where="is_dup")) == [1]
    dataset = open_dataset(location)
    dataset.update({"is_dup": "NOT is_dup"})
    indexed(location)
    release_tags(open_dataset(location), ["indexed-v3"])
    open_dataset(location).cleanup_old_versions(versions=[3], error_if_tagged_old_versions=False)
    for limit in (1, 5):
        assert ids(search(location, "king", pin=pin, where="is_dup", limit=limit)) == [1]


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


def test_a_preview_shows_the_words_where_they_stand() -> None:
    text = "filler " * 100 + "Here the Photosynthesis of carbon\n dioxide is taken up. " + "filler " * 100
    shown = preview(text, parse("photosynthesis carbon dioxide"))
    assert [shown.text[start:stop] for start, stop in shown.matches] == ["Photosynthesis", "carbon", "dioxide"]
    assert shown.text.startswith("... filler") and shown.text.endswith(" ...")
    phrase = preview(text, parse('"carbon dioxide" carbon'))
    assert [phrase.text[start:stop] for start, stop in phrase.matches] == ["carbon dioxide"]
    assert preview("x" * 500, None).text == "x" * 200 + " ..." and preview(None, None).text == ""
