"""Finding a checkpoint by what a person types: a run's folder, a checkpoint's folder, or a recipe's name.

Invariant: only complete checkpoints are found; the passport read is the checkpoint's own.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from pretrain_assets.config import Recipe, from_dict
from pretrain_assets.errors import CheckpointError, ReplacedError
from pretrain_assets.launch.contract import CHECKPOINTS_NAME, RUN_NAME
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import absolute, filesystem, is_remote, join
from pretrain_assets.train import checkpoint
from pretrain_assets.train.spec import WITHOUT

MOST_NEAR = 3
"""Names of runs that are near to a wrong one, in a message."""
NO_TIME = datetime.min.replace(tzinfo=UTC)
"""Before any time at which a run was changed."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint and its passport."""

    run_dir: str
    """Folder of the run."""
    step: int
    """Optimizer steps done."""
    passport: dict[str, Any]
    """What it carries about its data."""

    @property
    def uri(self) -> str:
        """Folder of the checkpoint."""
        return checkpoint.checkpoint_uri(self.run_dir, self.step)

    @property
    def pin(self) -> Pin:
        """Table version it was trained on."""
        return Pin.parse(self.passport["pin"])

    @property
    def recipe(self) -> Recipe:
        """Recipe it was trained with."""
        return from_dict(Recipe, self.passport["recipe"])


def find_checkpoint(which: str | None, runs_uri: str, *, digests: bool = True) -> Checkpoint:
    """Find one checkpoint.

    Args:
        which: Folder of a checkpoint or of a run, name of a run or recipe, or None for the run that was changed last.
        runs_uri: Folder of all runs.
        digests: Check its files to the last byte, which reads them all; for a question about its data sizes will do.

    Raises:
        CheckpointError: nothing there, or nothing complete.
    """
    which = placed(which, runs_uri)
    if which and f"/{CHECKPOINTS_NAME}/step_" in which:
        run_dir, _, digits = which.rstrip("/").rpartition(f"/{CHECKPOINTS_NAME}/step_")
        if re.fullmatch(r"\d{1,18}", digits):
            return _open(run_dir, int(digits), digests)
        if "/" not in digits:
            raise CheckpointError(f"{which[:200]!r} is not the folder of a step, such as step_00001000")
    runs = [which] if which and "/" in which else list(_runs(runs_uri, which))
    for run_dir in runs:
        for left in reversed(range(checkpoint.TRIES)):
            step = checkpoint.newest(run_dir, digests=digests)
            if step is None:
                break
            try:
                return _read(run_dir, step)  # whose files `newest` has just checked
            except ReplacedError:
                if not left:
                    raise
    if which and runs and _exists(runs[0]):
        raise CheckpointError(
            f"No complete checkpoint in {runs[0]}: none was saved yet, or none is whole. `pretrain train` of its "
            "recipe goes on with it."
        )
    wanted = f"of {which!r} " if which else ""
    raise CheckpointError(
        f"No complete checkpoint {wanted}under {runs_uri}.{_near(which, runs_uri)} Train one with `pretrain train "
        "RECIPE` (`pretrain recipes` lists them), or materialize model/checkpoint."
    )


def with_checkpoint(
    which: str | None, runs_uri: str, use: Callable[[Checkpoint], T], *, digests: bool = True
) -> tuple[Checkpoint, T]:
    """The checkpoint that `find_checkpoint` finds, or a newer one where a run replaced it, and what is made of it.

    Raises:
        ReplacedError: again and again.
        CheckpointError: as `find_checkpoint`; a step that was asked for is no longer there.
    """
    for _ in range(checkpoint.TRIES - 1):
        found = find_checkpoint(which, runs_uri, digests=digests)
        try:
            return found, use(found)
        except ReplacedError:
            continue
    found = find_checkpoint(which, runs_uri, digests=digests)
    return found, use(found)


def find_run(which: str | None, runs_uri: str) -> str:
    """Folder of a run, with or without a checkpoint: a folder as given, else the run (of a recipe) changed last.

    Raises:
        CheckpointError: nothing there.
    """
    which = placed(which, runs_uri)
    if which and "/" in which:
        return which.rstrip("/")
    run_dir = next(_runs(runs_uri, which), None)
    if run_dir is None:
        raise CheckpointError(
            f"No run {f'of {which!r} ' if which else ''}under {runs_uri}.{_near(which, runs_uri)} Start one with "
            "`pretrain train RECIPE`."
        )
    return run_dir


def placed(which: str | None, runs_uri: str) -> str | None:
    """What a person typed, a path from the root on; one that is relative to the folder of all runs stands there, if it
    is only there. A name stays as it is.
    """
    if not which or (which not in (".", "..") and "/" not in which) or is_remote(which):
        return which
    run = which.partition("/")[0]
    there = run and not os.path.exists(run) and _exists(join(runs_uri, run))
    return join(runs_uri, which) if there else absolute(which)


def _exists(uri: str) -> bool:
    fs, path = filesystem(uri)
    return bool(fs.exists(path))


def _near(which: str | None, runs_uri: str) -> str:
    """A sentence on the runs whose names are nearest to one that nothing is named; empty without any."""
    names = [run_dir.rstrip("/").rsplit("/", 1)[-1] for run_dir in _runs(runs_uri, None)]
    asked = (which or "").rstrip("/").rsplit("/", 1)[-1]
    known = {spelling: name for name in reversed(names) for spelling in (name, name.rpartition("-v")[0])}
    found = dict.fromkeys(known[one] for one in difflib.get_close_matches(asked, known, n=MOST_NEAR))
    return f" Did you mean {' or '.join(found)}? `pretrain runs` lists all." if found else ""


def _runs(runs_uri: str, recipe: str | None) -> Iterator[str]:
    """Folders of runs (of one recipe, or of this name), the one changed last first, runs with holes after all others:
    a replay of a run is not taken for it. A folder without `run.json` is a run where it is asked for by its name.
    """
    fs, path = filesystem(runs_uri)
    fs.invalidate_cache()
    if not fs.exists(path):
        return
    found = []
    for entry in fs.ls(path, detail=False):
        name = entry.rstrip("/").rsplit("/", 1)[-1]
        spec = f"{entry.rstrip('/')}/{RUN_NAME}"
        has_spec = fs.exists(spec)
        if (recipe in (None, name) or name.startswith(f"{recipe}-v")) and (has_spec or name == recipe):
            run_dir = join(runs_uri, name) if is_remote(runs_uri) else entry
            found.append((WITHOUT not in name, fs.modified(spec) if has_spec else NO_TIME, run_dir))
    yield from (run_dir for *_, run_dir in sorted(found, reverse=True))


def _open(run_dir: str, step: int, digests: bool) -> Checkpoint:
    if step not in checkpoint.steps(run_dir):
        have = ", ".join(str(s) for s in checkpoint.steps(run_dir)) or "none"
        raise CheckpointError(f"{run_dir} has no checkpoint of step {step}; it has: {have}")
    fault = checkpoint.find_fault(checkpoint.checkpoint_uri(run_dir, step), digests=digests)
    if fault:
        raise CheckpointError(f"Checkpoint {checkpoint.checkpoint_uri(run_dir, step)} cannot be used: {fault}")
    return _read(run_dir, step)


def _read(run_dir: str, step: int) -> Checkpoint:
    passport = checkpoint.read_passport(checkpoint.checkpoint_uri(run_dir, step))
    return Checkpoint(run_dir=run_dir, step=step, passport=passport)
