"""What a run saw at one optimizer step: the documents, where they lie in its blocks, and how they begin.

Invariant: computed from the run's recipe and pin alone, so a run without any checkpoint can be asked as well; the
answer is what the loader emits, token by token.
"""

from __future__ import annotations

from dataclasses import dataclass

from pretrain_assets.config import Recipe
from pretrain_assets.errors import CheckpointError, ConfigError
from pretrain_assets.forensics.checkpoints import find_checkpoint, find_run
from pretrain_assets.forensics.exposure import schedule_of
from pretrain_assets.launch.contract import CHECKPOINTS_NAME, RUN_NAME, read_file, read_spec
from pretrain_assets.loader.exposure import Exposure, documents
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.lookup import rows_by_id
from pretrain_assets.table.storage import Location, join
from pretrain_assets.train.checkpoint import steps

PREVIEW_CHARS = 200
"""Characters of a document shown."""


@dataclass(frozen=True, kw_only=True)
class SeenDocument:
    """A part of a document in one block."""

    exposure: Exposure
    """Where it lies, and how many tokens it has there."""
    source: str | None
    """Where the document is from; None if the table does not say."""
    preview: str | None
    """How the document begins; None if the table has no text, or the row is gone."""


@dataclass(frozen=True, kw_only=True)
class SeenStep:
    """One step of a run."""

    run: str
    """Folder of the run or checkpoint."""
    pin: str
    """Table version it trains on."""
    step: int
    """Optimizer step, from 1."""
    total_steps: int
    """Steps of the whole run."""
    epoch: int
    """Epoch of the step, from 0."""
    num_blocks: int
    """Blocks of the step, over all ranks."""
    num_documents: int
    """Different documents in it."""
    num_parts: int
    """Parts of documents in its blocks."""
    parts: tuple[SeenDocument, ...]
    """The first of them, in block order."""


def seen_at(which: str | None, step: int, *, location: Location, runs_uri: str, limit: int = 20) -> SeenStep:
    """The documents that a run saw (or, ahead of it, will see) at a step.

    Args:
        which: Folder of a run or checkpoint, recipe name, or None for the run that was changed last.
        step: Optimizer step, from 1.
        location: The table, for a checkpoint whose run is not there; a run names its own.
        runs_uri: Folder of all runs.
        limit: Parts of documents to look up.

    Raises:
        CheckpointError: no such run or checkpoint.
        ConfigError: the run has no such step.
        TableError: its table or version is gone.
    """
    run, pin, recipe, location = _find(which, runs_uri, location)
    schedule = schedule_of(location, pin, recipe)
    total_steps = schedule.total_steps(max_steps=recipe.train.max_steps, epochs=recipe.train.epochs)
    _check_step(step, total_steps, recipe)
    exposures = documents(schedule, step)
    shown = exposures[:limit]
    rows = rows_by_id(location, pin, (exposure.doc_id for exposure in shown), ["source", "text"])
    return SeenStep(
        run=run,
        pin=str(pin),
        step=step,
        total_steps=total_steps,
        epoch=schedule.locate(step)[0],
        num_blocks=recipe.blocks_per_step,
        num_documents=len({exposure.doc_id for exposure in exposures}),
        num_parts=len(exposures),
        parts=tuple(
            SeenDocument(exposure=exposure, source=row.get("source"), preview=_preview(row.get("text")))
            for exposure in shown
            for row in [rows.get(exposure.doc_id, {})]
        ),
    )


def _find(which: str | None, runs_uri: str, location: Location) -> tuple[str, Pin, Recipe, Location]:
    """Folder, pin, recipe and table of a checkpoint, or of a run by its run.json."""
    is_checkpoint = bool(which) and f"/{CHECKPOINTS_NAME}/" in str(which)
    found = find_checkpoint(which, runs_uri) if is_checkpoint else None
    run_dir = found.run_dir if found else find_run(which, runs_uri)
    run_json = join(run_dir, RUN_NAME)
    spec = read_spec(run_json) if read_file(run_json) is not None else None
    if spec:
        location = Location(database_uri=spec.database_uri, table_name=spec.table_name)
        if not found:
            return run_dir, Pin.parse(spec.pin), spec.recipe, location
    elif not found and not steps(run_dir):
        raise CheckpointError(f"There is no run in {run_dir}: it has neither a {RUN_NAME} nor a checkpoint.")
    found = found or find_checkpoint(run_dir, runs_uri)
    return found.uri, found.pin, found.recipe, location


def _check_step(step: int, total_steps: int, recipe: Recipe) -> None:
    if 1 <= step <= total_steps:
        return
    why = "steps count from 1, and before the first nothing was seen" if step < 1 else "the run ends before it"
    raise ConfigError(f"There is no step {step}: {why}. {recipe.name} has steps 1 to {total_steps:,}; give --step N.")


def _preview(text: str | None) -> str | None:
    return None if text is None else " ".join(text.split())[:PREVIEW_CHARS]
