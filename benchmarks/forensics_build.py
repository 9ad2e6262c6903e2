"""What `benchmarks.forensics` asks: a curated, tokenized, embedded table with a run on it, and one of 2 million rows.

Invariant: stages, plans and passports are the project's own. A run has everything of a real one but weights: a question
is answered from its recipe, pin and step, and nothing of that depends on how good a model is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import debian_corpus, forensics_model, harness, plan_cases
from benchmarks import loader_table as table
from pretrain_assets.config import DataConfig, ModelConfig, Recipe, RunSpec, TrainConfig
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location

if TYPE_CHECKING:
    from pretrain_assets.forensics.checkpoints import Checkpoint

DIMS = 128
RECIPE = Recipe(
    name="benchmark",
    model=ModelConfig(n_layer=12, n_head=12, n_embd=768),
    data=DataConfig(
        filter="NOT is_dup AND id % 100 != 0",
        held_out_filter="NOT is_dup AND id % 100 = 0",
        seq_len=1024,
        num_splits=8,
    ),
    train=TrainConfig(global_batch_tokens=16 * 1024, warmup_steps=10),
)
"""One epoch, 16 blocks of 1,024 tokens a step."""
LARGE = Recipe(
    name="large", model=RECIPE.model, data=table.data(128), train=TrainConfig(global_batch_tokens=512 * 1024)
)
"""One epoch of the large table, 512 blocks of 1,024 tokens a step, as for GPT-2."""
APPENDED_EVERY = 100
"""One document in so many comes again in the append, its words turned."""


def location_in(folder: str) -> Location:
    """The table."""
    return Location(database_uri=f"{folder}/lancedb")


def runs_in(folder: str) -> str:
    """The folder of runs."""
    return f"{folder}/runs"


def model_in(folder: str) -> str:
    """The embedding model."""
    return f"{folder}/static"


def newest(location: Location) -> Pin:
    """The table's newest version."""
    from pretrain_assets.table.storage import open_dataset
    from pretrain_assets.table.versions import table_id

    dataset = open_dataset(location)
    return Pin(table_id(dataset), dataset.version)


def checkpoint_in(folder: str) -> Checkpoint:
    """The one checkpoint of the one run."""
    from pretrain_assets.forensics.checkpoints import find_checkpoint

    return find_checkpoint(None, runs_in(folder))


def corpus_table(corpus: str, folder: str, workers: int | None) -> Callable[[], Any]:
    """Every stage up to the tokens, then the run that trained one epoch; seconds of each stage."""
    import lance  # noqa: F401  imports are no part of the work

    def work() -> dict[str, float]:
        from pretrain_assets.table.versions import find_record
        from pretrain_assets.train.spec import make_spec

        seconds, location = {}, location_in(folder)
        for stage, run in _stages(location, corpus, workers).items():
            started = time.monotonic()
            run()
            seconds[stage] = round(time.monotonic() - started, 2)
        record = find_record(location, "tokenized")
        write_run(make_spec(location, record.pin, record.tag, RECIPE, runs_in(folder)))
        return seconds

    return work


def embedding(corpus: str, folder: str, workers: int | None) -> Callable[[], Any]:
    """The column of vectors, by a model fitted to the corpus; the fitting is no part of the work."""
    import lance  # noqa: F401

    forensics_model.make(debian_corpus.texts(Path(corpus)), Path(model_in(folder)), dims=DIMS)

    def work() -> int:
        return _embed(folder, workers)

    return work


def index(folder: str, exact_below: int) -> Callable[[], Any]:
    """One run of the index stage: of what there is to index, as `pretrain index` does it."""
    import lance  # noqa: F401

    from pretrain_assets.config import IndexConfig
    from pretrain_assets.forensics.indexes.index import build_index

    def work() -> dict[str, Any]:
        location = location_in(folder)
        record = build_index(location, IndexConfig(exact_below=exact_below), input_pin=newest(location)).record
        return {"rows": record.rows, "bytes": record.bytes_added, "vectors": record.details.get("vectors")}

    return work


def append(corpus: str, folder: str, workers: int | None) -> Callable[[], Any]:
    """New documents, taken through every stage but the index: what its next run finds to do."""

    def work() -> dict[str, Any]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        documents = debian_corpus.documents(Path(corpus)).to_pylist()[::APPENDED_EVERY]
        rows = [{**row, "doc_id": f"again-{row['doc_id']}", "text": turned(row["text"])} for row in documents]
        path = f"{folder}/appended.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        for run in _stages(location_in(folder), path, workers).values():
            run()
        _embed(folder, workers)
        return {"rows": len(rows)}

    return work


def turned(text: str) -> str:
    """The second half of a text's words, then the first: another text about the same."""
    words = text.split()
    return " ".join([*words[len(words) // 2 :], *words[: len(words) // 2]])


def large_table(folder: str, rows: int) -> Callable[[], Any]:
    """A table with ids and token counts, a run of one epoch on it, and its plan."""
    import lance  # noqa: F401

    def work() -> dict[str, Any]:
        location = location_in(folder)
        facts = plan_cases.write(location.database_uri, rows)
        spec = RunSpec(
            recipe=LARGE,
            database_uri=location.database_uri,
            table_name=location.table_name,
            pin=str(table.PIN),
            tag="benchmark",
            tokenizer=table.TOKENIZER,
            run_dir=f"{runs_in(folder)}/large-v1-0",
        )
        return {**facts, "steps": write_run(spec)}

    return work


def write_run(spec: RunSpec) -> int:
    """A run that has done its epoch, as its files say: run.json, one line of metrics, a checkpoint without weights.

    Returns:
        Its steps.
    """
    from pretrain_assets.forensics.exposure import schedule_of
    from pretrain_assets.launch.contract import METRICS_NAME, PASSPORT_NAME, write_file, write_spec
    from pretrain_assets.train import checkpoint
    from pretrain_assets.train.passport import make_passport

    location = Location(database_uri=spec.database_uri, table_name=spec.table_name)
    schedule = schedule_of(location, Pin.parse(spec.pin), spec.recipe)
    steps = schedule.total_steps(max_steps=None, epochs=1)
    losses = {"train_loss": 3.0, "train_loss_step": steps, "val_loss": 3.0, "val_loss_step": steps}
    passport = make_passport(spec, schedule, step=steps, total_steps=steps, losses=losses)
    write_spec(spec)
    write_file(f"{spec.run_dir}/{METRICS_NAME}", f'{{"step": {steps}, "loss": 3.0, "ranks": 8}}\n'.encode())
    checkpoint.begin(spec.run_dir, steps)
    files = {PASSPORT_NAME: json.dumps(passport), "weights.txt": "There are none: this run was never trained.\n"}
    written = {name: checkpoint.write_file(spec.run_dir, steps, name, [text.encode()]) for name, text in files.items()}
    checkpoint.commit(spec.run_dir, steps, written)
    return steps


def table_facts(folder: str) -> Callable[[], Any]:
    """Of the table: tokens, characters, bytes on disk, and the steps of its run."""

    def work() -> dict[str, Any]:
        from pretrain_assets.table.query import sql_rows
        from pretrain_assets.table.storage import open_dataset

        dataset = open_dataset(location_in(folder))
        (sums,) = sql_rows(dataset, "SELECT sum(n_tokens) AS tokens, sum(n_chars) AS characters FROM dataset")
        sizes = harness.files_of(location_in(folder).uri)
        return {**sums, "table_bytes": sum(sizes.values()), "steps": checkpoint_in(folder).step}

    return work


def _embed(folder: str, workers: int | None) -> int:
    from pretrain_assets.config import EmbedConfig, EngineConfig
    from pretrain_assets.curate.embedding import embed

    location = location_in(folder)
    config = EmbedConfig(model=model_in(folder), library="model2vec")
    return embed(location, config, input_pin=newest(location), engine=EngineConfig(workers=workers)).record.rows


def _stages(location: Location, corpus: str, workers: int | None) -> dict[str, Callable[[], Any]]:
    """The stages up to the tokens in order, each with what runs it."""
    from pretrain_assets.config import (
        ContaminationConfig,
        DedupConfig,
        EngineConfig,
        IngestConfig,
        NearDedupConfig,
        TokenizeConfig,
    )
    from pretrain_assets.curate.contamination import decontaminate
    from pretrain_assets.curate.dedup import dedup
    from pretrain_assets.curate.near_dedup import near_dedup
    from pretrain_assets.ingest.append import ingest
    from pretrain_assets.tokenize.columns import tokenize

    def fill(stage: Callable[..., Any], config: Any) -> Callable[[], Any]:
        return lambda: stage(location, config, input_pin=newest(location), engine=EngineConfig(workers=workers))

    return {
        "ingest": lambda: ingest(location, IngestConfig(sources=(corpus,))),
        "dedup": fill(dedup, DedupConfig()),
        "near-dedup": fill(near_dedup, NearDedupConfig()),
        "decontaminate": fill(decontaminate, ContaminationConfig()),
        "tokenize": fill(tokenize, TokenizeConfig(tokenizer="gpt2")),
    }
