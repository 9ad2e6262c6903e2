"""Mixtures: shares to within a document, every document equally often over the epochs, a ledger that closes by part."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain_assets import recipes
from pretrain_assets.config import MixtureComponent, override, to_dict
from pretrain_assets.errors import FilterError
from pretrain_assets.forensics.exposure import schedule_of, seen_by
from pretrain_assets.forensics.why import LEFT_OUT
from pretrain_assets.loader.exposure import documents, exposures
from pretrain_assets.loader.mixture import _splitmix64, assign, mix
from pretrain_assets.loader.parts import tally
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.report.text import mixture_text
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location
from pretrain_assets.train.passport import ledger_gaps
from pretrain_assets_tests.test_loader import EOS, PAD, make_loader, mixed_lengths, write_table


def component(name: str, predicate: str = "true", weight: float = 1.0) -> MixtureComponent:
    return MixtureComponent(name=name, predicate=predicate, weight=weight)


def rows(*lengths_of_parts: list[int]) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Lengths without EOS, parts and row ids; the parts are interleaved in storage."""
    lengths = np.concatenate([np.array(lengths, np.int32) for lengths in lengths_of_parts])
    parts = np.repeat(np.arange(len(lengths_of_parts), dtype=np.uint8), [len(part) for part in lengths_of_parts])
    order = np.random.default_rng(3).permutation(len(lengths))
    return lengths[order], parts[order], np.arange(len(lengths), dtype=np.uint64) * 7 + 5


def times_of(
    num_tokens: npt.NDArray[Any], parts: npt.NDArray[Any], row_ids: npt.NDArray[Any], weights: list[float], **at: int
) -> npt.NDArray[np.int64]:
    """How often each row is drawn."""
    positions = mix(num_tokens, parts, weights, row_ids, **{"seed": 0, "epoch": 0} | at)
    return np.bincount(positions, minlength=len(parts))


def test_splitmix64_is_the_published_one() -> None:
    """First outputs of the reference generator with state 1234567 (as on Rosetta Code)."""
    golden, state = 0x9E3779B97F4A7C15, 1234567
    states = np.array([(state + i * golden) % 2**64 for i in range(3)], np.uint64)
    assert _splitmix64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_ten_to_one_in_tokens_mixed_half_and_half() -> None:
    """1,000 documents of 10 tokens and 100 of 10 (EOS included): 5,500 tokens are due to each."""
    data = rows([9] * 1000, [9] * 100)
    times, parts = times_of(*data, [1, 1]), data[1]
    assert (times[parts == 0].sum(), times[parts == 1].sum()) == (550, 550)
    assert Counter(times[parts == 0].tolist()) == {0: 450, 1: 550}
    assert Counter(times[parts == 1].tolist()) == {5: 50, 6: 50}
    assert tally(data[0], parts, mix(data[0], parts, [1, 1], data[2], seed=0, epoch=0), num_parts=2).tolist() == [
        [1000, 0, 450, 10_000, 0, 4_500],
        [100, 450, 0, 1_000, 4_500, 0],
    ]


def test_three_parts_of_unequal_documents_reach_their_shares() -> None:
    rng = np.random.default_rng(0)
    data = rows(*(rng.integers(0, longest, n).tolist() for longest, n in ((400, 900), (90, 300), (1500, 40))))
    num_tokens, parts, _ = data
    lengths, weights = num_tokens + 1, [0.2, 0.5, 0.3]
    for epoch in (0, 1, 17):
        times = times_of(*data, weights, epoch=epoch)
        for part, weight in enumerate(weights):
            inside = parts == part
            assert abs(times[inside] @ lengths[inside] - lengths.sum() * weight) <= lengths[inside].max()
    assert times[parts == 1].min() > 3  # 300 short documents make half of the tokens


def test_the_weights_of_the_table_draw_every_row_once() -> None:
    data = rows([4] * 50, [9] * 30)
    assert mix(data[0], data[1], [250, 300], data[2], seed=9, epoch=4).tolist() == list(range(80))


@pytest.mark.parametrize("share", [0.03, 0.31, 0.77])
def test_the_ring_covers_all_documents_evenly_over_the_epochs(share: float) -> None:
    rng = np.random.default_rng(1)
    data = rows(rng.integers(0, 60, 200).tolist(), rng.integers(0, 60, 200).tolist())
    num_tokens, parts, _ = data
    inside, lengths = parts == 0, num_tokens + 1
    seen = np.zeros(len(parts), np.int64)
    for epoch in range(40):
        seen += times_of(*data, [share, 1 - share], epoch=epoch)
        assert seen[inside].max() - seen[inside].min() <= 1
        due = (epoch + 1) * lengths.sum() * share
        assert abs(seen[inside] @ lengths[inside] - due) <= lengths[inside].max() / 2
    assert seen[inside].min() >= 1


def test_the_draw_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    data = rows([9] * 300, [9] * 30)
    first = times_of(*data, [1, 1])
    assert np.array_equal(first, times_of(*data, [2, 2]))  # weights are proportions
    assert not np.array_equal(first, times_of(*data, [1, 1], seed=1))
    assert not np.array_equal(first, times_of(*data, [1, 1], epoch=1))
    num_tokens, parts, row_ids = data
    back = times_of(num_tokens[::-1].copy(), parts[::-1].copy(), row_ids[::-1].copy(), [1, 1])[::-1]
    assert (back != first).sum() <= 2  # but where the upper halves of two hashes agree


def test_repeats_are_kept_apart_for_clumped_shuffles() -> None:
    data = rows([9] * 40, [9] * 4)
    positions = mix(data[0], data[1], [1, 1], data[2], seed=0, epoch=0)
    assert (np.diff(positions.astype(np.int64)) != 0).all()
    again = positions[len(np.unique(positions)) :]
    assert set(data[1][again]) == {1} and positions.dtype == np.uint32


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10_000))
def test_any_mixture(data: st.DataObject, seed: int, epoch: int) -> None:
    """Shares to within one document, draws that differ by at most one, and a tally that closes."""
    lengths = st.lists(st.integers(0, 50) | st.sampled_from([0, 5_000]), min_size=1, max_size=12)
    sizes = data.draw(st.lists(lengths, min_size=1, max_size=5))
    weights = data.draw(st.lists(st.floats(1e-3, 1e3), min_size=len(sizes), max_size=len(sizes)))
    num_tokens, parts, row_ids = rows(*sizes)
    positions = mix(num_tokens, parts, weights, row_ids, seed=seed, epoch=epoch)
    times, tokens = np.bincount(positions, minlength=len(parts)), num_tokens.astype(np.int64) + 1
    drawn = tally(num_tokens, parts, positions, num_parts=len(sizes))
    for part, weight in enumerate(weights):
        inside = parts == part
        due = tokens.sum() * weight / sum(weights)
        reached = times[inside] @ tokens[inside]
        assert abs(reached - due) <= tokens[inside].max() * (1 + 1e-9)
        assert times[inside].max() - times[inside].min() <= 1
        rows_in, rows_more, rows_none, tokens_in, tokens_more, tokens_none = drawn[part].tolist()
        assert (rows_in, tokens_in) == (inside.sum(), tokens[inside].sum())
        assert rows_in + rows_more - rows_none == times[inside].sum()
        assert tokens_in + tokens_more - tokens_none == reached


SOURCES = ["wiki", "code", None, "it's"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> lance.LanceDataset:
    """400 rows in four fragments, every eleventh deleted; n_tokens counts from 0 to 9 by id."""
    table = pa.table(
        {
            "id": pa.array(range(400), pa.int64()),
            "source": [SOURCES[i % 4] for i in range(400)],
            "n_tokens": pa.array([i % 10 for i in range(400)], pa.int32()),
        }
    )
    uri = str(tmp_path_factory.mktemp("mixture") / "t.lance")
    lance.write_dataset(table, uri, enable_stable_row_ids=True, data_storage_version="2.2", max_rows_per_file=100)
    lance.dataset(uri).delete("id % 11 = 3")
    return lance.dataset(uri)


def test_rows_are_assigned_in_the_order_of_the_filtered_scan(dataset: lance.LanceDataset) -> None:
    parts = (
        component("wiki", "source = 'wiki'"),
        component("quoted", "source = 'it''s' OR regexp_like(source, '^co')"),
        component("rest", "source IS NULL"),
    )
    kept = dataset.to_table(columns=["source"], filter="id > 50")["source"].to_pylist()
    assert assign(dataset, "id > 50", parts).tolist() == [{"wiki": 0, None: 2}.get(source, 1) for source in kept]


def test_255_parts(dataset: lance.LanceDataset) -> None:
    ids = dataset.to_table(columns=["id"], filter="n_tokens > 0", limit=255)["id"].to_pylist()
    parts = [component(f"p{i}", f"id = {i}") for i in reversed(ids)]
    assert assign(dataset, f"id IN {tuple(ids)}", parts).tolist() == list(range(255))[::-1]


@pytest.mark.parametrize(
    ("filter", "predicates", "words"),
    [
        (
            "true",
            {"wiki": "source = 'wiki'", "code": "source = 'code'"},
            [
                "data.mixture",
                "181 rows are in none of wiki, code, first row id 2: add a part with predicate "
                "\"((source = 'wiki') OR (source = 'code')) IS NOT TRUE\"",
            ],
        ),
        (
            "source = 'wiki'",
            {"wiki": "source = 'wiki'", "low": "id < 50", "all": "id >= 40"},
            ["91 rows are in several, first row id 0 in wiki and low", "IS NOT TRUE"],
        ),
        (
            "true",
            {"wiki": "source = 'wiki'", "not_code": "source != 'code'"},
            ["182 rows are in none", "in wiki and not_code"],
        ),
        ("true", {"all": "true", "none": "source = 'books'"}, ["no token", "'none'", "source = 'books'"]),
        ("true", {"short": "n_tokens = 0", "rest": "n_tokens > 0"}, ["no token", "'short'", "n_tokens = 0"]),
        ("true", {"wiki": "sorce = 'wiki'"}, ["data.mixture[wiki].predicate=\"sorce = 'wiki'\"", "mean 'source'?"]),
        ("true", {"wiki": "true) OR (false"}, ["data.mixture[wiki].predicate", "unbalanced parentheses"]),
        ("true", {"m": "regexp_match(source, '^w')", "b": "true"}, ["mixture[m].predicate", "call regexp_like"]),
        ("true", {"m": "id = 2 OR regexp_match(source, '^w')", "b": "true"}, ["call regexp_like"]),
        ("true", {"any": "random() < 0.5", "b": "true"}, ["data.mixture[any].predicate", "random()"]),
    ],
)
def test_what_is_not_a_partition_is_refused(
    dataset: lance.LanceDataset, filter: str, predicates: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(FilterError) as error:
        assign(dataset, filter, [component(name, predicate) for name, predicate in predicates.items()])
    for word in words:
        assert word in str(error.value)


def test_the_remedy_for_rows_in_no_part_works(dataset: lance.LanceDataset) -> None:
    """Also for rows whose source is NULL, which NOT (...) would miss."""
    parts = [component("wiki", "source = 'wiki'"), component("code", "source = 'code'")]
    with pytest.raises(FilterError) as error:
        assign(dataset, "true", parts)
    predicate = str(error.value).split('predicate "')[1].split('"')[0]
    assert Counter(assign(dataset, "true", [*parts, component("rest", predicate)]).tolist()) == {0: 91, 1: 91, 2: 181}


FEW, MANY = component("few", "id < 1012"), component("many", "id >= 1012")
SHARED: dict[str, Any] = {"filter": "id != 1001", "num_splits": 4}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Location, Pin]:
    return write_table(tmp_path_factory.mktemp("mixed"), mixed_lengths())


@pytest.mark.parametrize("cycles_per_step", [1, 3])
def test_exposures_and_ledger_equal_what_the_loader_emits(table: tuple[Location, Pin], cycles_per_step: int) -> None:
    """Eleven documents make half of two epochs: token by token, with every repeat, and counted part by part."""
    loader = make_loader(table, mixture=(FEW, MANY), **SHARED)
    schedule = Schedule(loader.plan, cycles_per_step=cycles_per_step)
    steps = [schedule.steps_in(0), 2]
    texts = dict(zip(range(1000, 1130), lance.dataset(table[0].uri).to_table()["input_ids"].to_pylist(), strict=True))
    seen = exposures(schedule, texts, last_step=sum(steps))
    assert seen[1001] is None and all(spans == sorted(spans) for spans in seen.values() if spans)
    emitted = [
        torch.cat([batch.input_ids for batch in loader.batches(epoch, 0, cycles_per_step, max_batches=steps[epoch])])
        for epoch in (0, 1)
    ]
    rebuilt = [torch.full_like(blocks, PAD) for blocks in emitted]
    trained: Counter[tuple[int, str]] = Counter()
    for doc_id, spans in seen.items():
        for span in spans or []:
            tokens = [*texts[doc_id], EOS][span.doc_start : span.doc_start + span.tokens]
            assert rebuilt[span.epoch][span.block, span.offset] == PAD  # no two draws in one place
            rebuilt[span.epoch][span.block, span.offset : span.offset + span.tokens] = torch.tensor(tokens)
            trained[span.epoch, "few" if doc_id < 1012 else "many"] += span.tokens
    assert all(torch.equal(a, b) for a, b in zip(rebuilt, emitted, strict=True))
    ledgers = schedule.ledgers(sum(steps))
    assert trained == {(e, name): ledgers[str(e)]["parts"][name]["tokens_trained"] for e, name in trained}
    assert len(trained) == 4 and max(len({(s.epoch, s.block) for s in spans or []}) for spans in seen.values()) > 6
    by_step = sorted(span for spans in seen.values() for span in spans or [])
    assert [span for step in range(1, sum(steps) + 1) for span in documents(schedule, step)] == by_step


def test_the_ledger_closes_by_part_and_a_gap_is_found(table: tuple[Location, Pin]) -> None:
    loader = make_loader(table, mixture=(FEW, MANY), **SHARED)
    plan, lengths = loader.plan(0), dict(zip(range(1000, 1130), mixed_lengths(), strict=True))
    schedule = Schedule(loader.plan, cycles_per_step=3)
    last_step = schedule.steps_in(0) + 2
    passport: dict[str, Any] = {"ledger": schedule.ledgers(last_step), "seq_len": 16}
    assert ledger_gaps(passport) == []
    ledger = passport["ledger"]["1"]
    assert ledger["tokens_not_reached"] > 0 and ledger["rows_repeated"] > 11 and ledger["rows_left_out_thinned"] > 11
    few = plan.ledger()["parts"]["few"]
    kept = [i for i in range(1000, 1012) if i != 1001]
    assert (few["rows_in"], few["tokens_in"]) == (11, sum(lengths[i] + 1 for i in kept))
    planned = Counter(i for i in plan.doc_ids.tolist() if i < 1012)
    assert few["rows_planned"] == planned.total() and set(planned) == set(kept)
    assert few["tokens_planned"] == sum(n * (lengths[i] + 1) for i, n in planned.items())
    assert few["rows_repeated"] - few["rows_left_out_beyond_splits"] == planned.total() - 11
    ledger["parts"]["few"]["tokens_repeated"] += 1
    ledger["parts"]["many"]["rows_planned"] -= 1
    assert [gap.split(":")[0] for gap in ledger_gaps(passport)] == ["epoch 1, part few", "epoch 1, part many"]


def test_without_a_mixture_every_row_is_drawn_once_and_the_ledger_has_no_parts(table: tuple[Location, Pin]) -> None:
    plan = make_loader(table, **SHARED).plan(0)
    assert len(set(plan.order.tolist())) == len(plan.order) == 128  # of 129 rows, in four splits
    assert not {"parts", "rows_repeated", "tokens_left_out_thinned"} & set(plan.ledger())


def test_seen_by_counts_every_repeat(table: tuple[Location, Pin]) -> None:
    loader = make_loader(table, mixture=(FEW, MANY), **SHARED)
    recipe = override(
        recipes.demo(), {"data": to_dict(loader.data), "train.global_batch_tokens": 64, "data.held_out_filter": "false"}
    )
    schedule = schedule_of(*table, recipe)
    steps = schedule.steps_in(0) + schedule.steps_in(1)  # the last blocks hold the ends of all splits, or almost
    seen = seen_by(table[0], pin=table[1], recipe=recipe, step=steps, ids=[1002, 1011, 1001, 1060])
    drawn = Counter(i for epoch in (0, 1) for i in loader.plan(epoch).doc_ids.tolist())
    assert drawn[1002] - 1 <= seen[1002].times <= drawn[1002] and drawn[1002] > 6
    assert seen[1011].describe().startswith(f"seen {seen[1011].times} times, first at step ")
    assert seen[1001].describe() == "not seen: left out by term 1 of the filter, 'id != 1001' (id is 1001)"
    one = seen_by(table[0], pin=table[1], recipe=recipe, step=1, ids=range(1012, 1130))
    planned = set(loader.plan(0).doc_ids.tolist())
    reasons = {i: answer.reason for i, answer in one.items() if not answer.times}
    inside = ("its turn comes at step", "left out at the end of split")
    assert {i for i, why in reasons.items() if any(text in why for text in inside)} == planned & reasons.keys()
    undrawn = [reason for i, reason in reasons.items() if i not in planned]
    assert undrawn and set(undrawn) <= {LEFT_OUT[kind].format(epoch=0) for kind in ("thinned", "beyond_splits")}


def test_another_mixture_is_another_plan_and_the_same_mixture_the_same(table: tuple[Location, Pin]) -> None:
    half = make_loader(table, mixture=(FEW, MANY), **SHARED).plan(0)
    same = make_loader(table, rank=1, world_size=2, mixture=(FEW, MANY), **SHARED).plan(0)
    other = make_loader(table, mixture=(FEW, dataclasses.replace(MANY, weight=2.0)), **SHARED).plan(0)
    assert half.digest == same.digest and np.array_equal(half.order, same.order)
    assert half.digest != other.digest and len(half.order) != len(other.order)
    share = other.ledger()["parts"]["few"]
    assert (share["weight_share"], share["rows_in"]) == (1 / 3, 11)


def test_the_table_of_a_mixture(table: tuple[Location, Pin]) -> None:
    schedule = Schedule(make_loader(table, mixture=(FEW, MANY), **SHARED).plan, cycles_per_step=1)
    ledgers = schedule.ledgers(5)
    seen = ledgers["0"]["tokens_trained"]
    lines = mixture_text({"ledger": ledgers, "tokens_seen": seen}).splitlines()
    few = ledgers["0"]["parts"]["few"]["tokens_trained"]
    assert lines[2].split()[:4] == ["few", "50.00%", f"{few / seen:.2%}", str(few)] and lines[3].startswith("many")
    assert mixture_text({"ledger": {"0": {"tokens_trained": 5}}, "tokens_seen": 5}) == ""
