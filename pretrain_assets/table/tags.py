"""Tags that runs and people put on versions: set when a run is launched, taken away by `pretrain release`.

Invariant: a launched run's version carries `run.<run>`, wherever the run's folder is; no tag of a stage is ever taken
away here, and none of a run that still names the version, unless it is forced.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from pretrain_assets.errors import TableError
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.versions import HISTORY_TAG, open_pin, stage_tags

RUN_PREFIX = "run."
PINNED_PREFIX = "pinned."
"""Of tags that maintenance sets on versions which only a run's files name."""
_log = logging.getLogger(__name__)


def protect_run(location: Location, pin: Pin, run_dir: str) -> None:
    """Tag the version that a run is about to be trained on as `run.<name of its folder>`; again is nothing new.

    Who may only read the table can train on it too: then the version is as protected as the run's folder makes it,
    which a warning says.
    """
    tag = RUN_PREFIX + run_dir.rstrip("/").rsplit("/", 1)[-1]
    dataset = open_pin(location, pin)
    try:
        if tag not in dataset.tags.list():
            dataset.tags.create(tag, pin.version)
    except OSError as error:
        _log.warning("version %d could not be tagged %s (%s): keep the run's folder", pin.version, tag, error)


def release(location: Location, tag: str, *, pinned_by_runs: Mapping[int, Sequence[str]], force: bool = False) -> int:
    """Take a run's or a person's tag away; returns the version that it named.

    Args:
        location: The table.
        tag: Name of the tag.
        pinned_by_runs: Training runs by the version that they name.
        force: Take a run's tag away although the run is still there.

    Raises:
        TableError: no such tag, the tag of a stage, or a run's that is still there.
    """
    dataset = open_dataset(location)
    tags = dataset.tags.list()
    mine = sorted(set(tags) - set(stage_tags(tags)) - {HISTORY_TAG})
    if tag not in tags:
        raise TableError(f"{location.uri} has no tag {tag!r}; it has: {', '.join(mine) or 'none to release'}")
    if tag not in mine:
        raise TableError(
            f"{tag!r} belongs to the table's own history and is not released by hand. `pretrain maintain` releases "
            "tags of stages once newer versions have taken their place."
        )
    version = int(tags[tag]["version"])
    runs = pinned_by_runs.get(version, ())
    if runs and tag.startswith((RUN_PREFIX, PINNED_PREFIX)) and not force:
        raise TableError(
            f"{tag} names version {version}, and so does {'; '.join(runs)}. Remove that run's folder first, or give "
            "--force: the run's checkpoints then lose their protection in the table."
        )
    dataset.tags.delete(tag)
    return version
