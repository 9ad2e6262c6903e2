"""What is known of the runs in a folder, to compare them: read from `run.json`, `result.json` and `metrics.jsonl`.

Invariant: it changes nothing and starts nothing; a run that another process writes now is read as far as it is.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Literal

from pretrain_assets.errors import ConfigError
from pretrain_assets.launch.contract import METRICS_NAME, RUN_NAME, read_result, read_spec
from pretrain_assets.table.storage import filesystem, join
from pretrain_assets.train.lock import is_held
from pretrain_assets.train.metrics import last, read_metrics


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as far as it got."""

    name: str
    """Name of its folder."""
    run_dir: str
    """Its folder."""
    recipe: str
    """Name of its recipe."""
    pin: str
    """`table-id@version` it trains on."""
    tag: str
    """Tag that names the version."""
    status: Literal["done", "stopped", "failed", "training", "unfinished"]
    """`unfinished`: it ended without a word, or trains elsewhere (an object store does not say)."""
    step: int
    """Newest optimizer step in its metrics."""
    total_steps: int | None
    """Its last step; None before its first record."""
    train_loss: float | None
    """Newest training loss."""
    val_loss: float | None
    """Newest validation loss."""
    val_loss_step: int | None
    """Step that it was measured at."""
    tok_per_s: float | None
    """Tokens per second over all ranks, the median of its records."""
    replay_of: str | None = None
    """Name of the folder of the run that it replays; None for any other run."""
    changed_at: float
    """When its metrics, or else its run.json, were last written; seconds since 1970."""


def list_runs(runs_uri: str) -> list[Run]:
    """Every run in a folder, local or on an object store, the one that was changed last first."""
    fs, path = filesystem(runs_uri)
    fs.invalidate_cache()
    names = [entry.rstrip("/").rsplit("/", 1)[-1] for entry in fs.ls(path, detail=False)] if fs.exists(path) else []
    found = [_read(join(runs_uri, name)) for name in names if fs.exists(f"{path.rstrip('/')}/{name}/{RUN_NAME}")]
    return sorted((run for run in found if run), key=lambda run: run.changed_at, reverse=True)


def _read(run_dir: str) -> Run | None:
    """A run; None where its `run.json` cannot be read, as one of another release."""
    try:
        spec = read_spec(join(run_dir, RUN_NAME))
    except ConfigError:
        return None
    records, result = read_metrics(run_dir), read_result(run_dir)
    fs, path = filesystem(run_dir)
    written = [f"{path}/{name}" for name in (METRICS_NAME, RUN_NAME)]
    val_loss, val_loss_step = last(records, "val_loss")
    speeds = [record["tok_per_s"] for record in records if "tok_per_s" in record]
    return Run(
        name=run_dir.rsplit("/", 1)[-1],
        run_dir=run_dir,
        recipe=spec.recipe.name,
        pin=spec.pin,
        tag=spec.tag,
        status=result["status"] if result else "training" if is_held(run_dir) else "unfinished",
        step=records[-1]["step"] if records else 0,
        total_steps=records[-1].get("total_steps") if records else None,
        train_loss=last(records, "loss")[0],
        val_loss=val_loss,
        val_loss_step=val_loss_step,
        replay_of=spec.replay.run_dir.rstrip("/").rsplit("/", 1)[-1] if spec.replay else None,
        tok_per_s=statistics.median(speeds) if speeds else None,
        changed_at=next(fs.modified(file).timestamp() for file in written if fs.exists(file)),
    )
