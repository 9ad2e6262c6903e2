"""Retention: which versions stay and why, which tags of stages are released, which versions are freed.

Invariant: a version that a training run, a checkpoint's passport, a person's tag or the newest index names is never
freed, and of every stage the newest versions stay. Whatever stays has its reasons written beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import MaintainConfig
from pretrain_assets.table.versions import HISTORY_TAG, STAGES, release_tags, stage_tags

if TYPE_CHECKING:
    import lance

OPENED = frozenset(STAGES) - {"deleted", "maintained"}
"""Stages whose newest versions are opened: by the stages after them, and drawn when nothing is to be done. Of any
other, such as a column of one's own, nobody opens an older version: its values are in the newest too, its records stay.
"""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A version that stays."""

    version: int
    """Version number."""
    reasons: tuple[str, ...]
    """Why, for people."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What becomes of every version that is there."""

    kept: tuple[Kept, ...]
    """Versions that stay, oldest first."""
    freed: tuple[int, ...]
    """Versions to clean up, oldest first."""
    released: tuple[str, ...]
    """Tags of stages that name a freed version."""
    unprotected: tuple[int, ...]
    """Versions that training runs name and no tag does: they get one before anything is cleaned up."""


def plan_retention(
    dataset: lance.LanceDataset,
    config: MaintainConfig,
    *,
    pinned_by_runs: Mapping[int, Sequence[str]],
    keep_newest: bool = True,
    index_to_come: bool = False,
) -> Retention:
    """Decide about every version; changes nothing.

    Args:
        dataset: The table at its newest version.
        config: How many versions stay, and how young ones do.
        pinned_by_runs: Training runs by the version that they, or their checkpoints, name.
        keep_newest: False when a newer version is about to be made, which then is the newest.
        index_to_come: A newer version of the index is about to be made.
    """
    everything = dataset.tags.list()
    tags, stage_of = _tags_by_version(everything), stage_tags(everything)
    stages = _newest_of_stages(tags, stage_of, config.keep_last, index_to_come)
    indexed = (v for v, names in tags.items() if any(stage_of.get(name) == "indexed" for name in names))
    index = None if index_to_come else max(indexed, default=None)
    oldest_young = datetime.now(timezone.utc) - timedelta(seconds=config.older_than_seconds)
    kept, freed, unprotected = [], [], []
    for entry in dataset.versions():
        version, names = entry["version"], tags.get(entry["version"], [])
        runs = list(pinned_by_runs.get(version, ()))
        reasons = ["newest version"] if keep_newest and version == dataset.version else []
        reasons += stages.get(version, [])
        reasons += runs
        reasons += [f"tag {name}" for name in names if name not in stage_of]
        reasons += ["full-text index"] if version == index else []
        if entry["timestamp"].astimezone(timezone.utc) > oldest_young:
            reasons.append(f"younger than {duration_text(config.older_than_seconds)}")
        if reasons:
            kept.append(Kept(version=version, reasons=tuple(reasons)))
            unprotected += [version] if runs and not names else []
        else:
            freed.append(version)
    released = [name for version in freed for name in tags.get(version, [])]
    return Retention(kept=tuple(kept), freed=tuple(freed), released=tuple(released), unprotected=tuple(unprotected))


def apply_retention(dataset: lance.LanceDataset, retention: Retention) -> None:
    """Protect what only a run names, release tags, then free versions with the files that no other version refers to.

    Args:
        dataset: The table at its newest version, newer than the plan or the same.
        retention: The plan.
    """
    for version in retention.unprotected:
        _log.info("tag pinned.v%d: a training run names this version, and no tag did", version)
        dataset.tags.create(f"pinned.v{version}", version)
    if retention.freed:
        release_tags(dataset, retention.released)
        dataset.cleanup_old_versions(versions=list(retention.freed), error_if_tagged_old_versions=False)


def duration_text(seconds: int) -> str:
    """Seconds in the largest unit that divides them: 7d, 12h, 90s."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds and seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _tags_by_version(tags: Mapping[str, Any]) -> dict[int, list[str]]:
    """Tags of the main branch by version, the archive of records aside."""
    found: dict[int, list[str]] = {}
    for name, tag in sorted(tags.items()):
        if name != HISTORY_TAG and tag.get("branch") is None:
            found.setdefault(tag["version"], []).append(name)
    return found


def _newest_of_stages(
    tags: Mapping[int, Sequence[str]], stage_of: Mapping[str, str], keep_last: int, index_to_come: bool
) -> dict[int, list[str]]:
    """Per version, the stages of which it is one of the newest."""
    by_stage: dict[str, list[int]] = {}
    for version, names in tags.items():
        for stage in (stage_of[name] for name in names if name in stage_of):
            by_stage.setdefault(stage, []).append(version)
    found: dict[int, list[str]] = {}
    for stage, versions in by_stage.items():
        if stage in OPENED:
            number = keep_last - (index_to_come and stage == "indexed")
            for version in sorted(versions)[-number:] if number else []:
                last = f"among the last {keep_last} {stage}" if version != max(versions) else f"newest {stage}"
                found.setdefault(version, []).append(last)
    return found
