"""`pretrain demo`: the main job on the bundled documents, and a summary a person wants to read.

Invariant: it goes through the same Dagster job and instance as the UI, and a second run makes no new version.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import click

from pretrain_assets import recipes
from pretrain_assets.curate.filters import resolve
from pretrain_assets.forensics.checkpoints import Checkpoint, find_checkpoint
from pretrain_assets.forensics.retrieval.search import search_seen
from pretrain_assets.launch.contract import read_result
from pretrain_assets.report.search_text import hits_text
from pretrain_assets.report.text import data_wait_text, stages_text
from pretrain_assets.table.storage import Location, exists, open_dataset
from pretrain_assets.table.versions import latest_record, open_pin, records
from pretrain_assets.train.spec import make_spec

QUERY = "marriage"

NEXT = (
    ("make ui", "the asset graph, versions and loss curves of this very run, in the browser"),
    (".venv/bin/pretrain card -o card.html", "the run on one page: data, ledger, losses, exposures, a sample traced"),
    (
        ".venv/bin/pretrain seen --step 50",
        "what it trained on at step 50; `where --doc 3606` is the way back, `receipt --doc 3606` takes it out",
    ),
    (
        '.venv/bin/pretrain attribute --text "A bird that supplies quills for writing."',
        "whose words these are, and when they were seen",
    ),
    (
        '.venv/bin/pretrain sample --prompt "MARRIAGE, n."',
        "more of what it learned; `pretrain evaluate` judges it by source",
    ),
    (
        '.venv/bin/pretrain filter "clean AND score >= 3"',
        "what a filter keeps, and what each of its terms removes; `pretrain curate report` shows it all",
    ),
    (".venv/bin/pretrain export", "a Hugging Face folder, with a model card of exactly the data it saw"),
    (
        ".venv/bin/pretrain train demo --set train.max_steps=40 \\\n"
        "    --set \"data.filter=NOT is_dup AND source = 'apt:dict-jargon' AND (id % 20 != 0)\"",
        "an ablation by changing a filter: the Jargon File instead, judged on the same held-out rows",
    ),
)


def run_demo(location: Location, runs_uri: str) -> None:
    """Materialize the whole graph for the demo recipe, then print the summary."""
    from pretrain_assets.assets.inprocess import run_job

    started = time.monotonic()
    before = _state(location, runs_uri)
    click.echo(
        "Bundled documents -> ingested -> duplicates, quality, contamination as columns -> tokenized -> a small GPT on "
        "2 ranks -> full-text index"
    )
    run_job("pretrain", partition="demo")
    took = f"({time.monotonic() - started:.0f} s)"
    after = _state(location, runs_uri)
    assert after is not None and after.result is not None  # the job above has just made them
    click.echo(summary(location, find_checkpoint(after.run_dir, runs_uri), after.result))
    if before == after:
        click.echo(f"\nNothing was new: no stage made a version, the table stays at v{after.version}. {took}")
    else:
        click.echo(f"\nDone {took}. Run it again: nothing will change, and it will say so.")


@dataclass(frozen=True, kw_only=True)
class _State:
    """What a second run must leave as it is."""

    version: int
    """Newest version of the table."""
    run_dir: str
    """Where the demo recipe trains on the newest tokens."""
    result: dict[str, Any] | None
    """Result of that run, when there is one."""


def _state(location: Location, runs_uri: str) -> _State | None:
    """The state of the demo; None before its first tokens."""
    if not exists(location):
        return None
    dataset = open_dataset(location)
    record = latest_record(dataset, "tokenized")
    if record is None:
        return None
    recipe = resolve(recipes.demo(), open_pin(location, record.pin).schema.names)
    run_dir = make_spec(location, record.pin, record.tag, recipe, runs_uri).run_dir
    return _State(version=dataset.version, run_dir=run_dir, result=read_result(run_dir))


def summary(location: Location, checkpoint: Checkpoint, result: dict[str, Any]) -> str:
    """Stages, losses, a sample, a search, and what to try next."""
    dataset = open_dataset(location)
    made = records(dataset)
    hits = search_seen(location, QUERY, checkpoint=checkpoint, limit=4)
    return "\n".join(
        [
            _title("One table, its versions"),
            stages_text(made),
            f"table {location.uri} ({made[0].table_id})",
            _title("Training"),
            _training(checkpoint, result),
            _title("A sample"),
            " ".join(str(result["sample"]).split()),
            _title(f'Search: "{QUERY}", over exactly the rows of the model\'s version'),
            hits_text(hits),
            _title("Next"),
            *(f"  {command}\n      {what}" for command, what in NEXT),
        ]
    )


def _training(checkpoint: Checkpoint, result: dict[str, Any]) -> str:
    passport = checkpoint.passport
    return "\n".join(
        [
            f"training loss   {result['first_loss']:.3f} -> {result['train_loss']:.3f}",
            f"validation loss {result['first_val_loss']:.3f} -> {result['val_loss']:.3f}  "
            f"(held out: {passport['held_out_filter']})",
            f"{result['step']} steps, {passport['tokens_seen']:,} tokens of {passport['tag']}, recipe "
            f"{passport['recipe']['name']}, {result['seconds']:.0f} s, {data_wait_text(result)}",
            f"checkpoint {checkpoint.uri}",
        ]
    )


def _title(text: str) -> str:
    return f"\n{text}\n{'-' * len(text)}"
