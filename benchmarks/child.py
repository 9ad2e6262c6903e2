"""Runs one case in a process of its own: `python -m benchmarks.child MODULE:FUNCTION ARGUMENTS ANSWER_FILE`.

A case is a function that prepares (imports, opens the table) and returns the work, a function without arguments. Only
the work is timed; memory is the whole process's. `harness.measure` starts it and watches its processes.
"""

from __future__ import annotations

import importlib
import json
import logging
import resource
import sys
import time
from pathlib import Path

BLOCK_BYTES = 512
"""Unit of `ru_oublock`: what Linux's write_bytes counts, in blocks (kernel/acct: task_io_get_oublock)."""


def main(name: str, arguments: str, answer_file: str) -> None:
    """Prepare, work, and write down seconds, processor seconds, bytes written and the answer."""
    logging.basicConfig(level=logging.WARNING)
    module, _, function = name.partition(":")
    work = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    before = _usage()
    started = time.monotonic()
    answer = work()
    seconds = time.monotonic() - started
    after = _usage()
    result = {
        "seconds": seconds,
        "cpu_seconds": after[0] - before[0],
        "bytes_written": after[1] - before[1],
        "peak_rss_bytes": peak_rss_bytes(Path("/proc/self/status").read_text()),
        "answer": answer,
    }
    Path(answer_file).write_text(json.dumps(result))


def peak_rss_bytes(status: str) -> int:
    """Peak of resident memory from a process's status file; `ru_maxrss` would begin with that of who started it."""
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)


def _usage() -> tuple[float, int]:
    """Processor seconds and bytes written, of this process and of its workers that have ended."""
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in parts), sum(part.ru_oublock for part in parts) * BLOCK_BYTES


if __name__ == "__main__":
    main(*sys.argv[1:])
