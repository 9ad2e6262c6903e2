"""The job contract: `run.json` in; `metrics.jsonl`, `checkpoints/` and `result.json` out; and the exit codes.

Invariant: both sides read and write these files here and nowhere else, and nothing in them is a secret. Files are
replaced whole: a reader sees the old one or the new one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from pretrain_assets.config import RunSpec, from_dict, lasting, to_dict
from pretrain_assets.errors import ConfigError

EXIT_DONE, EXIT_FAILED, EXIT_STOPPED = 0, 1, 75
"""Exit codes of one rank: done; failed; stopped after saving, start me again (EX_TEMPFAIL of sysexits.h)."""

RUN_NAME, METRICS_NAME, RESULT_NAME, CHECKPOINTS_NAME = "run.json", "metrics.jsonl", "result.json", "checkpoints"
MARKER_NAME, PASSPORT_NAME = "COMPLETE", "passport.json"

Status = Literal["done", "stopped", "failed"]
_DONE = {"step": int, "checkpoint": str, "digest": str, "passport": dict}
"""What the result of a run that is done must at least hold."""


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
        fs, path = _filesystem(f"{run_dir.rstrip('/')}/{RESULT_NAME}")
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
    sizes = {name: size for name, is_folder, size in list_folder(folder) if not is_folder and name != MARKER_NAME}
    for name, facts in files.items():
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != facts["bytes"]:
            return f"{name} has {sizes[name]} bytes, not {facts['bytes']}"
    return None


def list_folder(uri: str) -> list[tuple[str, bool, int]]:
    """Name, whether it is (a link to) a folder, and size of everything in a folder; nothing when there is none."""
    fs, path = _filesystem(uri)
    fs.invalidate_cache()
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
    try:
        return bytes(fs.cat_file(path))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None


def write_file(uri: str, data: bytes) -> None:
    """Replace a file whole, making its directory if need be."""
    fs, path = _filesystem(uri)
    if "://" in uri and not uri.startswith("file://"):
        fs.pipe_file(path, data)
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, target)


def _filesystem(uri: str) -> tuple[Any, str]:
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(uri)
    except (ImportError, ValueError) as error:  # an unknown protocol, or one whose package is not installed
        raise ConfigError(f"{uri!r} cannot be opened: {error}. Give a local path or s3://bucket/prefix.") from error
    return fs, path
