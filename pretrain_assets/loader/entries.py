"""Entries of a cache folder: one process makes an entry while the others wait, and what nobody uses any more goes.

Invariant: an entry with a manifest is whole. The kernel ends a lock with its holder, so a killed process stops nobody.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from pretrain_assets.errors import PretrainError
from pretrain_assets.table.lineage import canonical_json

CACHE_VARIABLE = "PRETRAIN_CACHE_DIR"
"""Environment variable that names the cache folder; best on a fast local disk."""
MANIFEST = "manifest.json"
"""File that makes an entry whole: written last, checked first."""
NEW = ".new"
"""Ending of what is being made."""
UNUSED_DAYS = 30
"""Entries that nobody opened for so long are removed."""

_LOCK = ".lock"
_DAY_SECONDS = 86_400
_kept: dict[Path, int] = {}
_log = logging.getLogger(__name__)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Say which folder it is that cannot be written, and what to do about it.

    Raises:
        PretrainError: for every OSError inside.
    """
    try:
        yield
    except OSError as error:
        raise PretrainError(
            f"The cache folder {folder} cannot be written: {error.strerror or error}. Make it writable, make room in "
            f"it, or set {CACHE_VARIABLE} to a folder on another local disk."
        ) from error


@contextmanager
def sole_process(entry: Path, work: str) -> Iterator[None]:
    """Be the only one of all processes (and threads) that works on an entry; the kernel ends it with its holder.

    Raises:
        PretrainError: the folder cannot be written.
    """
    with ExitStack() as stack:
        with writing(entry.parent):
            entry.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(_locked(entry.with_name(entry.name + _LOCK), wait=True))
            assert lock is not None
            lock.truncate(0)
            # unbuffered: what a full disk refuses must not be tried again by closing the file
            os.write(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()} {work}".encode())
        yield


@contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[IO[str] | None]:
    """Hold a lock file; None when another holds it and we do not wait."""
    import fcntl

    while True:
        with path.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    yield None
                    return
                file.seek(0)
                _log.info("waiting: %s", file.read() or f"another process holds {path}")
                fcntl.flock(file, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):  # not one just removed
                yield file
                return


def touch(entry: Path) -> None:
    """Note that an entry is in use; at most once a day."""
    lock = entry.with_name(entry.name + _LOCK)
    with suppress(OSError):  # a cache that somebody else filled, and that we may only read
        if time.time() - lock.stat().st_mtime > _DAY_SECONDS:
            os.utime(lock)


def keep(entry: Path) -> None:
    """Keep an entry whose files are opened by name again and again from being removed while this process lives."""
    import fcntl

    touch(entry)
    if entry not in _kept:
        _kept[entry] = os.open(entry / MANIFEST, os.O_RDONLY)  # and left open, until the process ends
        fcntl.flock(_kept[entry], fcntl.LOCK_SH)


def remove_unused(folder: Path) -> None:
    """Remove entries that nobody opened for `UNUSED_DAYS`, and what killed builders left."""
    for path in folder.glob(f"*{_LOCK}"):
        entry = path.with_name(path.name.removesuffix(_LOCK))
        new = entry.with_name(entry.name + NEW)
        with suppress(OSError):  # another process removes it at this moment, or it is another user's
            unused = time.time() - path.stat().st_mtime > UNUSED_DAYS * _DAY_SECONDS
            if not unused and not new.exists():
                continue
            with _locked(path, wait=False) as lock:
                if lock is None:
                    continue
                shutil.rmtree(new, ignore_errors=True)
                if unused and not _is_kept(entry):
                    _log.info("removing %s: not used for %d days", entry, UNUSED_DAYS)
                    shutil.rmtree(entry, ignore_errors=True)
                    path.unlink()


def discard(entry: Path) -> bool:
    """Remove an entry that must not stay; False where a process makes it or has it open."""
    lock_path = entry.with_name(entry.name + _LOCK)
    with _locked(lock_path, wait=False) as lock:
        if lock is None or _is_kept(entry):
            return False
        shutil.rmtree(entry, ignore_errors=True)
        lock_path.unlink()
        return not entry.exists()


def read_manifest(entry: Path, key: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of an entry.

    Raises:
        OSError: it is not there.
        ValueError: it is garbled, or that of another key.
    """
    manifest = json.loads((entry / MANIFEST).read_bytes())
    if not isinstance(manifest, dict) or manifest.get("key") != key:
        raise ValueError(f"{entry / MANIFEST} is not the manifest of {canonical_json(key)}")
    return manifest


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest of an entry; it is there whole or not at all."""
    path = folder / f"{MANIFEST}{NEW}"
    with writing(folder.parent):
        path.write_text(canonical_json(manifest))
        sync(path)
        path.rename(folder / MANIFEST)


def sync(path: Path) -> None:
    """Have the system write a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_kept(entry: Path) -> bool:
    import fcntl

    if not (entry / MANIFEST).exists():
        return False
    with (entry / MANIFEST).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
