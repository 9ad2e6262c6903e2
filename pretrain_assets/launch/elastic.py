"""torchrun that ends quietly: `python -m pretrain_assets.launch.elastic TORCHRUN_ARGUMENTS...`.

torchrun ends with a traceback of its own, also when it was only told to stop. This is the same program without it, and
it leaves what torchrun knows of the rank that failed first in a file, for the launcher that named one.

Invariant: exit code 0 when all ranks are done, 75 when they were stopped and saved, 128 + N when torchrun itself was
stopped by signal N, otherwise that of the rank that failed first (1 for one that a signal ended).
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

from pretrain_assets.launch.contract import EXIT_FAILED

ROOT_CAUSE_ENV = "PRETRAIN_ROOT_CAUSE"
"""Environment variable that names the file."""


def main(arguments: list[str]) -> int:
    """Run torchrun; returns the exit code."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    logging.disable(logging.CRITICAL)  # the ranks speak for themselves
    try:
        torchrun(arguments)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        signal_name = failure.signal_name() if failure.exitcode < 0 else None
        result = failure.error_file_data.get("result")
        if signal_name:
            print(f"rank {rank} (pid {failure.pid}) was ended by {signal_name}", file=sys.stderr)
        path = os.environ.get(ROOT_CAUSE_ENV)
        if path:
            cause = {"rank": rank, "pid": failure.pid, "exit_code": failure.exitcode, "signal": signal_name}
            Path(path).write_text(json.dumps(cause | {"result": result}))
        return failure.exitcode if failure.exitcode > 0 else EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
