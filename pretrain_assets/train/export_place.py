"""The place of an export: what may not be replaced there, and what goes when it is.

Invariant: changes nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from pathlib import PurePosixPath
from typing import Any

from pretrain_assets.errors import CheckpointError
from pretrain_assets.launch.contract import CHECKPOINTS_NAME, RUN_NAME, list_folder
from pretrain_assets.table.storage import filesystem, is_remote

NAMED = 5
"""Of what an export removes, so many are named."""

_log = logging.getLogger(__name__)


def refuse_runs(uri: str) -> None:
    """Refuse a place whose replacement would cost a run: one that is, holds or lies in its folder of checkpoints."""
    fs, path = filesystem(uri)
    fs.invalidate_cache()
    path = path if is_remote(uri) else os.path.realpath(path)
    what = "is a file" if fs.isfile(path) else None
    for above in (PurePosixPath(path), *PurePosixPath(path).parents):
        if above.name == CHECKPOINTS_NAME and (fs.exists(f"{above.parent}/{RUN_NAME}") or fs.glob(f"{above}/step_*")):
            what = f"lies among the checkpoints of the run {above.parent}"
    for folder, folders, files in (fs.walk if is_remote(uri) else os.walk)(path):
        if RUN_NAME in files or CHECKPOINTS_NAME in folders:
            what = f"holds the run {folder}"
            break
    if what:
        raise CheckpointError(f"{uri} {what}, which no export replaces. Choose another place with --out.")


def refuse_others(uri: str, found: Mapping[str, Any] | None, made_from: Mapping[str, Any]) -> None:
    """Refuse a place that holds anything but an export, whole or not, of the same checkpoint."""
    fs, path = filesystem(uri)
    fs.invalidate_cache()
    if not fs.exists(path) or (fs.isdir(path) and not fs.ls(path, detail=False)):
        return
    if found is not None and all(found[name] == made_from[name] for name in ("checkpoint", "dtype")):
        return
    what = f"the {found['dtype']} export of checkpoint {found['checkpoint']}" if found else "something else"
    raise CheckpointError(f"{uri} holds {what}. Choose another place with --out, or give --overwrite to replace it.")


def warn_of_others(uri: str, ours: Collection[str]) -> None:
    """Name what goes when the folder is replaced, but for the files of the export that is there."""
    others = [f"{name}/" if is_folder else name for name, is_folder, _ in list_folder(uri) if name not in ours]
    if others:
        more = f" and {len(others) - NAMED:,} more" if len(others) > NAMED else ""
        named = f"{', '.join(sorted(others)[:NAMED])}{more}"
        _log.warning("replacing %s removes what no export put there (%d): %s", uri, len(others), named)
