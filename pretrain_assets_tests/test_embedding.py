"""Embeddings and scores by small real models, made here, saved to a folder and loaded by the code that loads any."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tokenizers

from pretrain_assets.cli import cli
from pretrain_assets.config import EmbedConfig, EngineConfig, MaskConfig, ModelScoreConfig
from pretrain_assets.curate import document_models, embedding, model_scores
from pretrain_assets.curate.embedding import embed, unit_vectors
from pretrain_assets.curate.masking import mask
from pretrain_assets.curate.model_scores import score, score_bins
from pretrain_assets.errors import ConfigError, ModelError, TableError
from pretrain_assets.table.lineage import StageResult
from pretrain_assets.table.schema import making_parameters
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets_tests.tables import append, make_table, newest, values

WORDS = [
    "the",
    "king",
    "queen",
    "crown",
    "sat",
    "on",
    "throne",
    "ship",
    "sailor",
    "sea",
    "wind",
    "bread",
    "oven",
    "was",
    "and",
]
TEXTS = [
    "the king sat on the throne",
    "the queen and the crown",
    "ship and sailor",
    None,
    "the wind on the sea",
    " \n",
    "",
]
AXES = {
    "king": 0,
    "queen": 0,
    "crown": 0,
    "throne": 0,
    "ship": 1,
    "sailor": 1,
    "sea": 1,
    "wind": 1,
    "bread": 2,
    "oven": 2,
}


def word_tokenizer() -> tokenizers.Tokenizer:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: at for at, word in enumerate([*special, *WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def save_bert(folder: Path, kind: str, **settings: Any) -> str:
    """A random BERT of one layer, the same each time."""
    import torch
    import transformers

    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=4 + len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=24,
        hidden_dropout_prob=0.5,  # nothing may depend on it: models are read in evaluation mode
        initializer_range=0.6,
        **settings,
    )
    getattr(transformers, kind)(config).save_pretrained(folder)
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(), model_max_length=24, **names
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model2vec model of three dimensions: royalty, the sea, the kitchen; other words are nothing."""
    from model2vec import StaticModel

    folder = tmp_path_factory.mktemp("models") / "static"
    tokenizer = word_tokenizer()
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    vectors = np.zeros((len(tokens), 3), np.float32)
    for at, token in enumerate(tokens):
        if token in AXES:
            vectors[at, AXES[token]] = 2.0
    StaticModel(vectors, tokenizer, {}).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with one output, as FineWeb-Edu's classifier."""
    folder = tmp_path_factory.mktemp("models") / "graded"
    return save_bert(folder, "BertForSequenceClassification", num_labels=1)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with three labels, of which one is right."""
    labels = {"bad": 0, "fair": 1, "good": 2}
    named = {"label2id": labels, "id2label": {at: label for label, at in labels.items()}}
    folder = tmp_path_factory.mktemp("models") / "labelled"
    return save_bert(folder, "BertForSequenceClassification", **named)


def run(location: Location, model: str, **settings: Any) -> StageResult:
    settings = {"library": "model2vec", **settings}
    return embed(location, EmbedConfig(model=model, **settings), input_pin=newest(location))


def run_score(location: Location, model: str, name: str = "edu", **settings: Any) -> StageResult:
    return score(location, ModelScoreConfig(name=name, model=model, **settings), input_pin=newest(location))


def vectors_of(location: Location) -> Any:
    return np.array(values(location, "embedding"), np.float64)


# --- static vectors ----------------------------------------------------------------------------------------------


def test_static_vectors_have_length_one_and_sensible_neighbours(tmp_path: Path, static: str) -> None:
    location = make_table(tmp_path, TEXTS)
    result = run(location, static)
    found = vectors_of(location)
    assert open_dataset(location).schema.field("embedding").type == pa.list_(pa.float16(), 3)
    assert found.tolist() == [[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert values(location, "embedding")[3] == [0, 0, 0], "NULL has the zero vector, and no NULL"
    assert result.record.ledger == {"in": 7, "embedded": 5, "empty": 2}
    finding = unit_vectors(open_dataset(location))
    assert (finding.passed, finding.details) == (True, {"zero": 3})


def test_a_mixed_text_lies_between_and_has_length_one(tmp_path: Path, static: str) -> None:
    location = make_table(tmp_path, ["king ship", "king king ship", "unknown words only"])
    run(location, static, dtype="float32")
    found = vectors_of(location)
    assert open_dataset(location).schema.field("embedding").type == pa.list_(pa.float32(), 3)
    np.testing.assert_allclose(found[:2], [[0.5**0.5, 0.5**0.5, 0], [0.8**0.5, 0.2**0.5, 0]], atol=1e-6)
    assert found[2].tolist() == [0, 0, 0]


def test_the_metadata_names_the_model_and_no_path(tmp_path: Path, static: str) -> None:
    location = make_table(tmp_path / "db", TEXTS)
    record = run(location, static).record
    making = making_parameters(open_dataset(location).schema.field("embedding"))
    assert making == record.parameters
    fingerprint = document_models.find_model(static).fingerprint
    assert making == {
        "model": "static",
        "fingerprint": fingerprint,
        "library": "model2vec",
        "dims": 3,
        "max_tokens": 512,
        "precision": "float32",
        "normalised": True,
    }
    assert str(Path(static).parent) not in record.to_json()


def test_only_new_rows_are_embedded_and_another_model_makes_all_anew(tmp_path: Path, static: str) -> None:
    from model2vec import StaticModel

    location = make_table(tmp_path / "db", TEXTS)
    run(location, static)
    again = run(location, static)
    append(location, ["bread"])
    more = run(location, static)
    assert (again.changed, more.record.rows) == (False, 1)
    assert vectors_of(location)[-1].tolist() == [0, 0, 1]
    model = StaticModel.from_pretrained(static)
    StaticModel(-model.embedding, model.tokenizer, {}).save_pretrained(tmp_path / "static")
    other = run(location, str(tmp_path / "static"))
    assert (other.record.rows, vectors_of(location)[-1].tolist()) == (8, [0, 0, -1])


def test_vectors_and_scores_follow_a_text_column_that_was_made_anew(tmp_path: Path, static: str, graded: str) -> None:
    location = make_table(tmp_path / "db", ["a@b.cc"])
    found = []
    for word in ("king", "ship"):
        mask(location, MaskConfig(emails=(word,)), input_pin=newest(location))
        assert run(location, static, text_column="text_masked").changed
        assert run_score(location, graded, text_column="text_masked").changed
        found.append((vectors_of(location).tolist(), values(location, "model_score_edu")))
    assert [vectors for vectors, _ in found] == [[[1, 0, 0]], [[0, 1, 0]]]
    for (_, score_of), word in zip(found, ("king", "ship"), strict=True):
        np.testing.assert_allclose(score_of, logits_of(graded, word)[0], atol=1e-6)
    assert not run(location, static, text_column="text_masked").changed
    assert not run_score(location, graded, text_column="text_masked").changed


def test_a_worker_with_other_files_refuses(tmp_path: Path, static: str) -> None:
    import shutil

    folder = Path(shutil.copytree(static, tmp_path / "static"))
    model = document_models.find_model(str(folder))
    (folder / "config.json").write_text(json.dumps({"normalize": True}))
    with pytest.raises(ModelError, match=rf"for this worker, and {model.fingerprint} where the stage was started"):
        document_models.same_model(model)
    assert document_models.find_model(static).fingerprint == model.fingerprint


def test_vectors_that_are_not_of_length_one_are_found(tmp_path: Path) -> None:
    import lance

    table = pa.table({"embedding": pa.array([[1.0, 0.0], [0.5, 0.5], [0.0, 0.0]], pa.list_(pa.float16(), 2))})
    finding = unit_vectors(lance.write_dataset(table, str(tmp_path / "t.lance")))
    assert not finding.passed and finding.description.startswith("1 of 3 vectors")


# --- transformers ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sentence_transformers_from_a_folder_of_transformers(tmp_path: Path) -> None:
    """Mean over the tokens' last states, as transformers itself gives them."""
    import torch
    import transformers

    folder = save_bert(tmp_path / "bert", "BertModel")
    location = make_table(tmp_path / "db", TEXTS)
    run(location, folder, library="sentence-transformers", dtype="float32", batch_size=2)
    model = transformers.BertModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = vectors_of(location)
    for text, vector in zip(TEXTS, found, strict=True):
        if not (text or "").strip():
            assert not vector.any()
            continue
        with torch.inference_mode():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(dim=0).numpy()
        np.testing.assert_allclose(vector, states / np.linalg.norm(states), atol=1e-5)
    record = run(location, folder, library="sentence-transformers", max_tokens=4).record
    assert record.parameters["dims"] == 16 and record.parameters["max_tokens"] == 4
    short = vectors_of(location)
    assert not np.allclose(short[0], found[0], atol=0.05)
    assert unit_vectors(open_dataset(location)).passed


@pytest.mark.slow
def test_two_workers_embed_as_one(tmp_path: Path, static: str) -> None:
    locations = [make_table(tmp_path / name, TEXTS) for name in ("one", "two")]
    for location, workers in zip(locations, (1, 2), strict=True):
        append(location, ["bread and sea", "oven"])
        config = EmbedConfig(model=static, library="model2vec")
        embed(location, config, input_pin=newest(location), engine=EngineConfig(workers=workers))
    assert vectors_of(locations[0]).tolist() == vectors_of(locations[1]).tolist()


# --- what cannot work --------------------------------------------------------------------------------------------


def test_no_model_says_what_to_give(tmp_path: Path, static: str) -> None:
    location = make_table(tmp_path / "db", ["a"])
    with pytest.raises(ConfigError, match=r"model='' cannot work: give a directory, or the name of a model on the hub"):
        EmbedConfig(model="")
    with pytest.raises(ModelError, match=r"No model nobody/has-this: it is no local directory, and the hub"):
        run(location, "nobody/has-this")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty has no weights \(\*\.safetensors\): save the model"):
        run(location, str(tmp_path / "empty"))
    with pytest.raises(TableError, match="no column text_masked"):
        run(location, static, text_column="text_masked")
    assert "embedding" not in open_dataset(location).schema.names


def test_a_model_of_another_library_is_named(tmp_path: Path, graded: str) -> None:
    location = make_table(tmp_path / "db", ["a"])
    with pytest.raises(ModelError, match=r"model2vec cannot load .*graded: .*Is it a model for another library\?"):
        run(location, graded)


def test_a_missing_package_names_the_extra(tmp_path: Path, static: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    model = document_models.find_model(static)
    for library, extra in (("model2vec", "embed-static"), ("sentence-transformers", "embed")):
        with pytest.raises(ConfigError, match=rf"not installed: pip install 'pretrain-assets\[{extra}\]'"):
            embedding.load(model, EmbedConfig(model=static, library=library), "cpu")  # type: ignore[arg-type]


# --- scores ------------------------------------------------------------------------------------------------------


def logits_of(folder: str, text: str | None, max_tokens: int = 24) -> Any:
    import torch
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        given = tokenizer(text or "", return_tensors="pt", truncation=True, max_length=max_tokens)
        return model(**given).logits[0].double().numpy()


def test_a_score_is_the_models_one_output(tmp_path: Path, graded: str) -> None:
    location = make_table(tmp_path, [*TEXTS, "king " * 100])
    record = run_score(location, graded, batch_size=3).record
    expected = [logits_of(graded, text)[0] for text in [*TEXTS, "king " * 100]]
    np.testing.assert_allclose(values(location, "model_score_edu"), expected, atol=1e-5)
    assert len(set(np.round(expected, 3))) > 4, "the model tells texts apart"
    assert (record.stage, record.columns) == ("model_scored_edu", ("model_score_edu",))
    assert record.ledger == {"in": 8, "written": 8}
    assert record.parameters["model"] == "graded" and record.parameters["activation"] == "none"
    bins = score_bins(open_dataset(location), "edu")
    assert len(bins) == 10 and sum(bins.values()) == 8


@pytest.mark.parametrize(("activation", "expected"), [("auto", "softmax"), ("sigmoid", "sigmoid"), ("none", "none")])
def test_the_probability_of_a_label(tmp_path: Path, labelled: str, activation: str, expected: str) -> None:
    location = make_table(tmp_path, TEXTS)
    record = run_score(location, labelled, "good", label="good", activation=activation).record
    logits = np.array([logits_of(labelled, text) for text in TEXTS])
    wanted = {
        "none": logits[:, 2],
        "sigmoid": 1 / (1 + np.exp(-logits[:, 2])),
        "softmax": np.exp(logits[:, 2]) / np.exp(logits).sum(axis=1),
    }
    np.testing.assert_allclose(values(location, "model_score_good"), wanted[expected], atol=1e-5)
    assert (record.parameters["label"], record.parameters["activation"]) == ("good", expected)


def test_two_models_score_side_by_side(tmp_path: Path, graded: str, labelled: str) -> None:
    location = make_table(tmp_path, ["the king", "bread"])
    run_score(location, graded)
    run_score(location, labelled, "bad", label="bad")
    assert {"model_score_edu", "model_score_bad"} <= set(open_dataset(location).schema.names)
    assert [run_score(location, graded).changed, run_score(location, labelled, "bad", label="bad").changed] == [
        False
    ] * 2
    shorter = run_score(location, graded, max_tokens=3)
    assert shorter.changed, "a text cut shorter is another score"
    np.testing.assert_allclose(values(location, "model_score_edu")[0], logits_of(graded, "the king", 3)[0], atol=1e-5)


def test_labels_and_models_that_are_not_there(tmp_path: Path, static: str, graded: str, labelled: str) -> None:
    location = make_table(tmp_path / "db", ["a"])
    for model, label in ((labelled, ""), (labelled, "best")):
        with pytest.raises(ModelError, match=rf"has no label '{label}': choose one of bad, fair, good\."):
            run_score(location, model, label=label)
    with pytest.raises(ModelError, match=r"has no label 'good': choose one of LABEL_0\."):
        run_score(location, graded, label="good")
    with pytest.raises(ModelError, match=r"static is no model of transformers|static is unknown"):
        run_score(location, static)
    with pytest.raises(ConfigError, match="name='Edu' cannot work"):
        ModelScoreConfig(name="Edu", model=graded)


def test_a_multi_label_model_gives_probabilities_one_by_one(tmp_path: Path) -> None:
    settings = {"num_labels": 2, "problem_type": "multi_label_classification"}
    folder = save_bert(tmp_path / "several", "BertForSequenceClassification", **settings)
    config = ModelScoreConfig(name="x", model=folder, label="LABEL_1")
    assert model_scores.output_of(document_models.find_model(folder), config) == (1, "sigmoid")


def test_the_verbs(tmp_path: Path, static: str, graded: str, capsys: pytest.CaptureFixture[str]) -> None:
    from pretrain_assets.config import IngestConfig
    from pretrain_assets.ingest.append import ingest

    (tmp_path / "a.jsonl").write_text('{"text": "the king"}\n{"text": "bread"}\n')
    ingest(Location(database_uri=str(tmp_path / "db")), IngestConfig(sources=(str(tmp_path / "a.jsonl"),)))
    base = ["--database", str(tmp_path / "db")]
    cli.main([*base, "embed", static, "--library", "model2vec", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["parameters"]["dims"] == 3
    cli.main([*base, "score", "edu", graded], standalone_mode=False)
    assert "model_scored_edu-v3: 2 rows" in capsys.readouterr().out


@pytest.mark.slow
def test_the_assets(tmp_path: Path, static: str, graded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import dagster as dg

    from pretrain_assets.assets.checks import corpus_checks
    from pretrain_assets.assets.embedded import embedded, model_scored
    from pretrain_assets.assets.keys import EMBEDDED, MODEL_SCORED
    from pretrain_assets.assets.resources import default_resources
    from pretrain_assets.config import TokenizeConfig
    from pretrain_assets.table.versions import tag_version
    from pretrain_assets.tokenize.columns import tokenize

    monkeypatch.setenv("PRETRAIN_DATABASE_URI", str(tmp_path / "db"))
    location = make_table(tmp_path / "db", TEXTS)
    record = tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=newest(location)).record
    tag_version(open_dataset(location), replace(record, stage="decontaminated"))  # which model_scored reads

    def materialize(**config: Any) -> dg.ExecuteInProcessResult:
        run_config = {"ops": {f"corpus__{name}": {"config": values} for name, values in config.items()}}
        assets = [asset for asset in (embedded, model_scored) if asset.key.path[-1] in config]
        return dg.materialize(assets, resources=default_resources(), run_config=run_config, raise_on_error=False)

    refused = materialize(embedded={})
    assert not refused.success
    (failure,) = refused.get_step_failure_events()
    assert "give a directory, or the name of a model on the hub" in str(failure.event_specific_data)
    done = materialize(
        embedded={"model": static, "library": "model2vec"}, model_scored={"model": graded, "name": "edu"}
    )
    assert done.success
    (check,) = done.get_asset_check_evaluations()
    assert (check.check_name, check.passed) == ("unit_vectors", True)
    for key, column in ((EMBEDDED, "embedding"), (MODEL_SCORED, "model_score_edu")):
        (event,) = done.asset_materializations_for_node("__".join(key.path))
        assert event.metadata["ledger"].value["in"] == 7 and column in open_dataset(location).schema.names
        guard = next(guard for guard in corpus_checks if {at.asset_key for at in guard.check_keys} == {key})
        with dg.instance_for_test() as instance:
            instance.report_runless_asset_event(
                dg.AssetMaterialization(asset_key=key, metadata={"lance/pin": event.metadata["lance/pin"].value})
            )
            context = dg.build_asset_check_context(resources=default_resources(), instance=instance)
            found = {result.check_name: result.passed for result in guard(context)}
        assert found.pop("ledger_closes") and all(found.values())
