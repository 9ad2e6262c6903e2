"""Who hears how a run goes: the console always, the trackers of the recipe, and Dagster when it listens (Pipes).

Invariant: training never depends on a listener. Only the main rank reports.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any, Protocol

from pretrain_assets.config import RunSpec
from pretrain_assets.train.lines import closing, progress_line
from pretrain_assets.train.trackers import open_trackers

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
        level = logging.ERROR if result["status"] == "failed" else logging.INFO
        _log.log(level, "%s", closing(result))


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


@contextlib.contextmanager
def open_reporters(spec: RunSpec, is_main: bool) -> Iterator[list[Reporter]]:
    """The reporters of this rank: none but on the main one.

    Raises:
        ConfigError: the package of a tracker that the recipe names is missing.
    """
    with contextlib.ExitStack() as stack:
        yield [ConsoleReporter(), *_trackers(spec, stack), *_pipes(stack)] if is_main else []


def _trackers(spec: RunSpec, stack: contextlib.ExitStack) -> list[Reporter]:
    return [stack.enter_context(contextlib.closing(tracker)) for tracker in open_trackers(spec)]


def _pipes(stack: contextlib.ExitStack) -> list[Reporter]:
    if PIPES_CONTEXT_ENV not in os.environ:
        return []
    try:
        from dagster_pipes import open_dagster_pipes
    except ImportError:
        _log.warning("%s is set but dagster-pipes is missing: pip install dagster-pipes", PIPES_CONTEXT_ENV)
        return []
    return [PipesReporter(stack.enter_context(open_dagster_pipes()))]
