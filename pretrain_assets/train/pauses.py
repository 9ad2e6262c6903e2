"""When Python looks for garbage: between steps that are not timed, never in the middle of one.

Invariant: the collector is as it was before, once the run is over. Unscheduled it halts a rank, and with it all others,
for up to half a second at any step.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Inside, garbage is collected by `collect` alone, and what was there before is not looked at again."""
    was_enabled = gc.isenabled()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def collect() -> None:
    """Collect now: a pause that nobody waits for, such as after an evaluation or a checkpoint."""
    gc.collect()
