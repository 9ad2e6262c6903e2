"""Exported models: transformers computes the same, they come back bitwise, and they say what they saw."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import lance
import pyarrow as pa
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pretrain_assets.assets.keys import CHECKPOINT, EXPORT
from pretrain_assets.assets.resources import CorpusResource, LauncherResource
from pretrain_assets.cli import cli
from pretrain_assets.config import ModelConfig, TokenizerIdentity
from pretrain_assets.definitions import build_defs
from pretrain_assets.errors import CheckpointError, ConfigError, ReplacedError, TableError, TokenizerError
from pretrain_assets.launch.contract import write_spec
from pretrain_assets.loader.exposure import exposures, times_seen
from pretrain_assets.loader.planner import Planner
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.report.model_card import model_card
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.schema import computed_field
from pretrain_assets.table.storage import Location
from pretrain_assets.table.versions import identified
from pretrain_assets.tokenize import load_tokenizer
from pretrain_assets.tokenize.pretrained import identify, save_tokenizer, tokenizer_of
from pretrain_assets.train import checkpoint, state
from pretrain_assets.train import export as exporting
from pretrain_assets.train.agreement import logits_match
from pretrain_assets.train.export import Export, default_uri, export
from pretrain_assets.train.exported import is_exported, load_exported, open_exported
from pretrain_assets.train.layout import to_config, to_theirs
from pretrain_assets.train.model import GPT
from pretrain_assets.train.provenance import provenance
from pretrain_assets.train.run import run
from pretrain_assets.train.sampling import generate
from pretrain_assets.train.state import load_model
from pretrain_assets_tests.runs import SEQ, spec_in

BYTE = load_tokenizer("byte")
TEXTS = [
    f"The {word} number {i} stands {'alone ' * (i % 5)}here." for i, word in enumerate(["river", "mast", "à"] * 25)
]
SOURCES = ["wiki" if i % 3 else "books | and | pipes" for i in range(len(TEXTS))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Location, str]:
    """A table of 75 documents in bytes, and the folder of a run on it: 14 steps, into the second epoch."""
    folder = tmp_path_factory.mktemp("export")
    tokens = [list(text.encode()) for text in TEXTS]
    rows = pa.table(
        {
            "id": pa.array(range(len(TEXTS)), pa.int64()),
            "source": SOURCES,
            "license": ["CC0" if source == "wiki" else None for source in SOURCES],
            "input_ids": pa.array(tokens, pa.list_(pa.int32())),
            "n_tokens": pa.array(map(len, tokens), pa.int32()),
        }
    )
    lance.write_dataset(rows.cast(identified(rows.schema, "table")), f"{folder}/db/corpus.lance")
    spec = spec_in(
        f"{folder}/db",
        f"{folder}/runs/demo-v1-test",
        tokenizer=BYTE.identity,
        train__max_steps=14,
        train__eval_every=7,
        execution__checkpoint_every=7,
    )
    write_spec(spec)
    assert run(spec) == 0
    return Location(database_uri=f"{folder}/db"), spec.run_dir


@pytest.fixture(scope="module")
def made(trained: tuple[Location, str]) -> Export:
    return export_to(trained, None)


def export_to(trained: tuple[Location, str], uri: Path | str | None, **settings: Any) -> Export:
    location, run_dir = trained
    return export(location, run_dir, 14, write_card=model_card, uri=str(uri) if uri else None, **settings)


def checkpoint_of(trained: tuple[Location, str]) -> Path:
    return Path(checkpoint.checkpoint_uri(trained[1], 14))


def random_model(tokenizer: TokenizerIdentity = BYTE.identity, **changes: Any) -> GPT:
    """A model in which every weight, bias and norm matters."""
    shape: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 16, **changes}
    model = GPT(ModelConfig(**shape), tokenizer, SEQ)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(mean=float("norm" in name and "weight" in name), std=0.3, generator=generator)
    return model.eval()


def blocks(model: GPT) -> Tensor:
    return torch.randint(0, model.vocab_size, (3, SEQ), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def complaints() -> Iterator[list[str]]:
    """What transformers logs."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Handler()
    logging.getLogger("transformers").addHandler(handler)
    yield found
    logging.getLogger("transformers").removeHandler(handler)


# --- there ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["trained", "random"])
def test_transformers_computes_the_same_logits_and_greedy_text(
    trained: tuple[Location, str],
    weights: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    complaints: list[str],
) -> None:
    import transformers

    ours = load_model(checkpoint_of(trained)) if weights == "trained" else random_model()
    monkeypatch.setattr(exporting, "load_model", lambda folder: ours)
    uri = export_to(trained, tmp_path / "model").uri
    theirs = transformers.AutoModelForCausalLM.from_pretrained(uri, local_files_only=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(uri, local_files_only=True)
    assert type(theirs).__name__ == "GPT2LMHeadModel" and theirs.dtype == torch.float32
    ids = blocks(ours)
    with torch.no_grad():
        found, expected = theirs(ids).logits, ours.logits(ids)
    assert found.shape == (3, SEQ, 257)
    assert float((found - expected).abs().max()) < 1e-5 and torch.equal(found.argmax(-1), expected.argmax(-1))
    if weights == "random":
        assert float(expected.std()) > 0.5
    prompt = tokenizer("The river", return_tensors="pt")
    text = theirs.generate(**prompt, max_new_tokens=20, do_sample=False)[0].tolist()
    greedy = generate(ours, list(b"The river"), num_tokens=20, temperature=0)
    assert text == greedy[: greedy.index(256) + 1 if 256 in greedy else None]
    assert complaints == []


def test_the_stored_head_is_tied_and_the_padding_of_the_vocabulary_stays_here(made: Export) -> None:
    with safe_open(f"{made.uri}/model.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert "lm_head.weight" not in names and len(names) == 4 + 12
        assert file.get_slice("transformer.wte.weight").get_shape() == [257, 32]
    config = json.loads(Path(made.uri, "config.json").read_text())
    assert config["vocab_size"] == 257 and config["n_positions"] == SEQ and config["eos_token_id"] == 256
    assert "pad_token_id" not in config  # 257: the embedding has no such row


def test_a_pad_id_inside_the_vocabulary_is_named() -> None:
    inside = TokenizerIdentity(name="hf:x", fingerprint="f", vocab_size=300, eos_id=2, pad_id=1)
    assert to_config(random_model(inside), inside, "float32")["pad_token_id"] == 1


@pytest.mark.parametrize(("dtype", "bytes_per_weight"), [("bfloat16", 2), ("float16", 2), ("float32", 4)])
def test_types_of_weights_and_the_check_of_the_asset(
    trained: tuple[Location, str], dtype: Any, bytes_per_weight: int
) -> None:
    made = export_to(trained, None, dtype=dtype)
    assert made.uri == default_uri(trained[1], 14, dtype)
    with safe_open(f"{made.uri}/model.safetensors", framework="pt") as file:
        assert str(file.get_tensor("transformer.wpe.weight").dtype) == f"torch.{dtype}"
    finding = logits_match(made.uri, trained[1], 14, dtype)
    assert finding.passed and finding.description.endswith("the same at 64 of 64 positions")


def test_the_check_of_the_asset_can_fail(trained: tuple[Location, str], tmp_path: Path) -> None:
    made = export_to(trained, tmp_path / "model")
    weights = Path(made.uri, "model.safetensors")
    with safe_open(weights, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors["transformer.h.0.ln_1.bias"][0] += 0.1
    save_file(tensors, weights, metadata={"format": "pt"})
    finding = logits_match(made.uri, trained[1], 14, "float32")
    assert not finding.passed and finding.details["largest_difference"] > 1e-4


# --- and back ------------------------------------------------------------------------------------------------------


def test_back_again_is_bitwise_the_same_model_and_loss(trained: tuple[Location, str], made: Export) -> None:
    before = load_model(checkpoint_of(trained))
    after, tokenizer, lineage = load_exported(Path(made.uri))
    assert tokenizer == BYTE.identity and lineage == made.lineage and not after.training
    for name, weight in before.state_dict().items():
        real = slice(257) if name == "token_embedding.weight" else slice(None)
        assert torch.equal(after.state_dict()[name][real], weight[real]), name
    ids = blocks(before)
    with torch.no_grad():
        assert float(after(ids)) == float(before(ids))


def test_evaluate_gives_the_run_s_own_validation_loss(trained: tuple[Location, str], made: Export) -> None:
    passport = checkpoint.read_passport(checkpoint_of(trained))
    answers = [json.loads(pretrain(trained, "evaluate", of, "--json").stdout) for of in (made.uri, trained[1])]
    assert answers[0]["evaluation"] == answers[1]["evaluation"]
    assert answers[0]["evaluation"]["loss"] == passport["val_loss"]


def test_loading_needs_no_transformers(made: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ImportError):
        import transformers  # noqa: F401
    assert load_exported(Path(made.uri)).model.vocab_size == 257


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a GPT-2 that transformers made, with the vocabulary of GPT-2, and the model."""
    import transformers

    folder = tmp_path_factory.mktemp("foreign") / "gpt2"
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=16)).eval()
    model.save_pretrained(folder)
    save_tokenizer(load_tokenizer("gpt2").identity, folder, max_tokens=16)
    return folder, model


def test_a_gpt2_of_hugging_face_is_ours_as_well(foreign: tuple[Path, Any]) -> None:
    folder, theirs = foreign
    model, tokenizer, lineage = load_exported(folder)
    assert tokenizer == load_tokenizer("gpt2").identity and lineage == {}
    ids = torch.randint(0, 50257, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model.logits(ids), theirs(ids).logits, atol=1e-5, rtol=0)


def test_names_without_prefix_causal_masks_and_several_files_are_read(
    foreign: tuple[Path, Any], tmp_path: Path
) -> None:
    """As in the first GPT-2 files on the hub."""
    folder, theirs = Path(shutil.copytree(foreign[0], tmp_path / "gpt2")), foreign[1]
    old = {
        name.removeprefix("transformer."): value.clone()
        for name, value in theirs.state_dict().items()
        if name != "lm_head.weight"
    }
    old["h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
    (folder / "model.safetensors").unlink()
    files = {"a.safetensors": sorted(old)[:5], "b.safetensors": sorted(old)[5:]}
    for name, keys in files.items():
        save_file({key: old[key] for key in keys}, folder / name)
    index = {"weight_map": {key: name for name, keys in files.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model = load_exported(folder).model
    assert torch.equal(model.layers[0].expand.weight, theirs.transformer.h[0].mlp.c_fc.weight.T)


Spoil = Callable[[Path], object]


def set_config(name: str, value: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))

    return spoil


def index_of(folder: Path) -> Path:
    return folder / "model.safetensors.index.json"


def change_weights(change: Callable[[dict[str, Tensor]], object] | None, **said: str) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / "model.safetensors"
        with safe_open(path, framework="pt") as file:
            tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
        if change:
            change(tensors)
        save_file(tensors, path, metadata={**metadata, **said})

    return spoil


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "pickled.*safetensors"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json.*interrupted"),
        (lambda folder: os.truncate(folder / "model.safetensors", 5000), "model.safetensors is damaged"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is damaged"),
        (set_config("model_type", "llama"), "model_type='llama'"),
        (set_config("activation_function", "relu"), "activation_function='relu'"),
        (set_config("scale_attn_by_inverse_layer_idx", True), "scale_attn_by_inverse_layer_idx=True"),
        (set_config("n_inner", 7), "n_inner=7"),
        (set_config("n_layer", 2), r"n_layer=2.*its lineage.*n_layer=1"),
        (set_config("n_head", 4), r"n_head=4.*its lineage.*n_head=2"),
        (set_config("n_positions", 99), "of 99 positions, its lineage"),
        (set_config("n_positions", "32"), "config.json has n_positions='32'"),
        (set_config("n_embd", None), "config.json does not say n_embd"),
        (set_config("n_layer", True), "config.json has n_layer=True"),
        (set_config("n_head", 0), "config.json has n_head=0"),
        (set_config("n_head", 5), "config.json describes no model: n_embd=32"),
        (set_config("resid_pdrop", "none"), "config.json describes no model: resid_pdrop='none'"),
        (lambda folder: (folder / "config.json").write_text("[1]"), "config.json is damaged.*object"),
        (lambda folder: index_of(folder).write_text("{}"), "index.json is damaged"),
        (lambda folder: index_of(folder).write_text('{"weight_map": {"a": "../x.safetensors"}}'), "index.json is dam"),
        (change_weights(None, lineage="[]"), "lineage in its safetensors"),
        (change_weights(None, lineage='{"pin": 3}'), "lineage in its safetensors"),
        (change_weights(None, lineage="{"), "lineage in its safetensors"),
        (
            change_weights(lambda w: w.update({"transformer.ln_f.bias": torch.ones(32).int()})),
            "has the type torch.int32",
        ),
        (change_weights(lambda w: w.update({"transformer.wpe.weight": torch.zeros(9, 32)})), "wpe.weight has the sh"),
        (change_weights(lambda w: w.pop("transformer.h.0.ln_1.bias")), r"missing: transformer\.h\.0\."),
        (set_config("vocab_size", 200), "vocab_size=200, its lineage a tokenizer of 257"),
        (change_weights(lambda w: w.pop("transformer.ln_f.bias")), "missing: transformer.ln_f.bias"),
        (change_weights(lambda w: w.update(more=torch.zeros(1))), "unknown: transformer.more"),
        (change_weights(lambda w: w.update({"lm_head.weight": torch.zeros(257, 32)})), "head of its own"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_name(made: Export, tmp_path: Path, spoil: Spoil, words: str) -> None:
    folder = Path(shutil.copytree(made.uri, tmp_path / "model"))
    spoil(folder)
    (folder / "export.json").unlink()  # without which the files must speak for themselves
    with pytest.raises(CheckpointError, match=f"(?s){words}"):
        load_exported(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", None),
        ("config.json", None),
        ("tokenizer.json", None),
        ("export.json", b'{"checkpoint": "", "dtype": "", "digest": "", "files": 3}'),
        ("export.json", b'{"checkpoint": "", "dtype": "", "digest": "", "files": {"config.json": 3}}'),
        ("export.json", b"["),
    ],
)
def test_a_file_that_is_not_as_it_was_exported_is_refused(
    made: Export, tmp_path: Path, name: str, content: bytes | None
) -> None:
    folder = Path(shutil.copytree(made.uri, tmp_path / "model"))
    (folder / "README.md").write_text("for people, who may rewrite it")
    assert load_exported(folder).lineage == made.lineage
    data = bytearray((folder / name).read_bytes())
    data[-2] ^= 1
    (folder / name).write_bytes(data if content is None else content)
    with pytest.raises(CheckpointError, match=f"{name} is damaged.*Export or copy it again"):
        load_exported(folder)


def test_a_foreign_model_without_its_tokenizer_is_refused(foreign: tuple[Path, Any], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(foreign[0], tmp_path / "gpt2"))
    set_config("vocab_size", 300)(folder)
    with pytest.raises(TokenizerError, match="50,257 ids, the model 300"):
        load_exported(folder)
    for content in ("{", "[]", '{"model": 3}'):
        (folder / "tokenizer.json").write_text(content)
        with pytest.raises(TokenizerError, match=r"tokenizer.json is damaged"):
            load_exported(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"no tokenizer.json. Put the"):
        load_exported(folder)


# --- tokenizers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["byte", "gpt2"])
def test_the_written_tokenizer_gives_the_same_ids_and_text(name: str, tmp_path: Path) -> None:
    import transformers

    ours = load_tokenizer(name)
    save_tokenizer(ours.identity, tmp_path, max_tokens=5000)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert (theirs.eos_token_id, len(theirs)) == (ours.identity.eos_id, ours.identity.vocab_size)
    for text in ["", " lead", "a  b\n\n\tc'll", "naïve 日本語 🙂", "\x00\x7f\xa0", "x" * 3000, "1234 <|endoftext"]:
        ids = ours.encode_batch([text])[0].tolist()
        assert theirs(text)["input_ids"] == ids and theirs.decode(ids) == text
    assert theirs.decode([255, 65]) == ours.decode([255, 65])


def test_a_tokenizer_from_a_directory_travels_with_the_model_and_leaves_the_path_behind(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    save_tokenizer(BYTE.identity, tmp_path / "mine", max_tokens=7)
    place = f"hf:{tmp_path}/mine"
    identity = load_tokenizer(place).identity
    assert identity.name == "hf:mine"
    with pytest.raises(TokenizerError, match="--tokenizer hf:"):
        save_tokenizer(identity, tmp_path, max_tokens=9)
    (tmp_path / "model").mkdir()
    save_tokenizer(identity, tmp_path / "model", max_tokens=9, place=place)
    assert str(tmp_path) not in (tmp_path / "model" / "tokenizer_config.json").read_text()
    assert tokenizer_of(identity, f"hf:{tmp_path}/model").identity.fingerprint == identity.fingerprint
    other = TokenizerIdentity(name="hf:mine", fingerprint="other", vocab_size=257, eos_id=256, pad_id=257)
    with pytest.raises(TokenizerError, match="fingerprint other"):
        tokenizer_of(other, place)
    assert identify(tmp_path / "mine").fingerprint == identity.fingerprint


# --- the folder ----------------------------------------------------------------------------------------------------


def state_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}


def test_again_writes_nothing_and_a_damaged_file_is_mended(trained: tuple[Location, str], tmp_path: Path) -> None:
    first, folder = export_to(trained, tmp_path / "model"), tmp_path / "model"
    before = state_of(folder)
    again = export_to(trained, folder)
    assert (first.changed, again.changed, again.digest) == (True, False, first.digest)
    assert state_of(folder) == before and again.files == first.files
    (folder / "vocab.txt").touch()  # of somebody else; not a reason to write
    assert not export_to(trained, folder).changed
    os.truncate(folder / "model.safetensors", 100)
    assert export_to(trained, folder).changed
    assert {name: data for name, (_, data) in state_of(folder).items()} == {n: data for n, (_, data) in before.items()}


def test_equal_checkpoints_give_equal_bytes_and_no_file_names_a_place(
    trained: tuple[Location, str], made: Export, tmp_path: Path
) -> None:
    other = export_to(trained, tmp_path / "elsewhere")
    assert other.digest == made.digest
    for path in Path(made.uri).iterdir():
        assert path.read_bytes() == Path(other.uri, path.name).read_bytes(), path.name
        for place in (trained[1], trained[0].database_uri, str(tmp_path)):
            assert place.encode() not in path.read_bytes(), (path.name, place)
    head = Path(made.uri, "model.safetensors").read_bytes()[8:60]
    assert head.startswith(b'{"__metadata__":{"format":"pt","lineage":')


def test_something_else_in_the_place_is_refused_without_overwrite(
    trained: tuple[Location, str], tmp_path: Path
) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    export_to(trained, folder)  # empty: nothing to lose
    with pytest.raises(CheckpointError, match=r"float32 export of checkpoint .* --overwrite"):
        export_to(trained, folder, dtype="bfloat16")
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "chapter-1.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="holds something else"):
        export_to(trained, folder)
    assert (folder / "chapter-1.txt").read_text() == "years of work"
    assert export_to(trained, folder, overwrite=True).changed
    assert not (folder / "chapter-1.txt").exists() and sorted(p.name for p in tmp_path.iterdir()) == ["thesis"]


def test_no_run_is_ever_replaced(trained: tuple[Location, str], tmp_path: Path) -> None:
    run_dir = Path(trained[1])
    places = [run_dir, run_dir.parent, checkpoint_of(trained), run_dir / "run.json"]
    places += [run_dir / "checkpoints", run_dir / "checkpoints" / "mine"]
    (tmp_path / "link").symlink_to(run_dir / "checkpoints")
    for place in [*places, tmp_path / "link" / "step_00000007"]:
        with pytest.raises(CheckpointError, match=r"which no export replaces.*--out"):
            export_to(trained, place, overwrite=True)
    (tmp_path / "checkpoints").mkdir()  # of no run
    assert export_to(trained, tmp_path / "checkpoints" / "demo").changed
    assert checkpoint.find_fault(checkpoint_of(trained)) is None


def test_what_a_killed_export_set_aside_comes_back(trained: tuple[Location, str], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    export_to(trained, folder)
    before = state_of(folder)
    left, foreign = tmp_path / ".model.export-abcd_123", [tmp_path / ".model.tmp", tmp_path / ".model.export-12345678"]
    left.mkdir()
    folder.rename(left / "old")
    for other in foreign:
        (other / "theirs").mkdir(parents=True)
    with exporting._staging(str(folder)) as at_work:
        assert not export_to(trained, folder).changed
        assert state_of(folder) == before and not left.exists() and at_work.exists()
    assert sorted(tmp_path.iterdir()) == sorted([folder, *foreign])


@pytest.mark.parametrize("verb", ["sample", "export", "evaluate"])
def test_a_model_that_has_diverged_is_refused(
    trained: tuple[Location, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    model = load_model(checkpoint_of(trained))
    with torch.no_grad():
        model.norm.bias[3] = float("nan")
    for module in (exporting, state):
        monkeypatch.setattr(module, "load_model", lambda folder: model)
    options = ["--out", str(tmp_path / "model")] if verb == "export" else []
    assert "it has diverged" in str(pretrain(trained, verb, *options, code=1).exception)
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_that_is_no_text_is_refused(trained: tuple[Location, str]) -> None:
    found = pretrain(trained, "sample", "--prompt", "a\udcff", code=1).exception
    assert isinstance(found, ConfigError) and "is not UTF-8" in str(found)


def test_an_export_that_fails_leaves_nothing_and_an_older_one_as_it_was(
    trained: tuple[Location, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    folder = tmp_path / "model"
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "save_file", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            export_to(trained, folder)
    assert list(tmp_path.iterdir()) == []
    export_to(trained, folder)
    before = state_of(folder)
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "save_file", full)
        with pytest.raises(CheckpointError):
            export_to(trained, folder, dtype="float16", overwrite=True)
    assert state_of(folder) == before and len(list(tmp_path.iterdir())) == 1


def test_a_checkpoint_replaced_while_it_is_exported_is_no_failure_to_write(
    trained: tuple[Location, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, load = tmp_path / "run", exporting.load_model

    def replaced(folder: Path) -> GPT:
        if folder.name == "step_00000014":
            checkpoint.discard(str(folder))
        return load(folder)

    monkeypatch.setattr(exporting, "load_model", replaced)
    shutil.copytree(trained[1], run_dir)
    with pytest.raises(ReplacedError, match="step_00000014 was replaced by a newer one while it was read"):
        export_to((trained[0], str(run_dir)), tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    shutil.rmtree(run_dir)
    shutil.copytree(trained[1], run_dir)
    said = pretrain((trained[0], str(run_dir)), "export", "--out", str(tmp_path / "model")).output
    assert said.startswith(f"{run_dir}/checkpoints/step_00000007 (table@1)\n")
    assert json.loads((tmp_path / "model" / "export.json").read_text()).keys() >= {"checkpoint", "files"}


def test_on_an_object_store_half_an_export_is_no_model_and_is_finished_later(
    trained: tuple[Location, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    store, uri = fsspec.filesystem("memory"), "memory://exports/half"
    put, done = store.put_file, []

    def breaking(local: str, remote: str, **settings: Any) -> None:
        if len(done) == 3:
            raise OSError("connection lost")
        done.append(remote.rsplit("/", 1)[-1])
        put(local, remote, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "put_file", lambda self, *a, **k: breaking(*a, **k))
        with pytest.raises(CheckpointError, match="connection lost"):
            export_to(trained, uri)
    assert done[0] == "export.json" and "config.json" not in done
    assert not store.exists("/exports/half/config.json")
    made = export_to(trained, uri)
    assert made.changed and not export_to(trained, uri).changed and is_exported(uri)
    with open_exported(uri) as folder:
        assert load_exported(folder).lineage == made.lineage


# --- what it says --------------------------------------------------------------------------------------------------


def test_lineage_names_the_data_and_what_became_of_it(trained: tuple[Location, str], made: Export) -> None:
    location, run_dir = trained
    passport = checkpoint.read_passport(checkpoint_of(trained))
    lineage = made.lineage
    for name in ("pin", "table_id", "version", "tag", "filter", "tokens_seen", "ledger", "val_loss", "recipe"):
        assert lineage[name] == passport[name], name
    assert lineage["table"] == "corpus" and lineage["contamination"] == "not measured"
    kept = [i for i in range(len(TEXTS)) if i % 10]
    tokens = Counter[str]()
    for i in kept:
        tokens[SOURCES[i]] += len(TEXTS[i].encode()) + 1
    rows = Counter(SOURCES[i] for i in kept)
    assert lineage["sources"] == [
        {
            "source": source,
            "license": "CC0" if source == "wiki" else None,
            "num_rows": rows[source],
            "num_tokens": count,
            "share": round(count / tokens.total(), 6),
        }
        for source, count in tokens.most_common()
    ]
    spec = spec_in(location.database_uri, run_dir)
    schedule = Schedule(Planner(location, Pin.parse("table@1"), spec.recipe.data).plan, spec.recipe.cycles_per_step)
    seen = exposures(schedule, kept, last_step=14)
    draws = [sum(span.doc_start == 0 for span in seen[i] or ()) for i in kept]
    assert times_seen(schedule, last_step=14).tolist() == draws
    assert 0 < draws.count(1) < len(kept) and max(draws) == 2
    assert lineage["exposures"] == {
        "documents": len(kept),
        "seen_once": draws.count(1),
        "seen_more_than_once": draws.count(2),
        "not_seen": draws.count(0),
        "most_times": 2,
    }
    with safe_open(f"{made.uri}/model.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["lineage"]) == lineage


def test_the_card_is_one_that_the_hub_can_read(trained: tuple[Location, str], made: Export) -> None:
    card = Path(made.uri, "README.md").read_text()
    assert card == made.card
    front, text = card.removeprefix("---\n").split("---\n", 1)
    assert "library_name: transformers" in front and "license" not in front
    model = load_model(checkpoint_of(trained))
    exported = sum(value.numel() for value in to_theirs(model).values())
    facts = (
        *(made.lineage["pin"], made.lineage["filter"], "tokenized-v1"),
        f"{exported:,}; in training {model.num_parameters:,}, with the vocabulary padded to 384 tokens",
        f"14 steps, {made.lineage['tokens_seen']:,} tokens, {14 / made.lineage['steps_per_epoch']:.3g} epochs of "
        f"{made.lineage['steps_per_epoch']} steps",
        "not measured; `pretrain decontaminate`",
    )
    for fact in facts:
        assert fact in text, fact
    (row,) = (line for line in text.splitlines() if line.startswith(r"| books \| and \| pipes"))
    assert "unknown" in row and row.replace(r"\|", "").count("|") == 6
    assert "attention is plain" not in text
    masked = {**made.lineage, "recipe": {**made.lineage["recipe"], "model": {"document_mask": True}}}
    masked["recipe"]["model"] = {**made.lineage["recipe"]["model"], "document_mask": True}
    assert "attention is plain" in model_card(masked)


@pytest.mark.parametrize(
    ("step", "total", "words"),
    [
        (8, 102, "8 of 102 steps, 8,192 tokens, 0.0784 epochs of 102 steps"),
        (102, 102, "102 steps, 8,192 tokens, 1 epoch of 102 steps"),
        (1, 1, "1 step, 8,192 tokens, 0.0098 epochs of 102 steps"),
    ],
)
def test_the_card_says_how_much_of_an_epoch_it_was(made: Export, step: int, total: int, words: str) -> None:
    seen = {"step": step, "total_steps": total, "tokens_seen": 8192, "steps_per_epoch": 102}
    assert f" {words} " in model_card({**made.lineage, **seen})


def test_contamination_is_counted_by_the_filter_where_the_version_knows_it(
    trained: tuple[Location, str], made: Export, tmp_path: Path
) -> None:
    rows = lance.dataset(trained[0].uri).to_table(columns=["id", "input_ids", "n_tokens"])
    flags = [None if i >= 73 else i in (3, 20, 44) for i in range(len(TEXTS))]  # row 20 is held out
    parameters = {"eval_sets": [{"name": "mmlu"}, {"name": "gsm8k"}]}
    making: dict[str, Any] = {"stage": "decontaminated", "code_version": "1", "parameters": parameters}
    rows = rows.append_column(computed_field("contaminated", pa.bool_(), **making), pa.array(flags))
    location = Location(database_uri=str(tmp_path))
    lance.write_dataset(rows.cast(identified(rows.schema, "table")), location.uri)
    found = provenance(location, checkpoint.read_passport(checkpoint_of(trained)), "digest")
    documents = sum(i % 10 != 0 for i in range(len(TEXTS)))
    counts = {"documents": documents, "contaminated": 2, "not_searched": 2}
    assert found["contamination"] == {**counts, "eval_sets": ["mmlu", "gsm8k"]}
    words = (
        f"2 of {documents} training documents hold an item of the evaluation sets mmlu, gsm8k, and 2 were not searched"
    )
    assert words in model_card({**found, "dtype": "float32"})


def test_code_of_the_card_runs(
    made: Export, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = made.card.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(made.uri)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("The")


def test_a_table_without_sources_says_nothing_of_them_and_another_table_is_refused(
    trained: tuple[Location, str], made: Export, tmp_path: Path
) -> None:
    passport = checkpoint.read_passport(checkpoint_of(trained))
    rows = lance.dataset(trained[0].uri).to_table(columns=["id", "input_ids", "n_tokens"])
    for identity in ("table", "other"):
        location = Location(database_uri=f"{tmp_path}/{identity}")
        lance.write_dataset(rows.cast(identified(rows.schema, identity)), location.uri)
        if identity == "other":
            with pytest.raises(TableError, match="not the table of pin"):
                provenance(location, passport, "digest")
        else:
            found = provenance(location, passport, "digest")
            assert found["sources"] == []
            assert "names no sources" in model_card({**found, "dtype": "float32"})


# --- verbs and the asset -------------------------------------------------------------------------------------------


def pretrain(trained: tuple[Location, str], *arguments: str, code: int = 0) -> Any:
    runs = str(Path(trained[1]).parent)
    found = CliRunner().invoke(
        cli, ["--database", trained[0].database_uri, "--runs", runs, *arguments], catch_exceptions=code == 1
    )
    assert found.exit_code == code, found.output
    return found


def test_export_verb(
    trained: tuple[Location, str], made: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRETRAIN_TOKENIZER", "gpt2")  # the setting of the next tokenize, not of this model
    assert "nothing written" in pretrain(trained, "export", "demo").stdout
    monkeypatch.chdir(tmp_path)
    found = json.loads(pretrain(trained, "export", "--out", "here", "--dtype", "bfloat16", "--json").stdout)
    assert found["uri"] == str(tmp_path / "here") and found["changed"] and (tmp_path / "here" / "README.md").exists()
    assert found["from"] == str(checkpoint_of(trained))


def test_what_goes_with_a_folder_that_is_replaced_is_named_before(
    trained: tuple[Location, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        caplog.clear()
        return found

    place = tmp_path / "here"
    (place / "plots").mkdir(parents=True)
    for number in range(6):
        (place / f"note{number}.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="give --overwrite"):
        export_to(trained, place)
    assert len(list(place.iterdir())) == 7 and not warnings()
    export_to(trained, place, overwrite=True)
    assert warnings() == [
        f"replacing {place} removes what no export put there (7): note0.txt, note1.txt, note2.txt, note3.txt, "
        "note4.txt and 2 more"
    ]
    export_to(trained, place, overwrite=True, dtype="bfloat16")  # the files of the export itself are no news
    assert not warnings()
    (place / "mine.txt").touch()
    (place / "config.json").unlink()
    assert export_to(trained, place, dtype="bfloat16").changed
    assert warnings() == [f"replacing {place} removes what no export put there (1): mine.txt"]


def test_sample_verb_says_the_same_from_checkpoint_and_export(trained: tuple[Location, str], made: Export) -> None:
    settings = ["--prompt", "The ri", "--num-tokens", "40", "--num-samples", "2", "--json"]
    of_run, of_export = (
        json.loads(pretrain(trained, "sample", which, *settings).stdout) for which in ("demo", made.uri)
    )
    assert of_run["samples"] == of_export["samples"] and of_run["pin"] == of_export["pin"] == "table@1"
    assert of_run["model"] == str(checkpoint_of(trained)) and of_export["model"] == made.uri
    first, second = of_run["samples"]
    assert (first["seed"], second["seed"]) == (0, 1) and first["text"] != second["text"]
    alone = json.loads(pretrain(trained, "sample", *settings, "--num-samples", "1", "--seed", "1").stdout)
    assert alone["samples"] == [second]
    for sample in (first, second):
        assert bytes(sample["ids"]).decode(errors="replace") == sample["text"]
        assert sample["ended"] == (len(sample["ids"]) < 40)
    text = pretrain(trained, "sample", *settings[:4]).stdout
    head, _, rest = text.partition("\n")
    assert head == f"{checkpoint_of(trained)} (table@1)" and rest == f"\nThe ri{first['text']}\n"


def test_sample_verb_at_the_edges(trained: tuple[Location, str]) -> None:
    def ids(*arguments: str) -> list[int]:
        return list(json.loads(pretrain(trained, "sample", *arguments, "--json").stdout)["samples"][0]["ids"])

    assert ids("--num-tokens", "0") == []
    model = load_model(checkpoint_of(trained))
    greedy = generate(model, [256], num_tokens=5, temperature=0)[1:]
    assert ids("--temperature", "0", "--num-tokens", "5") == greedy[: greedy.index(256) if 256 in greedy else None]
    literal = generate(model, list(b"<|endoftext|>"), num_tokens=4, temperature=0)[13:]
    found = ids("--prompt", "<|endoftext|>", "--temperature", "0", "--num-tokens", "4")
    assert found == literal[: literal.index(256) if 256 in literal else None]
    long = "x" * 3 * SEQ
    assert len(ids("--prompt", long, "--num-tokens", "3", "--top-k", "0")) <= 3
    assert pretrain(trained, "sample", "--num-tokens", "0", "--prompt", "à la").stdout.endswith("\nà la\n")
    for wrong, words in (
        ("--temperature=-1", "temperature=-1.0"),
        ("--top-k=-1", "top_k=-1"),
        ("--seed=-1", "seed=-1"),
    ):
        assert words in str(pretrain(trained, "sample", wrong, code=1).exception)


@pytest.mark.slow
def test_the_asset_exports_what_the_checkpoint_s_event_names(
    trained: tuple[Location, str], made: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    location, run_dir = trained
    resources = {
        "corpus": CorpusResource(database_uri=location.database_uri),
        "launcher": LauncherResource(runs_uri=str(Path(run_dir).parent)),
    }
    job = build_defs(resources).resolve_implicit_global_asset_job_def()
    with dg.DagsterInstance.ephemeral() as instance:

        def materialize() -> tuple[dict[str, Any], str]:
            result = job.execute_in_process(asset_selection=[EXPORT], partition_key="demo", instance=instance)
            assert result.success
            (check,) = result.get_asset_check_evaluations()
            assert check.check_name == "logits_match" and check.passed
            (event,) = result.asset_materializations_for_node("model__export")
            assert event.tags is not None
            return {n: v.value for n, v in event.metadata.items()}, event.tags["dagster/data_version"]

        found, version = materialize()  # nobody materialized a checkpoint: the recipe's newest
        assert (found["folder"], found["changed"], version) == (made.uri, False, made.digest)
        assert found["card"] == made.card and found["lance/pin"] == "table@1" and found["files"] == made.files
        older = checkpoint.checkpoint_uri(run_dir, 7)
        event = dg.AssetMaterialization(CHECKPOINT, partition="demo", metadata={"checkpoint": older})
        instance.report_runless_asset_event(event)
        found, other = materialize()
        assert found["folder"] == default_uri(run_dir, 7) and found["changed"] and other != version


@pytest.mark.optional
@pytest.mark.slow
def test_lm_eval_runs_on_it_offline(made: Export, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs lm_eval: pip install 'lm_eval[hf]==0.4.13'")
    (tmp_path / "items.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:5]))
    task = {
        "task": "tiny",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "items.jsonl")}},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    (tmp_path / "tiny.yaml").write_text(json.dumps(task))
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={made.uri}"]
    command += ["--tasks", "tiny", "--include_path", str(tmp_path), "--device", "cpu", "--output_path", str(tmp_path)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (results,) = tmp_path.rglob("results_*.json")
    assert 0 < json.loads(results.read_text())["results"]["tiny"]["bits_per_byte,none"] < 9


def test_the_weights_that_are_written_are_all_of_the_model() -> None:
    model = random_model()
    written = to_theirs(model)
    padding = model.token_embedding.weight[model.vocab_size :].numel()
    assert sum(value.numel() for value in written.values()) == model.num_parameters - padding
