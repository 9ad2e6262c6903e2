"""Loader state: what it names, what is refused, the way to StreamingDataset and back, and rows without packing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch
from lancedb.streaming import StreamingDataset

from pretrain_assets.config import MixtureComponent
from pretrain_assets.errors import CheckpointError, ConfigError, DataIdentityError, TableError
from pretrain_assets.loader.rows import RowLoader
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.loader.state import position_from, state_at
from pretrain_assets.loader.stream import BlockLoader
from pretrain_assets.loader.streaming_state import from_streaming_state, to_streaming_state
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location
from pretrain_assets.train.passport import check_plan
from pretrain_assets_tests.loader_tables import Case, Where, emitted, rows_of, stacked

LENGTHS = (0, 0, 1, 14, 15, 16, 31, 83, *np.random.default_rng(1).integers(0, 40, 32).tolist())
CASE = Case(lengths=LENGTHS, rows_per_file=20, filter="NOT is_dup AND id % 7 != 0", num_splits=4, seed=5)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRETRAIN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Where:
    return CASE.build(tmp_path_factory.mktemp("table"))


def in_json(state: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(state)))


def originals(where: Where, world_size: int = 1, case: Case = CASE) -> list[Any]:
    blocks = case.loader(where).plan(0).blocks_per_epoch
    return [case.original(where, blocks, rank, world_size) for rank in range(world_size)]


def test_a_state_is_one_cycle_number_and_goes_on_on_any_world_size(where):
    whole = emitted(CASE.loader(where))[0]
    state = in_json(state_at(CASE.loader(where, 1, 2), 0, 3))
    assert {**state, "plan": len(state["plan"])} == {
        "format": 1,
        "epoch": 0,
        "cycle": 3,
        "plan": 32,
        "data": {
            "table_version": "t@1",
            "filter": CASE.filter,
            "mixture": [],
            "token_column": "input_ids",
            "shuffle_clump_size": 1,
            "tokenizer": "f",
            "seed": 5,
            "num_splits": 4,
            "seq_len": 16,
            "eos_id": 300,
            "pad_id": 301,
        },
    }
    assert state == state_at(CASE.loader(where), 0, 3)
    for world_size in (1, 2, 4):
        loaders = [CASE.loader(where, rank, world_size) for rank in range(world_size)]
        rest = [emitted(loader, *position_from(loader, state))[0] for loader in loaders]
        assert torch.equal(torch.cat(rest, 1), whole[3:])


def test_a_state_survives_an_append_where_the_version_is_pinned_and_nothing_else(tmp_path):
    """FIELD_TESTS 5."""
    location, pin = CASE.build(tmp_path)
    whole = emitted(CASE.loader((location, pin)))[0]
    state = state_at(CASE.loader((location, pin)), 0, 2)
    lance.write_dataset(rows_of(LENGTHS[:9], first_id=9000), location.uri, mode="append")
    pinned = CASE.loader((location, pin))
    assert torch.equal(emitted(pinned, *position_from(pinned, state))[0], whole[2:])
    with pytest.raises(DataIdentityError) as caught:
        position_from(CASE.loader((location, Pin("t", 2))), state)
    assert str(caught.value) == (
        "This state cannot be loaded by this loader, which differs in table_version:\n"
        "  table_version (version of the table):\n"
        "    state:       't@1'\n"
        "    this loader: 't@2'\n"
        "Give the loader the state's settings to go on from it, or start without a state."
    )
    dataset = lance.dataset(location.uri)
    dataset.cleanup_old_versions(retain_versions=1)
    with pytest.raises(TableError, match=r"version"):
        CASE.loader((location, pin))


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"filter": "NOT is_dup"}, "filter:\n  filter (data.filter):"),
        ({"seed": 6}, "seed:\n  seed (data.seed):\n    state:       5\n    this loader: 6"),
        ({"seq_len": 32}, "seq_len:\n  seq_len (data.seq_len):"),
        ({"num_splits": 8, "clump": 4}, "shuffle_clump_size, num_splits:"),
        ({"eos_id": 299, "pad_id": 300}, "eos_id, pad_id:\n  eos_id (end-of-text id of the tokenizer):"),
    ],
)
def test_a_state_of_other_data_is_refused_with_every_difference(where, changes, difference):
    state = state_at(CASE.loader(where), 0, 1)
    with pytest.raises(DataIdentityError) as caught:
        position_from(replace(CASE, **changes).loader(where), state)
    assert f"which differs in {difference}" in str(caught.value)


def test_another_tokenizer_is_refused(where):
    loader, state = CASE.loader(where), state_at(CASE.loader(where), 0, 1)
    other = BlockLoader(*where, CASE.data, replace(loader.tokenizer, fingerprint="g"))
    with pytest.raises(DataIdentityError, match=r"differs in tokenizer:\n.*fingerprint.*\n.*'f'\n.*'g'"):
        position_from(other, state)


def test_rows_changed_under_the_same_version_are_refused(where, tmp_path, monkeypatch):
    state = state_at(CASE.loader(where), 0, 1)
    monkeypatch.setenv("PRETRAIN_CACHE_DIR", str(tmp_path / "cache"))  # as on another node
    changed = replace(CASE, lengths=(*LENGTHS[:-1], LENGTHS[-1] + 1)).build(tmp_path)
    with pytest.raises(DataIdentityError, match=rf"no longer {state['plan']}: rows or their token counts were changed"):
        position_from(CASE.loader(changed), state)


def test_a_passport_names_the_plan_of_its_epoch(where):
    loader = CASE.loader(where)
    schedule = Schedule(loader.plan, cycles_per_step=2)
    check_plan(schedule, {"epoch": 1}, "step_2")  # made before passports had it
    check_plan(schedule, {"epoch": 1, "plan": loader.plan(1).digest}, "step_2")
    with pytest.raises(DataIdentityError, match=r"Checkpoint step_2 cannot be resumed.*the plan of epoch 1 has digest"):
        check_plan(schedule, {"epoch": 1, "plan": loader.plan(0).digest}, "step_2")


def test_seeds_that_give_the_same_order_in_two_epochs_are_named(where):
    far = replace(CASE, seed=CASE.seed + 100_003)
    near, beyond = CASE.loader(where), far.loader(where)
    assert near.plan(1).order.tolist() == beyond.plan(0).order.tolist()
    note = "seed 100008 shuffles epoch 0 as seed 5 shuffles epoch 1"
    with pytest.raises(DataIdentityError, match=note):
        position_from(near, state_at(beyond, 0, 1))
    with pytest.raises(DataIdentityError, match=note):
        from_streaming_state(near, to_streaming_state(beyond, 0, 1))
    with pytest.raises(DataIdentityError) as caught:
        position_from(beyond, state_at(near, 0, 1))
    assert "shuffles" not in str(caught.value)


def test_what_is_no_state_is_refused(where):
    loader = CASE.loader(where)
    state = state_at(loader, 0, 1)
    for changes in ({"format": 2}, {"cycle": -1}, {"cycle": True}, {"epoch": None}, {"data": None}):
        with pytest.raises(CheckpointError, match="no loader state of format 1"):
            position_from(loader, state | changes)
    cycles = loader.plan(0).cycles_per_epoch
    assert position_from(loader, state | {"cycle": cycles}) == (0, cycles)
    with pytest.raises(CheckpointError, match=f"cycle={cycles + 1} is past the {cycles} of epoch 0"):
        position_from(loader, state | {"cycle": cycles + 1})


# --- StreamingDataset -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_can_change_loaders_at_every_cycle(where, world_size):
    """Their state is ours at every cycle, each goes on from the other's, and both yield the same rest."""
    loaders = [CASE.loader(where, rank, world_size) for rank in range(world_size)]
    owned, cycles = 4 // world_size, loaders[0].plan(0).cycles_per_epoch
    datasets = originals(where, world_size)
    streams = [iter(dataset) for dataset in datasets]
    whole = emitted(CASE.loader(where))[0]
    for cycle in range(cycles + 1):
        theirs = StreamingDataset.merge_state_dicts([dataset.state_dict() for dataset in datasets])
        ours = to_streaming_state(loaders[0], 0, cycle)
        assert ours == theirs
        for rank, (loader, fresh) in enumerate(zip(loaders, originals(where, world_size), strict=True)):
            assert from_streaming_state(loader, in_json(theirs)) == (0, cycle)
            rest = whole[cycle:, rank * owned : (rank + 1) * owned]
            assert torch.equal(emitted(loader, 0, cycle)[0], rest)
            fresh.load_state_dict(ours)
            assert torch.equal(stacked(list(fresh), owned, 16)[0], rest)
        for stream in streams:
            blocks = [next(stream) for _ in range(owned if cycle < cycles else 0)]
            assert len(blocks) == (owned if cycle < cycles else 0)


def test_streaming_states_of_other_data_are_refused(where, tmp_path):
    loader, blocks = CASE.loader(where), CASE.loader(where).plan(0).blocks_per_epoch

    def state_of(dataset: Any, cycles: int) -> dict[str, Any]:
        stream = iter(dataset)
        for _ in range(4 * cycles):
            next(stream)
        return dict(dataset.state_dict())

    good = state_of(CASE.original(where, blocks), 2)
    assert from_streaming_state(loader, good) == (0, 2)
    refused = {
        "shuffle_seed:": state_of(CASE.original(where, blocks, shuffle_seed=6), 2),
        "blocks_per_epoch:": state_of(CASE.original(where, blocks - 4), 2),
        "splits stand elsewhere after 2 blocks, which differs in split 0:": state_of(
            CASE.original(where, blocks, filter="NOT is_dup"), 2
        ),
    }
    table = lance.dataset(where[0].uri).to_table()
    column = table.schema.get_field_index("input_ids")
    other = [[(token + 1) % 300 for token in tokens] for tokens in table["input_ids"].to_pylist()]
    changed = table.set_column(column, table.schema.field(column), pa.array(other, pa.list_(pa.int32())))
    copy = Location(database_uri=str(tmp_path))
    lance.write_dataset(changed, copy.uri, enable_stable_row_ids=True, data_storage_version="2.2")
    # the same rows, lengths and order, other tokens: only the buffers differ
    refused["4 of 4 splits stand elsewhere"] = state_of(CASE.original((copy, Pin("t", 1)), blocks), 2)
    for message, state in refused.items():
        with pytest.raises(DataIdentityError) as caught:
            from_streaming_state(loader, state)
        assert message in str(caught.value)
    with pytest.raises(CheckpointError, match=r"\[2, 2, 0, 0\] are not all equal.*merge_state_dicts"):
        from_streaming_state(loader, good | {"blocks_emitted_per_split": [2, 2, 0, 0]})
    with pytest.raises(CheckpointError, match="lacks pack_sequences, eos_id"):
        from_streaming_state(loader, {name: good[name] for name in ("shuffle_seed", "num_splits", "epoch")})


def test_a_mixture_has_no_streaming_state(where):
    mixture = (MixtureComponent(name="all", predicate="true", weight=1.0),)
    loader = BlockLoader(*where, replace(CASE.data, mixture=mixture), CASE.loader(where).tokenizer)
    with pytest.raises(ConfigError, match="StreamingDataset has no mixtures"):
        to_streaming_state(loader, 0, 1)


# --- rows -------------------------------------------------------------------------------------------------------------


def rows_of_original(where: Where, rank: int, world_size: int, epoch: int) -> list[dict[str, Any]]:
    settings = {"columns": ["id", "input_ids"], "epoch": epoch, "pack_sequences": None, "blocks_per_epoch": None}
    return list(CASE.original(where, 0, rank, world_size, **settings))


@pytest.mark.parametrize(("world_size", "epoch", "window"), [(1, 0, 1), (1, 1, 1 << 20), (2, 1, 200)])
def test_rows_equal_the_original_from_every_cycle(where, world_size, epoch, window):
    case = replace(CASE, settings=replace(CASE.settings, window_tokens=window))
    owned = 4 // world_size
    for rank in range(world_size):
        rows = RowLoader(case.loader(where, rank, world_size), ["id", "input_ids"])
        wanted = rows_of_original(where, rank, world_size, epoch)
        assert len(wanted) == rows.cycles_in(epoch) * owned == 28 // world_size
        for cycle in range(rows.cycles_in(epoch) + 1):
            state = in_json(rows.state_at(epoch, cycle))
            batches = list(rows.batches(*rows.position_from(state)))
            assert [batch.num_rows for batch in batches] == [owned] * (rows.cycles_in(epoch) - cycle)
            assert [row for batch in batches for row in batch.to_pylist()] == wanted[cycle * owned :]
        threes = [batch.to_pylist() for batch in rows.batches(epoch, 1, 3)]
        assert [len(batch) for batch in threes] == [3 * owned] * ((rows.cycles_in(epoch) - 1) // 3)
        assert [row for batch in threes for row in batch] == wanted[owned : owned + 3 * owned * len(threes)]


def test_states_of_rows_and_blocks_are_not_mistaken_for_each_other(where):
    loader = CASE.loader(where)
    rows = RowLoader(loader, ["id"])
    with pytest.raises(DataIdentityError, match="differs in reads"):
        rows.position_from(state_at(loader, 0, 1))
    with pytest.raises(DataIdentityError, match="differs in reads"):
        position_from(loader, rows.state_at(0, 1))
    with pytest.raises(CheckpointError, match=r"cycle=99 is past the \d+ of epoch 0"):
        rows.position_from(rows.state_at(0, 99))
    with pytest.raises(ConfigError, match=r"columns=\['nope'\]: name at least one of the table's: id, is_dup"):
        RowLoader(loader, ["nope"])


def test_a_mixture_repeats_rows(tmp_path: Path):
    where = replace(CASE, filter="true").build(tmp_path)
    parts = (("few", "id < 1010", 3.0), ("many", "id >= 1010", 1.0))
    mixture = tuple(MixtureComponent(name=n, predicate=p, weight=w) for n, p, w in parts)
    data = replace(CASE.data, filter="true", mixture=mixture)
    rows = RowLoader(BlockLoader(*where, data, CASE.loader(where).tokenizer), ["id"])
    plan = rows.loader.plan(0)
    ids = np.array([batch["id"].to_pylist() for batch in rows.batches(0)])
    assert ids.T.ravel().tolist() == plan.doc_ids.tolist()
    assert len(set(ids.ravel().tolist())) < ids.size
