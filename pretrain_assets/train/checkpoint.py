"""Checkpoints: folders `checkpoints/step_00000100/` of safetensors and JSON, on local disk or S3.

Invariant: a folder counts only with its COMPLETE marker, written last, and only while every file has the size and
digest that the marker gives. Loading never executes code. Older checkpoints go only after a newer one is complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pretrain_assets.errors import CheckpointError
from pretrain_assets.launch.contract import CHECKPOINTS_NAME, MARKER_NAME, PASSPORT_NAME
from pretrain_assets.table.storage import filesystem, is_remote, join

_STEP = re.compile(r"^step_(\d{8})$")
_log = logging.getLogger(__name__)


def checkpoint_uri(run_dir: str, step: int) -> str:
    """Where the checkpoint of a step lives."""
    return join(run_dir, CHECKPOINTS_NAME, f"step_{step:08d}")


def save(run_dir: str, step: int, tensors: Mapping[str, Mapping[str, Tensor]], passport: Mapping[str, Any]) -> str:
    """Write a checkpoint and return its uri.

    Args:
        run_dir: Directory of the run, local or `s3://`.
        step: Steps trained.
        tensors: Tensors by name, by file name without suffix.
        passport: What the checkpoint carries about its data.

    Raises:
        CheckpointError: the place is full or cannot be written; earlier checkpoints stay as they were.
    """
    uri = checkpoint_uri(run_dir, step)
    try:
        with _staging(uri) as folder:
            for name, values in tensors.items():
                save_file({key: value.contiguous() for key, value in values.items()}, folder / f"{name}.safetensors")
            (folder / PASSPORT_NAME).write_text(json.dumps(passport, indent=2, ensure_ascii=False), encoding="utf-8")
            (folder / MARKER_NAME).write_text(json.dumps(_contents(folder), indent=2), encoding="utf-8")
            _publish(folder, uri)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"Cannot write checkpoint {uri}: {error}.{_free_space(run_dir)} Earlier checkpoints are intact. Free "
            "space, lower execution.keep_last or choose another run_dir, then start the same run again: it resumes."
        ) from error
    return uri


def steps(run_dir: str) -> list[int]:
    """Steps that have a folder, complete or not, newest first."""
    fs, path = filesystem(join(run_dir, CHECKPOINTS_NAME))
    fs.invalidate_cache()
    if not fs.exists(path):
        return []
    names = [entry.rstrip("/").rsplit("/", 1)[-1] for entry in fs.ls(path, detail=False)]
    return sorted((int(match[1]) for name in names if (match := _STEP.match(name))), reverse=True)


def newest(run_dir: str) -> int | None:
    """Step of the newest complete checkpoint; broken ones are skipped with a warning."""
    for step in steps(run_dir):
        with open_checkpoint(run_dir, step) as folder:
            fault = find_fault(folder)
        if fault is None:
            return step
        _log.warning("skipping checkpoint %s: %s", checkpoint_uri(run_dir, step), fault)
    return None


@contextmanager
def open_checkpoint(run_dir: str, step: int) -> Iterator[Path]:
    """The folder of a checkpoint on local disk; downloaded for the duration when it is remote."""
    uri = checkpoint_uri(run_dir, step)
    fs, path = filesystem(uri)
    if not is_remote(uri):
        yield Path(path)
        return
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as temporary:
        fs.get(path, f"{temporary}/{step}", recursive=True)
        yield Path(temporary, str(step))


def find_fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None when all are as its marker says."""
    marker = folder / MARKER_NAME
    if not marker.exists():
        return f"it has no {MARKER_NAME} marker, its writer was interrupted"
    try:
        files = {name: (int(f["bytes"]), str(f["sha256"])) for name, f in json.loads(marker.read_bytes()).items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"its {MARKER_NAME} marker is damaged"
    if PASSPORT_NAME not in files or len(files) < 2:
        return f"its {MARKER_NAME} marker does not name its files"
    for name, (num_bytes, sha256) in files.items():
        path = folder / name
        if not path.exists():
            return f"{name} is missing"
        if path.stat().st_size != num_bytes:
            return f"{name} has {path.stat().st_size} bytes, not {num_bytes}"
        if _sha256(path) != sha256:
            return f"{name} does not match its digest"
    return None


def read_passport(folder: Path) -> dict[str, Any]:
    """The passport of an open checkpoint."""
    return dict(json.loads((folder / PASSPORT_NAME).read_text(encoding="utf-8")))


def digest(folder: Path) -> str:
    """Digest of all files of an open checkpoint, passport included: equal for bitwise equal runs."""
    return _sha256(folder / MARKER_NAME)[:16]


def read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """The tensors of one file of an open checkpoint, on the CPU."""
    return dict(load_file(folder / f"{name}.safetensors"))


def prune(run_dir: str, keep_last: int) -> None:
    """Remove all but the newest `keep_last` checkpoints. Call it only after a save."""
    for step in steps(run_dir)[keep_last:]:
        _remove(checkpoint_uri(run_dir, step))


@contextmanager
def _staging(uri: str) -> Iterator[Path]:
    """An empty local folder, gone afterwards; beside a local target, so that a rename publishes it."""
    if is_remote(uri):
        with tempfile.TemporaryDirectory(prefix="checkpoint-") as temporary:
            yield Path(temporary)
        return
    target = Path(filesystem(uri)[1])
    folder = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, uri: str) -> None:
    """Make a staged folder the checkpoint: by rename, or on an object store by writing the marker last."""
    _remove(uri)
    fs, path = filesystem(uri)
    if not is_remote(uri):
        for file in folder.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        os.replace(folder, path)
        return
    for file in sorted(folder.iterdir(), key=lambda file: file.name == MARKER_NAME):
        fs.put_file(str(file), f"{path}/{file.name}")


def _remove(uri: str) -> None:
    """Remove a checkpoint, its marker first."""
    fs, path = filesystem(uri)
    fs.invalidate_cache()
    if fs.exists(f"{path}/{MARKER_NAME}"):
        fs.rm_file(f"{path}/{MARKER_NAME}")
    if fs.exists(path):
        fs.rm(path, recursive=True)


def _contents(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)}
        for file in sorted(folder.iterdir())
        if file.name != MARKER_NAME
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        digest = hashlib.sha256()
        while chunk := handle.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _free_space(run_dir: str) -> str:
    if is_remote(run_dir):
        return ""
    path = Path(filesystem(run_dir)[1])
    while not path.exists():
        path = path.parent
    return f" {shutil.disk_usage(path).free:,} bytes are free there."
