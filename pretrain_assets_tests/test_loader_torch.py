"""The loader inside PyTorch: DataLoader with spawned workers, StatefulDataLoader, epochs, kill and resume."""

from __future__ import annotations

import copy
import json
import multiprocessing
import pickle
from collections.abc import Iterator
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from pretrain_assets.config import LoaderConfig
from pretrain_assets.errors import CheckpointError, ConfigError, DataIdentityError
from pretrain_assets.loader.state import position_from, state_at
from pretrain_assets.train.dataset import PackedDataset
from pretrain_assets.train.iterations import Iterations, Position
from pretrain_assets_tests.loader_tables import Case, Where, emitted

LENGTHS = (0, 1, 14, 15, 16, 83, *np.random.default_rng(1).integers(0, 40, 44).tolist())
CASE = Case(lengths=LENGTHS, num_splits=4, seed=5, settings=LoaderConfig(window_tokens=200))
WORKERS = {"batch_size": None, "multiprocessing_context": "forkserver"}
"""As clean as "spawn", which one test uses, but torch is imported once for all workers."""

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 calls it


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    multiprocessing.set_forkserver_preload(["pretrain_assets.train.dataset", "numba", "pandas"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRETRAIN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Where:
    return CASE.build(tmp_path_factory.mktemp("table"))


@pytest.fixture(scope="module")
def epochs(where: Where) -> list[torch.Tensor]:
    """What three undisturbed epochs yield, each as (cycles, splits, seq_len)."""
    found = [emitted(CASE.loader(where), epoch)[0] for epoch in range(3)]
    assert all(len(epoch) > 12 for epoch in found) and not torch.equal(found[0][:12], found[1][:12])
    return found


def dataset(where: Where, rank: int = 0, world_size: int = 1, **changes: Any) -> PackedDataset:
    settings = {"cycles_per_batch": 1, "settings": CASE.settings} | changes
    return PackedDataset(*where, CASE.data, CASE.loader(where).tokenizer, rank=rank, world_size=world_size, **settings)


def ids(items: Any) -> torch.Tensor:
    """Items as (items, blocks, seq_len), or (items, seq_len) where they are blocks."""
    taken = [item["input_ids"] for item in items]
    return torch.stack(taken) if taken else torch.empty(0, 4, 16, dtype=torch.int64)


def in_json(state: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(state)))


def test_every_iteration_is_the_next_epoch_unless_one_is_set(where, epochs):
    """LOADER.md, oddity 5: theirs yields nothing the second time."""
    stream = dataset(where)
    assert torch.equal(ids(stream), epochs[0]) and torch.equal(ids(stream), epochs[1])
    stream.set_epoch(0)
    assert torch.equal(ids(islice(stream, 2)), epochs[0][:2])  # left early, and still over
    assert torch.equal(ids(DataLoader(stream, batch_size=None)), epochs[1])
    assert torch.equal(ids(dataset(where, epoch=2)), epochs[2])


def test_items_are_batches_as_the_loader_gives_them(where, epochs):
    batches = list(dataset(where, rank=1, world_size=2, cycles_per_batch=3))
    assert set(batches[0]) == {"input_ids", "doc_ids"} and batches[0]["doc_ids"].shape == (6, 16)
    more = next(iter(dataset(where, cycles_per_batch=3, outputs={"dtype": "int32", "cu_seqlens": True})))
    assert more["input_ids"].dtype == torch.int32 and more["cu_seqlens"][-1] == 12 * 16
    whole = epochs[0][: len(batches) * 3, 2:]
    assert torch.equal(torch.cat([batch["input_ids"] for batch in batches]), whole.flatten(0, 1))


def test_resuming_inside_an_epoch_leaves_the_next_ones_whole(where, epochs):
    """FIELD_TESTS 2."""
    stream = dataset(where)
    stream.load_state_dict(in_json(state_at(CASE.loader(where), 0, 5)))
    assert torch.equal(ids(stream), epochs[0][5:])
    assert torch.equal(ids(stream), epochs[1]) and torch.equal(ids(stream), epochs[2])
    stream.load_state_dict(state_at(CASE.loader(where), 1, len(epochs[1])))
    assert len(ids(stream)) == 0 and torch.equal(ids(stream), epochs[2])


def test_the_state_counts_what_was_handed_out_and_not_what_was_read_ahead(where, epochs):
    """FIELD_TESTS 4; at every cycle, and across the end of the epoch."""
    stream = dataset(where)
    assert position_from(CASE.loader(where), stream.state_dict()) == (0, 0)
    for taken, _ in enumerate(stream, start=1):
        assert position_from(CASE.loader(where), stream.state_dict()) == (0, taken)
        assert stream.state_after(taken) == stream.state_dict()
    assert position_from(CASE.loader(where), stream.state_dict()) == (1, 0)


@pytest.mark.slow
def test_workers_do_not_change_the_stream_and_states_fit_any_number_of_them(where, epochs):
    """Two epochs, then stops and goes on with 2 -> 0 -> 1 workers."""
    stream = dataset(where)
    spawned = DataLoader(stream, num_workers=2, batch_size=None, multiprocessing_context="spawn")
    assert torch.equal(ids(spawned), epochs[0])
    assert torch.equal(ids(islice(DataLoader(stream, num_workers=2, **WORKERS), 3)), epochs[1][:3])
    with pytest.raises(CheckpointError, match=r"only its consumer knows: use `state_after\(num_batches\)`"):
        stream.state_dict()
    state = in_json(stream.state_after(3))
    assert state == state_at(CASE.loader(where), 1, 3)
    assert torch.equal(emitted(CASE.loader(where), *position_from(CASE.loader(where), state))[0], epochs[1][3:])

    resumed = dataset(where)
    resumed.load_state_dict(state)
    assert torch.equal(ids(islice(DataLoader(resumed, batch_size=None), 4)), epochs[1][3:7])
    state = in_json(resumed.state_after(4))
    resumed = dataset(where)
    resumed.load_state_dict(state)
    assert torch.equal(ids(DataLoader(resumed, num_workers=1, **WORKERS)), epochs[1][7:])
    assert position_from(CASE.loader(where), resumed.state_after(2)) == (1, 9)


def test_three_kills_inside_an_epoch_on_two_ranks_and_one(where, epochs):
    """FIELD_TESTS 3: ranks 2 -> 1 -> 2 -> 1, no block lost or repeated."""
    state, taken = None, []
    for world_size in (2, 1, 2, 1):
        streams = [dataset(where, rank, world_size) for rank in range(world_size)]
        if state is not None:
            for stream in streams:
                stream.load_state_dict(state)
        iterators = [iter(stream) for stream in streams]
        for _ in range(3):
            taken.append(torch.cat([next(iterator)["input_ids"] for iterator in iterators]))
        states = [in_json(stream.state_dict()) for stream in streams]
        assert all(each == states[0] for each in states)
        state = states[0]
    assert torch.equal(torch.stack(taken), epochs[0][:12])


@pytest.mark.parametrize("snapshot_every", [1, 3])
@pytest.mark.parametrize("cycles_per_batch", [1, None])
def test_a_stateful_dataloader_goes_on_from_every_item(where, epochs, cycles_per_batch, snapshot_every):
    settings: dict[str, Any] = {"batch_size": None, "snapshot_every_n_steps": snapshot_every}
    items = epochs[0] if cycles_per_batch else epochs[0].flatten(0, 1)
    following = epochs[1] if cycles_per_batch else epochs[1].flatten(0, 1)
    loader = StatefulDataLoader(dataset(where, cycles_per_batch=cycles_per_batch), **settings)
    states = [in_json(loader.state_dict())]
    for _ in loader:
        states.append(in_json(loader.state_dict()))
    states.append(in_json(loader.state_dict()))
    for taken, state in enumerate(states):
        resumed = StatefulDataLoader(dataset(where, cycles_per_batch=cycles_per_batch), **settings)
        resumed.load_state_dict(state)
        ended = taken == len(items) + 1  # iterated to the end: what comes is the next epoch
        assert torch.equal(ids(resumed).reshape(-1, *items.shape[1:]), following if ended else items[taken:])
        if taken in (2, len(items)):
            assert torch.equal(ids(resumed), following)


@pytest.mark.parametrize(
    ("workers", "snapshot_every"),
    [pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(2, 3, marks=pytest.mark.slow), (1, 3)],
)
def test_a_stateful_dataloader_of_workers_goes_on(where, epochs, workers, snapshot_every):
    settings: dict[str, Any] = WORKERS | {"num_workers": workers, "snapshot_every_n_steps": snapshot_every}
    loader = StatefulDataLoader(dataset(where), **settings)
    iterator = iter(loader)
    assert torch.equal(ids(islice(iterator, 5)), epochs[0][:5])
    state = in_json(loader.state_dict())
    del iterator, loader
    resumed = StatefulDataLoader(dataset(where), **settings)
    resumed.load_state_dict(state)
    assert torch.equal(ids(resumed), epochs[0][5:])
    if (workers, snapshot_every) == (2, 3):  # iterated to the end: what comes is the next epoch
        ended = in_json(resumed.state_dict())
        after = StatefulDataLoader(dataset(where), **settings)
        after.load_state_dict(ended)
        assert torch.equal(ids(after), epochs[1])


def test_single_blocks_are_shared_as_the_original_shares_them(where, epochs):
    """Under the same DataLoader, LanceDB's StreamingDataset hands out the same blocks in the same order."""
    ours = DataLoader(dataset(where, cycles_per_batch=None), 3, num_workers=2, multiprocessing_context="forkserver")
    infos = [SimpleNamespace(id=number, num_workers=2) for number in range(2)]
    theirs = [
        DataLoader(CASE.original(where, 4 * len(epochs[0]), worker_info_override=info), batch_size=3) for info in infos
    ]
    turns = chain.from_iterable(zip(*theirs, strict=True))  # DataLoader asks its workers in turn
    for mine, its in zip(ours, turns, strict=True):
        assert torch.equal(mine["input_ids"], its["input_ids"]) and torch.equal(mine["doc_ids"], its["doc_ids"])


def test_single_blocks_stop_at_whole_cycles(where, epochs):
    stream = dataset(where, cycles_per_batch=None)
    blocks = iter(stream)
    assert torch.equal(ids(islice(blocks, 6)), epochs[0].flatten(0, 1)[:6])
    inside = in_json(stream.state_dict())
    with pytest.raises(CheckpointError, match=r"6 blocks end inside a cycle of 4 splits.*a multiple of 4 blocks"):
        stream.state_after(6)
    with pytest.raises(CheckpointError, match="the state of one DataLoader worker"):
        position_from(CASE.loader(where), inside)
    assert position_from(CASE.loader(where), stream.state_after(8)) == (0, 2)
    stream.load_state_dict(inside)
    assert torch.equal(ids(stream), epochs[0].flatten(0, 1)[6:])
    with pytest.raises(CheckpointError, match=r"made by .*'cycles_per_batch': None.*cannot be loaded by .*: 1"):
        dataset(where).load_state_dict(inside)


def test_what_cannot_work_says_why(where, monkeypatch):
    with monkeypatch.context() as patch:  # as in a worker; torch waits for seconds when a real one fails
        patch.setattr(torch.utils.data, "get_worker_info", lambda: SimpleNamespace(id=1, num_workers=3))
        with pytest.raises(ConfigError, match="num_workers=3 cannot share the 4 splits of a rank equally"):
            next(iter(dataset(where, cycles_per_batch=None)))
    forked = dataset(where)
    forked._process = -1  # as in a fork, which would not be safe from the process that runs the tests
    with pytest.raises(ConfigError, match="multiprocessing_context='spawn' or 'forkserver'"):
        next(iter(forked))
    with pytest.raises(ConfigError, match="cu_seqlens are made for whole batches"):
        dataset(where, cycles_per_batch=None, outputs={"cu_seqlens": True})


def test_a_state_of_other_data_is_refused(where):
    state = state_at(CASE.loader(where), 0, 2)
    with pytest.raises(DataIdentityError, match="differs in seed, num_splits"):
        dataset(where).load_state_dict(state | {"data": state["data"] | {"seed": 1, "num_splits": 8}})


def test_a_dataset_travels_without_what_it_has_opened(where, epochs):
    stream = dataset(where)
    next(iter(stream))
    travelled = pickle.loads(pickle.dumps(stream))
    assert torch.equal(ids(travelled), epochs[1])


def test_a_worker_that_starts_late_gets_the_epoch_it_was_made_for():
    parent = Iterations(Position(3, 2, 0))
    early, late = (copy.copy(parent) for _ in range(2))  # as sent to workers: the memory is shared
    early.begin(early.turn())
    assert parent.next == (4, 0, 0) and parent.last == (3, 2, 0)
    turn = late.turn()
    assert turn.position == (3, 2, 0)
    late.begin(turn)
    assert parent.next == late.turn().position == (4, 0, 0)
    unwanted = copy.copy(parent)
    parent.restart(Position(7, 0, 0))
    unwanted.begin(unwanted.turn())
    assert parent.next == parent.last == (7, 0, 0)
