"""Recipes and runs as tables for people.

Invariant: a value that is not known is printed as n/a.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from pretrain_assets.plural import counted

if TYPE_CHECKING:
    from pretrain_assets.train.runs import Run


def recipes_text(recipes: Sequence[Mapping[str, Any]]) -> str:
    """Recipes, one line each."""
    rows = [
        (
            recipe["name"],
            f"{recipe['num_parameters'] / 1e6:.1f} M",
            f"{recipe['tokens_per_step']:,}",
            counted(recipe["max_steps"], "step") if recipe["max_steps"] else counted(recipe["epochs"], "epoch"),
            recipe["description"],
        )
        for recipe in recipes
    ]
    return tabulate(
        rows, headers=("recipe", "parameters", "tokens/step", "length", "what it is"), disable_numparse=True
    )


def runs_text(runs: Sequence[Run], now: float | None = None) -> str:
    """Runs, one line each; `now` in seconds since 1970, default the clock's."""
    now = time.time() if now is None else now
    replays = any(run.replay_of for run in runs)
    rows = [
        (
            run.name,
            run.tag,
            run.status,
            f"{run.step:,}/{_shown(run.total_steps, ',')}",
            _shown(run.train_loss, ".4f"),
            _shown(run.val_loss, ".4f")
            + (f" (step {run.val_loss_step:,})" if run.val_loss_step not in (None, run.step) else ""),
            _shown(run.tok_per_s, ",.0f"),
            _ago(now - run.changed_at),
            *([run.replay_of or ""] if replays else []),
        )
        for run in runs
    ]
    headers = ["run", "trained on", "status", "step", "loss", "val loss", "tok/s", "last change"]
    headers += ["replay of"] if replays else []
    return tabulate(rows, headers=headers, disable_numparse=True)


def _shown(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
