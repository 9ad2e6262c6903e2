"""Who is working on the table now: leases that end with their holder, however it ends.

Invariant: of two living holders of conflicting leases, at most one goes on. Each holder first writes its own file, then
looks for others: of two that come together at least one sees the other, and whoever sees another steps back.

On local disk a kernel lock says whether a holder lives; it ends with the process. On an object store the holder writes
its file again every `BEAT_SECONDS`; after `DEAD_SECONDS` without, or once its process is gone from this host, it counts
as dead.
"""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pretrain_assets.errors import BusyError
from pretrain_assets.table.storage import Location, filesystem, is_remote, join

MAINTENANCE = "maintenance"
"""The lease that goes with no other: it removes files that others may be about to use."""
BEAT_SECONDS = 10.0
DEAD_SECONDS = 60.0
TRIES = 4
"""Looks at the others before giving up: two that come together both step back once or twice."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """One holder of a lease."""

    name: str
    """What it does: `ingest`, `fill <stage>`, `maintenance`."""
    host: str
    """Host name, boot id and pid namespace: where `pid` means something."""
    pid: int
    """Process id."""
    since: str
    """UTC time at which it began, for people."""

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid} on {self.host.split('/')[0]}, since {self.since} UTC)"


@contextmanager
def hold(location: Location, name: str) -> Iterator[None]:
    """Hold the lease `name` on a table; `maintenance` conflicts with every other, the rest only with their own name.

    Raises:
        BusyError: a living process holds a conflicting one.
    """
    folder = join(location.staging_uri, "leases")
    holder = Holder(name=name, host=_host(), pid=os.getpid(), since=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S}")
    for attempt in range(TRIES):
        key, release = _write(folder, holder)
        others = [other for other in _living(folder, except_key=key) if _conflict(name, other.name)]
        if not others:
            try:
                yield
            finally:
                release()
            return
        release()
        if attempt + 1 < TRIES:
            time.sleep(random.uniform(0.02, 0.1) * (attempt + 1))
    raise BusyError(
        f"{location.uri} is in use: {'; '.join(map(str, others))}. Wait until it has ended, then run this again"
        + (f"; if it was killed, its lease ends after {DEAD_SECONDS:.0f} seconds." if is_remote(folder) else ".")
    )


def holders(location: Location) -> list[Holder]:
    """All living holders of leases on a table."""
    return _living(join(location.staging_uri, "leases"), except_key=None)


def _conflict(one: str, other: str) -> bool:
    return one == other or MAINTENANCE in (one, other)


def _host() -> str:
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    parts = [socket.gethostname()]
    parts += [boot.read_text().strip()] if boot.exists() else []
    parts += [str(namespace.stat().st_ino)] if namespace.exists() else []
    return "/".join(parts)


def _write(folder: str, holder: Holder) -> tuple[str, Callable[[], None]]:
    """Publish a lease; returns its file name and the function that ends it."""
    key = f"{uuid.uuid4().hex}.lease"
    content = json.dumps(asdict(holder)).encode()
    write = _write_remote if is_remote(folder) else _write_local
    return key, write(folder, key, content)


def _write_local(folder: str, key: str, content: bytes) -> Callable[[], None]:
    import fcntl

    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, key)
    descriptor = os.open(f"{path}.new", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.write(descriptor, content)
    os.rename(f"{path}.new", path)  # visible only once it is locked

    def release() -> None:
        Path(path).unlink(missing_ok=True)
        os.close(descriptor)

    return release


def _write_remote(folder: str, key: str, content: bytes) -> Callable[[], None]:
    fs, path = filesystem(join(folder, key))
    fs.pipe_file(path, content)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_SECONDS):
            try:
                fs.pipe_file(path, content)
            except OSError:  # a store that does not answer for a while: the next beat may reach it
                continue

    thread = threading.Thread(target=beat, name=f"lease {key}", daemon=True)
    thread.start()

    def release() -> None:
        ended.set()
        thread.join()
        fs.rm_file(path)

    return release


def _living(folder: str, *, except_key: str | None) -> list[Holder]:
    """Holders that live; the files of dead ones are removed."""
    fs, path = filesystem(folder)
    fs.invalidate_cache()
    if not fs.exists(path):
        return []
    keys = {str(entry).rsplit("/", 1)[-1] for entry in fs.ls(path, detail=False)}
    now = fs.modified(join(path, except_key)) if except_key and is_remote(folder) else datetime.now(timezone.utc)
    found = []
    for key in sorted(keys - {except_key}):
        holder = _look(fs, join(path, key), now, remote=is_remote(folder)) if key.endswith(".lease") else None
        if holder is not None:
            found.append(holder)
    return found


def _look(fs: Any, path: str, now: datetime, *, remote: bool) -> Holder | None:
    """The holder behind a lease file, or None once it is dead or gone."""
    try:
        content = fs.cat_file(path)
        holder = Holder(**json.loads(content)) if content else Holder(name="unknown", host="unknown", pid=0, since="?")
        if not remote:
            living = _is_locked(path)
        elif holder.host == _host() and not _is_running(holder.pid):
            living = False
        else:
            living = (now - fs.modified(path)).total_seconds() < DEAD_SECONDS
        if not living:
            fs.rm_file(path)
    except FileNotFoundError:  # it ended while we looked
        return None
    return holder if living else None


def _is_locked(path: str) -> bool:
    import fcntl

    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
