"""The job contract: `run.json` in; `metrics.jsonl`, `checkpoints/` and `result.json` out; and the exit codes.

Invariant: both sides read and write these files here and nowhere else, and nothing in them is a secret. Files are
replaced whole: a reader sees the old one or the new one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from pretrain_assets.config import RunSpec, from_dict, lasting, to_dict
from pretrain_assets.errors import ConfigError

EXIT_DONE, EXIT_FAILED, EXIT_STOPPED = 0, 1, 75
"""Exit codes of one rank: done; failed; stopped after saving, start me again (EX_TEMPFAIL of sysexits.h)."""

RUN_NAME, METRICS_NAME, RESULT_NAME, CHECKPOINTS_NAME = "run.json", "metrics.jsonl", "result.json", "checkpoints"
MARKER_NAME, PASSPORT_NAME = "COMPLETE", "passport.json"

Status = Literal["done", "stopped", "failed"]


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
        return from_dict(RunSpec, json.loads(data))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{uri} is not JSON: {error}") from error


def read_result(run_dir: str) -> dict[str, Any] | None:
    """The run's `result.json`, or None when there is none, or none that says how the run ended."""
    data = read_file(f"{run_dir.rstrip('/')}/{RESULT_NAME}")
    try:
        result = json.loads(data or b"{}")
    except ValueError:
        return None
    return result if isinstance(result, dict) and "status" in result else None


def finished_result(spec: RunSpec) -> dict[str, Any] | None:
    """The result if exactly this run is done and its last checkpoint is still there, else None."""
    result = read_result(spec.run_dir)
    if result is None or result["status"] != "done":
        return None
    passport = result.get("passport", {})
    same = passport.get("identity") == spec.identity and lasting(passport.get("recipe", {})) == spec.recipe.lasting
    last = f"{spec.run_dir.rstrip('/')}/{CHECKPOINTS_NAME}/step_{result['step']:08d}/{MARKER_NAME}"
    return result if same and read_file(last) is not None else None


def write_result(run_dir: str, result: dict[str, Any]) -> None:
    """Write the run's `result.json`."""
    write_file(f"{run_dir.rstrip('/')}/{RESULT_NAME}", json.dumps(result, indent=2, ensure_ascii=False).encode())


def clear_unfinished_result(run_dir: str) -> None:
    """Remove the result of an earlier attempt that did not get done, so that it is not taken for this one's."""
    result = read_result(run_dir)
    if result is not None and result["status"] != "done":
        fs, path = _filesystem(f"{run_dir.rstrip('/')}/{RESULT_NAME}")
        fs.rm(path)


def read_file(uri: str) -> bytes | None:
    """A file's bytes, or None when there is none."""
    fs, path = _filesystem(uri)
    try:
        return bytes(fs.cat_file(path))
    except FileNotFoundError:
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

    fs, path = fsspec.core.url_to_fs(uri)
    return fs, path
