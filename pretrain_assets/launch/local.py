"""The local launcher: torchrun on this machine, in its own session, tied to the process that started it.

Invariant: `run_local` returns or raises only when no process of the run is left. Every command is an argument list.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pretrain_assets.config import RunSpec
from pretrain_assets.errors import ConfigError
from pretrain_assets.launch.contract import clear_unfinished_result, finished_result, read_result, write_spec
from pretrain_assets.launch.elastic import ROOT_CAUSE_ENV
from pretrain_assets.launch.guard import guarded
from pretrain_assets.plural import counted

_log = logging.getLogger(__name__)

GRACE_SECONDS = 60
"""Seconds that a stopped run gets to finish its step and save; torchrun's own 30 are few for large models."""

STOPPED_EARLY = {code for signum in (signal.SIGTERM, signal.SIGINT) for code in (-signum, 128 + signum)}
"""Codes of a torchrun that was told to stop; without a result, it was before the first step."""

POLL_SECONDS = 0.5
"""Seconds between looks at what a run reports."""


def torchrun_argv(run_json: str, nproc: int) -> list[str]:
    """The command that trains on `nproc` processes of this machine."""
    return [
        *[sys.executable, "-m", "pretrain_assets.launch.elastic", "--standalone", "--nproc-per-node", str(nproc)],
        *["--shutdown-timeout", str(GRACE_SECONDS), "-m", "pretrain_assets.train", run_json],
    ]


def check_nproc(spec: RunSpec, nproc: int) -> None:
    """Refuse a number of processes that cannot share the splits equally.

    Raises:
        ConfigError: num_splits is not a multiple of nproc.
    """
    splits = spec.recipe.data.num_splits
    if nproc < 1 or splits % nproc:
        fitting = ", ".join(str(n) for n in range(1, splits + 1) if splits % n == 0)
        raise ConfigError(f"nproc={nproc} cannot share num_splits={splits} equally; use one of {fitting} processes")


def run_local(
    spec: RunSpec,
    nproc: int,
    *,
    env: Mapping[str, str] | None = None,
    while_running: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Train on this machine and wait; returns the run's result, whose `status` is done, stopped or failed.

    A run that is done already is not started again.

    `while_running` is called about twice a second, so that an orchestrator can pass on what the run reports.

    Being cancelled (KeyboardInterrupt or any other exception) stops the run: it saves a checkpoint, then the
    exception goes on.

    Raises:
        ConfigError: nproc does not divide num_splits; raised before anything starts.
    """
    check_nproc(spec, nproc)
    finished = finished_result(spec)
    if finished:
        return finished
    clear_unfinished_result(spec.run_dir)
    argv = guarded(torchrun_argv(write_spec(spec), nproc))
    with tempfile.TemporaryDirectory(prefix="pretrain-launch-") as folder:
        root_cause = Path(folder, "root_cause.json")
        environment = {**_defaults(nproc), **os.environ, **(env or {}), ROOT_CAUSE_ENV: str(root_cause)}
        _log.info("starting %s in %s", counted(nproc, "rank"), spec.run_dir)
        process = subprocess.Popen(argv, env=environment, start_new_session=True)
        try:
            code = _wait(process, while_running)
        finally:
            stop(process)
        cause = json.loads(root_cause.read_text()) if root_cause.exists() else {}
    result = read_result(spec.run_dir)
    if result is None and code in STOPPED_EARLY:
        return {"status": "stopped", "run_dir": spec.run_dir}
    if result is None or (code != 0 and result["status"] == "done"):
        return {"status": "failed", "error": _reason(code, cause), "run_dir": spec.run_dir} | (
            cause.get("result") or {}
        )
    if result.get("error_type") == "RankDied" and cause.get("signal") and cause["rank"] == result["rank"]:
        result["error"] += f" [signal: {cause['signal']}]"  # which only its parent knows
    return result


def _reason(code: int, cause: Mapping[str, Any]) -> str:
    """Why a run ended without a result of its own."""
    if not cause:
        return f"torchrun ended with code {code} before any rank did; its output above says why"
    how = f"was ended by {cause['signal']}" if cause["signal"] else f"exited with code {cause['exit_code']}"
    return f"rank {cause['rank']} (pid {cause['pid']}) {how} and left no result; its output above is all that is known"


def _defaults(nproc: int) -> dict[str, str]:
    """Environment of a run on CPUs, where it says nothing else: threads shared out, and freed memory kept.

    glibc gives every large tensor back to the kernel when it is freed; with a GPT-2 vocabulary that is half of the run
    time (measured: 480 against 917 tokens/s per core for the demo's model). Neither changes a result.
    """
    if os.path.exists("/dev/nvidiactl"):
        return {}
    threads = max(1, (os.cpu_count() or 1) // nproc)
    return {"OMP_NUM_THREADS": str(threads), "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(16 << 30)}


def _wait(process: subprocess.Popen[Any], while_running: Callable[[], None]) -> int:
    while True:
        try:
            return process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            while_running()


def stop(process: subprocess.Popen[Any]) -> None:
    """End a guarded torchrun: SIGTERM, time to save, then SIGKILL, upon which the kernel kills its ranks."""
    if process.poll() is not None:
        return
    _log.info("stopping: the ranks finish their step and save (%d seconds at most)", GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS + 5
    while process.poll() is None:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        except BaseException:  # a second Ctrl-C or SIGTERM; nothing may be left behind, nor lost by haste
            _log.info("still saving: leave it the %.0f seconds it has", max(0.0, deadline - time.monotonic()))
