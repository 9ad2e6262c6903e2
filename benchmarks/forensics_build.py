"""What `benchmarks.forensics` asks: a curated, tokenized, embedded table with a run on it, and one of 2 million rows.

Invariant: the stages are the project's own, in their order. The run is a real one of two steps, which then stands for
one that finished its epoch: a question depends on the recipe, the pin and the step, not on how good the weights are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import debian_corpus, forensics_model, plan_cases
from benchmarks import loader_table as table
from pretrain_assets.config import DataConfig, ExecutionConfig, ModelConfig, Recipe, RunSpec, TrainConfig, to_dict
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location

if TYPE_CHECKING:
    from pretrain_assets.forensics.checkpoints import Checkpoint

DIMS = 128
STEPS = 2
RECIPE = Recipe(
    name="benchmark",
    model=ModelConfig(n_layer=1, n_head=2, n_embd=16),
    data=DataConfig(
        filter="NOT is_dup AND id % 100 != 0",
        held_out_filter="NOT is_dup AND id % 100 = 0",
        seq_len=256,
        num_splits=8,
    ),
    train=TrainConfig(global_batch_tokens=8 * 256, warmup_steps=1, eval_every=1_000_000, eval_blocks=8),
    execution=ExecutionConfig(micro_batch_blocks=1, log_every=1, checkpoint_every=1_000_000, stop_after=STEPS),
)
"""Of one epoch: 8 blocks of 256 tokens a step, so that two steps of it take no time."""
LARGE = Recipe(
    name="large",
    model=RECIPE.model,
    data=table.data(128),
    train=TrainConfig(global_batch_tokens=512 * 1024, warmup_steps=1),
)
"""On the large table: the shape of GPT-2 runs, 512 blocks of 1,024 tokens a step."""


def corpus_table(corpus: str, folder: str) -> Callable[[], Any]:
    """Every stage in order, then two steps of training; seconds of each."""
    import lance  # noqa: F401  imports are no part of the work
    import model2vec  # noqa: F401
    import torch  # noqa: F401

    def work() -> dict[str, Any]:
        seconds: dict[str, float] = {}
        location = location_in(folder)
        started = time.monotonic()

        def done(stage: str) -> None:
            nonlocal started
            seconds[stage] = round(time.monotonic() - started, 2)
            started = time.monotonic()

        texts = debian_corpus.texts(Path(corpus))
        model = forensics_model.make(texts, model_in(folder), dims=DIMS)
        done("fit the embedding")
        for stage, run in _stages(location, corpus, str(model)):
            run()
            done(stage)
        _train(location, folder)
        done("two steps of training")
        return {"stages_seconds": seconds, "text_bytes": sum(len(text.encode()) for text in texts), "rows": len(texts)}

    return work


def location_in(folder: str) -> Location:
    """The table."""
    return Location(database_uri=f"{folder}/lancedb")


def runs_in(folder: str) -> str:
    """The folder of runs."""
    return f"{folder}/runs"


def model_in(folder: str) -> Path:
    """The embedding model."""
    return Path(folder) / "static"


def newest(location: Location) -> Pin:
    """The table's newest version."""
    from pretrain_assets.table.storage import open_dataset
    from pretrain_assets.table.versions import table_id

    dataset = open_dataset(location)
    return Pin(table_id(dataset), dataset.version)


def checkpoint_in(folder: str) -> tuple[Checkpoint, int]:
    """The run's checkpoint as if it had finished its epoch, and the steps that it has really done."""
    from pretrain_assets.forensics.checkpoints import find_checkpoint
    from pretrain_assets.forensics.exposure import schedule_of

    found = find_checkpoint(None, runs_in(folder))
    schedule = schedule_of(location_in(folder), found.pin, found.recipe)
    return finished(found, schedule.total_steps(max_steps=None, epochs=1)), found.step


def finished(found: Checkpoint, step: int) -> Checkpoint:
    """The same checkpoint after more steps."""
    return replace(found, step=step, passport={**found.passport, "step": step})


def large_table(folder: str, rows: int) -> Checkpoint:
    """A table with ids and token counts, and a run of one epoch on it; its checkpoint is in memory alone."""
    from pretrain_assets.forensics.checkpoints import Checkpoint
    from pretrain_assets.forensics.exposure import schedule_of
    from pretrain_assets.launch.contract import write_spec

    location = location_in(folder)
    plan_cases.write(location.database_uri, rows)
    spec = RunSpec(
        recipe=LARGE,
        database_uri=location.database_uri,
        table_name=location.table_name,
        pin=str(table.PIN),
        tag="benchmark",
        tokenizer=table.TOKENIZER,
        run_dir=f"{runs_in(folder)}/large-v1-0",
    )
    write_spec(spec)
    steps = schedule_of(location, table.PIN, LARGE).total_steps(max_steps=None, epochs=1)
    passport = {"pin": spec.pin, "step": steps, "recipe": to_dict(LARGE), "tokenizer": to_dict(table.TOKENIZER)}
    return Checkpoint(run_dir=spec.run_dir, step=steps, passport=passport)


def _stages(location: Location, corpus: str, model: str) -> list[tuple[str, Callable[[], Any]]]:
    """The stages of the table, each with what runs it."""
    from pretrain_assets.config import (
        ContaminationConfig,
        DedupConfig,
        EmbedConfig,
        IngestConfig,
        NearDedupConfig,
        TokenizeConfig,
    )
    from pretrain_assets.curate.contamination import decontaminate
    from pretrain_assets.curate.dedup import dedup
    from pretrain_assets.curate.embedding import embed
    from pretrain_assets.curate.near_dedup import near_dedup
    from pretrain_assets.ingest.append import ingest
    from pretrain_assets.tokenize.columns import tokenize

    embedding = EmbedConfig(model=model, library="model2vec")
    return [
        ("ingest", lambda: ingest(location, IngestConfig(sources=(corpus,)))),
        ("dedup", lambda: dedup(location, DedupConfig(), input_pin=newest(location))),
        ("near-dedup", lambda: near_dedup(location, NearDedupConfig(), input_pin=newest(location))),
        ("decontaminate", lambda: decontaminate(location, ContaminationConfig(), input_pin=newest(location))),
        ("tokenize", lambda: tokenize(location, TokenizeConfig(tokenizer="gpt2"), input_pin=newest(location))),
        ("embed", lambda: embed(location, embedding, input_pin=newest(location))),
    ]


def _train(location: Location, folder: str) -> None:
    """Two steps of the run, as a node would do them."""
    from pretrain_assets.launch.contract import write_spec
    from pretrain_assets.table.tags import protect_run
    from pretrain_assets.table.versions import find_record
    from pretrain_assets.train.run import run
    from pretrain_assets.train.spec import make_spec

    record = find_record(location, "tokenized")
    spec = make_spec(location, record.pin, record.tag, RECIPE, runs_in(folder))
    protect_run(location, record.pin, spec.run_dir)
    write_spec(spec)
    run(spec)


def facts(folder: str) -> dict[str, Any]:
    """Of the table: rows, tokens, versions, and bytes on disk."""
    from benchmarks import harness
    from pretrain_assets.table.query import sql_rows
    from pretrain_assets.table.storage import open_dataset

    dataset = open_dataset(location_in(folder))
    (sums,) = sql_rows(dataset, "SELECT count(*) AS n, sum(n_tokens) AS tokens FROM dataset")
    sizes = harness.files_of(Path(location_in(folder).uri))
    return {"rows": sums["n"], "tokens": sums["tokens"], "bytes": sum(sizes.values()), "versions": dataset.version}


def passages(folder: str, count: int) -> list[dict[str, Any]]:
    """Documents spread over those that the run trains on, with their text: what questions are made from."""
    from pretrain_assets.table.storage import open_dataset

    dataset = open_dataset(location_in(folder), newest(location_in(folder)).version)
    rows = dataset.count_rows(RECIPE.data.filter)
    found = dataset.scanner(columns=["id"], filter=RECIPE.data.filter).to_table()["id"].to_pylist()
    chosen = [found[at * rows // count] for at in range(min(count, rows))]
    table = dataset.to_table(columns=["id", "text", "source"], filter=f"id IN ({', '.join(map(str, chosen))})")
    return sorted(table.to_pylist(), key=lambda row: json.dumps(row["id"] * 7919 % 10_007))
