"""Where a replay begins: a checkpoint of the original that had seen none of the documents, or one that is chosen.

Invariant: from a clean checkpoint a replay gives, bit for bit, what it gives from new weights. One that has saved a
checkpoint goes on from that: its start stays what it was, also where that is gone by now.
"""

from __future__ import annotations

from pretrain_assets.config import Recipe, ReplayOf
from pretrain_assets.errors import CheckpointError, ConfigError
from pretrain_assets.launch.contract import RUN_NAME, read_file, read_spec
from pretrain_assets.loader.exposure import totals
from pretrain_assets.loader.plan import Int64Array
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.table.storage import join
from pretrain_assets.train.checkpoint import checkpoint_uri, find_fault, steps


def clean_start(run_dir: str, first_step: int) -> int:
    """Step of the newest whole checkpoint of a run from before `first_step`; 0 for new weights."""
    clean = (step for step in steps(run_dir) if step < first_step)
    return next((step for step in clean if find_fault(checkpoint_uri(run_dir, step)) is None), 0)


def check_start(run_dir: str, step: int) -> None:
    """Refuse a step of which a run has no whole checkpoint; 0 stands for new weights.

    Raises:
        CheckpointError: it has none.
    """
    saved = steps(run_dir)
    if step and step not in saved:
        have = ", ".join(map(str, [0, *reversed(saved)]))
        raise CheckpointError(f"{run_dir} has no checkpoint of step {step} to begin with; it has: {have}")
    fault = find_fault(checkpoint_uri(run_dir, step)) if step else None
    if fault:
        raise CheckpointError(f"Checkpoint {checkpoint_uri(run_dir, step)} cannot be used: {fault}")


def begun(run_dir: str, original: str) -> ReplayOf | None:
    """Where a replay in a folder began, by its run.json; None unless it is one of this original."""
    run_json = join(run_dir, RUN_NAME)
    origin = read_spec(run_json).replay if read_file(run_json) is not None else None
    return origin if origin and origin.run_dir == original else None


def holes_since(
    schedule: Schedule, recipe: Recipe, start_step: int, total_steps: int, ids: Int64Array
) -> tuple[int, ...]:
    """Epoch and cycle from which on the documents are holes (`data.without_from`): (0, 0) if the start is clean.

    Args:
        schedule: Of the original.
        recipe: Of the original.
        start_step: Step to begin after.
        total_steps: Steps of the whole run.
        ids: The documents, ascending.

    Raises:
        ConfigError: the run sees none of them after the start; or it leaves out other documents from another step on.
    """
    epoch, cycle = recipe.data.without_from
    others_since = sum(schedule.steps_in(e) for e in range(epoch)) + cycle // schedule.cycles_per_step
    seen = [int(totals(schedule, ids, last_step=step).tokens.sum()) for step in (others_since, start_step, total_steps)]
    if seen[1] == seen[2]:
        raise ConfigError(
            f"After step {start_step} the run sees none of these documents again: going on from there changes nothing. "
            "Begin with an earlier step, or give no --from-step."
        )
    if recipe.data.without and (seen[0] or seen[1]):
        raise ConfigError(
            f"This run leaves out other documents since step {others_since} and had seen some of these before, or "
            f"before step {start_step}: one run cannot have both. Replay its original, without all of them."
        )
    if recipe.data.without:
        return epoch, cycle
    return schedule.locate(start_step + 1) if seen[1] else (0, 0)
