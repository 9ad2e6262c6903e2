"""`torchrun -m pretrain_assets.train run.json`, or without torchrun for one rank.

Invariant: exit code 0 is done, 75 is stopped by SIGTERM or Ctrl-C after saving (start the same command again), 1 is
failed. A rank never outlives the torchrun that started it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from typing import Any

from pretrain_assets.launch.contract import EXIT_FAILED, EXIT_STOPPED, read_spec
from pretrain_assets.launch.guard import die_with_parent


def main(arguments: list[str]) -> int:
    """Train as the run file says; returns the exit code."""
    if len(arguments) != 1:
        print("usage: [torchrun --nproc-per-node N] -m pretrain_assets.train RUN_JSON", file=sys.stderr)
        return EXIT_FAILED
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGKILL)
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set() if _has_met() else os._exit(EXIT_STOPPED))
    rank = int(os.environ.get("RANK", 0))
    level = logging.INFO if rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stdout)
    try:
        spec = read_spec(arguments[0])
        from pretrain_assets.train.run import run  # torch: seconds to import, after the signal handler is in place

        return run(spec, stop.is_set)
    except Exception as error:  # of the only rank, or before the ranks watch each other
        from pretrain_assets.train.failure import Failure

        failure = Failure.of(error, rank, step=0)
        failure.record()
        print(failure.text, file=sys.stderr)
        return EXIT_FAILED


def _has_met() -> bool:
    """Whether all ranks are there: before, there is nothing to save, and a wait for others that did not come."""
    distributed: Any = sys.modules.get("torch.distributed")
    return int(os.environ.get("WORLD_SIZE", 1)) == 1 or bool(distributed and distributed.is_initialized())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
