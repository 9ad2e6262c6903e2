"""What an exported model says about its data: a checkpoint's passport, and what follows from it and the pinned table.

Invariant: the same checkpoint and table give the same facts. They hold no clock, host, path or secret, so they may be
hashed and published.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import DataConfig, Recipe, from_dict
from pretrain_assets.loader.exposure import times_seen
from pretrain_assets.loader.planner import Planner
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.query import sql_rows
from pretrain_assets.table.schema import making_parameters
from pretrain_assets.table.storage import Location
from pretrain_assets.table.versions import open_pin

if TYPE_CHECKING:
    import lance

PASSPORT_FIELDS = (
    *("pin", "table_id", "version", "tag", "filter", "held_out_filter", "tokenizer", "recipe"),
    *("step", "tokens_seen", "ledger", "train_loss", "val_loss", "val_loss_step", "code_version"),
)
"""What is taken over from the passport as it stands."""
CODE_VERSION = "3"
"""Of all exporting: another one where the same checkpoint gives other files."""
MAX_SOURCES = 100
"""Sources that are named, those with the most tokens; the others are added up."""
NOT_MEASURED = "not measured"


def provenance(location: Location, passport: Mapping[str, Any], checkpoint_digest: str) -> dict[str, Any]:
    """The facts, as plain JSON values.

    Beside the fields of the passport, `replay_of` of a replay among them: `total_steps` of the run and
    `steps_per_epoch`, `table` (name), `checkpoint` (digest), `sources` (rows and tokens of the training rows at the
    pin), `exposures` (how many documents were seen once, more than once, never) and `contamination` (of the training
    rows, where the pinned version knows).

    Raises:
        TableError: the table is another one, or the pinned version is gone.
    """
    recipe, pin = from_dict(Recipe, passport["recipe"]), Pin.parse(passport["pin"])
    dataset = open_pin(location, pin)
    return {
        **{name: passport[name] for name in PASSPORT_FIELDS},
        **{name: passport[name] for name in ("replay_of",) if name in passport},
        **{name: passport["budget"][name] for name in ("total_steps", "steps_per_epoch")},
        "table": location.table_name,
        "checkpoint": checkpoint_digest,
        "sources": sources(dataset, recipe.data),
        "exposures": exposures(location, pin, recipe, passport["step"]),
        "contamination": contamination(dataset, recipe.data),
    }


def sources(dataset: lance.LanceDataset, data: DataConfig) -> list[dict[str, Any]]:
    """Rows and tokens (one end-of-text each included) of the training rows, by source and, where known, licence.

    Most tokens first; the last entry may be several sources together. Empty where the table names no sources.
    """
    names = dataset.schema.names
    if "source" not in names:
        return []
    columns = ", ".join(["source", *(["license"] if "license" in names else [])])
    query = (
        f"SELECT {columns}, count(*) AS num_rows, sum({data.count_column} + 1) AS num_tokens FROM dataset "
        f"WHERE {data.filter} GROUP BY {columns} ORDER BY num_tokens DESC, {columns}"
    )
    found = sql_rows(dataset, query)
    all_tokens = sum(row["num_tokens"] for row in found)
    named, others = found[:MAX_SOURCES], found[MAX_SOURCES:]
    if others:
        named.append(
            {
                "source": f"{len(others):,} others",
                **{name: sum(row[name] for row in others) for name in ("num_rows", "num_tokens")},
            }
        )
    return [{**row, "share": round(row["num_tokens"] / all_tokens, 6)} for row in named]


def contamination(dataset: lance.LanceDataset, data: DataConfig) -> dict[str, Any] | str:
    """How many training rows hold an item of an evaluation set, by the columns of this version; see `curate`."""
    if "contaminated" not in dataset.schema.names:
        return NOT_MEASURED
    query = (
        "SELECT count(*) AS documents, count(*) FILTER (WHERE contaminated) AS contaminated, "
        f"count(*) FILTER (WHERE contaminated IS NULL) AS not_searched FROM dataset WHERE {data.filter}"
    )
    (counts,) = sql_rows(dataset, query)
    sets = making_parameters(dataset.schema.field("contaminated")).get("eval_sets", [])
    return {**counts, "eval_sets": [one["name"] for one in sets]}


def exposures(location: Location, pin: Pin, recipe: Recipe, step: int) -> dict[str, int]:
    """How many of the documents that the filter keeps were trained on once, more than once and never, at a step."""
    schedule = Schedule(Planner(location, pin, recipe.data).plan, recipe.cycles_per_step)
    times = times_seen(schedule, last_step=step)
    once, never = int((times == 1).sum()), int((times == 0).sum())
    return {
        "documents": len(times),
        "seen_once": once,
        "seen_more_than_once": len(times) - once - never,
        "not_seen": never,
        "most_times": int(times.max(initial=0)),
    }
