"""Engines: where the tasks of a column fill run. One protocol, and every engine gives identical columns.

Invariant: an engine decides where and when a task runs, never what it computes. A task whose worker died runs again on
another; since tasks take finished work as it is, nothing is written twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from pretrain_assets.config import EngineConfig

if TYPE_CHECKING:
    from pretrain_assets.table.filler.columnfile import StagedFile
    from pretrain_assets.table.filler.tasks import Job, Report, Task


class Session(Protocol):
    """An engine at work for one fill."""

    def run(self, job: Job, tasks: Sequence[Task], report: Report) -> list[list[StagedFile]]:
        """Run all tasks, and return their results in the same order.

        Raises:
            Whatever a task raised first; and `WorkerError` when workers die at the same task again and again.
        """


def start(config: EngineConfig) -> AbstractContextManager[Session]:
    """Start the engine that the configuration names; leaving the context stops its workers.

    Raises:
        ConfigError: the engine's package is not installed.
    """
    if config.engine == "ray":
        from pretrain_assets.table.filler.engines import on_ray

        return on_ray.start(config)
    if config.engine == "geneva":
        from pretrain_assets.table.filler.engines import on_geneva

        return on_geneva.start(config)
    from pretrain_assets.table.filler.engines import local

    return local.start(config)
