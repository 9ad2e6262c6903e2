"""Who hears how a run goes: the console always, Dagster through Pipes when it is listening.

Invariant: training never depends on a listener. Only the main rank reports.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

PIPES_CONTEXT_ENV = "DAGSTER_PIPES_CONTEXT"
"""Set by a Dagster Pipes client for the process that it starts."""

_log = logging.getLogger(__name__)


class Reporter(Protocol):
    """Hears about a run."""

    def progress(self, record: dict[str, Any]) -> None:
        """A training or evaluation record, as in metrics.jsonl, with `total_steps` and `eta_seconds`."""

    def result(self, result: dict[str, Any]) -> None:
        """The result, as in result.json."""


class ConsoleReporter:
    """One plain line per record."""

    def progress(self, record: dict[str, Any]) -> None:
        """Log a line."""
        _log.info("%s", progress_line(record))

    def result(self, result: dict[str, Any]) -> None:
        """Log the outcome."""
        if result["status"] == "failed":
            _log.error("failed after %.1f s: %s", result["seconds"], result["error"])
            return
        losses = f"loss {_number(result.get('train_loss'))} | val loss {_number(result.get('val_loss'))}"
        _log.info("%s at step %s | %s | %.1f s", result["status"], result["step"], losses, result["seconds"])


class PipesReporter:
    """Custom messages to Dagster: kind `progress` for each record, kind `result` at the end."""

    def __init__(self, context: Any):
        self._context = context

    def progress(self, record: dict[str, Any]) -> None:
        """Send a record."""
        self._context.report_custom_message({**record, "kind": "progress"})

    def result(self, result: dict[str, Any]) -> None:
        """Send the result."""
        self._context.report_custom_message({**result, "kind": "result"})


@contextmanager
def open_reporters(is_main: bool) -> Iterator[list[Reporter]]:
    """The reporters of this rank: none but on the main one."""
    if not is_main:
        yield []
    elif PIPES_CONTEXT_ENV not in os.environ:
        yield [ConsoleReporter()]
    else:
        try:
            from dagster_pipes import open_dagster_pipes
        except ImportError:
            _log.warning("%s is set but dagster-pipes is missing: pip install dagster-pipes", PIPES_CONTEXT_ENV)
            yield [ConsoleReporter()]
            return
        with open_dagster_pipes() as context:
            yield [ConsoleReporter(), PipesReporter(context)]


def progress_line(record: dict[str, Any]) -> str:
    """A record as text."""
    parts = [f"step {record['step']}/{record['total_steps']}"]
    if "val_loss" in record:
        return " | ".join([*parts, f"val loss {record['val_loss']:.4f} on {record['val_tokens']:,} tokens"])
    share = record["mfu"]
    parts += [
        f"loss {record['loss']:.4f}",
        f"lr {record['lr']:.1e}",
        f"grad {record['grad_norm']:.2f}",
        f"{record['tok_per_s'] / 1e3:.1f}k tok/s",
        "MFU n/a" if share is None else f"MFU {share:.1%}",
        f"data-wait {record['data_wait']:.1%}",
        f"queue {record['queue_rows']} rows",
        f"eta {record['eta_seconds']:.0f}s",
    ]
    return " | ".join(parts)


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4f}"
