"""The loader against LanceDB's own StreamingDataset, against itself on other world sizes, and its own arithmetic."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch

from pretrain_assets.config import DataConfig, LoaderConfig, TokenizerIdentity
from pretrain_assets.errors import ConfigError, FilterError, TableError
from pretrain_assets.loader.exposure import documents, exposures
from pretrain_assets.loader.permutation import ROWS_PER_FILE, permutation
from pretrain_assets.loader.plan import EpochPlan
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.loader.stream import BlockLoader
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location, open_lancedb
from pretrain_assets.table.versions import identified

SCHEMA = identified(
    pa.schema(
        [("id", pa.int64()), ("is_dup", pa.bool_()), ("input_ids", pa.list_(pa.int32())), ("n_tokens", pa.int32())]
    ),
    "t",
)
FILTER = "NOT is_dup AND id % 7 != 0"
EOS, PAD, SEQ = 300, 301, 16
TOKENIZER = TokenizerIdentity(name="t", fingerprint="f", vocab_size=301, eos_id=EOS, pad_id=PAD)


def write_table(folder: Path, lengths: list[int | None], *, rows_per_file: int = 40) -> tuple[Location, Pin]:
    """A table of random documents; ids count from 1000, a null length is a row not tokenized yet."""
    rng = np.random.default_rng(0)
    tokens = [None if n is None else rng.integers(0, 300, n).tolist() for n in lengths]
    columns = [range(1000, 1000 + len(lengths)), [i % 10 == 3 for i in range(len(lengths))], tokens, lengths]
    table = pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)
    location = Location(database_uri=str(folder))
    lance.write_dataset(
        table,
        location.uri,
        enable_stable_row_ids=True,
        data_storage_version="2.2",
        max_rows_per_file=rows_per_file,
    )
    return location, Pin("t", 1)


def mixed_lengths(n: int = 130) -> list[int | None]:
    """Empty documents, one-token documents, exact multiples of the block (EOS included) and one off, long ones."""
    special = [0, 0, 1, 1, SEQ - 2, SEQ - 1, SEQ, 2 * SEQ - 1, 5 * SEQ + 3]
    return [*special, *np.random.default_rng(1).integers(0, 40, n - len(special)).tolist()]


def make_loader(where: tuple[Location, Pin], rank: int = 0, world_size: int = 1, **changes: object) -> BlockLoader:
    settings = changes.pop("settings", LoaderConfig())
    data = DataConfig(**{"filter": FILTER, "num_splits": 4, "seed": 5, "seq_len": SEQ} | changes)  # type: ignore[arg-type]
    return BlockLoader(*where, data, TOKENIZER, rank=rank, world_size=world_size, settings=settings)


def stack(loader: BlockLoader, epoch: int = 0, start_cycle: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Everything an epoch yields, as (cycles, owned splits, seq_len)."""
    batches = list(loader.batches(epoch, start_cycle))
    shape = (len(batches), len(loader.splits), loader.data.seq_len)
    ids = torch.cat([b.input_ids for b in batches]) if batches else torch.empty(0)
    docs = torch.cat([b.doc_ids for b in batches]) if batches else torch.empty(0)
    return ids.reshape(shape), docs.reshape(shape)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Location, Pin]:
    return write_table(tmp_path_factory.mktemp("loader"), mixed_lengths())


def original(where: tuple[Location, Pin], plan: EpochPlan, rank: int, world_size: int, epoch: int = 0):
    """LanceDB's StreamingDataset on the same table."""
    from lancedb.streaming import StreamingDataset

    return StreamingDataset(
        open_lancedb(where[0], where[1].version),
        num_splits=plan.num_splits,
        shuffle_seed=5,
        epoch=epoch,
        rank=rank,
        world_size=world_size,
        columns=["input_ids"],
        filter=FILTER,
        pack_sequences=SEQ,
        eos_id=EOS,
        pad_id=PAD,
        blocks_per_epoch=plan.blocks_per_epoch,
    )


@pytest.mark.parametrize("rows", [1_100_000, pytest.param(ROWS_PER_FILE + 500_000, marks=pytest.mark.slow)])
def test_orders_of_millions_of_rows_are_lancedbs(rows, monkeypatch):
    """Above ROWS_PER_FILE LanceDB's sort mixes the one split whose rows come from two of its files; ours keeps them."""
    import lancedb
    from lancedb.permutation import permutation_builder

    monkeypatch.setenv("LANCEDB_PERM_BUILDER_MEMORY_LIMIT", str(4 << 30))
    table = lancedb.connect("memory://").create_table("rows", pa.table({"row": np.arange(rows)}))
    builder = permutation_builder(table).split_random(fixed=16, seed=3)
    address = builder.execute().to_arrow()["row_id"].to_numpy().astype(np.int64)  # fragment << 32 | place in it
    theirs = ((address >> 32) * (1 << 20) + (address & 0xFFFFFFFF)).reshape(16, -1)
    ours = permutation(rows, seed=3)[: rows // 16 * 16].reshape(16, -1)
    differing = np.flatnonzero((ours != theirs).any(axis=1))
    assert differing.tolist() == ([] if rows < ROWS_PER_FILE else [7])
    assert np.array_equal(np.sort(ours, axis=1), np.sort(theirs, axis=1))


def test_state_at_every_cycle_equals_the_original(table):
    loader = make_loader(table)
    plan = loader.plan(0)
    dataset = original(table, plan, 0, 1)
    for emitted, _ in enumerate(dataset, start=1):
        if emitted % 4 == 0:
            state, position = dataset.state_dict(), plan.position(emitted // 4)
            assert position.docs_consumed.tolist() == state["samples_consumed_per_split"]
            assert position.tail_tokens.tolist() == [len(state["pack_buffers"][s]["tokens"]) for s in range(4)]
    assert emitted == plan.blocks_per_epoch


@pytest.mark.parametrize("window_tokens", [1, 1 << 20])
def test_every_world_size_and_every_resume_point_give_the_same_blocks(table, window_tokens):
    settings = LoaderConfig(window_tokens=window_tokens)  # windows of one cycle, and one for the whole epoch
    whole, docs = stack(make_loader(table))
    assert not torch.equal(whole, stack(make_loader(table), epoch=1)[0][: len(whole)])
    for world_size in (1, 2, 4):
        loaders = [make_loader(table, rank, world_size, settings=settings) for rank in range(world_size)]
        for cycle in range(0, len(whole) + 1, 1 if world_size == 1 else 5):
            parts = [stack(loader, start_cycle=cycle) for loader in loaders]
            assert torch.equal(torch.cat([p[0] for p in parts], 1), whole[cycle:])
            assert torch.equal(torch.cat([p[1] for p in parts], 1), docs[cycle:])


def test_splits_are_disjoint_and_cover_the_filtered_rows(table):
    plan = make_loader(table, num_splits=16).plan(0)
    kept = [i for i in range(1000, 1130) if (i - 1000) % 10 != 3 and i % 7]
    assert len(set(plan.doc_ids.tolist())) == len(plan.doc_ids) == len(kept) // 16 * 16
    assert set(plan.doc_ids.tolist()) <= set(kept)


def test_ledger_closes_and_has_the_right_values(tmp_path):
    where = write_table(tmp_path, [9] * 50)  # 10 tokens with EOS
    plan = make_loader(where, filter="id >= 1000", num_splits=16).plan(0)
    # 48 rows in 16 splits of 30 tokens: 480 // 16 = 30 blocks, so one cycle of 16; 14 tokens of each split are left
    assert plan.blocks_per_epoch == 16
    assert plan.ledger() == {
        "rows_in": 50,
        "rows_planned": 48,
        "rows_left_out_beyond_splits": 2,
        "tokens_in": 500,
        "tokens_trained": 256,
        "tokens_not_reached": 0,
        "tokens_left_out_partial_step": 0,
        "tokens_left_out_end_of_split": 224,
        "tokens_left_out_beyond_splits": 20,
        "tokens_padded": 0,
        "blocks": 16,
    }


@pytest.mark.parametrize("cycles", [None, 0, 1, 6])
def test_ledger_counts_what_the_loader_emits(table, cycles):
    loader = make_loader(table)
    plan = loader.plan(0)
    ledger = plan.ledger(cycles_per_step=3, cycles=cycles)
    usable = plan.cycles_per_epoch // 3 * 3
    emitted = stack(loader)[0][: usable if cycles is None else cycles]
    assert ledger["tokens_padded"] == int((emitted == PAD).sum())
    assert ledger["tokens_trained"] == int((emitted != PAD).sum())
    assert ledger["rows_in"] == ledger["rows_planned"] + ledger["rows_left_out_beyond_splits"]
    parts = ("trained", "not_reached", "left_out_partial_step", "left_out_end_of_split", "left_out_beyond_splits")
    assert ledger["tokens_in"] == sum(ledger[f"tokens_{part}"] for part in parts)
    assert ledger["blocks"] * SEQ == ledger["tokens_trained"] + ledger["tokens_padded"]


def test_exposures_equal_what_the_loader_emits_token_by_token(table):
    """Two epochs, two cycles per step, stopped inside the second epoch."""
    loader = make_loader(table)
    schedule = Schedule(loader.plan, cycles_per_step=2)
    last_step = schedule.steps_in(0) + 3
    texts = dict(zip(range(1000, 1130), lance.dataset(table[0].uri).to_table()["input_ids"].to_pylist(), strict=True))
    seen = exposures(schedule, [*texts, 9_999_999], last_step=last_step)
    assert seen[9_999_999] is None and seen[1003] is None  # unknown, and a duplicate
    emitted = torch.full((last_step, 8, SEQ), PAD)
    step = 0
    for epoch in (0, 1):
        for batch in loader.batches(epoch, cycles_per_batch=2):
            if step < last_step:
                emitted[step] = batch.input_ids
                step += 1
    rebuilt = torch.full_like(emitted, PAD)
    for doc_id, spans in seen.items():
        for span in spans or []:
            row = span.block % 8 if schedule.locate(span.step)[1] * 4 <= span.block else -1
            tokens = [*texts[doc_id], EOS][span.doc_start : span.doc_start + span.tokens]
            rebuilt[span.step - 1, row, span.offset : span.offset + span.tokens] = torch.tensor(tokens)
    assert torch.equal(rebuilt, emitted)


def test_step_to_documents_is_the_inverse_of_document_to_steps(table):
    loader = make_loader(table)
    schedule = Schedule(loader.plan, cycles_per_step=2)
    last_step = schedule.steps_in(0) + 2
    by_step = defaultdict(list)
    for spans in exposures(schedule, range(1000, 1130), last_step=last_step).values():
        for span in spans or []:
            by_step[span.step].append(span)
    for step in range(1, last_step + 1):
        assert documents(schedule, step) == sorted(by_step[step], key=lambda e: (e.block, e.offset))


def test_a_step_larger_than_an_epoch_is_refused_with_numbers(table):
    schedule = Schedule(make_loader(table).plan, cycles_per_step=1000)
    with pytest.raises(ConfigError, match=r"Epoch 0 has \d+ blocks of 16 tokens, fewer than the 4000 of one step"):
        schedule.total_steps(max_steps=None, epochs=1)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"filter": "id +"}, FilterError, "data.filter='id \\+' is not a predicate"),
        ({"filter": "nope = 1"}, FilterError, "no column is named 'nope'. .*lists all columns"),
        ({"filter": "id"}, FilterError, "does not return a boolean"),
        ({"filter": "id > 1; DROP"}, FilterError, "semicolon"),
        ({"filter": "id < 0"}, FilterError, "keeps none of the 130 rows"),
        ({"num_splits": 500}, FilterError, "fewer than num_splits=500"),
    ],
)
def test_filters_that_cannot_work_say_why(table, changes, error, message):
    with pytest.raises(error, match=message):
        make_loader(table, **changes).plan(0)


def test_world_size_that_does_not_divide_names_those_that_do(table):
    with pytest.raises(ConfigError, match=r"num_splits=12 cannot be shared by 5 ranks.*1, 2, 3, 4, 6, 12 ranks"):
        make_loader(table, world_size=5, num_splits=12)


def test_untokenized_rows_are_found_when_the_plan_is_built(tmp_path):
    with pytest.raises(FilterError, match=r"keeps 2 rows whose n_tokens is NULL, first row id 4.*tokenized stage"):
        make_loader(write_table(tmp_path, [5, 5, 5, 5, None, 5, None] * 1), filter="id >= 1000").plan(0)


def test_wrong_token_counts_are_an_error_not_a_shifted_stream(tmp_path):
    location, pin = write_table(tmp_path, [15] * 20)
    lance.dataset(location.uri).update({"n_tokens": "16"}, where="id = 1004")
    loader = make_loader((location, Pin(pin.table_id, 2)), filter="true")
    with pytest.raises(TableError, match=r"not hold the 16 tokens that were counted for document 1004 \(row id 4\)"):
        stack(loader)


def test_a_recreated_table_is_refused(table):
    with pytest.raises(TableError, match="not the table of pin"):
        make_loader((table[0], Pin("other", 1)))


def test_closing_early_ends_the_thread_and_counts_add_up(table):
    loader = make_loader(table, settings=LoaderConfig(window_tokens=1))
    batches = loader.batches(0)
    for _ in range(3):
        next(batches)
    stats = loader.stats()
    assert stats.rows_consumed == loader.plan(0).position(3).docs_consumed.sum()
    assert stats.rows_unread + stats.rows_read + stats.rows_packed + stats.rows_consumed == len(loader.plan(0).row_ids)
    assert stats.bytes_read > 0 and stats.read_seconds > 0
    batches.close()
    assert not [t for t in threading.enumerate() if t.name == "block-reader"]


def test_max_batches_reads_no_further(table):
    loader = make_loader(table)
    whole = stack(make_loader(table))[0]
    batches = list(loader.batches(0, 2, 3, max_batches=1))
    assert len(batches) == 1
    assert torch.equal(batches[0].input_ids, whole[2:5].flatten(0, 1))
    before, after = loader.plan(0).position(2), loader.plan(0).position(5)
    begun_earlier = (before.tail_tokens > 0).sum()
    assert loader.stats().rows_consumed == (after.docs_consumed - before.docs_consumed).sum() + begun_earlier


def test_appended_rows_do_not_change_a_pinned_stream(tmp_path):
    where = write_table(tmp_path, mixed_lengths())
    before = stack(make_loader(where))[0]
    lance.write_dataset(lance.dataset(where[0].uri).to_table(limit=30), where[0].uri, mode="append")
    assert torch.equal(stack(make_loader(where))[0], before)
    after = make_loader((where[0], Pin("t", 2))).plan(0)
    assert len(after.rows) > len(make_loader(where).plan(0).rows)


def test_plan_and_exposure_do_not_import_torch():
    code = (
        "import sys, pretrain_assets.loader.plan, pretrain_assets.loader.exposure, pretrain_assets.loader.stream;"
        "sys.exit(any(m in sys.modules for m in ('torch', 'lancedb', 'lance', 'dagster')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ends_increase_by_length_plus_one(table):
    plan = make_loader(table).plan(0)
    lengths = dict(zip(range(1000, 1130), mixed_lengths(), strict=True))
    for split in range(4):
        ids = plan.doc_ids[plan.offsets[split] : plan.offsets[split + 1]].tolist()
        ends = [0, *plan.ends_of(split).tolist()]
        assert [b - a for a, b in pairwise(ends)] == [lengths[i] + 1 for i in ids]
