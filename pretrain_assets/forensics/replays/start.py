"""Where a replay begins: a checkpoint of the original that had seen none of the documents, or one that is chosen.

Invariant: from a clean checkpoint a replay gives, bit for bit, what it gives from new weights.
"""

from __future__ import annotations

from pretrain_assets.config import Recipe
from pretrain_assets.errors import CheckpointError, ConfigError
from pretrain_assets.loader.exposure import totals
from pretrain_assets.loader.plan import Int64Array
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.train.checkpoint import checkpoint_uri, find_fault, steps


def find_start(run_dir: str, first_step: int, from_step: int | None) -> int:
    """Step of the checkpoint of a run to begin with; 0 for new weights.

    Args:
        run_dir: Folder of the run.
        first_step: Step that saw the first of the documents: the newest whole checkpoint before it is taken.
        from_step: The one asked for, instead.

    Raises:
        CheckpointError: the run has no whole checkpoint of the step asked for.
    """
    saved = steps(run_dir)
    if from_step is None:
        clean = (step for step in saved if step < first_step)
        return next((step for step in clean if find_fault(checkpoint_uri(run_dir, step)) is None), 0)
    if from_step and from_step not in saved:
        have = ", ".join(map(str, [0, *reversed(saved)]))
        raise CheckpointError(f"{run_dir} has no checkpoint of step {from_step} to begin with; it has: {have}")
    fault = find_fault(checkpoint_uri(run_dir, from_step)) if from_step else None
    if fault:
        raise CheckpointError(f"Checkpoint {checkpoint_uri(run_dir, from_step)} cannot be used: {fault}")
    return from_step


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
