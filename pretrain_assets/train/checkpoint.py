"""Checkpoints: folders `checkpoints/step_00000100/` of safetensors and JSON, on local disk or S3.

Invariant: a folder counts only with its COMPLETE marker, written last, and only while every file has the size and
digest that the marker gives. Loading never executes code. Older checkpoints go only after a newer one is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pretrain_assets.errors import CheckpointError, ReplacedError
from pretrain_assets.launch.contract import (
    CHECKPOINTS_NAME,
    MARKER_NAME,
    PASSPORT_NAME,
    FileFacts,
    explained,
    file_sizes,
    find_size_fault,
    list_folder,
    persistently,
    read_file,
    read_marker,
)
from pretrain_assets.table.storage import filesystem, is_remote, join
from pretrain_assets.train import passport as passports

MODEL, OPTIMIZER = "model", "optimizer"
"""What the names of files of weights, and of the optimizer's state, begin with."""

VISIBLE_SECONDS = 60.0
"""How long a file written on another machine may take to show up in a network file system, whose clients cache."""

TRIES = 5
"""How often a reader looks again for the newest checkpoint of a run that replaces them while it looks."""

STEP_NAME = re.compile(r"^step_(\d{8,})$")
"""Name of the folder of a checkpoint."""
_log = logging.getLogger(__name__)


def checkpoint_uri(run_dir: str, step: int) -> str:
    """Where the checkpoint of a step lives."""
    return join(run_dir, CHECKPOINTS_NAME, f"step_{step:08d}")


# --- reading ----------------------------------------------------------------------------------------------------------


def steps(run_dir: str) -> list[int]:
    """Steps that have a folder, complete or not, newest first."""
    found = list_folder(join(run_dir, CHECKPOINTS_NAME))
    return sorted(
        (int(match[1]) for name, folder, _ in found if folder and (match := STEP_NAME.match(name))), reverse=True
    )


def newest(run_dir: str, *, digests: bool = True) -> int | None:
    """Step of the newest checkpoint without a fault (`find_fault`); what is skipped, broken or no folder of a step, is
    named in a warning.
    """
    for name, is_folder, _ in list_folder(join(run_dir, CHECKPOINTS_NAME)):
        if name.startswith("step_") and not (is_folder and STEP_NAME.match(name)):
            _log.warning("skipping %s: it is not the folder of a step", join(run_dir, CHECKPOINTS_NAME, name))
    for _ in range(TRIES):
        there = steps(run_dir)
        for step in there:
            uri = checkpoint_uri(run_dir, step)
            fault = find_fault(uri, digests=digests)
            if fault is None:
                return step
            if list_folder(uri):
                _log.warning("skipping checkpoint %s: %s", uri, fault)
        if steps(run_dir) == there:
            break
    return None


def find_fault(folder: str | Path, *, digests: bool = True) -> str | None:
    """What is wrong with a checkpoint's files or passport, or None when all are as its marker says.

    Args:
        folder: Its local folder or uri.
        digests: Read the files, not only their sizes; remote ones are not read here, but checked as they are fetched.
    """
    uri = str(folder)
    files = read_marker(uri)
    if isinstance(files, str):
        return files
    fault = find_size_fault(uri)
    if fault is not None or not digests:
        return fault
    try:
        for name, facts in files.items():
            if not is_remote(uri) and _sha256(Path(filesystem(uri)[1], name)) != facts["sha256"]:
                return f"{name} does not match its digest"
        step = read_passport(uri)["step"]
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except CheckpointError as error:
        return str(error)
    named = STEP_NAME.match(uri.rstrip("/").rpartition("/")[2])
    if named and int(named[1]) != step:
        return f"it is the checkpoint of step {step} in the folder of another step"
    return None


@contextlib.contextmanager
def open_checkpoint(run_dir: str, step: int, *, weights_only: bool = True) -> Iterator[Path]:
    """The folder of a checkpoint on local disk; a remote one is fetched for the duration, whole or without moments.

    Raises:
        CheckpointError: a remote file is not what the marker says.
        ReplacedError: whatever went wrong inside, the checkpoint is no longer there.
    """
    uri = checkpoint_uri(run_dir, step)
    try:
        with _fetched(uri, weights_only) as folder:
            yield folder
    except Exception as error:
        if read_file(join(uri, MARKER_NAME)) is None:
            raise _replaced(uri) from error
        raise


@contextlib.contextmanager
def _fetched(uri: str, weights_only: bool) -> Iterator[Path]:
    files = read_marker(uri)
    if isinstance(files, str):
        raise CheckpointError(f"Checkpoint {uri} cannot be used: {files}")
    fs, path = filesystem(uri)
    if not is_remote(uri):
        yield Path(path)
        return
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as temporary:
        wanted = [name for name in files if not (weights_only and name.startswith(OPTIMIZER))]
        for name in [*wanted, MARKER_NAME]:
            with explained(uri, "read"):
                persistently(uri, partial(fs.get_file, f"{path}/{name}", f"{temporary}/{name}"))
        for name in wanted:
            if _sha256(Path(temporary, name)) != files[name]["sha256"]:
                raise CheckpointError(
                    f"Checkpoint {uri} is damaged: {name} does not match its digest. Remove this folder to use the "
                    "checkpoint before it."
                )
        yield Path(temporary)


def read_passport(folder: str | Path) -> dict[str, Any]:
    """The passport of a checkpoint, by its local folder or uri.

    Raises:
        CheckpointError: it is no JSON object, or a field that is read later is not there or of another type.
        ReplacedError: it is not there.
    """
    uri = join(str(folder), PASSPORT_NAME)
    data = read_file(uri)
    if data is None:
        raise _replaced(str(folder))
    try:
        return passports.parse(data)
    except ValueError as error:
        raise CheckpointError(f"{uri} {error}: remove its folder to use the checkpoint before it") from error


def digest(folder: str | Path) -> str:
    """Digest of all files of a checkpoint, passport included: equal for bitwise equal runs.

    Raises:
        ReplacedError: it is not there.
    """
    marker = read_file(join(str(folder), MARKER_NAME))
    if marker is None:
        raise _replaced(str(folder))
    return hashlib.sha256(marker).hexdigest()[:16]


def _replaced(uri: str) -> ReplacedError:
    return ReplacedError(
        f"Checkpoint {uri} was replaced by a newer one while it was read, or removed: run the same command again"
    )


# --- writing: every rank its files, then one rank commits -------------------------------------------------------------


def begin(run_dir: str, step: int) -> None:
    """Take the marker off a broken remote checkpoint that is about to be written anew."""
    uri = checkpoint_uri(run_dir, step)
    if is_remote(uri):
        fs, path = filesystem(uri)
        with contextlib.suppress(FileNotFoundError):
            fs.rm_file(f"{path}/{MARKER_NAME}")


def write_file(run_dir: str, step: int, name: str, chunks: Iterable[bytes | memoryview]) -> FileFacts:
    """Write one file of a checkpoint that is not there yet, hashing it on the way."""
    place = _staging(checkpoint_uri(run_dir, step))
    fs, path = filesystem(place)
    if not is_remote(place):
        Path(path).mkdir(parents=True, exist_ok=True)
    sha256, num_bytes = hashlib.sha256(), 0
    with fs.open(f"{path}/{name}", "wb") as handle:
        for chunk in chunks:
            handle.write(chunk)
            sha256.update(chunk)
            num_bytes += len(chunk)
        if not is_remote(place):
            handle.flush()
            os.fsync(handle.fileno())
    return {"bytes": num_bytes, "sha256": sha256.hexdigest()}


def commit(run_dir: str, step: int, files: Mapping[str, FileFacts]) -> None:
    """Make written files a checkpoint: after this it counts, before it does not.

    Raises:
        CheckpointError: a rank wrote its files where this one does not see them.
    """
    uri = checkpoint_uri(run_dir, step)
    place = _staging(uri)
    deadline = time.monotonic() + VISIBLE_SECONDS
    sizes = file_sizes(place)
    while missing := [name for name in files if sizes.get(name) != files[name]["bytes"]]:
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{missing[0]} is not in {place} as seen by the main rank. All machines of a run must share its "
                "directory: use a shared file system or s3://"
            )
        time.sleep(0.5)
        sizes = file_sizes(place)
    fs, path = filesystem(place)
    for name in sizes.keys() - files.keys():  # of a save that was killed
        fs.rm_file(f"{path}/{name}")
    marker = json.dumps(dict(sorted(files.items())), indent=2).encode()
    write_file(run_dir, step, MARKER_NAME, [marker])
    if not is_remote(uri):
        discard(uri)
        os.replace(path, filesystem(uri)[1])


def discard(uri: str) -> None:
    """Remove a checkpoint, its marker first; of a link to a folder only the link."""
    fs, path = filesystem(uri)
    fs.invalidate_cache()
    if not is_remote(uri) and Path(path).is_symlink():
        Path(path).unlink()
        return
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        fs.rm_file(f"{path}/{MARKER_NAME}")
    with contextlib.suppress(FileNotFoundError):
        fs.rm(path, recursive=True)


def discard_unfinished(run_dir: str) -> None:
    """Remove what saves that failed or were killed left on local disk; call it while none is under way."""
    if not is_remote(run_dir):
        for folder in Path(filesystem(run_dir)[1], CHECKPOINTS_NAME).glob(".step_*.tmp"):
            shutil.rmtree(folder, ignore_errors=True)


def prune(run_dir: str, saved: int, *, keep_last: int, keep_every: int | None = None) -> None:
    """Remove older checkpoints; call it after the one of step `saved` is committed.

    Kept are the newest `keep_last` up to that one, and those at multiples of `keep_every`. Later ones, which a run that
    went back has yet to reach again, stay; broken ones before it go.
    """
    older = [step for step in steps(run_dir) if step <= saved]
    good = [step for step in older if find_fault(checkpoint_uri(run_dir, step), digests=False) is None]
    kept = {*good[:keep_last], *(step for step in good if keep_every and step % keep_every == 0)}
    for step in older:
        if step not in kept:
            discard(checkpoint_uri(run_dir, step))
    discard_unfinished(run_dir)


def _staging(uri: str) -> str:
    """Where a checkpoint is written: beside its place, for a rename; on object stores in it, the marker last."""
    head, _, name = uri.rpartition("/")
    return uri if is_remote(uri) else f"{head}/.{name}.tmp"


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 22):
            found.update(chunk)
    return found.hexdigest()
