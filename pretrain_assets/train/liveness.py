"""Whether the ranks of a run live and get on: one that dies, fails or hangs ends the whole job, and is named.

Every rank holds a TCP connection to the main rank and tells it every second how far it is. The kernel closes the
connection of a process that ends, however it ends, so the others know at once, also while they wait in a collective.

Invariant: needs no collective and no device, and costs a step nothing. One failure is reported once: that of the rank
that failed first, not the "connection closed" of those that noticed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from pretrain_assets.errors import PretrainError
from pretrain_assets.launch.contract import EXIT_FAILED
from pretrain_assets.train.distributed import World, end_process, hang_seconds, mortal
from pretrain_assets.train.failure import Failure, died, hung
from pretrain_assets.train.links import Link, meet

GRACE_SECONDS, ECHO_SECONDS = 0.5, 5.0
"""After a first failure, others may still turn out to have come before it: for longer where all that is known may be an
echo, such as the closed connection of a collective."""

VERDICT_SECONDS = 30.0
"""How long a rank that failed waits to hear which failure counts, and the main rank for the others' goodbyes."""

SHOWN, FRAMES = 4, 12
"""Ranks that show where they hang, and how many calls each."""

OnFailure = Callable[[Failure], None]

_log = logging.getLogger(__name__)


@contextmanager
def watching(world: World, on_failure: OnFailure) -> Iterator[None]:
    """Inside, this rank is watched; a failure of any rank ends this process, after `on_failure` on the main rank.

    A rank that reaches the end waits for the main rank, so that a launcher never sees half of a job finished.

    Raises:
        WorkerError: the ranks cannot reach each other.
        SystemExit: a rank of several failed inside, which was reported.
        Exception: what was raised inside by the only rank.
    """
    watch = None
    if world.size > 1:
        with mortal():
            links = meet(world)
        world.pulse.at("starting")
        watch = Watch(world, links, on_failure)
    try:
        yield
    except BaseException as error:
        own = Failure.of(error, world.rank, world.pulse.step)
        cause = watch.agree(own) if watch else own
        if world.is_main:
            _write(cause, on_failure)
        if watch:
            cause.record()
            watch.say(cause)
            raise SystemExit(EXIT_FAILED) from error
        raise
    if watch:
        watch.leave()


def _write(cause: Failure, on_failure: OnFailure) -> None:
    try:
        on_failure(cause)
    except PretrainError as error:
        _log.error("the result could not be written: %s", error)
    except Exception:  # the storage may be what failed; the launcher finds the cause in torchrun's error file
        _log.exception("the result could not be written")


class Watch:
    """The thread of a rank that talks to the main rank, or on the main rank to all others."""

    def __init__(self, world: World, links: dict[int, Link], on_failure: OnFailure):
        self._world, self._links, self._on_failure = world, links, on_failure
        self._limit = hang_seconds()
        self._found: list[Failure] = []
        self._found_at = 0.0
        self._cause: Failure | None = None
        self._leaving = self._failing = self._told = False
        self._settled, self._over = threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="liveness", daemon=True).start()

    def agree(self, own: Failure) -> Failure:
        """The failure that ends the job, now that this rank has one; the caller ends this process."""
        self._failing = True
        if self._world.is_main:
            self._found.append(own)
        else:
            self._links[0].send({"failure": asdict(own)})
        self._settled.wait(VERDICT_SECONDS)
        return self._cause or own

    def say(self, cause: Failure) -> None:
        """Print the failure, unless the main rank does."""
        if not self._told:
            print(cause.text, file=sys.stderr, flush=True)

    def leave(self) -> None:
        """End the watch in good order, when the main rank has come to its end as well."""
        self._leaving = True
        for link in self._links.values():
            link.send({"goodbye": True})
        self._over.wait(VERDICT_SECONDS if self._world.is_main else None)

    def _watch(self) -> None:
        told = 0.0
        while not self._over.is_set() and not self._settled.is_set():
            if time.monotonic() - told >= 1.0:
                told = time.monotonic()
                for link in self._links.values():
                    link.send({"pulse": self._world.pulse.now()})
            there = {link.socket: link for link in self._links.values() if not link.closed}
            for socket in select.select(list(there), [], [], 0.1)[0]:
                self._hear(there[socket])
            if not self._leaving:
                self._judge()
            elif all(link.closed or link.left for link in self._links.values()):
                self._over.set()
        for link in self._links.values():
            link.socket.close()

    def _hear(self, link: Link) -> None:
        for message in link.receive():
            if "failure" in message:
                self._found.append(Failure(**message["failure"]))
            elif "verdict" in message:
                self._told = True
                self._conclude(Failure(**message["verdict"]))
        if link.closed and not link.left and not self._leaving and self._cause is None:
            self._found.append(died(link))

    def _judge(self) -> None:
        """Once something was found, and others had time to say that they came first, end the job."""
        if not self._found:
            self._found += hung(self._world, self._links, self._limit)
        if not self._found or self._cause:
            return
        self._found_at = self._found_at or time.monotonic()
        only_echoes = all(failure.is_echo for failure in self._found)
        if time.monotonic() - self._found_at >= (ECHO_SECONDS if only_echoes else GRACE_SECONDS):
            self._conclude(min(self._found, key=lambda failure: failure.is_echo))

    def _conclude(self, cause: Failure) -> None:
        self._cause = cause
        if self._world.is_main:
            for link in self._links.values():
                link.send({"verdict": asdict(cause)})
        if self._failing:  # the main thread ends the process
            self._settled.set()
            return
        if self._world.is_main:
            _write(cause, self._on_failure)
        cause.record()
        self.say(cause)
        if self._world.rank in cause.stuck[:SHOWN]:
            _show_stack(self._world.rank)
        for rank in cause.stuck:
            if rank in self._links and self._links[rank].is_silent and self._world.local_size == self._world.size:
                with contextlib.suppress(ProcessLookupError):  # it can neither save nor end by itself
                    os.kill(self._links[rank].pid, signal.SIGKILL)
        end_process()


def _show_stack(rank: int) -> None:
    """Print where the main thread of this process is."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    calls = "".join(traceback.format_stack(frame, limit=FRAMES))
    print(f"rank {rank} hangs at (innermost call last):\n{calls}", file=sys.stderr, flush=True)
