"""The job contract: `run.json` in; `metrics.jsonl`, `checkpoints/` and `result.json` out; and the exit codes.

Invariant: both sides read and write these files here and nowhere else, and nothing in them is a secret. Files are
replaced whole: a reader sees the old one or the new one.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, get_args

from pretrain_assets.config import RunSpec, from_dict, lasting, to_dict
from pretrain_assets.errors import ConfigError, PretrainError, StorageError

EXIT_DONE, EXIT_FAILED, EXIT_STOPPED = 0, 1, 75
"""Exit codes of one rank: done; failed; stopped after saving, start me again (EX_TEMPFAIL of sysexits.h)."""

RUN_NAME, METRICS_NAME, RESULT_NAME, CHECKPOINTS_NAME = "run.json", "metrics.jsonl", "result.json", "checkpoints"
MARKER_NAME, PASSPORT_NAME = "COMPLETE", "passport.json"

PATIENCE_SECONDS = 120.0
"""How long an object store that does not answer is tried again: its usual outages are shorter, and end no run."""

Status = Literal["done", "stopped", "failed"]
_DONE = {"step": int, "checkpoint": str, "digest": str, "passport": dict}
"""What the result of a run that is done must at least hold."""


T = TypeVar("T")
_log = logging.getLogger(__name__)


class FileFacts(TypedDict):
    """What a checkpoint's marker says of a file."""

    bytes: int
    """Its size."""
    sha256: str
    """Its digest, in hex."""


def write_spec(spec: RunSpec) -> str:
    """Write `run.json` into the run's directory; returns its uri."""
    uri = f"{spec.run_dir.rstrip('/')}/{RUN_NAME}"
    write_file(uri, json.dumps(to_dict(spec), indent=2, ensure_ascii=False).encode())
    return uri


def read_spec(uri: str) -> RunSpec:
    """Read a `run.json`.

    Raises:
        ConfigError: no such file, not JSON, or not a run.
    """
    data = read_file(uri)
    if data is None:
        raise ConfigError(f"There is no run file {uri}; `launch.contract.write_spec` makes one from a RunSpec")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{uri} is not JSON: {error}") from error
    return from_dict(RunSpec, values)


def read_result(run_dir: str) -> dict[str, Any] | None:
    """The run's `result.json`, or None when there is none, or none that says how the run ended."""
    data = read_file(f"{run_dir.rstrip('/')}/{RESULT_NAME}")
    try:
        result = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return None
    return result if isinstance(result, dict) and result.get("status") in get_args(Status) else None


def finished_result(spec: RunSpec) -> dict[str, Any] | None:
    """The result if exactly this run is done and its last checkpoint is still there, else None.

    A damaged result is none. Of the checkpoint's files the sizes are compared with its marker; what else may be wrong
    with them is found when they are loaded, as reading many gigabytes to say that nothing is to be done would be slow.
    """
    result = read_result(spec.run_dir)
    if result is None or result["status"] != "done" or any(type(result.get(key)) is not _DONE[key] for key in _DONE):
        return None
    passport = result["passport"]
    recipe = passport.get("recipe")
    same = passport.get("identity") == spec.identity and isinstance(recipe, dict)
    if not same or lasting(recipe) != spec.recipe.lasting:
        return None
    last = f"{spec.run_dir.rstrip('/')}/{CHECKPOINTS_NAME}/step_{result['step']:08d}"
    return result if find_size_fault(last) is None else None


def write_result(run_dir: str, result: dict[str, Any]) -> None:
    """Write the run's `result.json`."""
    write_file(f"{run_dir.rstrip('/')}/{RESULT_NAME}", json.dumps(result, indent=2, ensure_ascii=False).encode())


def clear_unfinished_result(run_dir: str) -> None:
    """Remove the result of an earlier attempt that did not get done, so that it is not taken for this one's."""
    result = read_result(run_dir)
    if result is not None and result["status"] != "done":
        uri = f"{run_dir.rstrip('/')}/{RESULT_NAME}"
        fs, path = _filesystem(uri)
        with explained(uri, "remove"):
            fs.rm(path)


def read_marker(folder: str) -> dict[str, FileFacts] | str:
    """The files that the marker in a checkpoint's folder names, or what is wrong with it."""
    data = read_file(f"{folder}/{MARKER_NAME}")
    if data is None:
        return f"it has no {MARKER_NAME} marker, its writer was interrupted"
    try:
        files: dict[str, FileFacts] = {
            name: {"bytes": int(facts["bytes"]), "sha256": str(facts["sha256"])}
            for name, facts in json.loads(data).items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return f"its {MARKER_NAME} marker is damaged"
    if PASSPORT_NAME not in files or len(files) < 2 or any("/" in name for name in files):
        return f"its {MARKER_NAME} marker does not name its files"
    return files


def find_size_fault(folder: str) -> str | None:
    """What the names and sizes of a checkpoint's files show to be wrong with it, or None."""
    files = read_marker(folder)
    if isinstance(files, str):
        return files
    sizes = file_sizes(folder)
    for name, facts in files.items():
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != facts["bytes"]:
            return f"{name} has {sizes[name]} bytes, not {facts['bytes']}"
    return None


def file_sizes(folder: str) -> dict[str, int]:
    """Sizes of the files of a checkpoint, by name; its marker left out."""
    return {name: size for name, is_folder, size in list_folder(folder) if not is_folder and name != MARKER_NAME}


def list_folder(uri: str) -> list[tuple[str, bool, int]]:
    """Name, whether it is (a link to) a folder, and size of everything in a folder; nothing when there is none."""
    fs, path = _filesystem(uri)
    fs.invalidate_cache()
    with explained(uri, "list"):
        try:
            found = fs.ls(path, detail=True)
        except FileNotFoundError:
            return []
    return [
        (
            entry["name"].rstrip("/").rsplit("/", 1)[-1],
            entry["type"] == "directory" or (bool(entry.get("islink")) and fs.isdir(entry["name"])),
            int(entry["size"] or 0),
        )
        for entry in found
    ]


def read_file(uri: str) -> bytes | None:
    """A file's bytes, or None when there is none."""
    fs, path = _filesystem(uri)
    with explained(uri, "read"):
        try:
            return bytes(fs.cat_file(path))
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None


def write_file(uri: str, data: bytes, *, patience: float | None = None) -> None:
    """Replace a file whole, making its directory if need be; on object stores as `persistently`.

    Raises:
        StorageError: it cannot be written; the old file is as it was.
    """
    fs, path = _filesystem(uri)
    with explained(uri, "write"):
        if _is_remote(uri):
            persistently(uri, lambda: fs.pipe_file(path, data), patience=patience)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.tmp")
        try:
            temporary.write_bytes(data)
            os.replace(temporary, target)
        except OSError:
            temporary.unlink(missing_ok=True)  # half a file on a full disk
            raise


def persistently(uri: str, work: Callable[[], T], *, patience: float | None = None) -> T:
    """What `work` gives; where an object store does not answer, it is done again and again, with longer pauses.

    What does not pass by itself (no such bucket, no permission) is raised at once, and so is everything on a disk.

    Args:
        uri: Where it is done.
        work: What may be done more than once.
        patience: Seconds to go on for; None for `PATIENCE_SECONDS`.
    """
    began, pause = time.monotonic(), 1.0
    left = PATIENCE_SECONDS if patience is None else patience
    while True:
        try:
            return work()
        except Exception as error:  # the clients of object stores raise what they like
            cause = error.__cause__ if isinstance(error, StorageError) else error
            lasting_fault = isinstance(cause, (FileNotFoundError, PermissionError, PretrainError))
            if lasting_fault or not _is_remote(uri) or time.monotonic() + pause > began + left:
                raise
            if pause == 1.0:
                _log.warning("%s: %s; trying again for %.0f s", uri, _first_line(error), left)
        time.sleep(pause)
        pause = min(2 * pause, 15.0)


def storage_fault(uri: str, error: BaseException) -> str:
    """What happened where a run is kept, and the remedy, in one line."""
    code = error.errno if isinstance(error, OSError) else None
    elsewhere = "choose another place for runs (--runs, PRETRAIN_RUNS_URI)"
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = f"{free_space(uri)}Free space, lower execution.keep_last or {elsewhere}."
    elif isinstance(error, PermissionError) or code == errno.EROFS:
        remedy = f"Allow this user to read and write there, or {elsewhere}."
    elif not _is_remote(uri):
        remedy = f"Look at what is there, or {elsewhere}."
    elif isinstance(error, FileNotFoundError):
        remedy = f"Make the bucket, or {elsewhere}."
    else:
        remedy = "Look at the network, AWS_ENDPOINT_URL and the other AWS_* settings, then start the same run again."
    return f"{_first_line(error).rstrip('.')}. {remedy}"


def free_space(uri: str) -> str:
    """A sentence on the free space where a run is written; empty for object stores."""
    if _is_remote(uri):
        return ""
    path = Path(_filesystem(uri)[1])
    while not path.exists():
        path = path.parent
    return f"{shutil.disk_usage(path).free:,} bytes are free there. "


@contextmanager
def explained(uri: str, doing: str) -> Iterator[None]:
    """Inside, what the storage raises (a disk an OSError, the client of an object store anything) is a StorageError."""
    try:
        yield
    except PretrainError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and not _is_remote(uri):
            raise
        raise StorageError(f"Cannot {doing} {uri}: {storage_fault(uri, error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300] or type(error).__name__


def _is_remote(uri: str) -> bool:
    return "://" in uri and not uri.startswith("file://")


def _filesystem(uri: str) -> tuple[Any, str]:
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(uri)
    except (ImportError, ValueError) as error:  # an unknown protocol, or one whose package is not installed
        raise ConfigError(f"{uri!r} cannot be opened: {error}. Give a local path or s3://bucket/prefix.") from error
    return fs, path
