"""The time machine and the ledger: `seen` and `where` against what ranks really consumed, and reasons that are true."""

from __future__ import annotations

import json
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from pretrain_assets import recipes
from pretrain_assets.cli import cli
from pretrain_assets.config import (
    DedupConfig,
    IngestConfig,
    MixtureComponent,
    Recipe,
    RunSpec,
    TokenizeConfig,
    override,
    to_dict,
)
from pretrain_assets.curate.dedup import dedup
from pretrain_assets.errors import CheckpointError, ConfigError, TableError
from pretrain_assets.forensics.exposure import seen_by
from pretrain_assets.forensics.seen import SeenStep, seen_at
from pretrain_assets.forensics.subject import find_subject
from pretrain_assets.forensics.where import Where, where
from pretrain_assets.ingest.append import ingest
from pretrain_assets.launch.contract import write_spec
from pretrain_assets.launch.local import torchrun_argv
from pretrain_assets.loader.exposure import Exposure, documents, exposures, times_seen
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.loader.turns import Turn, turns
from pretrain_assets.table.delete import Request, delete
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.schema import tokenizer_identity
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.tokenize.columns import tokenize
from pretrain_assets_tests.runs import EOS, PAD, SEQ, make_database, spec_in
from pretrain_assets_tests.test_loader import EOS as LOADER_EOS
from pretrain_assets_tests.test_loader import PAD as LOADER_PAD
from pretrain_assets_tests.test_loader import make_loader, write_table

DRIVER = """
import os, sys
import numpy as np
from pretrain_assets.launch.contract import read_spec
from pretrain_assets.train.engine import Engine
from pretrain_assets.train.run import run

folder, last, rank, train_step, now = sys.argv[2], int(sys.argv[3]), os.environ["RANK"], Engine.train_step, 0

def recorded(self, blocks, *, step, total_steps):
    global now
    now = step
    np.save(f"{folder}/{step}-{os.environ['WORLD_SIZE']}-{rank}.npy", blocks.input_ids.numpy())
    return train_step(self, blocks, step=step, total_steps=total_steps)

Engine.train_step = recorded
sys.exit(run(read_spec(sys.argv[1]), lambda: now == last))
"""
"""One rank of a run that keeps the blocks of every step as the model gets them."""
MIXTURE = (
    MixtureComponent(name="few", predicate="id % 5 = 1", weight=2.0),
    MixtureComponent(name="many", predicate="id % 5 != 1", weight=1.0),
)
HOLES = (3, 17, 21, 111)


def recorded_run(spec: RunSpec, folder: Path, *, ranks: int, last: int) -> int:
    """Train up to a step, or to the end, under torchrun; returns its exit code."""
    driver = folder / "driver.py"
    driver.write_text(DRIVER)
    argv = [*torchrun_argv("", ranks)[:-3], str(driver), write_spec(spec), str(folder), str(last)]
    return subprocess.run(argv, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode


@pytest.mark.slow
def test_seen_and_where_equal_what_the_ranks_of_a_real_run_consumed(tmp_path: Path) -> None:
    """Two epochs of a mixture with holes: two ranks, stopped; one rank, stopped; two ranks to the end.

    Every token of every block, padding included, is where `seen` says; `where` is the inverse for every document.
    """
    database = make_database(tmp_path)
    spec = spec_in(
        database,
        str(tmp_path / "run"),
        train__max_steps=None,
        train__epochs=2,
        data__mixture=[to_dict(part) for part in MIXTURE],
        data__without=list(HOLES),
        execution__keep_every=1,
        execution__log_every=5,
    )
    assert recorded_run(spec, tmp_path, ranks=2, last=7) != 0
    asked: dict[str, Any] = {"location": Location(database_uri="/nowhere"), "runs_uri": str(tmp_path)}
    early = where(spec.run_dir, range(250), **asked)
    assert recorded_run(spec, tmp_path, ranks=1, last=13) != 0
    assert recorded_run(spec, tmp_path, ranks=2, last=999) == 0
    consumed: dict[tuple[int, int, int], Any] = {
        tuple(map(int, path.stem.split("-"))): np.load(path) for path in tmp_path.glob("*-*-*.npy")
    }
    last = where(spec.run_dir, range(250), **asked)
    assert (early.step, last.step, early.total_steps) == (7, last.total_steps, last.total_steps)
    made_by = {step: ranks for step, ranks, _ in consumed}
    assert made_by == {step: 1 if 7 < step <= 13 else 2 for step in range(1, last.step + 1)} and last.step > 20

    texts = lance.dataset(f"{database}/corpus.lance", version=1).to_table()["input_ids"].to_pylist()
    by_document: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for (step, ranks, rank), blocks in consumed.items():
        found = seen_at(spec.run_dir, step, rank=rank, limit=None, **asked)
        assert (found.ranks, found.done, len(found.blocks)) == (ranks, True, len(blocks))
        assert np.array_equal(rebuilt(found, texts), blocks)
        assert found.tokens_padded == (blocks == PAD).sum()
        for part in found.parts:
            by_document[part.id].append((part.span, rank))
            one = seen_at(spec.run_dir, step, block=part.span.block, limit=None, **asked) if step == 9 else found
            assert part in one.parts
    for before, after in zip(early.documents, last.documents, strict=True):
        assert [(span, span.rank) for span in after.seen] == sorted(by_document[after.id])
        assert before.seen == tuple(span for span in after.seen if span.step <= 7)
        assert strip_ranks(before.to_come) == strip_ranks(span for span in after.seen if span.step > 7)
        assert (after.why is None) == bool(after.seen) and not after.to_come
    kinds = Counter(document.why.kind for document in last.documents if document.why)
    assert kinds["held_out"] == 25 and {"thinned", "hole"} <= kinds.keys()
    assert not any(last.documents[i].seen for i in HOLES) and any(last.documents[i].masked for i in HOLES)


def strip_ranks(spans: Any) -> list[tuple[int, ...]]:
    return [(s.step, s.epoch, s.block, s.split, s.offset, s.tokens, s.doc_start) for s in spans]


def rebuilt(found: SeenStep, texts: list[list[int]]) -> Any:
    """The blocks that a step consists of, by what is said of it."""
    blocks = np.full((len(found.blocks), SEQ), PAD)
    for part in found.parts:
        row, span = found.blocks.index(part.span.block), part.span
        tokens = [*texts[part.id], EOS][span.doc_start : span.doc_start + span.tokens]
        assert (blocks[row, span.offset : span.offset + span.tokens] == PAD).all()  # no two documents in one place
        blocks[row, span.offset : span.offset + span.tokens] = tokens
    return blocks


@pytest.mark.parametrize("case", range(6))
def test_steps_documents_and_ledgers_are_three_views_of_what_the_loader_emits(case: int, tmp_path: Path) -> None:
    """Small tables and orders drawn at random: several splits, two ranks, clumps, mixtures, partial steps, holes."""
    draw = np.random.default_rng(case)
    place = write_table(tmp_path, draw.integers(0, int(draw.choice([6, 40])), 60).tolist())
    cycles_per_step, seq_len, num_splits = int(draw.integers(1, 4)), int(draw.integers(5, 20)), int(draw.choice([2, 4]))
    data: dict[str, Any] = {
        **{"filter": "NOT is_dup", "num_splits": num_splits, "seed": case, "seq_len": seq_len},
        "shuffle_clump_size": int(draw.integers(1, 4)),
        "mixture": MIXTURE if case % 2 else (),
        "without": (1000, 1001, 1007, 1013, 1022, 5000) if case > 1 else (),
        "without_from": (0, 2) if case > 3 else (0, 0),
    }
    ranks = [make_loader(place, rank, 2, **data) for rank in range(2)]
    schedule = Schedule(ranks[0].plan, cycles_per_step)
    texts = dict(zip(range(1000, 1060), open_dataset(place[0]).to_table()["input_ids"].to_pylist(), strict=True))
    last = schedule.steps_in(0) + max(1, schedule.steps_in(1) // 2)
    streams = [chain(*(rank.batches(epoch, 0, cycles_per_step) for epoch in (0, 1))) for rank in ranks]
    by_document: dict[int, list[Exposure]] = defaultdict(list)
    for step in range(1, last + 1):
        first = schedule.locate(step)[1] * num_splits
        blocks = np.full((cycles_per_step * num_splits, seq_len), LOADER_PAD)
        for seen in documents(schedule, step):
            by_document[seen.doc_id].append(seen)
            part = blocks[seen.block - first, seen.offset : seen.offset + seen.tokens]
            assert (part == LOADER_PAD).all()  # no two documents in one place
            part[:] = [*texts[seen.doc_id], LOADER_EOS][seen.doc_start : seen.doc_start + seen.tokens]
        emitted = [next(stream).input_ids.reshape(cycles_per_step, -1, seq_len) for stream in streams]
        assert np.array_equal(np.concatenate(emitted, axis=1).reshape(blocks.shape), blocks)
    found = {i: spans or [] for i, spans in exposures(schedule, texts, last_step=last).items()}
    assert {i: spans for i, spans in found.items() if spans} == {i: sorted(spans) for i, spans in by_document.items()}
    times = [sum(span.doc_start == 0 for span in found[i]) for i in ranks[0].plan(0).rows.doc_ids.tolist()]
    assert times_seen(schedule, last_step=last).tolist() == times
    for epoch, ledger in schedule.ledgers(last).items():
        of_epoch = chain(*turns(schedule, texts, int(epoch), seed=case).values())
        assert tokens_by_line(of_epoch, last) == {
            line: count for line, count in ledger.items() if count and line.startswith("tokens_") and line not in SUMS
        }


SUMS = ("tokens_in", "tokens_repeated", "tokens_planned", "tokens_padded")
"""Lines of an epoch's ledger that are not what became of some tokens."""


def tokens_by_line(made: Iterable[Turn], last: int) -> dict[str, int]:
    """What became of the tokens of documents, as an epoch's ledger says it."""
    lines = Counter[str]()
    for turn in made:
        for spans, line in ((turn.exposures, "tokens_trained"), (turn.masked, "tokens_in_holes")):
            for span in spans:
                lines[line if span.step <= last else "tokens_not_reached"] += span.tokens
        lines.update({f"tokens_left_out_{reason}": tokens for reason, tokens in turn.left_out.items()})
    return dict(lines)
