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
from click.testing import CliRunner

from pretrain_assets import recipes
from pretrain_assets.cli import cli
from pretrain_assets.config import (
    DedupConfig,
    IngestConfig,
    MixtureComponent,
    RunSpec,
    TokenizeConfig,
    override,
    to_dict,
)
from pretrain_assets.curate.dedup import dedup
from pretrain_assets.errors import CheckpointError, ConfigError, TableError
from pretrain_assets.forensics.checkpoints import Checkpoint
from pretrain_assets.forensics.exposure import schedule_of
from pretrain_assets.forensics.ledger import ledger_of
from pretrain_assets.forensics.seen import SeenStep, seen_at
from pretrain_assets.forensics.where import where
from pretrain_assets.forensics.why import why_outside
from pretrain_assets.ingest.append import ingest
from pretrain_assets.launch.contract import write_spec
from pretrain_assets.launch.local import torchrun_argv
from pretrain_assets.loader.exposure import Exposure, documents, exposures, reached, times_seen
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.loader.turns import Turn, turns
from pretrain_assets.report.ledger_text import ledger_text
from pretrain_assets.table.delete import Request, delete
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.schema import tokenizer_identity
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.tokenize.columns import tokenize
from pretrain_assets.train.passport import make_passport
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
    for step, ranks in made_by.items():
        found = seen_at(spec.run_dir, step, limit=None, **asked)
        shares = [consumed[step, ranks, rank] for rank in range(ranks)]  # (cycles x splits of the rank, tokens) each
        blocks = np.concatenate([share.reshape(2, -1, SEQ) for share in shares], axis=1).reshape(-1, SEQ)
        assert (found.ranks, found.done) == (ranks, True)
        assert np.array_equal(rebuilt(found, texts), blocks) and found.tokens_padded == (blocks == PAD).sum()
        for part in found.parts:
            by_document[part.id].append((part.span, part.span.split * ranks // 4))
    mine = seen_at(spec.run_dir, 9, block=8 * 8 + 3, limit=None, **asked)
    assert np.array_equal(rebuilt(mine, texts), consumed[9, 1, 0][3:4])
    second = seen_at(spec.run_dir, 20, rank=1, limit=None, **asked)
    assert np.array_equal(rebuilt(second, texts), consumed[20, 2, 1])
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
        "filter": "NOT is_dup",
        "num_splits": num_splits,
        "seed": case,
        "seq_len": seq_len,
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
    far = [max((s.doc_start + s.tokens for s in found[i]), default=0) for i in ranks[0].plan(0).rows.doc_ids.tolist()]
    assert reached(schedule, last_step=last).tolist() == far
    for epoch, ledger in schedule.ledgers(last).items():
        of_epoch = chain(*turns(schedule, texts, int(epoch), left_over=ranks[0].planner.left_over).values())
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


FILTER, HELD_OUT = "NOT is_dup AND (id % 10 != 0) AND n_chars > 20", "NOT is_dup AND (id % 10 = 0)"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """A run of five steps, by its metrics, on 90 documents; rows are copied, deleted and added around its version."""
    folder = tmp_path_factory.mktemp("time")
    location = Location(database_uri=str(folder / "db"))
    texts = [f"Document {i} of the first file says this and no more." for i in range(60)]
    texts[7], texts[8] = texts[3], "Too short."

    def add(name: str, lines: list[str]) -> Pin:
        source = folder / name
        source.write_text(
            "".join(json.dumps({"text": text, "id": f"{name}#{i}"}) + "\n" for i, text in enumerate(lines))
        )
        return ingest(location, IngestConfig(sources=(str(source),), id_column="id")).pin

    add("one.jsonl", texts)
    delete(location, Request(ids=(5,)))
    pin = add("two.jsonl", [f"Document {i} of the second file, which is told apart." for i in range(31)])
    pin = dedup(location, DedupConfig(), input_pin=pin).pin
    record = tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=pin).record
    add("three.jsonl", ["A document that came too late.", "Another one that came too late."])
    delete(location, Request(ids=(12, 92)))
    changes = {
        "data.filter": FILTER,
        "data.held_out_filter": HELD_OUT,
        "data.seq_len": 32,
        "data.num_splits": 4,
        "train.global_batch_tokens": 512,
    }
    spec = RunSpec(
        recipe=override(recipes.demo(), {**changes, "train.max_steps": 6}),
        database_uri=location.database_uri,
        table_name=location.table_name,
        pin=str(record.pin),
        tag=record.tag,
        tokenizer=tokenizer_identity(open_dataset(location, record.version), "input_ids"),
        run_dir=str(folder / "runs" / "demo-v6-aaaaaaaa"),
    )
    write_spec(spec)
    metrics = [{"step": 1, "ranks": 2}, {"step": 4, "ranks": 4}, {"step": 5, "ranks": 4}]
    Path(spec.run_dir, "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics))
    return spec


def asked(spec: RunSpec) -> dict[str, Any]:
    """Where a run is looked for."""
    return {
        "location": Location(database_uri=spec.database_uri, table_name=spec.table_name),
        "runs_uri": str(Path(spec.run_dir).parent),
    }


def test_every_document_has_its_places_or_a_reason_that_is_true(project: RunSpec) -> None:
    found = where("demo", [*range(94), "one.jsonl#14"], **asked(project))
    assert (found.step, found.total_steps, len(found.documents)) == (5, 6, 94)
    documents = {document.id: document for document in found.documents}
    why = {i: document.why.text for i, document in documents.items() if document.why}
    kinds = {i: document.why.kind for i, document in documents.items() if document.why}
    assert why[5] == "deleted before version 5 (deleted-v2)" and documents[5].preview is None
    assert why[7] == "a copy of row 3; left out by term 1 of the filter, 'NOT is_dup'"
    assert why[8] == "left out by term 3 of the filter, 'n_chars > 20' (n_chars is 10)"
    assert documents[8].why and documents[8].why.facts["terms"] == [{"number": "3", "text": "n_chars > 20"}]
    assert {i for i, kind in kinds.items() if kind == "held_out"} == set(range(0, 91, 10))
    assert why[91] == "added later (ingested-v6); the run is pinned to version 5"
    assert why[92] == "added later (ingested-v6) and deleted since (deleted-v7); the run is pinned to version 5"
    assert why[93] == "there never was a row 93: ids go from 0 to 92"
    assert documents[12].deleted == ("deleted-v7",) and documents[12].doc_id == "one.jsonl#12"
    schedule = schedule_of(asked(project)["location"], Pin.parse(project.pin), project.recipe)
    for i, document in documents.items():
        spans = exposures(schedule, [i], last_step=8)[i] or []
        assert strip_ranks(document.seen) == strip_ranks(span for span in spans if span.step <= 5)
        assert [span.step for span in document.to_come] == [span.step for span in spans if span.step == 6]
        if kinds.get(i) in ("not_reached", "past_the_end"):
            assert f"at step {spans[0].step} " in why[i] and (spans[0].step > 6) == (kinds[i] == "past_the_end")
    assert {"not_reached", "past_the_end"} <= set(kinds.values())
    assert {span.rank for document in documents.values() for span in document.to_come} == {None}
    ranks = {(s.step, s.split): s.rank for document in documents.values() for s in document.seen}
    assert ranks == {(step, split): split // 2 if step < 4 else split for step, split in ranks}


def test_a_reason_shows_no_tokens_and_no_long_value(project: RunSpec) -> None:
    location, pin = asked(project)["location"], Pin.parse(project.pin)
    data = override(project.recipe, {"data.filter": "array_length(input_ids) < 2 AND length(text) < 1"}).data
    why = why_outside(location, pin, data, [3])[3]
    assert why.text == "left out by term 1 of the filter, 'array_length(input_ids) < 2'" and why.facts["values"] == {}


def test_a_step_has_its_ranks_blocks_and_the_text_of_every_part(project: RunSpec) -> None:
    texts = open_dataset(asked(project)["location"], 5).to_table(columns=["id", "text"]).to_pylist()
    text = {row["id"]: row["text"] for row in texts}
    whole = seen_at(None, 2, limit=None, whole=True, **asked(project))
    assert (whole.ranks, whole.done, whole.num_parts, len(whole.blocks)) == (2, True, len(whole.parts), 16)
    for part in whole.parts:  # a token is a byte here, and the end of text the one after the last
        start, stop = part.span.doc_start, part.span.doc_start + part.span.tokens
        assert part.is_decoded and part.text == text[part.id][start:stop]
        assert part.span.rank == part.span.split // 2 and str(part.doc_id).partition("#")[0] in (
            "one.jsonl",
            "two.jsonl",
        )
    begins = [part.text for part in seen_at(None, 2, limit=None, **asked(project)).parts]
    assert begins == [" ".join(str(part.text).split())[:200] for part in whole.parts]
    second = seen_at(None, 2, rank=1, limit=None, whole=True, **asked(project))
    assert second.parts == tuple(part for part in whole.parts if part.span.rank == 1) and len(second.blocks) == 8
    four = seen_at(None, 2, rank=1, ranks=4, limit=None, **asked(project))
    assert {part.span.split for part in four.parts} == {1} and four.ranks == 4
    block = whole.blocks[3]
    assert seen_at(None, 2, block=block, limit=1, **asked(project)).parts[0].span.block == block
    ahead = seen_at(None, 6, **asked(project))
    assert (ahead.done, ahead.ranks, ahead.parts[0].span.rank) == (False, None, None)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"step": 7}, ConfigError, r"no step 7: the run ends before it\. demo has steps 1 to 6; give --step N"),
        ({"step": 0}, ConfigError, "no step 0: steps count from 1"),
        ({"step": 2, "rank": 2}, ConfigError, "no rank 2: step 2 was made by ranks 0 to 1"),
        ({"step": 6, "rank": 0}, ConfigError, r"How many ranks made step 6 is not known.*--ranks N"),
        ({"step": 2, "ranks": 3}, ConfigError, "num_splits=4 cannot be shared by 3 ranks equally; use one of 1, 2, 4"),
        ({"step": 2, "block": 3}, ConfigError, "Step 2 has no block 3: it has the blocks 16 to 31"),
        ({"step": 2, "block": 16, "rank": 1}, ConfigError, "Block 16 of step 2 was rank 0's; give --rank 0"),
        ({"step": 2, "which": "dmo"}, CheckpointError, r"No run of 'dmo' .*Did you mean demo-v6-aaaaaaaa\?"),
        ({"step": 2, "which": "/not/there"}, CheckpointError, "no run in /not/there.*pretrain runs"),
    ],
)
def test_what_cannot_be_shown_says_why(
    project: RunSpec, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    step, which = arguments.pop("step"), arguments.pop("which", None)
    with pytest.raises(error, match=message):
        seen_at(which, step, **arguments, **asked(project))


def test_the_verbs_answer_in_text_and_in_json(project: RunSpec) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        place = ["--database", project.database_uri, "--runs", str(Path(project.run_dir).parent)]
        result = CliRunner().invoke(cli, [*place, *arguments])
        return result.exit_code, result.stdout

    code, text = run("seen", "--step", "2", "--limit", "3")
    assert code == 0 and "step 2 of 6, epoch 0, 2 ranks" in text and "--limit" in text.splitlines()[-1]
    code, text = run("seen", "--step", "2", "--json")
    parts = json.loads(text)["parts"]
    assert json.loads(text)["num_parts"] == len(parts) > 3
    code, text = run("where", "--doc", parts[0]["doc_id"], "--doc", "93", "--json")
    found, unknown = json.loads(text)["documents"]
    assert (code, found["id"], unknown["why"]["kind"]) == (1, parts[0]["id"], "unknown")
    assert parts[0]["span"] in found["seen"]
    code, text = run("where", "--doc", str(found["id"]), "--doc", "7", "--doc", "12")
    assert code == 0 and "seen once by step 5" in text and "not seen: a copy of row 3;" in text
    assert "deleted since, by deleted-v7" in text
    with pytest.raises(TableError, match=r"no document with the doc_id 'one\.jsonl#99'.*pretrain search"):
        where(None, ["one.jsonl#99"], **asked(project))


def passport_of(spec: RunSpec, step: int) -> dict[str, Any]:
    """The passport that the run writes at a step."""
    schedule = schedule_of(asked(spec)["location"], Pin.parse(spec.pin), spec.recipe)
    losses = dict.fromkeys(("train_loss", "train_loss_step", "val_loss", "val_loss_step"), 1)
    return json.loads(json.dumps(make_passport(spec, schedule, step=step, total_steps=6, losses=losses)))


def test_every_row_and_token_on_the_way_into_a_checkpoint_is_accounted_for(project: RunSpec) -> None:
    passport = passport_of(project, 5)
    checkpoint = Checkpoint(run_dir=project.run_dir, step=5, passport=passport)
    ledger = ledger_of(asked(project)["location"], checkpoint)
    assert ledger.gaps == () and ledger.to_dict()["closes"]
    sections = {section.name: section for section in ledger.sections}
    assert list(sections) == ["ingested", "deduped", "tokenized", "table", "filter", "epoch 0"]
    assert sections["ingested"].detail == "2 versions, ingested-v1 to ingested-v3"
    assert sections["table"].accounts[0].came == {"ingested-v1": 60, "ingested-v3": 31}
    assert sections["table"].accounts[0].went == {"deleted-v2, deleted": 1, "version 5": 90}
    rows, tokens = sections["filter"].accounts
    terms = ["held out", "term 1, NOT is_dup", "term 2, id % 10 != 0", "term 3, n_chars > 20", "kept"]
    assert rows.went == dict(zip(terms, [10, 1, 0, 1, 78], strict=True)) and rows.came == {"version 5": 90}
    epoch = sections["epoch 0"].accounts
    assert epoch[1].came["in"] == tokens.went["kept"] + 78 and epoch[1].went["trained"] == ledger.tokens_seen
    text = ledger_text(ledger)
    assert text.count("\ncloses") == 6 and text.endswith("Every section closes.")


def test_what_is_not_accounted_for_is_said_with_its_numbers(project: RunSpec) -> None:
    passport = passport_of(project, 5)
    passport["ledger"]["0"]["tokens_trained"] -= 7
    passport["ledger"]["0"]["rows_in"] += 1
    ledger = ledger_of(asked(project)["location"], Checkpoint(run_dir=project.run_dir, step=5, passport=passport))
    kept = [
        row["n_tokens"] + 1 for row in open_dataset(asked(project)["location"], 5).to_table(filter=FILTER).to_pylist()
    ]
    assert ledger.gaps == (
        "epoch 0: 79 rows came in, 78 are accounted for",
        f"epoch 0: {sum(kept):,} tokens came in, {sum(kept) - 7:,} are accounted for",
        "epoch 0: 2,560 places in blocks came in, 2,553 are accounted for",
        "epoch 0: 79 rows came in; the filter keeps 78",
        "epoch 0: the passport does not say what the plan says",
    )
    assert "DOES NOT CLOSE" in ledger_text(ledger) and "The ledger does not close:" in ledger_text(ledger)
