"""The connections between the main rank and every other, for the little that ranks tell each other all the time.

Invariant: messages are lines of JSON of a few hundred bytes; sending never raises, a lost connection shows in `closed`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from typing import Any

from pretrain_assets.errors import WorkerError
from pretrain_assets.train.distributed import World
from pretrain_assets.train.pulse import Beat

CONNECT_SECONDS = 60.0
"""For all ranks to connect, once they have met."""
LOST_SECONDS = 40
"""A machine that acknowledges nothing for so long is gone (its kernel answers even when the process is stopped)."""
SILENT_SECONDS = 10.0
"""A process that says nothing for so long is stopped: its thread speaks every second."""


class Link:
    """The connection to one other rank, and what it said last."""

    def __init__(self, connection: socket.socket, rank: int = 0):
        self.socket, self.rank = connection, rank
        self.host, self.pid = "unknown", 0
        self.left = self.closed = False
        self.beat, self._heard, self._rest = Beat(0, "starting", 0.0), time.monotonic(), b""
        self._sending = threading.Lock()
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_SECONDS * 1000)

    @property
    def name(self) -> str:
        """The rank for people."""
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    @property
    def silence(self) -> float:
        """Seconds since its last word."""
        return time.monotonic() - self._heard

    @property
    def is_silent(self) -> bool:
        """Whether its process does not run."""
        return self.silence > SILENT_SECONDS

    def now(self) -> Beat:
        """Its pulse, as far as it is known."""
        return self.beat._replace(seconds=self.beat.seconds + self.silence)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; to a rank that is gone, nothing."""
        with self._sending, contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """What has come since the last call; waits when nothing has."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            data = b""
        self.closed, self._heard = not data, time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        messages = [json.loads(line) for line in lines]
        for message in messages:
            if "pulse" in message:
                self.beat = Beat(*message["pulse"])
            self.left |= "goodbye" in message
        return messages

    def greet(self, token: int, own_rank: int) -> None:
        """Say who this process is, and which run it belongs to."""
        self.send({"token": token, "rank": own_rank, "host": socket.gethostname(), "pid": os.getpid()})

    def is_greeted(self, token: int) -> bool:
        """Hear who is at the other end; False for anything but a rank of the same run."""
        self.socket.settimeout(CONNECT_SECONDS)
        try:
            greeting = next(iter(self.receive()), {})
        except ValueError:
            return False
        self.socket.settimeout(None)
        if greeting.get("token") != token:
            return False
        self.rank, self.host, self.pid = greeting["rank"], greeting["host"], greeting["pid"]
        return True


def meet(world: World) -> dict[int, Link]:
    """Connect every rank with the main one; returns this rank's links by the rank at the other end.

    Raises:
        WorkerError: a rank did not come.
    """
    alone = world.local_size == world.size  # on this machine, so nobody else needs to get in
    server = socket.create_server(("127.0.0.1" if alone else "", 0), backlog=world.size) if world.is_main else None
    port = world.from_main(server.getsockname()[1] if server else 0)
    token = world.from_main(secrets.randbits(62))
    if server:
        with server:
            return _accept(server, world, token)
    host = "127.0.0.1" if alone else os.environ["MASTER_ADDR"]
    try:
        link = Link(socket.create_connection((host, port), timeout=CONNECT_SECONDS))
    except OSError as error:
        raise WorkerError(
            f"Rank {world.rank} cannot connect to the main rank at {host}:{port}: {error}. Ranks need TCP connections "
            "to each other on any port."
        ) from error
    link.greet(token, world.rank)
    if not link.is_greeted(token):
        raise WorkerError(f"Rank {world.rank} was not answered by the main rank at {host}:{port}; start the job again.")
    return {0: link}


def _accept(server: socket.socket, world: World, token: int) -> dict[int, Link]:
    links: dict[int, Link] = {}
    server.settimeout(CONNECT_SECONDS)
    while len(links) < world.size - 1:
        try:
            link = Link(server.accept()[0])
        except TimeoutError as error:
            missing = ", ".join(str(rank) for rank in range(1, world.size) if rank not in links)
            raise WorkerError(
                f"Ranks {missing} did not connect to the main rank within {CONNECT_SECONDS:.0f} s. Ranks need TCP "
                "connections to each other on any port."
            ) from error
        if link.is_greeted(token):
            links[link.rank] = link
            link.greet(token, world.rank)
        else:
            link.socket.close()
    return links
