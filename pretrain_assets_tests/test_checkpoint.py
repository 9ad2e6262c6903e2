"""Checkpoints: their files, broken ones, saving in the background, other numbers of ranks and ways of sharing out."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

from pretrain_assets.config import ExecutionConfig, RunSpec, override, to_dict
from pretrain_assets.errors import CheckpointError, ConfigError, ReplacedError
from pretrain_assets.forensics.checkpoints import Checkpoint, find_checkpoint, with_checkpoint
from pretrain_assets.launch import contract
from pretrain_assets.launch.contract import finished_result, read_result, write_result, write_spec
from pretrain_assets.train import checkpoint, loop
from pretrain_assets.train.engine import Engine
from pretrain_assets.train.run import run
from pretrain_assets.train.saver import Saver
from pretrain_assets.train.shards import Piece, Snapshot, read_into, stored
from pretrain_assets.train.state import capture, load_model, restore
from pretrain_assets_tests.elastic import blocks_seen, on_ranks, run_on
from pretrain_assets_tests.ranks import ONE, blocks_of, engine_of
from pretrain_assets_tests.runs import (
    RECIPE,
    TOKENIZER,
    after,
    assert_close,
    eventually,
    losses,
    make_database,
    no_file_larger_than,
    passport_of,
    spec_in,
)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_database(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def make_spec(database: str, tmp_path: Path) -> Callable[..., RunSpec]:
    changed = {"execution__keep_every": 4}
    return lambda name="run", **changes: spec_in(database, str(tmp_path / name), **(changed | changes))


@pytest.fixture(scope="module")
def undisturbed(database: str, tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """The tiny run on one rank, in this process, start to end."""
    spec = spec_in(database, str(tmp_path_factory.mktemp("undisturbed")), execution__keep_every=4)
    assert run(spec) == 0
    return spec


def folder_of(run_dir: str | Path, step: int) -> Path:
    return Path(checkpoint.checkpoint_uri(str(run_dir), step))


def save_engine(engine: Engine, run_dir: str | Path, step: int) -> Path:
    recipe = override(RECIPE, {"model.n_layer": engine.model.config.n_layer})
    saver = Saver(str(run_dir), ONE, engine.execution)
    saver.save(step, capture(engine), passport_of(step, recipe))
    saver.wait()
    return folder_of(run_dir, step)


def save_tiny(run_dir: Path, step: int, **execution: Any) -> Path:
    saver = Saver(str(run_dir), ONE, ExecutionConfig(**{"keep_last": 9} | execution))
    saver.save(step, {"model": {"w": Piece(torch.arange(100_000.0) + step, (0,))}}, passport_of(step))
    saver.wait()
    return folder_of(run_dir, step)


def train(engine: Engine, *steps: int) -> list[float]:
    return [float(engine.train_step(blocks_of(step), step=step, total_steps=9)[0]) for step in steps]


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"train.optimizer": "muon"}, {"model.dropout": 0.2}], ids=str)
def test_a_loaded_engine_goes_on_bitwise_and_its_model_gives_the_same_loss(changes, tmp_path):
    engine = engine_of(changes)
    train(engine, 1, 2)
    folder = save_engine(engine, tmp_path, 2)
    model = load_model(folder)
    with engine.evaluating():
        assert float(model(blocks_of(9).input_ids)) == float(engine.loss(blocks_of(9)))
    expected = train(engine, 3, 4)
    again = engine_of(changes)
    train(again, 7)  # what it held before does not matter
    restore(folder, again)
    assert train(again, 3, 4) == expected


def test_files_are_those_that_torch_writes(tmp_path):
    engine = engine_of({})
    train(engine, 1)
    ours = save_engine(engine, tmp_path, 1) / "model-00001-of-00001.safetensors"
    weights = engine.model.state_dict()
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(weights, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path / "torch"), save_distributed=True))
    (theirs,) = (tmp_path / "torch").glob("*.safetensors")
    with safe_open(ours, "pt") as one, safe_open(theirs, "pt") as two:
        facts, expected = one.metadata(), two.metadata()
        assert json.loads(facts.pop("DCP_SHARDING_INFO")) == json.loads(expected.pop("DCP_SHARDING_INFO"))
        assert facts == expected
    assert load_file(ours).keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in load_file(ours).items())


def test_parts_of_ranks_are_put_together_without_any_pickle(tmp_path, monkeypatch):
    """Seven rows over three ranks, two rows that leave the third rank nothing, and a scalar: as FSDP2 shares out."""
    whole = {
        "a": torch.arange(21.0).view(7, 3),
        "b": torch.tensor([[1, 2], [3, 4]]),
        "b|step": torch.tensor(9.0),
        "c": torch.arange(5, dtype=torch.uint8),
        "d": torch.arange(3).bfloat16(),
    }
    parts = [
        {"a": (0, 3), "b": (0, 1), "d": (0, 3)},
        {"a": (3, 6), "b": (1, 2), "c": (0, 5)},
        {"a": (6, 7), "b|step": ()},
    ]
    snapshot = Snapshot()
    for rank, rows in enumerate(parts):
        pieces = {}
        for name, span in rows.items():
            part = whole[name][slice(*span)] if span else whole[name]
            pieces[name] = Piece(part, (span[0], *[0] * (part.dim() - 1)) if span else ())
        snapshot.take(pieces)
        checkpoint.write_file(str(tmp_path), 1, f"model-{rank}.safetensors", snapshot.chunks())
    folder = tmp_path / "checkpoints" / ".step_00000001.tmp"
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb()))  # where torch's other format has its pickle
    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, explode)
    assert stored(folder) == {name: (value.shape, value.dtype) for name, value in whole.items()}
    found = {name: torch.zeros_like(value) for name, value in whole.items()}
    read_into(folder, found)
    assert all(torch.equal(found[name], value) for name, value in whole.items())
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks a part of a: a file is missing"):
        stored(folder)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return explode, ()


def explode(*_: Any, **__: Any) -> None:
    raise AssertionError("a pickle was read")


def test_host_memory_is_used_again_and_equal_tensors_give_equal_files(tmp_path):
    engine, snapshot = engine_of({}), Snapshot()
    snapshot.take(capture(engine)["model"])
    place, first = snapshot._data.data_ptr(), b"".join(snapshot.chunks())
    train(engine, 1)
    snapshot.take(capture(engine)["model"])
    assert snapshot._data.data_ptr() == place and b"".join(snapshot.chunks()) != first
    snapshot.take(capture(engine_of({}))["model"])
    assert b"".join(snapshot.chunks()) == first


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model.n_layer": 3}, "Missing key in checkpoint state_dict: layers.2"),
        ({"model.n_layer": 1}, "holds another model: it also has layers.1"),
        ({"model.n_embd": 64}, r"Size mismatch between saved torch.Size\(.*32"),
    ],
)
def test_the_checkpoint_of_another_model_is_refused(changes, reason, tmp_path):
    engine = engine_of({})
    train(engine, 1)
    folder = save_engine(engine, tmp_path, 1)
    with pytest.raises(CheckpointError, match=reason):
        restore(folder, engine_of(changes))


# --- broken ones, old ones --------------------------------------------------------------------------------------------


def test_broken_checkpoints_and_strays_are_skipped_with_the_reason(tmp_path, caplog):
    folders = {step: save_tiny(tmp_path, step) for step in (1, 2, 3, 4, 5)}
    name = "model-00001-of-00001.safetensors"
    with (folders[5] / name).open("r+b") as handle:
        handle.truncate(1000)
    data = bytearray((folders[4] / name).read_bytes())
    data[-1] ^= 1
    (folders[4] / name).write_bytes(data)
    (folders[3] / "COMPLETE").unlink()
    (folders[2] / "passport.json").unlink()
    strays = [tmp_path / "checkpoints" / stray for stray in ("step_00000007", ".DS_Store", "step_abc")]
    for stray in strays[:2]:
        stray.write_text("")
    strays[2].mkdir()
    assert checkpoint.newest(str(tmp_path)) == 1
    for reason in (
        "has 1000 bytes, not",
        "does not match its digest",
        "no COMPLETE marker",
        "passport.json is missing",
        "step_00000007: it is not the folder of a step",
        "step_abc: it is not the folder of a step",
    ):
        assert reason in caplog.text
    assert ".DS_Store" not in caplog.text
    found = {"w": torch.zeros(100_000)}
    read_into(folders[1], found)
    assert torch.equal(found["w"], torch.arange(100_000.0) + 1)
    for step in (2, 3, 4):  # going on from step 1: broken ones are replaced, and those not yet reached stay
        save_tiny(tmp_path, step, keep_last=2)
        assert checkpoint.newest(str(tmp_path)) == step
    assert checkpoint.steps(str(tmp_path)) == [5, 4, 3] and all(stray.exists() for stray in strays)


def test_the_last_few_and_every_so_many_are_kept_and_what_a_killed_save_left_is_removed(tmp_path):
    left = tmp_path / "checkpoints" / ".step_00000011.tmp"
    left.mkdir(parents=True)
    (left / "model-00002-of-00002.safetensors").write_text("of another number of ranks")
    for step in range(1, 12):
        save_tiny(tmp_path, step, keep_last=2, keep_every=4)
    assert checkpoint.steps(str(tmp_path)) == [11, 10, 8, 4]
    assert {path.name for path in folder_of(tmp_path, 11).iterdir()} == {
        "COMPLETE",
        "passport.json",
        "model-00001-of-00001.safetensors",
    }
    assert all(not path.name.startswith(".") for path in (tmp_path / "checkpoints").iterdir())


FACTS = {"bytes": 1, "sha256": ""}


@pytest.mark.parametrize(
    "damage",
    [
        *["[]", "{}", '{"passport.json": {}}', "\xff", json.dumps({"passport.json": FACTS, "../../x": FACTS})],
        *['{"passport.json": {"bytes": 1e999, "sha256": ""}}', "[" * 100_000],
    ],
    ids=lambda damage: damage[:40],
)
def test_a_damaged_marker_is_no_marker(tmp_path, damage):
    folder = save_tiny(tmp_path, 2)
    (folder / "COMPLETE").write_text(damage, encoding="latin-1")
    assert "marker" in checkpoint.find_fault(folder) and checkpoint.newest(str(tmp_path)) is None


def test_a_folder_is_no_marker_and_is_replaced(tmp_path):
    folder = save_tiny(tmp_path, 2)
    (folder / "COMPLETE").unlink()
    (folder / "COMPLETE" / "more").mkdir(parents=True)
    assert "no COMPLETE marker" in checkpoint.find_fault(folder) and checkpoint.newest(str(tmp_path)) is None
    save_tiny(tmp_path, 2)
    assert checkpoint.newest(str(tmp_path)) == 2


def commit(run_dir: Path, step: int, **texts: str) -> Path:
    """A checkpoint of a passport and whatever else, without an engine."""
    named = {"passport.json": texts["passport"], "model-1.safetensors": "weights"}
    facts = {name: checkpoint.write_file(str(run_dir), step, name, [text.encode()]) for name, text in named.items()}
    checkpoint.commit(str(run_dir), step, facts)
    return folder_of(run_dir, step)


@pytest.mark.parametrize("passport", ['["a list"]', "null", "{"])
def test_a_checkpoint_whose_passport_is_no_object_is_skipped(passport, tmp_path):
    save_tiny(tmp_path, 1)
    assert "is not a JSON object" in checkpoint.find_fault(commit(tmp_path, 2, passport=passport))
    assert checkpoint.newest(str(tmp_path)) == 1


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        *[(name, None, f"lacks {name}") for name in ("recipe", "identity", "epoch", "step", "pin", "tokenizer")],
        *[(name, None, f"lacks {name}") for name in ("recipe.model", "recipe.train.optimizer", "budget.total_steps")],
        *[("epoch", value, f"has epoch={value!r}, which is no int") for value in ("1", 1.0, True, [])],
        ("recipe", "gpt2_124m", "has recipe='gpt2_124m', which is no dict"),
        ("pin", "table", "has no usable pin: Not a pin: 'table'"),
    ],
)
def test_a_checkpoint_whose_passport_lacks_what_is_read_of_it_is_skipped(path, value, said, tmp_path):
    save_tiny(tmp_path, 1)
    passport: dict[str, Any] = passport_of(2)
    *groups, last = path.split(".")
    inner = passport
    for group in groups:
        inner = inner[group]
    inner.pop(last) if value is None else inner.update({last: value})
    fault = checkpoint.find_fault(commit(tmp_path, 2, passport=json.dumps(passport)))
    assert f"step_00000002/passport.json {said}" in fault and "remove its folder" in fault
    assert checkpoint.newest(str(tmp_path)) == 1


def test_a_checkpoint_in_the_folder_of_another_step_is_skipped(tmp_path, caplog):
    save_tiny(tmp_path, 20)
    save_tiny(tmp_path, 39).rename(folder_of(tmp_path, 30))
    assert checkpoint.newest(str(tmp_path)) == 20
    assert "step_00000030: it is the checkpoint of step 39 in the folder of another step" in caplog.text


Spoil = Callable[[dict[str, torch.Tensor], dict[str, str]], object]


def spoil(folder: Path, kind: str, change: Spoil) -> None:
    """Change tensors and header of a file of an engine's checkpoint; the marker then says that all is well."""
    path = folder / f"{kind}-00001-of-00001.safetensors"
    with safe_open(path, "pt") as file:
        header = file.metadata()
    tensors = load_file(path)
    change(tensors, header)
    save_file(tensors, path, metadata=header)


def rename(old: str, new: str) -> Spoil:
    def change(tensors: dict[str, torch.Tensor], header: dict[str, str]) -> None:
        tensors[new] = tensors.pop(old)
        header["DCP_SHARDING_INFO"] = header["DCP_SHARDING_INFO"].replace(json.dumps(old), json.dumps(new))

    return change


def convert(name: str, to: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    return lambda tensors, header: tensors.update({name: to(tensors[name])})


def shard(text: str) -> Spoil:
    return lambda tensors, header: header.update(DCP_SHARDING_INFO=text)


NORM = "norm.weight"
FILES = {kind: f"{kind}-00001-of-00001.safetensors" for kind in ("model", "optimizer")}


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("model", rename(NORM, "norm.wieght"), "holds another model: it also has norm.wieght"),
        ("model", convert(NORM, torch.Tensor.int), "it holds norm.weight as torch.int32, not in floating point"),
        ("model", convert(NORM, lambda x: x[:5].clone()), "does not fit: .*Size mismatch"),
        *[
            (kind, shard(text), f"cannot be read: {FILES[kind]}: {said}")
            for kind in FILES
            for text, said in {
                "{": "its header: Expecting property name",
                "[]": ".*list indices must be",
                "{}": ".* is missing",
            }.items()
        ],
        ("model", shard('{"norm.weight": {"saved_offsets": [-1]}}'), f"cannot be read: {FILES['model']}: "),
        ("model", lambda tensors, header: header.pop("DCP_SHARDING_INFO"), "'DCP_SHARDING_INFO' is missing"),
        (
            "optimizer",
            rename(f"{NORM}|exp_avg", f"{NORM}|mean"),
            f"another optimizer's state of {NORM}, by its exp_avg, m",
        ),
        ("optimizer", rename(f"{NORM}|exp_avg", "more|exp_avg"), "the optimizer of another model; they differ in more"),
        ("optimizer", convert(f"{NORM}|exp_avg", torch.Tensor.int), rf"holds {NORM}\|exp_avg as torch.int32"),
        ("optimizer", convert(f"{NORM}|exp_avg", lambda x: x[:5].clone()), rf"{NORM}\|exp_avg of shape \(5,\)"),
        ("optimizer", convert("generator|cpu", lambda x: x[:9].clone()), r"generator\|cpu is no state of a generator"),
        ("optimizer", convert("generator|cpu", torch.Tensor.float), r"generator\|cpu is no state of a generator"),
        ("optimizer", lambda tensors, header: tensors.clear(), "holds no state of an optimizer"),
    ],
)
def test_damaged_headers_and_tensors_are_named(kind, change, said, tmp_path, trained_engine):
    folder = tmp_path / "step_00000001"
    shutil.copytree(trained_engine, folder)
    spoil(folder, kind, change)
    with pytest.raises(CheckpointError, match=said) as caught:
        restore(folder, engine_of({}))
    assert str(folder) in str(caught.value)
    if kind == "model":
        with pytest.raises(CheckpointError, match=said):
            load_model(folder)


@pytest.fixture(scope="module")
def trained_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of an engine."""
    engine = engine_of({})
    train(engine, 1)
    return save_engine(engine, tmp_path_factory.mktemp("trained"), 1)


def test_a_checkpoint_of_another_kind_of_device_has_no_generator_for_this_one(tmp_path, trained_engine):
    shutil.copytree(trained_engine, tmp_path / "step_00000001")
    spoil(tmp_path / "step_00000001", "optimizer", lambda tensors, header: tensors.pop("generator|cpu"))
    restore(tmp_path / "step_00000001", engine_of({}))


# --- read while a run goes on -----------------------------------------------------------------------------------------


def test_the_newest_is_found_while_a_run_replaces_what_is_looked_at(tmp_path, monkeypatch, caplog):
    save_tiny(tmp_path, 1)
    sha256, waiting = checkpoint._sha256, [2, 3]

    def meanwhile(path: Path) -> str:
        if waiting:
            save_tiny(tmp_path, waiting.pop(0), keep_last=1)
        return sha256(path)

    monkeypatch.setattr(checkpoint, "_sha256", meanwhile)
    assert checkpoint.newest(str(tmp_path)) == 3 and caplog.messages == []


def test_what_is_replaced_while_it_is_used_is_taken_anew_where_the_newest_was_asked_for(tmp_path):
    save_tiny(tmp_path / "run", 1)
    used: list[int] = []

    def use(found: Checkpoint) -> str:
        used.append(found.step)
        with checkpoint.open_checkpoint(found.run_dir, found.step) as folder:
            if found.step < 3:
                save_tiny(tmp_path / "run", found.step + 1, keep_last=1)
            return ", ".join(stored(folder))

    found, names = with_checkpoint(f"{tmp_path}/run", "", use)
    assert (used, found.step, names) == ([1, 2, 3], 3, "w")
    save_tiny(tmp_path / "run", 2, keep_last=2)
    with pytest.raises(CheckpointError, match="has no checkpoint of step 2; it has: 3"):
        with_checkpoint(str(folder_of(tmp_path / "run", 2)), "", use)


def test_a_checkpoint_that_is_gone_has_no_digest_nor_passport(tmp_path):
    folder = save_tiny(tmp_path, 1)
    whole = checkpoint.digest(folder)
    assert len(whole) == 16
    for name, read in {"COMPLETE": checkpoint.digest, "passport.json": checkpoint.read_passport}.items():
        (folder / name).unlink()
        with pytest.raises(
            ReplacedError, match=r"step_00000001 was replaced by a newer one .* run the same command again"
        ):
            read(folder)
    with pytest.raises(ReplacedError), checkpoint.open_checkpoint(str(tmp_path), 1):
        pass


def test_only_files_that_the_marker_names_are_read(tmp_path):
    folder = save_tiny(tmp_path, 1)
    (folder / "._model-00001-of-00001.safetensors").write_text("what a Mac leaves beside a file")
    found = {"w": torch.zeros(100_000)}
    assert checkpoint.newest(str(tmp_path)) == 1 and stored(folder).keys() == {"w"}
    read_into(folder, found)
    assert torch.equal(found["w"], torch.arange(100_000.0) + 1)
    (folder / "model-00001-of-00001.safetensors").write_text("damaged since")
    with pytest.raises(CheckpointError, match=r"step_00000001 cannot be read: .*header"):
        stored(folder)


def test_a_link_to_a_checkpoint_counts_and_pruning_removes_only_the_link(tmp_path):
    folder = save_tiny(tmp_path / "elsewhere", 1)
    folder_of(tmp_path, 1).parent.mkdir()
    folder_of(tmp_path, 1).symlink_to(folder)
    assert checkpoint.newest(str(tmp_path)) == 1
    save_tiny(tmp_path, 2, keep_last=1)
    assert checkpoint.steps(str(tmp_path)) == [2] and not folder_of(tmp_path, 1).is_symlink()
    assert checkpoint.newest(str(tmp_path / "elsewhere")) == 1


@pytest.mark.parametrize("name", ["step_00000012", ".step_00000012.tmp"])
def test_a_file_in_the_way_of_a_checkpoint_is_said_before_training(name, make_spec):
    spec = make_spec()
    stray = folder_of(spec.run_dir, 12).with_name(name)
    stray.parent.mkdir(parents=True)
    stray.write_text("")
    with pytest.raises(ConfigError, match=f"{name} is in the way of a checkpoint"):
        run(spec)
    assert losses(spec.run_dir) == {"loss": [], "val_loss": []} and stray.exists()


@pytest.mark.parametrize("step", ["²", "1" * 5000, "abc"], ids=lambda step: step[:3])
def test_what_names_no_step_is_refused(step, tmp_path):
    with pytest.raises(CheckpointError, match="is not the folder of a step"):
        find_checkpoint(f"{tmp_path}/run/checkpoints/step_{step}", str(tmp_path))
    with pytest.raises(ConfigError, match=r"'none://run.* cannot be opened"):
        find_checkpoint("none://run", str(tmp_path))


def test_a_damaged_result_or_a_checkpoint_of_other_sizes_is_not_done(undisturbed, make_spec):
    spec = make_spec()
    shutil.copytree(undisturbed.run_dir, spec.run_dir)
    result = read_result(spec.run_dir)
    assert finished_result(spec) == result
    damages = ({"step": "18"}, {"step": None}, {"passport": None}, {"passport": {**result["passport"], "recipe": []}})
    for damage in ({"status": "fine"}, {"checkpoint": None}, *damages):
        write_result(spec.run_dir, result | damage)
        assert finished_result(spec) is None
    write_result(spec.run_dir, {"status": "done"})
    assert finished_result(spec) is None
    Path(spec.run_dir, "result.json").write_text("[" * 100_000)
    assert finished_result(spec) is None
    write_result(spec.run_dir, result)
    with (folder_of(spec.run_dir, 18) / "model-00001-of-00001.safetensors").open("ab") as handle:
        handle.write(b"x")
    assert finished_result(spec) is None


def test_a_resumed_run_skips_a_truncated_checkpoint(undisturbed, make_spec, caplog):
    spec = make_spec()
    shutil.copytree(undisturbed.run_dir, spec.run_dir)
    (Path(spec.run_dir) / "result.json").unlink()
    with (folder_of(spec.run_dir, 18) / "optimizer-00001-of-00001.safetensors").open("r+b") as handle:
        handle.truncate(64)
    assert run(spec) == 0
    assert "skipping checkpoint" in caplog.text and "step_00000018" in caplog.text
    assert losses(spec.run_dir) == losses(undisturbed.run_dir)
    assert checkpoint.newest(spec.run_dir) == 18
    assert read_result(spec.run_dir)["digest"] == read_result(undisturbed.run_dir)["digest"]


def test_a_result_without_its_checkpoint_is_not_done(make_spec):
    spec = make_spec(train__max_steps=2)
    assert run(spec) == 0
    digest = read_result(spec.run_dir)["digest"]
    shutil.rmtree(Path(spec.run_dir, "checkpoints"))
    Path(spec.run_dir, "result.json").write_text("{")  # and a damaged result counts as none
    assert run(spec) == 0
    assert read_result(spec.run_dir)["digest"] == digest


def test_a_full_disk_is_reported_and_leaves_the_earlier_checkpoint(tmp_path):
    save_tiny(tmp_path, 1)
    with no_file_larger_than(100_000), pytest.raises(CheckpointError, match=r"step_00000002.* bytes are free there"):
        save_tiny(tmp_path, 2)
    assert checkpoint.newest(str(tmp_path)) == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


# --- in the background ------------------------------------------------------------------------------------------------


def test_steps_go_on_while_a_checkpoint_is_written_and_it_is_of_its_own_step(undisturbed, make_spec, monkeypatch):
    spec = make_spec()
    write_file, release = checkpoint.write_file, threading.Event()
    there: list[list[int]] = []  # checkpoints after each step

    def held(run_dir: str, step: int, *rest: Any) -> Any:
        assert step != 4 or release.wait(60)
        return write_file(run_dir, step, *rest)

    def should_stop() -> bool:
        there.append(checkpoint.steps(spec.run_dir))
        if len(there) == 7:
            release.set()
        return False

    monkeypatch.setattr(checkpoint, "write_file", held)
    assert run(spec, should_stop) == 0
    assert there[:7] == [[]] * 7  # steps 5, 6 and 7 were trained while the checkpoint of step 4 was being written
    assert 4 in there[8]  # the save of step 8 waited for it
    for step in (4, 8, 12, 16, 18):
        assert checkpoint.digest(folder_of(spec.run_dir, step)) == checkpoint.digest(
            folder_of(undisturbed.run_dir, step)
        )


@pytest.mark.parametrize("in_background", [True, False])
def test_an_error_while_writing_is_raised_at_the_next_step(make_spec, monkeypatch, undisturbed, in_background):
    spec = make_spec(execution__async_checkpoint=in_background)
    write_file, savers = checkpoint.write_file, []

    def full(run_dir: str, step: int, *rest: Any) -> Any:
        if step == 8:
            raise OSError(28, "No space left on device")
        return write_file(run_dir, step, *rest)

    def should_stop() -> bool:
        asked.append(1)
        return len(asked) == 9 and not eventually(lambda: savers[0].failed)

    asked: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_file", full)
        patch.setattr(loop, "Saver", lambda *arguments: savers.append(Saver(*arguments)) or savers[0])
        with pytest.raises(CheckpointError, match=r"step_00000008: rank 0: .*No space left on device\. .* bytes are"):
            run(spec, should_stop)
    assert losses(spec.run_dir)["loss"][-1][0] == (9 if in_background else 8)
    assert checkpoint.steps(spec.run_dir) == [4] and read_result(spec.run_dir)["status"] == "failed"
    assert run(spec) == 0
    assert losses(spec.run_dir) == losses(undisturbed.run_dir)


KILLED = """
import os, signal, sys
from pretrain_assets.launch.contract import read_spec
from pretrain_assets.train import checkpoint
from pretrain_assets.train.run import run
write_file = checkpoint.write_file

def dying(run_dir, step, name, chunks):
    def half():
        yield next(chunks)
        os.kill(os.getpid(), signal.SIGKILL)
    return write_file(run_dir, step, name, half() if step == 8 and name.startswith("optimizer") else chunks)

checkpoint.write_file = dying
run(read_spec(sys.argv[1]))
"""


@pytest.mark.slow
def test_killed_while_a_checkpoint_is_written_goes_on_from_the_one_before(make_spec, undisturbed):
    spec = make_spec()
    assert subprocess.run([sys.executable, "-c", KILLED, write_spec(spec)], check=False).returncode == -9
    folder = Path(spec.run_dir, "checkpoints")
    assert (folder / ".step_00000008.tmp").exists() and checkpoint.newest(spec.run_dir) == 4
    assert run(spec) == 0
    assert losses(spec.run_dir) == losses(undisturbed.run_dir)
    assert read_result(spec.run_dir)["digest"] == read_result(undisturbed.run_dir)["digest"]
    assert sorted(os.listdir(folder)) == [f"step_{step:08d}" for step in (4, 8, 12, 16, 18)]


# --- on S3 ------------------------------------------------------------------------------------------------------------


def test_checkpoints_live_on_s3_too(s3, caplog, monkeypatch):
    run_dir, engine = f"{s3.bucket('checkpoints')}/run", engine_of({"execution.keep_last": 2})
    for step in (1, 2, 3):
        train(engine, step)
        save_engine(engine, run_dir, step)
    assert checkpoint.steps(run_dir) == [3, 2] and checkpoint.newest(run_dir) == 3
    assert find_checkpoint(checkpoint.checkpoint_uri(run_dir, 2), "").passport["tokenizer"] == to_dict(TOKENIZER)
    weights = "model-00001-of-00001.safetensors"
    with checkpoint.open_checkpoint(run_dir, 3) as folder:
        assert sorted(os.listdir(folder)) == ["COMPLETE", weights, "passport.json"]
        found = load_model(folder).state_dict()
    assert all(torch.equal(value, found[name]) for name, value in engine.model.state_dict().items())
    again = engine_of({})
    with checkpoint.open_checkpoint(run_dir, 3, weights_only=False) as folder:
        restore(folder, again)
    assert train(again, 4) == train(engine, 4)

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="step_00000004: rank 0: not today"):
        patch.setattr(contract, "PATIENCE_SECONDS", 0.0)
        patch.setattr(checkpoint, "commit", not_today)
        save_engine(engine, run_dir, 4)
    fs, path = checkpoint.filesystem(checkpoint.checkpoint_uri(run_dir, 3))
    size = fs.size(f"{path}/{weights}")
    fs.pipe_file(f"{path}/{weights}", bytes(size))
    with (
        pytest.raises(CheckpointError, match=f"{weights} does not match its digest. Remove this folder"),
        checkpoint.open_checkpoint(run_dir, 3),
    ):
        pass
    fs.pipe_file(f"{path}/{weights}", bytes(size - 1))
    assert checkpoint.newest(run_dir) == 2
    assert "step_00000004: it has no COMPLETE marker" in caplog.text
    assert f"step_00000003: {weights} has {size - 1} bytes, not {size}" in caplog.text


def not_today(*_: Any) -> None:
    raise OSError("not today")


@pytest.mark.slow
def test_a_run_on_s3_goes_on_as_on_disk(undisturbed, database, s3):
    spec = spec_in(database, f"{s3.bucket('train-runs')}/tiny")
    assert run(spec, after(5)) == 75
    assert checkpoint.newest(spec.run_dir) == 5
    assert run(spec) == 0
    assert losses(spec.run_dir) == losses(undisturbed.run_dir)
    assert checkpoint.steps(spec.run_dir) == [18, 16]


# --- other numbers of ranks -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_any_number_of_ranks_and_any_sharing_goes_on_with_the_same_data_and_losses(make_spec, tmp_path, undisturbed):
    """4 -> 2 -> 1 -> 4 ranks, stopped at steps 5, 9 and 14; FSDP2 -> DDP -> alone -> FSDP2."""
    seen, expected = tmp_path / "seen", tmp_path / "expected"
    assert run_on(1, make_spec("alone"), 0, expected) == 0
    for num_ranks, parallel, last in ((4, "fsdp", 5), (2, "ddp", 9), (1, "ddp", 14), (4, "fsdp", 0)):
        spec = make_spec(execution__parallel=parallel, execution__micro_batch_blocks=num_ranks)
        assert (run_on(num_ranks, spec, last, seen) == 0) == (last == 0)
        assert read_result(spec.run_dir)["step"] == (last or 18)
    assert blocks_seen(seen) == blocks_seen(expected) and len(blocks_seen(seen)) == 18
    assert_close(losses(spec.run_dir), losses(undisturbed.run_dir))


@pytest.mark.slow
def test_four_ranks_load_what_they_saved_bitwise_and_fail_together(tmp_path, s3):
    bucket = s3.bucket("four-ranks")
    assert on_ranks(4, "facts", str(tmp_path), bucket) == 0
    by_rank = [json.loads((tmp_path / f"facts-{rank}.json").read_text()) for rank in range(4)]
    facts = by_rank[0]
    for name in ("ddp from ddp", "fsdp from fsdp"):
        assert facts[name] == facts[name.split()[0]]
    assert facts["fsdp from ddp"] == pytest.approx(facts["ddp"], abs=1e-6)
    assert facts["ddp from fsdp"] == pytest.approx(facts["fsdp"], abs=1e-6)
    for found in by_rank:
        assert "step_00000007: rank 1: [Errno 28] No space left on device." in found["full"]
        assert "-of-00004.safetensors is not in" in found["elsewhere"]
        assert "as seen by the main rank. All machines of a run must share its directory" in found["elsewhere"]
    assert checkpoint.steps(str(tmp_path)) == [7, 5, 3] and checkpoint.newest(str(tmp_path)) == 7
    with torch.no_grad():
        alone = float(load_model(folder_of(tmp_path, 7))(blocks_of(9).input_ids))
    assert alone == pytest.approx(facts["evaluated"], abs=1e-3)  # a sum over 102 targets
    local, remote = (checkpoint.checkpoint_uri(place, 7) for place in (str(tmp_path), bucket))
    assert checkpoint.find_fault(remote) is None and checkpoint.digest(remote) == checkpoint.digest(local)
