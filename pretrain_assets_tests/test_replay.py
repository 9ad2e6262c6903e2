"""Counterfactual replay: holes in the very places, the run from scratch without them bit for bit, and comparisons."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch
from click.testing import CliRunner

from pretrain_assets.cli import cli
from pretrain_assets.config import DataConfig, LoaderConfig, MixtureComponent, RunSpec, override, to_dict
from pretrain_assets.errors import CheckpointError, ConfigError, DataIdentityError, InputError, ReplacedError
from pretrain_assets.forensics.checkpoints import Checkpoint, find_checkpoint
from pretrain_assets.forensics.chosen import Chosen, choose, names_in
from pretrain_assets.forensics.replays.blocks import BlocksLoss, blocks_with_holes
from pretrain_assets.forensics.replays.compare import Comparison, compare
from pretrain_assets.forensics.replays.replay import ReplayPlan, plan_replay
from pretrain_assets.launch.contract import EXIT_STOPPED, read_result, write_spec
from pretrain_assets.launch.local import run_local
from pretrain_assets.loader.exposure import exposures, totals
from pretrain_assets.loader.holes import describe_holes, hidden_per_step, same_until, targets_per_cycle
from pretrain_assets.loader.rows import RowLoader
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.loader.state import position_from, state_at
from pretrain_assets.loader.stream import BlockLoader
from pretrain_assets.loader.streaming_state import to_streaming_state
from pretrain_assets.report.replay_plot import replay_html, replay_svg
from pretrain_assets.report.replay_text import comparison_text, plan_text
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.schema import PARAMETERS_KEY
from pretrain_assets.table.storage import Location
from pretrain_assets.table.versions import identified
from pretrain_assets.train import checkpoint, distributed
from pretrain_assets.train.engine import Blocks
from pretrain_assets.train.metrics import read_metrics
from pretrain_assets.train.passport import ledger_gaps
from pretrain_assets.train.run import run
from pretrain_assets.train.runs import list_runs
from pretrain_assets.train.spec import make_spec
from pretrain_assets_tests.loader_tables import Case, emitted
from pretrain_assets_tests.ranks import engine_of
from pretrain_assets_tests.runs import RECIPE, TOKENIZER, after, drive, losses

# --- blocks with holes -----------------------------------------------------------------------------------------------

CASE = Case(lengths=tuple(int(n) for n in np.random.default_rng(0).integers(0, 60, 120)), num_splits=4)
PAD = CASE.pad_id
GONE = (1003, 1007, 1050, 1051, 1119, 99_999)
MIXTURE = (
    MixtureComponent(name="even", predicate="id % 2 = 0", weight=3.0),
    MixtureComponent(name="odd", predicate="id % 2 = 1", weight=1.0),
)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> tuple[Location, Pin]:
    return CASE.build(tmp_path_factory.mktemp("documents"))


@pytest.fixture
def make_loader(documents: tuple[Location, Pin]) -> Callable[..., BlockLoader]:
    def make(*without: int, rank: int = 0, world_size: int = 1, window_tokens: int = 64, **data: Any) -> BlockLoader:
        changed = dataclasses.replace(CASE.data, without=without, **data)
        settings = LoaderConfig(window_tokens=window_tokens)
        tokenizer = dataclasses.replace(TOKENIZER, eos_id=CASE.eos_id, pad_id=PAD)
        return BlockLoader(*documents, changed, tokenizer, rank=rank, world_size=world_size, settings=settings)

    return make


@pytest.mark.parametrize("mixture", [(), MIXTURE])
def test_holes_are_exactly_the_spans_of_the_exposures(make_loader, mixture):
    """Every other token, and the documents' numbers in their blocks, are where they were; over two epochs."""
    for epoch in (0, 1):
        before, doc_ids = emitted(make_loader(mixture=mixture), epoch)
        schedule, expected = Schedule(make_loader(mixture=mixture).plan, 1), before.clone()
        last = schedule.steps_in(0) + schedule.steps_in(1)
        seen = exposures(schedule, GONE, last_step=last)
        assert seen[99_999] is None and sum(spans is not None for spans in seen.values()) > 2
        for span in (span for spans in seen.values() for span in spans or () if span.epoch == epoch):
            cycle = schedule.locate(span.step)[1]
            expected[cycle, span.split, span.offset : span.offset + span.tokens] = PAD
        assert not torch.equal(before, expected)
        for window in (64, 500, 1 << 20):
            found, numbers = emitted(make_loader(*GONE, mixture=mixture, window_tokens=window), epoch)
            assert torch.equal(found, expected) and torch.equal(numbers, doc_ids)
        for world_size, start in ((1, 7), (2, 0), (4, 5)):  # resumed, also inside a hole that spans blocks
            ranks = (make_loader(*GONE, mixture=mixture, rank=r, world_size=world_size) for r in range(world_size))
            assert torch.equal(torch.cat([emitted(rank, epoch, start)[0] for rank in ranks], 1), expected[start:])


def test_holes_that_begin_later(make_loader):
    whole, holes = emitted(make_loader())[0], emitted(make_loader(*GONE))[0]
    later = emitted(make_loader(*GONE, without_from=(0, 9)))[0]
    assert torch.equal(later[:9], whole[:9]) and torch.equal(later[9:], holes[9:])
    next_epoch = make_loader(*GONE, without_from=(1, 0))
    assert torch.equal(emitted(next_epoch)[0], whole) and len(next_epoch.plan(0).holes) == 0
    assert torch.equal(emitted(next_epoch, 1)[0], emitted(make_loader(*GONE), 1)[0])


@pytest.mark.parametrize("mixture", [(), MIXTURE])
@pytest.mark.parametrize("cycles", [0, 11, None])
def test_the_ledger_counts_holes_apart(make_loader, mixture, cycles):
    plan = make_loader(*GONE, mixture=mixture).plan(0)
    ledger, before = (made.ledger(cycles=cycles) for made in (plan, make_loader(mixture=mixture).plan(0)))
    blocks, whole = (emitted(make_loader(*ids, mixture=mixture))[0][:cycles] for ids in (GONE, ()))
    assert ledger["tokens_in_holes"] == int((blocks != whole).sum()) and "tokens_in_holes" not in before
    assert ledger["tokens_trained"] == int((blocks != PAD).sum())
    assert {**before, "tokens_trained": 0, "parts": 0} == {
        **{name: count for name, count in ledger.items() if name != "tokens_in_holes"},
        "tokens_trained": 0,
        "parts": 0,
    } or mixture
    for part in ledger.get("parts", {}).values():
        assert part["tokens_in_holes"] >= 0
    assert ledger_gaps({"ledger": {"0": ledger}, "seq_len": CASE.seq_len}) == []


@pytest.mark.parametrize("ids", [(), GONE, range(1000, 1100), range(1000, 1120)])
def test_targets_and_hidden_tokens_are_those_of_the_blocks(make_loader, ids):
    loader, schedule = make_loader(*ids), Schedule(make_loader(*ids).plan, 2)
    blocks, whole = emitted(loader)[0], emitted(make_loader())[0]
    assert targets_per_cycle(loader.plan(0)).tolist() == (blocks[:, :, 1:] != PAD).sum((1, 2)).tolist()
    hidden = hidden_per_step(schedule, schedule.steps_in(0))
    per_step = (blocks != whole).sum((1, 2))[: 2 * schedule.steps_in(0)].view(-1, 2).sum(1)
    assert hidden.tolist() == [0, *per_step.tolist()]


def test_every_block_that_a_hole_reaches_into_is_found(make_loader):
    """Also those in the middle of a document that is longer than a block, but none before the holes begin."""
    assert max(CASE.lengths) > 3 * CASE.seq_len
    for since in (0, 9):
        loader = make_loader(*GONE, without_from=(0, since))
        schedule, expected = Schedule(loader.plan, 2), []
        last_step = schedule.steps_in(0) + 5
        for epoch, cycles in ((0, 2 * schedule.steps_in(0)), (1, 10)):
            differ = (emitted(loader, epoch)[0] != emitted(make_loader(), epoch)[0]).any(2)[:cycles]
            expected += [(epoch, *place) for place in differ.nonzero().tolist()]
        assert blocks_with_holes(schedule, last_step) == expected


def test_a_document_of_another_epoch_is_no_warning_but_one_of_none_is(make_loader, caplog):
    loader = make_loader(filter="id != 1003")  # 119 rows for four splits: three are left over
    left_over = tuple(sorted(loader.planner.rows.doc_ids[loader.planner.left_over(0)].tolist()))
    assert len(left_over) == 3
    with caplog.at_level("INFO"):
        describe_holes(make_loader(*left_over, filter="id != 1003").plan(0), left_over)
        assert "holes: 0 of 3 documents" in caplog.text and {record.levelname for record in caplog.records} == {"INFO"}
        describe_holes(make_loader(*GONE).plan(0), GONE)
    assert caplog.records[-1].levelname == "WARNING" and "names 1 document that" in caplog.text


def test_the_same_holes_until_the_first_exposure(make_loader):
    one, two = (Schedule(make_loader(*ids).plan, 1) for ids in (GONE, ()))
    first = int(totals(two, np.array(GONE), last_step=30).first[:5].min())
    assert same_until(one, two, first - 1) and not same_until(one, two, first)


def test_holes_change_no_plan_and_are_part_of_a_state(make_loader):
    with_holes, without = make_loader(*GONE), make_loader()
    assert with_holes.plan(0).digest == without.plan(0).digest and len(without.plan(0).holes) == 0
    state = state_at(with_holes, 0, 3)
    assert position_from(make_loader(*GONE), state) == (0, 3)
    with pytest.raises(DataIdentityError, match=r"without .*\n.*6 documents, digest [0-9a-f]{16}"):
        position_from(without, state)
    with pytest.raises(ConfigError, match="rows come whole"):
        RowLoader(with_holes, ["id"])
    with pytest.raises(ConfigError, match="has no holes"):
        to_streaming_state(with_holes, 0, 0)


@pytest.mark.parametrize(
    ("holes", "words"),
    [
        ({"without": (2, 1)}, "ascending"),
        ({"without": (1, 1)}, "each once"),
        ({"without": (-1,)}, "whole numbers from 0"),
        ({"without": (True,)}, "whole numbers from 0"),
        ({"without": tuple(range(1_000_001))}, "1,000,001 ids"),
        ({"without_from": (0, 3)}, "together with data.without"),
        ({"without": (1,), "without_from": (1,)}, "an epoch and a cycle"),
    ],
)
def test_ids_that_cannot_be_left_out(holes, words):
    with pytest.raises(ConfigError, match=words):
        DataConfig(**holes)


def test_a_recipe_without_holes_is_the_one_from_before_there_were_any():
    assert not {"without", "without_from"} & RECIPE.lasting["data"].keys()
    assert override(RECIPE, {"data.without": [0]}).lasting["data"]["without"] == [0]


# --- runs ------------------------------------------------------------------------------------------------------------


def make_corpus(folder: Path) -> Location:
    """250 documents of up to 30 tokens, known to a tokenizer."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, 250)
    columns = {
        "id": pa.array(range(250), pa.int64()),
        "doc_id": [f"doc-{i}" for i in range(250)],
        "input_ids": pa.array([(rng.zipf(1.5, n) % 299).tolist() for n in lengths], pa.list_(pa.int32())),
        "n_tokens": pa.array(lengths, pa.int32()),
    }
    table = pa.table(columns)
    made = table.schema.field("input_ids").with_metadata({PARAMETERS_KEY: json.dumps(to_dict(TOKENIZER)).encode()})
    schema = identified(table.schema.set(table.schema.get_field_index("input_ids"), made), "table")
    location = Location(database_uri=str(folder))
    lance.write_dataset(table.cast(schema), location.uri, enable_stable_row_ids=True, data_storage_version="2.2")
    return location


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_num_cores", lambda: 1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Location:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def trained(corpus: Location, tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """18 steps, every fourth kept; an epoch has 14."""
    recipe = override(RECIPE, {"execution.keep_every": 4})
    spec = make_spec(corpus, Pin("table", 1), "tokenized-v1", recipe, str(tmp_path_factory.mktemp("runs")))
    assert run(spec) == 0
    return spec


@pytest.fixture
def original(trained: RunSpec, tmp_path: Path) -> Checkpoint:
    """A copy of the original run, for one test."""
    run_dir = str(shutil.copytree(trained.run_dir, tmp_path / "runs" / Path(trained.run_dir).name))
    write_spec(dataclasses.replace(trained, run_dir=run_dir))
    return find_checkpoint(run_dir, str(tmp_path / "runs"))


def first_seen(corpus: Location, spec: RunSpec, *, after_step: int) -> tuple[int, ...]:
    """Three documents that a run first sees after a step."""
    schedule = Schedule(BlockLoader(corpus, Pin.parse(spec.pin), spec.recipe.data, TOKENIZER).plan, 2)
    seen = totals(schedule, np.arange(250), last_step=18)
    return tuple(np.flatnonzero(seen.first > after_step)[:3].tolist())


def weights(run_dir: str, step: int) -> dict[str, Any]:
    """Digests of the files of weights and moments of a checkpoint."""
    found = json.loads(Path(checkpoint.checkpoint_uri(run_dir, step), checkpoint.MARKER_NAME).read_bytes())
    return {name: facts for name, facts in found.items() if name.endswith(".safetensors")}


def files(run_dir: str) -> dict[str, tuple[int, int]]:
    """Every file of a run, its size and time."""
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in Path(run_dir).rglob("*") if p.is_file()}


def train(spec: RunSpec, should_stop: Callable[[], bool] = lambda: False) -> int:
    """Train in this process; returns the exit code."""
    write_spec(spec)
    return run(spec, should_stop)


def replayed(corpus: Location, original: Checkpoint, ids: tuple[int, ...], **how: Any) -> ReplayPlan:
    return plan_replay(corpus, original, Chosen(ids=ids), **how)


def test_a_replay_from_a_clean_checkpoint_is_the_run_from_scratch(corpus, trained, original, tmp_path):
    """Bit for bit, stopped and resumed on the way; the original is not touched."""
    ids, before = first_seen(corpus, trained, after_step=9), files(original.run_dir)
    plan = replayed(corpus, original, ids)
    assert (plan.start_step, plan.seen_at_start, plan.left_out, plan.not_trained) == (8, 0, 3, {})
    assert plan.steps == 10 and plan.first_step > 9 and re.search("tiny-v1-without-[0-9a-f]{8}$", plan.run_dir)
    assert train(plan.spec, after(2)) == EXIT_STOPPED and checkpoint.newest(plan.run_dir) == 10
    assert replayed(corpus, original, ids).saved_step == 10
    assert train(plan.spec) == 0 and train(plan.spec) == 0

    scratch = make_spec(corpus, Pin("table", 1), "tokenized-v1", plan.spec.recipe, str(tmp_path / "scratch"))
    assert Path(scratch.run_dir).name == Path(plan.run_dir).name
    assert train(scratch) == 0
    assert weights(plan.run_dir, 18) == weights(scratch.run_dir, 18) != weights(original.run_dir, 18)
    assert losses(plan.run_dir) == losses(scratch.run_dir)  # those before it began too
    assert files(original.run_dir) == before

    passport = find_checkpoint(plan.run_dir, "").passport
    assert passport["replay_of"] == {
        "step": 18,
        "checkpoint": checkpoint.digest(original.uri),
        "start_step": 8,
        "start": checkpoint.digest(checkpoint.checkpoint_uri(original.run_dir, 8)),
        "documents_seen": 0,
        "tokens_seen": 0,
    }
    assert ledger_gaps(passport) == []
    held = sum(epoch["tokens_in_holes"] for epoch in passport["ledger"].values())
    assert passport["tokens_seen"] + held == original.passport["tokens_seen"] and held == plan.tokens_seen
    assert {run.name: run.replay_of for run in list_runs(str(tmp_path / "runs"))} == {
        Path(plan.run_dir).name: Path(original.run_dir).name,
        Path(original.run_dir).name: None,
    }
    assert find_checkpoint("tiny", str(tmp_path / "runs")).run_dir == original.run_dir
    assert find_checkpoint(Path(plan.run_dir).name, str(tmp_path / "runs")).run_dir == plan.run_dir


@pytest.mark.parametrize("from_step", [None, 8])
def test_a_replay_that_has_begun_needs_its_start_no_longer(corpus, trained, original, from_step):
    """Pruned meanwhile: the same command goes on, and what it says of the start stays true."""
    ids = first_seen(corpus, trained, after_step=9)
    how: dict[str, Any] = {"from_step": from_step, "steps": 3}
    plan = replayed(corpus, original, ids, **how)
    assert train(plan.spec, after(2)) == EXIT_STOPPED
    shutil.rmtree(checkpoint.checkpoint_uri(original.run_dir, 8))
    again = replayed(corpus, original, ids, **how)
    assert again.spec == plan.spec and (again.start_step, again.saved_step, again.last_step) == (8, 10, 11)
    shutil.rmtree(checkpoint.checkpoint_uri(plan.run_dir, 10))  # the only one of its own
    with pytest.raises(ReplacedError, match="or removed: run the same command again"):
        train(plan.spec)
    if from_step:
        with pytest.raises(CheckpointError, match="no checkpoint of step 8 to begin with; it has: 0, 4, 12"):
            replayed(corpus, original, ids, **how)
    else:
        assert replayed(corpus, original, ids, **how).start_step == 4


def test_without_a_clean_checkpoint_it_begins_anew(corpus, trained, original):
    ids = first_seen(corpus, trained, after_step=3)
    for step in (4, 8):
        shutil.rmtree(checkpoint.checkpoint_uri(original.run_dir, step))
    plan = replayed(corpus, original, ids, steps=2)
    assert (plan.start_step, plan.start, plan.last_step, plan.steps) == (0, None, 2, 2)
    assert train(plan.spec) == EXIT_STOPPED and read_result(plan.run_dir)["step"] == 2
    assert train(plan.spec) == EXIT_STOPPED and checkpoint.newest(plan.run_dir) == 2  # again: no step more


def test_a_start_that_is_not_clean_is_said_and_counted(corpus, trained, original):
    ids = tuple(range(1, 60))
    plan = replayed(corpus, original, ids, from_step=16)
    assert plan.seen_at_start > 30 and "NOT clean" in plan_text(plan) and not plan.is_clean
    assert train(plan.spec) == 0
    passport = find_checkpoint(plan.run_dir, "").passport
    assert passport["replay_of"]["documents_seen"] == plan.seen_at_start
    ledger = passport["ledger"]
    assert "tokens_in_holes" not in ledger["0"] and ledger["1"]["tokens_in_holes"] > 0 and not ledger_gaps(passport)
    assert replayed(corpus, original, ids).run_dir != plan.run_dir

    again = find_checkpoint(plan.run_dir, "")
    with pytest.raises(ConfigError, match="one run cannot have both"):
        replayed(corpus, again, (61,))
    with pytest.raises(ConfigError, match="sees none of these documents again"):
        replayed(corpus, original, first_seen(corpus, trained, after_step=9)[:1], from_step=16)


def test_a_step_of_nothing_but_holes_changes_nothing_and_counts(corpus, trained, original, caplog):
    plan = replayed(corpus, original, tuple(range(250)), changes={"execution.checkpoint_every": 1})
    assert train(dataclasses.replace(plan.spec, replay=None)) == 0
    result = read_result(plan.run_dir)
    assert result["step"] == 18 and result["passport"]["tokens_seen"] == 0 and result["train_loss"] is None
    assert not any("loss" in record for record in read_metrics(plan.run_dir))
    assert weights(plan.run_dir, 17) == weights(plan.run_dir, 18)
    shutil.rmtree(checkpoint.checkpoint_uri(plan.run_dir, 18))
    Path(plan.run_dir, "result.json").unlink()
    assert train(plan.spec) == 0 and weights(plan.run_dir, 17) == weights(plan.run_dir, 18)  # resumed without moments


def test_other_holes_and_other_starts_are_refused(corpus, trained, original):
    ids = first_seen(corpus, trained, after_step=9)
    plan = replayed(corpus, original, ids)
    other = override(plan.spec.recipe, {"data.without": list(ids[:2])})
    with pytest.raises(DataIdentityError, match="cannot be resumed by this run, which differs in without"):
        train(dataclasses.replace(plan.spec, recipe=other, run_dir=original.run_dir, replay=None))
    origin = plan.spec.replay
    assert origin is not None
    late = dataclasses.replace(
        origin, start_step=16, start=checkpoint.digest(f"{original.run_dir}/checkpoints/step_00000016")
    )
    with pytest.raises(DataIdentityError, match="had seen documents by then"):
        train(dataclasses.replace(plan.spec, replay=late))
    with pytest.raises(DataIdentityError, match="has changed since it was chosen"):
        train(dataclasses.replace(plan.spec, replay=dataclasses.replace(origin, start="another")))
    for name, value in (("optimizer", "muon"), ("learning_rate", 0.5)):
        changed = override(plan.spec.recipe, {f"train.{name}": value})
        with pytest.raises(DataIdentityError, match=f"differs in {name}"):
            train(dataclasses.replace(plan.spec, recipe=changed))


def test_a_replay_of_a_replay_leaves_out_both(corpus, trained, original):
    one, *others = first_seen(corpus, trained, after_step=9)
    first = replayed(corpus, original, (one,))
    assert train(first.spec) == 0
    second = replayed(corpus, find_checkpoint(first.run_dir, ""), (one, *others))
    assert second.not_trained == {"left out by that run already": 1} and second.left_out == 2
    assert second.start_step == 0  # the first replay keeps no checkpoint of steps that the others came after
    assert train(second.spec) == 0
    both = replayed(corpus, original, (one, *others))
    assert both.run_dir == second.run_dir and both.start_step == 8
    hidden = sum(point.tokens_in_holes for point in compare(second.run_dir).training)
    assert hidden == both.tokens_seen - first.tokens_seen


@pytest.mark.parametrize("mask", [False, True])
def test_a_micro_batch_or_block_of_holes_counts_nothing(mask):
    """The loss is the mean over the tokens there are; no NaN from the others."""
    ids = torch.randint(0, 299, (6, 32), generator=torch.Generator().manual_seed(0))
    ids[2:5], ids[5, 7:] = TOKENIZER.pad_id, TOKENIZER.pad_id
    blocks = Blocks(ids, torch.zeros_like(ids), torch.arange(32).expand(6, 32)) if mask else Blocks(ids)
    found = {}
    for size in (1, 2, 6):
        engine = engine_of({"execution.micro_batch_blocks": size, "model.document_mask": mask})
        loss, norm = engine.train_step(blocks, step=1, total_steps=9)
        found[size] = (float(loss), float(norm))
        assert all(torch.isfinite(weight).all() for weight in engine.model.parameters())
    assert found[1] == pytest.approx(found[6]) and found[2] == pytest.approx(found[6])
    losses_of = engine_of({"model.document_mask": mask}).loss(blocks, per_token=True)
    assert found[6][0] == pytest.approx(float(losses_of.detach().sum()) / (2 * 31 + 6))


def test_what_cannot_be_replayed(corpus, trained, original):
    held_out, unknown, late = 10, 5000, first_seen(corpus, trained, after_step=9)
    with pytest.raises(
        ConfigError, match=r"nothing to replay.*held out for validation: 1.*no version has such a row: 1"
    ):
        replayed(corpus, original, (held_out, unknown))
    early = find_checkpoint(f"{original.run_dir}/checkpoints/step_00000004", "")
    with pytest.raises(ConfigError, match="first seen later, from step"):
        replayed(corpus, early, late)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7 .* it has: 0, 4, 8, 12, 16, 18"):
        replayed(corpus, original, late, from_step=7)
    with pytest.raises(ConfigError, match=r"Only execution.\* and loader.\* may be set"):
        replayed(corpus, original, late, changes={"train.max_steps": 5})
    mixed = plan_replay(corpus, original, Chosen(ids=tuple(sorted({*late, held_out, unknown})), unknown=("x",)))
    assert mixed.left_out == 3 and mixed.asked == 6 and sum(mixed.not_trained.values()) == 3


def test_documents_are_chosen_by_id_name_or_predicate(corpus):
    lines = ["# a comment", "", "12 # twelve", "doc-7", "doc-#3", "  doc-nowhere  "]
    assert names_in(lines) == ["12", "doc-7", "doc-#3", "doc-nowhere"]
    chosen = choose(corpus, Pin("table", 1), names_in(lines), "n_tokens > 3 AND id < 3")
    assert {7, 12} <= set(chosen.ids) <= {0, 1, 2, 7, 12} and chosen.unknown == ("doc-#3", "doc-nowhere")


def test_the_comparison_and_its_pictures(corpus, trained, original):
    ids = first_seen(corpus, trained, after_step=9)
    plan = replayed(corpus, original, ids)
    assert train(plan.spec) == 0
    found = compare(plan.run_dir)
    by_step = {point.step: point for point in found.training}
    assert all(by_step[step].difference == 0 for step in range(1, plan.first_step))
    assert by_step[18].difference != 0 and found.validation[-1].difference != 0
    assert sum(point.tokens_in_holes for point in found.training) == plan.tokens_seen
    assert by_step[plan.first_step].tokens_in_holes > 0
    assert found.blocks is not None and found.blocks.step == 18 and found.blocks.others is not None
    assert found.blocks.left_out[1] > found.blocks.left_out[0]  # trained on against not
    text = comparison_text(found)
    assert "3 documents" in text and f"{found.blocks.left_out[0]:.4f}" in text and "tokens in holes" in text
    assert replay_svg(found).count("<polyline") == 3 and replay_html(found).endswith("</html>\n")
    with pytest.raises(ConfigError, match="is no replay of another run"):
        compare(original.run_dir)
    for step in checkpoint.steps(original.run_dir):
        shutil.rmtree(checkpoint.checkpoint_uri(original.run_dir, step))
    assert compare(plan.run_dir) == dataclasses.replace(found, blocks=None)
    shutil.rmtree(original.run_dir)
    with pytest.raises(ConfigError, match=r"which is gone .* the replay itself is a run like any other"):
        compare(plan.run_dir)


def test_the_verb_says_what_it_would_do_and_compares(corpus, trained, original, tmp_path):
    ids = first_seen(corpus, trained, after_step=9)
    (tmp_path / "ids.txt").write_text("".join(f"doc-{i}\n" for i in ids))
    runs = str(tmp_path / "runs")

    def replay(*arguments: str, **how: Any) -> Any:
        command = ["--runs", runs, "--database", corpus.database_uri, "replay", *arguments]
        return CliRunner().invoke(cli, command, **how)

    said = replay("tiny", "--without", str(tmp_path / "ids.txt"), "--nproc", "2", "--dry-run", "--json")
    plan = json.loads(said.stdout)
    assert (plan["left_out"], plan["start_step"], plan["steps"], plan["is_clean"]) == (3, 8, 10, True)
    assert not Path(plan["run_dir"]).exists()
    assert json.loads(replay("--without", "-", "--dry-run", "--json", input=f"{ids[0]}\n").stdout)["left_out"] == 1
    with pytest.raises(ConfigError, match="Which documents"):
        replay(catch_exceptions=False)
    with pytest.raises(InputError, match="cannot be read"):
        replay("--without", str(tmp_path / "nowhere"), catch_exceptions=False)
    with pytest.raises(ConfigError, match=r"ends in .svg or .html"):
        replay("--id", "1", "--plot", str(tmp_path / "plot.png"), catch_exceptions=False)

    spec = replayed(corpus, original, ids).spec
    assert train(spec) == 0
    svg = tmp_path / "curves.svg"
    done = replay("tiny", "--without", str(tmp_path / "ids.txt"), "--plot", str(svg))
    assert done.exit_code == 0 and "tokens in holes" in done.stdout and svg.exists()
    shown = json.loads(replay(spec.run_dir, "--compare", "--json").stdout)
    assert shown["start_step"] == 8 and len(shown["training"]) == 18


@pytest.mark.parametrize(
    ("left_out", "others", "words"),
    [
        ((2.0, 2.5), (3.0, 3.1), r"lower by 0.5000, and on the text beside them lower by 0.1000:\ncounterfactual memo"),
        ((2.0, 2.5), None, r"left out lower by 0.5000:\ncounterfactual memo"),
        (
            (2.0, 2.1),
            (3.0, 3.2),
            r"lower by 0.1000, and on the text beside them lower by 0.2000:\nno memorisation shown",
        ),
        ((2.0, 1.9), (3.0, 2.8), r"higher by 0.1000, and on the text beside them higher by 0.2000:\nno memorisation"),
        ((2.0, 2.0), (3.0, 3.0), r"no different, and on the text beside them no different:\nno memorisation shown"),
    ],
)
def test_memorisation_is_said_only_where_it_is_shown(left_out, others, words):
    blocks = BlocksLoss(
        step=9, num_blocks=16, num_with_holes=98, tokens_left_out=5, left_out=left_out, tokens_others=7, others=others
    )
    empty = dict(original="a", replay="b", pin="t@1", holes="", status="done", start_step=0, seen_at_start=0, step=9)
    text = comparison_text(
        Comparison(**empty, total_steps=9, training=(), validation=(), curves={}, blocks=blocks)  # type: ignore[arg-type]
    )
    assert re.search(words, text) and "in 16 of 98 blocks" in text


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_killed_replay_goes_on_as_itself(corpus, trained, original, tmp_path, parallel):
    """kill -9 of a rank after its first checkpoint, and with DDP also before it; then the same command again."""
    ids, changes = first_seen(corpus, trained, after_step=9), {"execution.parallel": parallel}
    plan = replayed(corpus, original, ids, changes=changes)
    if parallel == "ddp":
        assert drive(plan.spec, "kill", 2, tmp_path) != 0 and checkpoint.newest(plan.run_dir) is None
    assert drive(plan.spec, "kill", 7, tmp_path) != 0 and checkpoint.newest(plan.run_dir) == 12
    assert run_local(plan.spec, 2)["status"] == "done"
    undisturbed = dataclasses.replace(plan.spec, run_dir=str(tmp_path / "undisturbed"))
    assert run_local(undisturbed, 2)["status"] == "done"
    assert weights(plan.run_dir, 18) == weights(undisturbed.run_dir, 18)
    assert losses(plan.run_dir) == losses(undisturbed.run_dir)
