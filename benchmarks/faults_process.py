"""The campaign's side of its processes: an actor that takes steps and can be killed, and the watch over its workers.

Invariant: a kill takes the driver process alone; its workers are only ended here when they failed to end by themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import harness

ORPHAN_SECONDS = 10.0
"""Seconds after which a worker that outlived its driver counts as left over, and is ended."""
START_SECONDS = 120.0


class Actor:
    """An actor process; it starts at once and is waited for at its first step."""

    def __init__(self, workers: int, log: Path):
        command = [sys.executable, "-m", "benchmarks.faults_actor", str(workers)]
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command, cwd=harness.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
        self.workers = workers
        self._received, self._is_ready = b"", False

    def begin(self, database: Path, sources: Path, step: str) -> None:
        """Tell it what to do."""
        if not self._is_ready:
            answer = self.wait(START_SECONDS)
            if answer != {"ready": True}:
                raise RuntimeError(f"the actor did not start: {answer}")
            self._is_ready = True
        assert self.process.stdin is not None
        order = {"database": str(database), "sources": str(sources), "step": step}
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def wait(self, seconds: float) -> dict[str, Any] | None:
        """Its answer within these seconds, else None; `{"error": ...}` when it ended without one."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self.process.stdout], [], [], left)[0]:
                return None
            received = os.read(self.process.stdout.fileno(), 1 << 16)
            if not received:
                return {"error": f"ended with exit code {self.process.wait()}"}
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return dict(json.loads(line))

    def children(self) -> list[int]:
        """Its workers now: a few files to read, so that a kill comes when it is meant to."""
        found: list[int] = []
        for task in os.listdir(f"/proc/{self.process.pid}/task"):
            with contextlib.suppress(OSError):  # a thread that ended meanwhile
                found += map(int, Path(f"/proc/{self.process.pid}/task/{task}/children").read_text().split())
        return found

    def kill(self) -> bool:
        """Kill the driver alone; whether it died of that while it was at work."""
        self.process.kill()
        died = self.process.wait() == -9
        answer = self.wait(0)
        self._close()
        return died and (answer is None or "done" not in answer)

    def kill_worker(self, chance: random.Random) -> bool:
        """Kill one of its workers; False when there is none at this moment."""
        found = []
        for pid in self.children():
            with contextlib.suppress(OSError):
                if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        if not found:
            return False
        os.kill(chance.choice(found), signal.SIGKILL)
        return True

    def end(self) -> None:
        """Let it end by itself."""
        self._close()
        self.process.wait()

    def discard(self) -> None:
        """End it before its first step."""
        self.process.kill()
        self.end()

    def _close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class OrphanWatch:
    """Sees to it that workers end after their driver was killed."""

    def __init__(self) -> None:
        self.longest_seconds = 0.0
        """Longest time that a worker outlived its driver, as seen ten times a second."""
        self.left_over: list[str] = []
        """Workers that had to be ended."""
        self._orphans: dict[Any, float] = {}
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, workers: list[int]) -> None:
        """Watch the workers of a driver that was killed just now."""
        import psutil

        for pid in workers:
            with self._lock, contextlib.suppress(psutil.Error):
                self._orphans[psutil.Process(pid)] = time.monotonic()

    def end(self) -> None:
        """Wait for those that are left."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.1) or self._orphans:
            with self._lock:
                for process, since in list(self._orphans.items()):
                    self._look(process, time.monotonic() - since)
            time.sleep(0.02)

    def _look(self, process: Any, seconds: float) -> None:
        import psutil

        try:
            alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            alive = False
        if alive:
            self.longest_seconds = max(self.longest_seconds, seconds)
        if alive and seconds > ORPHAN_SECONDS:
            self.left_over.append(f"process {process.pid} outlived its driver by {ORPHAN_SECONDS:.0f} s")
            process.kill()
            alive = False
        if not alive:
            del self._orphans[process]


@contextlib.contextmanager
def orphan_watch() -> Iterator[OrphanWatch]:
    """A watch; leaving the context waits for the last worker."""
    watch = OrphanWatch()
    try:
        yield watch
    finally:
        watch.end()
