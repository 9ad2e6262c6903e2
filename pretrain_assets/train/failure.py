"""What ended a run: an exception, a death or a hang of one rank, as words and as `result.json` has it.

Invariant: plain values only, so that one rank can tell another.
"""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain_assets.errors import PretrainError
from pretrain_assets.train.distributed import HANG_ENV, World
from pretrain_assets.train.links import Link
from pretrain_assets.train.pulse import PLACES


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a run ended."""

    rank: int
    """The rank that failed."""
    message: str
    """What happened; names the rank, unless it is the main one's own exception."""
    kind: str
    """Class of the exception, or `RankDied`, `RankHung`."""
    traceback: str = ""
    """Python's, for an exception that is not the user's to mend."""
    is_mistake: bool = False
    """Whether the user can mend it, so that the same command would meet it again."""
    is_echo: bool = False
    """Whether it may only be what another rank's end looks like from here."""
    stuck: list[int]
    """Ranks that hang."""

    @classmethod
    def of(cls, error: BaseException, rank: int, step: int) -> Failure:
        """The failure of this rank by an exception."""
        is_mistake, kind = isinstance(error, PretrainError), type(error).__name__
        at = f" at step {step}" if step else ""
        who = f"rank {rank} ({socket.gethostname()}, pid {os.getpid()}){at}"
        return cls(
            rank=rank,
            message=str(error) if rank == 0 else f"{who}: {error if is_mistake else f'{kind}: {error}'}",
            kind=kind,
            traceback="" if is_mistake else f"{who} failed:\n{''.join(traceback.format_exception(error))}",
            is_mistake=is_mistake,
            is_echo=isinstance(error, RuntimeError),  # torch.distributed.DistError is one
            stuck=[],
        )

    @property
    def text(self) -> str:
        """For the console."""
        return self.traceback.rstrip() or f"error: {self.message}"

    @property
    def result(self) -> dict[str, Any]:
        """For `result.json`."""
        found = {"status": "failed", "error": self.message, "error_type": self.kind, "is_mistake": self.is_mistake}
        return found | {"rank": self.rank} | ({"traceback": self.traceback} if self.traceback else {})

    def record(self) -> None:
        """Write torchrun's error file for this process, if torchrun started it, with `result` for our launcher."""
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if path:
            details = {"py_callstack": self.text, "timestamp": str(int(time.time()))}
            message = {"message": self.message, "extraInfo": details}
            Path(path).write_text(json.dumps({"message": message, "result": self.result}), encoding="utf-8")


def died(link: Link) -> Failure:
    """The rank at the other end ended without a goodbye."""
    return Failure(
        rank=link.rank,
        message=f"{link.name} ended without a word, last known to be {link.beat.place} at step {link.beat.step}: it "
        "was killed (by the kernel when memory is short: `dmesg | tail`), crashed, or its machine was lost",
        kind="RankDied",
        stuck=[],
    )


def hung(world: World, links: Mapping[int, Link], limit: float) -> list[Failure]:
    """The ranks that the others wait for, as one failure, when a rank has not got on for `limit` seconds."""
    beats = {rank: link.now() for rank, link in links.items() if not link.left and not link.closed}
    if world.is_main:
        beats[world.rank] = world.pulse.now()
        beats = {rank: beat for rank, beat in beats.items() if beat.place != "finishing"}
    elif links[0].silence < limit:  # all else is the main rank's to judge
        return []
    if not beats or max(beat.seconds for beat in beats.values()) < limit:
        return []
    silent = [rank for rank in beats if rank in links and links[rank].is_silent]
    stuck = silent or [rank for rank, beat in beats.items() if beat.order == min(b.order for b in beats.values())]
    lines = []
    for rank in sorted(stuck):
        name = links[rank].name if rank in links else f"rank {rank} ({socket.gethostname()}, pid {os.getpid()})"
        quiet = " and its process does not run (SIGSTOP?)" if rank in silent else ""
        lines.append(f"{name} has been {beats[rank].describe()}{quiet}")
    others = "; the others wait for it" if len(stuck) < len(beats) else ""
    message = (
        f"the run hangs: {'; '.join(lines)}{others}. Look at {PLACES[beats[stuck[0]].place]}. Where it is only slow, "
        f"allow more than {limit:.0f} s: {HANG_ENV}={2 * limit:.0f}"
    )
    return [Failure(rank=min(stuck), message=message, kind="RankHung", stuck=sorted(stuck))]
