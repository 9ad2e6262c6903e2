"""FIELD_TESTS 1 to 9 and 12: faults that users of comparable loaders reported, each with the right value in it.

6 is `test_field_6_a_tagged_version_outlives_rewrites_and_clean_up` (test_maintain.py) as well, 5 of whole runs is
`test_field_5_other_data_is_refused_with_every_difference_and_both_values` (test_train.py).
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from itertools import chain, islice, pairwise
from pathlib import Path

import lance
import pytest
import torch

from pretrain_assets.config import LoaderConfig, TokenizerIdentity
from pretrain_assets.errors import ConfigError, DataIdentityError, TableError
from pretrain_assets.loader.entries import CACHE_VARIABLE
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.loader.state import position_from, state_at
from pretrain_assets.loader.stream import BlockLoader
from pretrain_assets.table.lineage import Pin
from pretrain_assets_tests.loader_tables import (
    Blocks,
    Case,
    Where,
    emitted,
    stacked,
    write_documents,
    write_in_reading_order,
)

EOS, PAD = 300, 301
LENGTHS = (0, 0, 1, 1, 14, 15, 16, 31, 83, *random.Random(1).choices(range(40), k=121))
MIXED = Case(lengths=LENGTHS, num_splits=8, seed=5, filter="id % 7 != 0", rows_per_file=40)
WORLD_SIZES = (1, 2, 4, 1)


def hashes(blocks: Blocks) -> list[list[str]]:
    """A digest of every block, by cycle and split."""
    both = torch.stack(blocks, 2)
    return [[hashlib.sha256(block.numpy().tobytes()).hexdigest() for block in cycle] for cycle in both]


def on_ranks(case: Case, where: Where, world_size: int, start: int, num_cycles: int | None = None) -> list[list[str]]:
    """Digests of the blocks that so many ranks together yield from a cycle on; the loaders end in mid-stream."""
    parts = []
    for rank in range(world_size):
        loader = case.loader(where, rank, world_size)
        batches = loader.batches(0, start)
        found = list(islice(batches, num_cycles))
        batches.close()
        parts.append(stacked(found, len(loader.splits), case.seq_len))
    ids, docs = (torch.cat([part[kind] for part in parts], 1) for kind in (0, 1))
    return hashes((ids, docs))


def saved(loader: BlockLoader, cycle: int) -> dict[str, object]:
    """The state as a checkpoint's file gives it back."""
    return dict(json.loads(json.dumps(state_at(loader, 0, cycle))))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Where:
    return MIXED.build(tmp_path_factory.mktemp("mixed"))


@pytest.fixture
def undisturbed(mixed: Where) -> list[list[str]]:
    found = hashes(emitted(MIXED.loader(mixed)))
    assert len(found) == MIXED.loader(mixed).plan(0).cycles_per_epoch == 16
    return found


# --- order, resume, elasticity -----------------------------------------------------------------------------------


def test_field_1_kill_at_every_block_and_go_on_with_other_ranks_and_threads(
    mixed: Where, undisturbed: list[list[str]]
) -> None:
    """Every cycle is read by a new loader: 1, 2, 4, 1 ranks in turn, with other threads and windows each time.

    A block inside a cycle is no place to go on from (LOADER.md, oddity 6): the whole cycle comes again.
    """
    cycle, found = 0, []
    while cycle < len(undisturbed):
        threads, window = 1 + cycle % 3, (1, 1 << 21)[cycle % 2]
        case = replace(MIXED, settings=LoaderConfig(io_threads=threads, window_tokens=window))
        world_size = WORLD_SIZES[cycle % 4]
        found += on_ranks(case, mixed, world_size, cycle, 1)
        state = saved(case.loader(mixed, 0, world_size), cycle + 1)
        epoch, cycle = position_from(MIXED.loader(mixed), state)
        assert (epoch, cycle) == (0, len(found))
    assert found == undisturbed


@pytest.mark.parametrize(("before", "after"), list(pairwise(WORLD_SIZES)))
def test_field_1_one_kill_anywhere_and_the_stream_goes_on_exactly(
    mixed: Where, undisturbed: list[list[str]], before: int, after: int
) -> None:
    for cycle in range(1, len(undisturbed), 3):
        case = replace(MIXED, settings=LoaderConfig(io_threads=1 + cycle % 4, window_tokens=1 + 100 * cycle))
        found = on_ranks(case, mixed, before, 0, cycle) + on_ranks(case, mixed, after, cycle)
        assert found == undisturbed


def test_field_2_epochs_after_a_resumed_one_have_full_length(tmp_path: Path) -> None:
    case = Case(lengths=(15,) * 66, num_splits=4, seed=1)  # 16 blocks of every split, 2 documents left out
    where = case.build(tmp_path)
    whole = [emitted(case.loader(where), epoch)[0] for epoch in range(3)]
    assert [len(ids) for ids in whole] == [16, 16, 16]
    resumed = case.loader(where)
    for epoch, start in ((0, 7), (1, 0), (2, 0)):
        assert torch.equal(emitted(resumed, epoch, start)[0], whole[epoch][start:])
    schedule = Schedule(case.loader(where).plan, cycles_per_step=3)
    assert schedule.total_steps(max_steps=None, epochs=3) == 15
    assert [schedule.locate(step) for step in (5, 6, 10, 11, 15)] == [(0, 12), (1, 0), (1, 12), (2, 0), (2, 12)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_field_3_three_kills_in_one_epoch_lose_and_repeat_no_document(tmp_path: Path, world_size: int) -> None:
    """60 documents of 7 tokens, each its own number, in blocks of 12: they end at other places than the blocks."""
    case = Case(lengths=(), num_splits=2, seq_len=12, seed=3)
    where = write_documents(tmp_path, [[number] * 7 for number in range(60)], rows_per_file=11)
    seen: Counter[int] = Counter()
    for start, stop in ((0, 3), (3, 4), (4, 11), (11, 20)):
        for rank in range(world_size):
            for batch in case.loader(where, rank, world_size).batches(0, start, max_batches=stop - start):
                seen.update(batch.input_ids.flatten().tolist())
    assert seen == {**dict.fromkeys(range(60), 7), EOS: 60}


def test_field_4_what_was_read_ahead_is_not_counted_as_trained_on(mixed: Where, undisturbed: list[list[str]]) -> None:
    loader = MIXED.loader(mixed)
    batches = loader.batches(0)
    first = next(batches)
    left_out = len(loader.plan(0).row_ids) - loader.plan(0).position(16).docs_consumed.sum()
    deadline = time.monotonic() + 10
    while loader.stats().rows_unread > left_out and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loader.stats().rows_unread == left_out, "all that the epoch needs was read by now"
    state = saved(loader, 1)
    batches.close()
    assert hashes(stacked([first], 8, 16)) == undisturbed[:1]
    assert position_from(MIXED.loader(mixed), state) == (0, 1)
    assert on_ranks(MIXED, mixed, 2, 1) == undisturbed[1:]


def test_field_4_read_ahead_is_bounded(tmp_path: Path) -> None:
    """LanceDB's read-ahead grows through the run (LOADER.md, oddity 4); ours stops when nobody takes."""
    case = Case(
        lengths=(15,) * 2000,
        num_splits=4,
        settings=LoaderConfig(window_tokens=1, read_ahead_bytes=1, io_threads=2),
    )
    loader = case.loader(case.build(tmp_path))
    batches = loader.batches(0)
    next(batches)
    time.sleep(0.3)
    stats = loader.stats()
    batches.close()
    assert stats.rows_consumed == 4
    assert 0 < stats.rows_read + stats.rows_packed <= 4 * 8
    assert stats.rows_unread + stats.rows_read + stats.rows_packed + stats.rows_consumed == 2000


# --- what changed between save and resume ------------------------------------------------------------------------


def test_field_5_appended_rows_change_nothing_for_a_pinned_run(tmp_path: Path) -> None:
    where = MIXED.build(tmp_path)
    state, before = saved(MIXED.loader(where), 5), hashes(emitted(MIXED.loader(where)))
    lance.write_dataset(lance.dataset(where[0].uri).to_table(limit=30), where[0].uri, mode="append")
    loader = MIXED.loader(where)
    assert position_from(loader, state) == (0, 5)
    assert hashes(emitted(loader, 0, 5)) == before[5:]
    with pytest.raises(DataIdentityError, match=r"(?s)differs in table_version:.*'t@1'.*'t@2'"):
        position_from(MIXED.loader((where[0], Pin("t", 2))), state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"filter": "id % 7 != 1"}, r"differs in filter:.*'id % 7 != 0'.*'id % 7 != 1'"),
        ({"seq_len": 32}, r"differs in seq_len:.* 16\n.* 32\n"),
        ({"seed": 6}, r"differs in seed:.* 5\n.* 6\n"),
        ({"num_splits": 4}, r"differs in num_splits:.* 8\n.* 4\n"),
        ({"eos_id": 299}, r"differs in eos_id:.* 300\n.* 299\n"),
        ({"clump": 2}, r"differs in shuffle_clump_size:.* 1\n.* 2\n"),
        ({"filter": "true", "seq_len": 8}, r"differs in filter, seq_len:.*'true'.* 16\n.* 8\n"),
    ],
)
def test_field_5_other_settings_are_refused_with_both_values(
    mixed: Where, changes: dict[str, object], message: str
) -> None:
    state = saved(MIXED.loader(mixed), 5)
    with pytest.raises(DataIdentityError, match=f"(?s){message}"):
        position_from(replace(MIXED, **changes).loader(mixed), state)  # type: ignore[arg-type]


def test_field_5_another_tokenizer_is_refused_although_the_ids_are_the_same(mixed: Where) -> None:
    loader = MIXED.loader(mixed)
    tokenizer = TokenizerIdentity(name="t", fingerprint="other", vocab_size=1, eos_id=EOS, pad_id=PAD)
    with pytest.raises(DataIdentityError, match=r"(?s)differs in tokenizer .*'f'.*'other'|differs in tokenizer:"):
        position_from(BlockLoader(*mixed, MIXED.data, tokenizer), saved(loader, 5))


def test_field_5_a_version_that_was_cleaned_up_is_named(tmp_path: Path) -> None:
    where = MIXED.build(tmp_path)
    dataset = lance.dataset(where[0].uri)
    dataset.delete("id = 1000")
    dataset.cleanup_old_versions(older_than=timedelta(0))
    with pytest.raises(TableError, match="has no version 1"):
        MIXED.loader(where)


def test_field_6_a_tagged_version_trains_the_same_after_rewrite_compaction_and_clean_up(tmp_path: Path) -> None:
    """Field 10 too: ten rows get other tokens, which the pinned run does not see."""
    where = MIXED.build(tmp_path)
    before, dataset = hashes(emitted(MIXED.loader(where))), lance.dataset(where[0].uri)
    dataset.tags.create("keep", 1)
    for value in (1, 2, 3):
        dataset.update({"input_ids": f"[{value}]", "n_tokens": "1"}, where="id >= 1010 AND id < 1020")
        lance.dataset(where[0].uri).optimize.compact_files(target_rows_per_fragment=1000)
        dataset = lance.dataset(where[0].uri)
    full = bytes_on_disk(tmp_path)
    dataset.cleanup_old_versions(older_than=timedelta(0), error_if_tagged_old_versions=False)
    assert [version["version"] for version in dataset.versions()] == [1, dataset.version]
    assert bytes_on_disk(tmp_path) < full
    assert hashes(emitted(MIXED.loader(where))) == before
    assert hashes(emitted(MIXED.loader((where[0], Pin("t", dataset.version))))) != before


def bytes_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# --- shares, uneven splits, padding ------------------------------------------------------------------------------


def test_field_7_sixteen_ranks_share_the_filtered_corpus_without_overlap(tmp_path: Path) -> None:
    """200 documents that fill one block each, of which the filter keeps 160: a block is known by its first token."""
    case = Case(lengths=(), num_splits=16, filter="id % 5 != 0", seed=2)
    where = write_documents(tmp_path, [[number] * 15 for number in range(200)], rows_per_file=30)
    ranks = [emitted(case.loader(where, rank, 16))[0][..., 0].flatten().tolist() for rank in range(16)]
    assert [len(set(documents)) for documents in ranks] == [len(documents) for documents in ranks] == [10] * 16
    assert sorted(chain(*ranks)) == [number for number in range(200) if number % 5]


def test_field_8_rows_that_no_number_of_splits_divides(tmp_path: Path) -> None:
    case = Case(lengths=(15,) * 37, num_splits=4)
    where = case.build(tmp_path)
    for world_size in (1, 2, 4):
        loaders = [case.loader(where, rank, world_size) for rank in range(world_size)]
        assert [len(list(loader.batches(0))) for loader in loaders] == [9] * world_size
    assert case.loader(where).plan(0).ledger()["rows_left_out_beyond_splits"] == 1


def test_field_8_one_split_with_only_long_documents(tmp_path: Path) -> None:
    """All ranks yield as many blocks as the tokens of all splits fill; short splits are padded, the long one is cut."""
    case = Case(lengths=(), num_splits=4, seed=7)
    documents = [[1] * 159] * 5 + [[2] * 15] * 15  # 50 blocks in the first split, 5 in each of the others
    where = write_in_reading_order(tmp_path, case, documents)
    for world_size in (1, 2, 4):
        parts = [emitted(case.loader(where, rank, world_size))[0] for rank in range(world_size)]
        assert [len(part) for part in parts] == [16] * world_size
    ids = torch.cat(parts, 1)
    assert [int((ids[:, split] == PAD).sum()) for split in range(4)] == [0, *[11 * 16] * 3]
    ledger = case.loader(where).plan(0).ledger()
    assert (ledger["tokens_in"], ledger["tokens_trained"]) == ((50 + 15) * 16, (16 + 15) * 16)
    assert (ledger["tokens_padded"], ledger["tokens_left_out_end_of_split"]) == (33 * 16, 34 * 16)


@pytest.mark.parametrize(
    ("lengths", "steps", "left_out"),
    [
        ((15,) * 11 + (16,), 1, 0),  # 193 tokens: one more than a step of 3 cycles of 4 blocks of 16
        ((15,) * 12, 1, 0),
        ((15,) * 16, 1, 64),
        ((15,) * 11 + (14,), 0, 128),  # 191
        ((15,) * 11, 0, 128),
    ],
)
def test_field_8_a_corpus_just_over_and_just_under_one_global_batch(
    tmp_path: Path, lengths: tuple[int, ...], steps: int, left_out: int
) -> None:
    case = Case(lengths=lengths, num_splits=4)
    where = case.build(tmp_path)
    for world_size in (1, 2, 4):
        loaders = [case.loader(where, rank, world_size) for rank in range(world_size)]
        assert [len(list(loader.batches(0, 0, 3))) for loader in loaders] == [steps] * world_size
    schedule = Schedule(case.loader(where).plan, cycles_per_step=3)
    if steps:
        assert schedule.total_steps(max_steps=None, epochs=1) == steps
    else:
        with pytest.raises(ConfigError, match=r"Epoch 0 has 8 blocks of 16 tokens, fewer than the 12 of one step"):
            schedule.total_steps(max_steps=None, epochs=1)
    assert schedule.plan(0).ledger(cycles_per_step=3)["tokens_left_out_partial_step"] == left_out


@pytest.mark.parametrize(
    ("long", "blocks", "trained", "padded", "left_out"),
    [
        (1, 48, 768, 0, 32),  # 400 documents of 2 tokens, EOS counted: 200 a split, 12 blocks each
        (801, 100, 3 * 200 + 400, 600, 600),  # one of 802: 1,600 tokens, 400 a split, of which three have only 200
    ],
)
def test_field_9_the_pad_share_of_one_token_documents_is_measured_and_bounded(
    tmp_path: Path, long: int, blocks: int, trained: int, padded: int, left_out: int
) -> None:
    """Padding is never more than what splits leave out: the epoch has no more blocks than its tokens fill."""
    case = Case(lengths=(1,) * 399 + (long,), num_splits=4)
    loader = case.loader(case.build(tmp_path))
    ledger, ids = loader.plan(0).ledger(), emitted(loader)[0]
    assert ids.numel() == ledger["blocks"] * 16 == blocks * 16
    assert (ledger["tokens_trained"], ledger["tokens_padded"]) == (trained, padded)
    assert ledger["tokens_left_out_end_of_split"] == left_out >= padded
    assert int((ids == PAD).sum()) == padded


def test_field_12_documents_that_end_at_a_block_boundary_one_under_and_one_over(tmp_path: Path) -> None:
    case = Case(lengths=(), num_splits=2, seq_len=8, seed=1)
    documents = [[1] * 7, [2] * 6, [3] * 8, [4] * 3, [5] * 7, [6] * 7, [], [7, 7]]
    where = write_in_reading_order(tmp_path, case, documents)
    ids, docs = emitted(case.loader(where))
    assert ids.tolist() == [
        [[1, 1, 1, 1, 1, 1, 1, EOS], [5, 5, 5, 5, 5, 5, 5, EOS]],
        [[2, 2, 2, 2, 2, 2, EOS, 3], [6, 6, 6, 6, 6, 6, 6, EOS]],
        [[3, 3, 3, 3, 3, 3, 3, EOS], [EOS, 7, 7, EOS, PAD, PAD, PAD, PAD]],
    ]
    assert docs.tolist() == [
        [[0] * 8, [0] * 8],
        [[0] * 7 + [1], [0] * 8],
        [[0] * 8, [0] + [1] * 7],
    ]
    theirs = stacked(list(case.original(where, 6)), 2, 8)
    assert torch.equal(ids, theirs[0]) and torch.equal(docs, theirs[1])
