"""Attribution: runs of tokens found exactly, documents planted 1, 4 and 16 times, and influence as it is measured."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from pretrain_assets import recipes
from pretrain_assets.cli import cli
from pretrain_assets.config import (
    EmbedConfig,
    IndexConfig,
    MixtureComponent,
    ModelConfig,
    Recipe,
    TokenizeConfig,
    override,
    to_dict,
)
from pretrain_assets.curate.embedding import embed
from pretrain_assets.errors import ConfigError, ModelError, TableError
from pretrain_assets.forensics.attribution.attribution import attribute
from pretrain_assets.forensics.attribution.automaton import BREAK, automaton, longest_runs, places_of, read
from pretrain_assets.forensics.attribution.influence import influences
from pretrain_assets.forensics.attribution.passage import passage_of, passages_of
from pretrain_assets.forensics.attribution.verbatim import Run, reading, resolved, rows_with
from pretrain_assets.forensics.checkpoints import Checkpoint
from pretrain_assets.forensics.indexes.index import build_index
from pretrain_assets.launch.contract import write_spec
from pretrain_assets.loader.stream import BlockLoader
from pretrain_assets.report.attribution_text import attribution_text
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location
from pretrain_assets.table.versions import identified
from pretrain_assets.tokenize import load_tokenizer
from pretrain_assets.tokenize.columns import tokenize
from pretrain_assets.train.model import GPT
from pretrain_assets.train.run import run
from pretrain_assets_tests.loader_tables import emitted
from pretrain_assets_tests.runs import TOKENIZER, passport_of, spec_in
from pretrain_assets_tests.tables import make_table, newest

SECRET = "The seventh heron sleeps above the granary, and its keeper counts nine blue lanterns before the ferry leaves."
CONTINUATION = SECRET[25:95]
FILLER = [
    f"Entry {i}: nothing worth a second look happened at station {i * 7}, said clerk {i * 13}." for i in range(40)
]
RECIPE = override(
    recipes.demo(),
    {
        "data.filter": "id % 10 != 9",
        "data.held_out_filter": "id % 10 = 9",
        "data.seq_len": 32,
        "data.num_splits": 2,
        "train.global_batch_tokens": 64,
    },
)


# --- the kernel ---------------------------------------------------------------------------------------------------


def runs_naively(text: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """For every place of the text, the longest run from there on that stands in the tokens."""
    stand = {tuple(tokens[a:b]) for a in range(len(tokens)) for b in range(a + 1, len(tokens) + 1)}
    return [
        max((n for n in range(len(text) - at + 1) if tuple(text[at : at + n]) in stand), default=0)
        for at in range(len(text))
    ]


def maximal(lengths: Sequence[int], least: int) -> list[tuple[int, int]]:
    """Those that are long enough and not inside the one before."""
    before = [0, *lengths]
    return [(at, n) for at, n in enumerate(lengths) if n >= least and before[at] != n + 1]


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(1, 5), st.integers(1, 4))
def test_runs_are_those_of_a_naive_search(data: st.DataObject, kinds: int, least: int) -> None:
    text = data.draw(st.lists(st.integers(0, kinds - 1), min_size=1, max_size=14))
    documents = data.draw(st.lists(st.lists(st.integers(0, kinds), max_size=14), max_size=4))
    made = automaton(text)

    chained = np.array([token for document in documents for token in (*document, BREAK)], np.int32)
    found = longest_runs(made, chained, least)
    best = [max(lengths) for lengths in zip([0] * len(text), *(runs_naively(text, d) for d in documents), strict=True)]
    assert [(start, tokens) for start, tokens, _ in found.tolist()] == maximal(best, least)
    for start, tokens, place in found.tolist():
        assert chained[place : place + tokens].tolist() == text[start : start + tokens]

    counts = np.zeros(made.num_symbols, np.int64)
    flat = np.array([token for document in documents for token in document], np.int32)
    offsets = np.cumsum([0, *map(len, documents)])
    shared = [(d, text[end + 1 - tokens : end + 1]) for d, end, tokens in read(made, counts, flat, offsets, least)]
    assert shared == [
        (d, document[at : at + tokens])
        for d, document in enumerate(documents)
        for at, tokens in maximal(runs_naively(document, text), least)
    ]
    assert counts.tolist() == [int((flat == token).sum()) for token in sorted({*text})]
    part = data.draw(st.lists(st.integers(0, kinds - 1), min_size=1, max_size=4))
    naively = [at for at in range(len(flat) + 1 - len(part)) if flat[at : at + len(part)].tolist() == part]
    assert places_of(flat, np.array(part, np.int32)).tolist() == naively


def test_a_letter_repeated_a_million_times_takes_no_longer_than_other_tokens() -> None:
    letters = np.full(1_000_000, 87, np.int32)
    assert np.array_equal(places_of(letters, letters[:300]), np.arange(999_701))
    one = reading(passage_of(load_tokenizer("byte"), "W" * 5_000, letters[:5_000]), least=32)
    parts = resolved(one, [Run(start, 500) for start in range(4_501)])  # all equally rare: the first one, what is left
    assert parts == [Run(0, 500), *(Run(start, 32) for start in range(500, 4_969, 32))]


# --- documents planted in training text ---------------------------------------------------------------------------


def corpus(folder: Path, texts: Sequence[str | None]) -> tuple[Location, Pin]:
    """A table of these texts, tokenized by bytes and indexed."""
    location = make_table(folder, texts)
    pin = tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=newest(location)).pin
    build_index(location, IndexConfig(), input_pin=pin)
    return location, pin


def checkpoint(pin: Pin, step: int, recipe: Recipe = RECIPE, tokenizer: str = "byte") -> Checkpoint:
    """What a run on that version would leave, without its weights."""
    identity = to_dict(load_tokenizer(tokenizer).identity)
    return Checkpoint(
        run_dir="r", step=step, passport=passport_of(step, recipe) | {"pin": str(pin), "tokenizer": identity}
    )


def planted(times: int) -> list[str]:
    """Filler, and the secret in so many rows between it, none of them held out."""
    texts, places = list(FILLER), [at for at in range(40) if at % 10 != 9][:: 36 // times][:times]
    for at in places:
        texts[at] = f"{texts[at]} {SECRET}"
    return texts


def trained_on(location: Location, pin: Pin, recipe: Recipe, words: str) -> Iterator[int]:
    """After each step of one epoch, how often the words have stood in the loader's own blocks, split by split."""
    loader = BlockLoader(location, pin, recipe.data, load_tokenizer("byte").identity)
    blocks, _ = emitted(loader, 0)
    for step in range(1, len(blocks) // recipe.cycles_per_step + 1):
        seen = blocks[: step * recipe.cycles_per_step]
        streams = (
            bytes(min(token, 255) for token in seen[:, split].flatten().tolist()) for split in range(seen.shape[1])
        )
        yield sum(stream.count(words.encode()) for stream in streams)


@pytest.mark.parametrize("times", [1, 4, 16])
def test_a_document_planted_so_often_is_the_first_and_its_exposures_are_right(tmp_path: Path, times: int) -> None:
    location, pin = corpus(tmp_path, planted(times))
    truth = list(trained_on(location, pin, RECIPE, CONTINUATION))
    assert truth[-1] >= times - 1  # all of them, but one at the end of a split may be cut
    for step in {1, len(truth) // 2, len(truth)}:
        found = attribute(location, checkpoint(pin, step), text=CONTINUATION)
        first = found.sources[0]
        assert SECRET in planted(times)[first.id] and first.covered_tokens == len(CONTINUATION)
        spans = found.spans or found.unseen_spans
        assert (spans[0].text, spans[0].rows, len(spans[0].ids)) == (CONTINUATION, times, times)
        assert sum(span.times_seen for span in found.spans if span.text == CONTINUATION) == truth[step - 1]
        if truth[step - 1]:
            assert truth.index(next(filter(None, truth))) + 1 == found.spans[0].first_step
            assert found.verdict.startswith("Verbatim: 70 of 70 tokens stand word for word in what")


def test_planted_within_one_text_it_is_seen_at_every_place(tmp_path: Path) -> None:
    location, pin = corpus(tmp_path, [*FILLER, " / ".join([SECRET] * 16)])
    truth = list(trained_on(location, pin, RECIPE, CONTINUATION))
    assert truth[-1] > 10
    for times in (1, 7, truth[-1]):  # while it is being read, and after
        step = truth.index(times) + 1
        source = attribute(location, checkpoint(pin, step), text=CONTINUATION).sources[0]
        assert (source.id, source.matches[0].occurrences, source.matches[0].times_seen) == (40, 16, times)


def test_what_a_mixture_repeats_counts_each_time(tmp_path: Path) -> None:
    location, pin = corpus(tmp_path, planted(1))
    parts = (
        MixtureComponent(name="secret", predicate="id = 0", weight=0.5),
        MixtureComponent(name="rest", predicate="id != 0", weight=0.5),
    )
    recipe = dataclasses.replace(RECIPE, data=dataclasses.replace(RECIPE.data, mixture=parts))
    truth = list(trained_on(location, pin, recipe, CONTINUATION))
    found = attribute(location, checkpoint(pin, len(truth), recipe), text=CONTINUATION)
    assert found.sources[0].id == 0
    assert found.sources[0].matches[0].times_seen == found.spans[0].times_seen == truth[-1] > 5


def test_what_was_not_trained_on_is_no_source_and_says_why(tmp_path: Path) -> None:
    texts = list(FILLER)
    texts[19] = SECRET  # held out
    location, pin = corpus(tmp_path, texts)
    found = attribute(location, checkpoint(pin, 20), text=f"{CONTINUATION}|{FILLER[3][10:60]}")
    assert (found.covered_tokens, found.covered_unseen_tokens) == (50, 70)
    assert [span.text for span in found.unseen_spans] == [CONTINUATION] and found.unseen_spans[0].times_seen == 0
    by_id = {source.id: source for source in found.sources}
    assert by_id[19].matches[0].first_step is None and by_id[3].matches[0].times_seen == 1
    assert "Further 70 tokens stand word for word only where it was not trained on" in found.verdict
    assert "document 19 (test) (not seen: held out for validation)" in found.verdict
    nothing = attribute(location, checkpoint(pin, 20), text="The clerk of station seven said nothing at all of herons.")
    assert (
        not nothing.spans
        and nothing.verdict.startswith("No verbatim source")
        and "Nearest otherwise" in nothing.verdict
    )
    assert "«" not in attribution_text(nothing) and "«" in attribution_text(found)
    assert json.loads(json.dumps(dataclasses.asdict(nothing)))["exact"] is True


def test_without_index_all_rows_are_read_and_with_candidates_alone_only_those(tmp_path: Path) -> None:
    location = make_table(tmp_path, [*planted(4), None])
    pin = tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=newest(location)).pin
    bare = attribute(location, checkpoint(pin, 9), text=CONTINUATION)
    assert bare.spans[0].rows == 4 and bare.sources[0].bm25 is None and "pretrain index" in bare.notes[0]
    with pytest.raises(TableError, match=r"no candidates to read: .*pretrain index.* --exact reads all"):
        attribute(location, checkpoint(pin, 9), text=CONTINUATION, exact=False)
    build_index(location, IndexConfig(), input_pin=pin)
    some = attribute(location, checkpoint(pin, 9), text=CONTINUATION, exact=False)
    assert (some.rows_in_version, some.rows_read, some.candidates_by_words) == (41, 4, 4)
    assert some.spans[0].rows == 4 and "--exact reads all" in some.verdict


def test_what_more_rows_hold_than_are_kept_is_judged_by_those_trained_on(tmp_path: Path) -> None:
    texts = [f"{SECRET} {i}" for i in range(76)] + [f"{SECRET} {'and so on ' * 9}{i}" for i in range(4)]
    location, pin = corpus(tmp_path, texts)
    recipe = override(RECIPE, {"data.filter": "id >= 76", "data.held_out_filter": "id < 0"})
    truth = list(trained_on(location, pin, recipe, SECRET))
    assert truth[-1] == 4
    for step in (1, truth.index(2) + 1, len(truth)):  # none, those that are being read, and all
        found = attribute(location, checkpoint(pin, step, recipe), text=SECRET)
        spans = found.spans or found.unseen_spans
        if not truth[step - 1]:
            assert not any(span.text == SECRET for span in found.spans)
            continue
        assert (spans[0].text, spans[0].rows, spans[0].times_seen) == (SECRET, 80, truth[step - 1])
        assert found.covered_unseen_tokens == 0 and found.sources[0].id >= 76
        assert spans[0].first_step == truth.index(next(filter(None, truth))) + 1
        assert "in the 68 of them that were looked at" in found.verdict or step < len(truth)


def test_rows_that_hold_a_run_inside_longer_ones_are_counted_as_far_as_they_are_known() -> None:
    codec = load_tokenizer("byte")
    one = reading(passage_of(codec, SECRET, codec.encode_batch([SECRET])[0]), least=32)
    tokens, offsets = codec.encode_batch([SECRET[:50]] * 70 + [SECRET])
    one.add(np.arange(71), tokens, offsets, np.array([0] * 69 + [51, 45], np.int32))
    short, whole = rows_with(one, Run(0, 50)), rows_with(one, Run(0, len(SECRET)))
    assert (short.count, short.at_least, short.ids[0], short.seen) == (70, True, 69, [69])
    assert (whole.count, whole.at_least, whole.ids, whole.seen) == (1, False, [70], [])
    assert rows_with(one, Run(0, 40)).seen == [69, 70]


@pytest.mark.slow
def test_vectors_bring_candidates_that_share_no_word(tmp_path: Path) -> None:
    from model2vec import StaticModel

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "heron": 1, "stork": 2, "clerk": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model = str(tmp_path / "model")
    StaticModel(np.array([[0, 0], [1, 0], [1, 0.1], [0, 1]], np.float32), tokenizer, {}).save_pretrained(model)
    location, pin = corpus(tmp_path / "db", [*FILLER, "One stork, and no more."])
    embed(location, EmbedConfig(model=model, library="model2vec"), input_pin=pin)  # in a later version
    found = attribute(location, checkpoint(pin, 20), text="heron", model=model, exact=False)
    by_id = {source.id: source for source in found.sources}
    assert by_id[40].cosine == pytest.approx(0.995, abs=0.001) and by_id[40].bm25 is None
    assert (found.candidates_by_words, found.candidates_by_vectors) == (0, 20)
    with pytest.raises(ModelError, match="No model"):
        attribute(location, checkpoint(pin, 20), text="a heron", model=str(tmp_path / "none"))


def test_a_text_from_the_middle_of_another_has_its_first_word_found_too(tmp_path: Path) -> None:
    values, offsets = load_tokenizer("gpt2").encode_batch(planted(1))
    ids = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))
    rows = {"id": pa.array(range(40), pa.int64()), "text": planted(1), "input_ids": ids}
    table = pa.table(rows | {"n_tokens": pa.array(np.diff(offsets), pa.int32())})
    lance.write_dataset(table.cast(identified(table.schema, "t")), f"{tmp_path}/corpus.lance")
    for text in (SECRET, SECRET[4:], f" {SECRET[4:]}"):
        found = attribute(
            Location(database_uri=str(tmp_path)), checkpoint(Pin("t", 1), 20, tokenizer="gpt2"), text=text
        )
        assert [span.characters for span in found.spans] == [(0, len(text))]
        match = found.sources[0].matches[0]
        assert match.document_characters is not None and found.sources[0].source is None
        assert planted(1)[0][slice(*match.document_characters)].strip() == text.strip()


def test_white_space_alone_is_no_run(tmp_path: Path) -> None:
    verses = [f"Verse {i}\n{' ' * 60}indented" for i in range(20)]
    location, pin = corpus(tmp_path, verses)
    found = attribute(location, checkpoint(pin, 9), text=f"{' ' * 50}\n{' ' * 50}")
    assert not found.spans and not found.unseen_spans


@pytest.mark.parametrize(("text", "words"), [("", "the text is empty"), ("ab", "Too short: the text has 2 tokens")])
def test_too_little_text(tmp_path: Path, text: str, words: str) -> None:
    location, pin = corpus(tmp_path, FILLER[:10])
    if text:
        assert attribute(location, checkpoint(pin, 1), text=text).verdict.startswith(words)
        return
    with pytest.raises(ConfigError, match=words):
        attribute(location, checkpoint(pin, 1), text=text)


def test_characters_of_tokens() -> None:
    codec = load_tokenizer("gpt2")
    text = "naïve 💩 façade"
    as_it_is, spaced = passages_of(codec, text)
    for passage in (as_it_is, spaced):
        assert passage.characters is not None
        assert (passage.characters[0], passage.characters[-1]) == (0, len(text))
        assert (np.diff(passage.characters) >= 0).all()
    assert spaced.ids[0] != as_it_is.ids[0]


# --- influence ----------------------------------------------------------------------------------------------------


def test_influence_to_first_order_is_what_a_small_step_does() -> None:
    model = GPT(ModelConfig(n_layer=2, n_head=2, n_embd=32), TOKENIZER, 32)
    model.init_weights(0)
    rng = np.random.default_rng(0)
    text, other = rng.integers(0, 299, 20).tolist(), rng.integers(0, 299, 70).tolist()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    documents = [[299, *text, 299], [299, *other, *text, 299], [299, *other, 299]]
    found = influences(model, text, documents, context=[299], learning_rate=1e-3)
    assert found[0].measured < found[1].measured < 0
    assert [one.document_tokens for one in found] == [21, 91, 71]
    for one in found:
        assert one.measured == pytest.approx(one.first_order, rel=0.01, abs=1e-6)
    ids = torch.tensor([[299, *text]])
    assert found[0].loss == pytest.approx(float(model(ids, reduction="sum").detach()) / 20, rel=1e-5)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


# --- the verb -----------------------------------------------------------------------------------------------------


def test_the_verb_wants_one_text(tmp_path: Path) -> None:
    for arguments in ([], ["--text", "a", "--prompt", "b"]):
        result = CliRunner().invoke(cli, ["--runs", str(tmp_path), "attribute", *arguments])
        assert isinstance(result.exception, ConfigError) and "Give one text: --text" in str(result.exception)


@pytest.fixture(scope="module")
def memorised(tmp_path_factory: pytest.TempPathFactory) -> tuple[Location, str]:
    """A table with the secret in 16 rows, and the folder of a run that has learned it by heart."""
    folder = tmp_path_factory.mktemp("memorised")
    location, pin = corpus(folder / "db", planted(16))
    changes = {
        "data__filter": RECIPE.data.filter,
        "data__held_out_filter": RECIPE.data.held_out_filter,
        "data__seq_len": 64,
        "model__n_layer": 2,
        "model__n_embd": 64,
        "train__global_batch_tokens": 8 * 64,
        "train__learning_rate": 5e-3,
        "train__warmup_steps": 20,
        "train__max_steps": 400,
        "train__eval_every": 400,
        "execution__checkpoint_every": 400,
    }
    spec = spec_in(
        location.database_uri,
        f"{folder}/runs/tiny-v2-test",
        pin=str(pin),
        tokenizer=load_tokenizer("byte").identity,
        **changes,
    )
    write_spec(spec)
    assert run(spec) == 0
    return location, spec.run_dir


@pytest.mark.slow
def test_what_a_model_has_learned_by_heart_is_attributed_to_its_source(memorised: tuple[Location, str]) -> None:
    location, run_dir = memorised
    common = ["--database", location.database_uri, "--runs", str(Path(run_dir).parent), "attribute", run_dir]
    asked = ["--prompt", SECRET[:20], "--tokens", "80", "--temperature", "0"]
    influence = ["--influence", "1", "--learning-rate", "1e-4"]
    done = CliRunner().invoke(cli, [*common, *asked, *influence, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["text"] == SECRET[20:100] and found["prompt"] == SECRET[:20]
    assert found["verdict"].startswith("Verbatim: 80 of 80 tokens stand word for word")
    first, span = found["sources"][0], found["spans"][0]
    assert first["matches"][0]["text"] == found["text"] and SECRET in planted(16)[first["id"]]
    assert (span["rows"], len(span["ids"])) == (16, 16) and span["times_seen"] > 15 * 40  # some fifty epochs
    step = first["influence"]
    assert step["measured"] == pytest.approx(step["first_order"], rel=0.1, abs=1e-6)
    told = CliRunner().invoke(cli, [*common, *asked, "--with-prompt"], catch_exceptions=False).stdout
    assert "Verbatim: 100 of 100 tokens" in told.replace("\n", " ") and f"«{SECRET[:100]}»" in told
