"""The loader's profile in words and as a table.

Invariant: prints what it is given and measures nothing.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence

from tabulate import tabulate

from pretrain_assets.loader.diagnosis import Diagnosis
from pretrain_assets.loader.profile import Measurement

HEADERS = (
    *("", "setting", "tokens/s", "MB/s", "reading", "packing", "waits for\nreads", "consumer\nwaits"),
    *("first\nblock", "peak\nmemory", "rows unread/read\n/packed/consumed"),
)
WIDTH = 110
"""Characters of a line of prose."""


def profile_text(measurements: Sequence[Measurement], diagnosis: Diagnosis, *, recipe: str) -> str:
    """A line per setting, then what they mean and what to type."""
    rows = [_row(m, best=place == diagnosis.best) for place, m in enumerate(measurements)]
    align = ("left", "left", *("right",) * (len(HEADERS) - 2))
    own = measurements[0].variant.recipe.loader
    parts = [
        tabulate(rows, headers=HEADERS, disable_numparse=True, colalign=align),
        f"* the one to take; as it is: window_tokens={own.window_tokens} io_threads={own.io_threads} "
        f"read_ahead_bytes={own.read_ahead_bytes}",
        "seconds, and shares of the time measured; reading is added up over its threads",
    ]
    if any(m.variant.changes_order for m in measurements):
        parts.append("! would change the order of the data: another run")
    prose = [diagnosis.finding, *(f"- {line}" for line in diagnosis.advice)]
    prose += [f"Note: {note}" for note in diagnosis.notes]
    parts += ["", *(textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for line in prose)]
    if diagnosis.changes:
        words = shlex.join(word for name, value in diagnosis.changes.items() for word in ("--set", f"{name}={value}"))
        parts += ["", f"  pretrain train {recipe} {words}"]
    return "\n".join(parts)


def _row(measured: Measurement, *, best: bool) -> list[str]:
    def time(seconds: float) -> str:
        return f"{seconds:.1f} s {seconds / measured.seconds:4.0%}"

    return [
        "*" if best else "!" if measured.variant.changes_order else "",
        measured.variant.name,
        f"{measured.tokens_per_second:,.0f}",
        f"{measured.bytes_per_second / 1e6:,.0f}",
        time(measured.read_seconds),
        time(measured.pack_seconds),
        time(measured.pack_wait_seconds),
        time(measured.wait_seconds),
        f"{measured.first_block_seconds:.2f} s",
        f"{measured.peak_memory_bytes / 1e6:,.0f} MB",
        "/".join(str(count) for count in measured.rows.values()),
    ]
