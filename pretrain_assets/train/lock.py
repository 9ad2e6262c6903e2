"""One training job per run directory.

Invariant: while a job trains, another one started on the same local directory is refused before it touches a file. The
kernel drops the lock when the process ends, however it ends. Object stores have no such lock: there, Dagster's training
pool keeps jobs apart.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pretrain_assets.errors import ConfigError
from pretrain_assets.launch.contract import storage_fault
from pretrain_assets.table.storage import filesystem, is_remote

LOCK_NAME = ".lock"


@contextmanager
def sole_writer(run_dir: str) -> Iterator[None]:
    """Hold the directory of a run, on the main rank; the other ranks belong to the same job.

    Raises:
        ConfigError: another job holds it, or nothing can be written there.
    """
    if is_remote(run_dir) or int(os.environ.get("RANK", 0)) != 0:
        yield
        return
    import fcntl

    folder = Path(filesystem(run_dir)[1])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / LOCK_NAME).open("w")
    except OSError as error:
        raise ConfigError(f"The run cannot write to its folder {run_dir}: {storage_fault(run_dir, error)}") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"{run_dir} is being trained by another process. Wait for it or stop it, then start this one again."
            ) from error
        yield


def is_held(run_dir: str) -> bool:
    """Whether a job trains in a local directory now; False on object stores, which cannot say."""
    path = Path(run_dir) / LOCK_NAME
    if is_remote(run_dir) or not path.exists():
        return False
    import fcntl

    with path.open() as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
