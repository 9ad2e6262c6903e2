"""Ties a command to its parent: `python -m pretrain_assets.launch.guard PARENT_PID -- COMMAND...` becomes COMMAND.

Invariant: when the parent is killed, even by SIGKILL, the kernel sends SIGTERM to the command. Linux only; elsewhere
the command runs untied. Imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def guarded(argv: list[str]) -> list[str]:
    """The command line that runs `argv` tied to the calling process."""
    return [sys.executable, "-m", "pretrain_assets.launch.guard", str(os.getpid()), "--", *argv]


def die_with_parent(signum: signal.Signals, parent: int | None = None) -> None:
    """Ask the kernel to send `signum` to this process when its parent ends; exit if the parent has ended already."""
    if sys.platform != "linux":
        return
    expected = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signum))
    if os.getppid() != expected:
        sys.exit(f"parent process {expected} has already ended")


def main(arguments: list[str]) -> None:
    """Tie this process to its parent, then become the command."""
    die_with_parent(signal.SIGTERM, int(arguments[0]))
    command = arguments[arguments.index("--") + 1 :]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
