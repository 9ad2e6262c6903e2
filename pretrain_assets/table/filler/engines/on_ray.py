"""The Ray engine: the same tasks on a Ray cluster, one started here or one that is joined.

Invariant: a worker is an actor with the cores and GPUs that were asked for, and has one task at a time. So a function
is built once per worker, a GPU stays its own, as many tasks are in flight as there are workers, and a death is the
fault of one known task. A cluster that we joined is left as it was.

Nodes need this package and the module of every batch function, in the driver's versions, and reach the table with their
own credentials (`AWS_*` in the environment of each node): none are sent.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import EngineConfig
from pretrain_assets.errors import ConfigError, WorkerError
from pretrain_assets.table.filler.engines import Session
from pretrain_assets.table.filler.engines.local import MAX_DEATHS, cores
from pretrain_assets.table.filler.spec import RowColumns, Worker
from pretrain_assets.table.filler.tasks import Job, Report, State, Task

if TYPE_CHECKING:
    from pretrain_assets.table.filler.columnfile import StagedFile

_log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 128 << 20
"""Shared memory of a cluster started here: tasks and results are a few kilobytes, columns never pass through it."""


@contextmanager
def start(config: EngineConfig) -> Iterator[Session]:
    """An engine that connects at its first job, so that a stage with nothing to do starts nothing.

    Raises:
        ConfigError: Ray is not installed.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before the import: Ray reports to its makers otherwise
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "engine=ray needs Ray, which is not installed here: pip install 'ray[client]>=2.54' (on every node of the "
            "cluster), or use engine=local."
        ) from error
    session = RaySession(config)
    try:
        yield session
    finally:
        session.close()


class RayWorker:
    """What runs in a worker process: one `State` for all its tasks."""

    def __init__(self, worker: Worker):
        for name in ("RAYON_NUM_THREADS", "OMP_NUM_THREADS"):
            os.environ[name] = str(worker.num_threads)
        self._state = State(worker)

    def ready(self) -> None:
        """Answer once the process is there."""

    def run(self, job: Job, task: Task) -> tuple[list[StagedFile], list[tuple[int, int, bool]]]:
        """A task's result, and what it reported: one sum for work found finished, one for work done."""
        sums = {True: [0, 0], False: [0, 0]}

        def report(rows: int, num_bytes: int, was_finished: bool) -> None:
            sums[was_finished][0] += rows
            sums[was_finished][1] += num_bytes

        files = task.run(job, self._state, report)
        return files, [(rows, num_bytes, found) for found, (rows, num_bytes) in sums.items() if rows]


class RaySession:
    """Workers on one Ray cluster, kept from job to job."""

    def __init__(self, config: EngineConfig):
        self._config = config
        self._connected_here = False
        self._num_gpus = 0.0
        self._idle: list[Any] = []
        self._busy: dict[Any, tuple[Any, int | None]] = {}
        """Awaited answer -> the worker that owes it, and its task; None while it starts."""

    def run(self, job: Job, work: Sequence[Task], report: Report) -> list[list[StagedFile]]:
        """All results, in the order of the tasks."""
        self._connected_here = connect(self._config) or self._connected_here
        if num_gpus(job) != self._num_gpus:
            self._dismiss()
            self._num_gpus = num_gpus(job)
        try:
            return self._run(job, work, report, num_workers(self._config, job))
        except BaseException:
            self._dismiss()  # nobody waits for what they are at
            raise

    def close(self) -> None:
        """Stop the workers, and a cluster started here; only leave one that was joined."""
        self._dismiss()
        if self._connected_here:
            import ray

            ray.shutdown()
            self._connected_here = False

    def _run(self, job: Job, work: Sequence[Task], report: Report, most: int) -> list[list[StagedFile]]:
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        results: dict[int, list[StagedFile]] = {}
        todo = deque(range(len(work)))
        deaths = _Deaths(work)
        while len(results) < len(work):
            while len(self._idle) + len(self._busy) < min(most, len(work) - len(results)):
                worker = self._hire()
                self._busy[worker.ready.remote()] = (worker, None)
            while self._idle and todo:
                worker, index = self._idle.pop(), todo.popleft()
                self._busy[worker.run.remote(job, work[index])] = (worker, index)
            for answer in ray.wait(list(self._busy), num_returns=1)[0]:
                worker, at = self._busy.pop(answer)
                try:
                    outcome = ray.get(answer)
                except RayTaskError as error:
                    raise (error.cause if isinstance(error.cause, Exception) else error) from None
                except RayActorError as error:
                    ray.kill(worker)  # it may only be out of reach
                    deaths.count(at, error)
                    if at is not None:
                        todo.appendleft(at)
                    continue
                self._idle.append(worker)
                if at is not None:
                    results[at], sums = outcome
                    for rows, num_bytes, was_finished in sums:
                        report(rows, num_bytes, was_finished)
        return [results[index] for index in range(len(work))]

    def _hire(self) -> Any:
        import ray

        actor = ray.remote(RayWorker).options(num_cpus=self._config.cpus_per_worker, num_gpus=self._num_gpus)
        return actor.remote(new_worker(self._config, self._num_gpus))

    def _dismiss(self) -> None:
        import ray

        for worker in [*self._idle, *(worker for worker, _ in self._busy.values())]:
            ray.kill(worker)
        self._idle, self._busy = [], {}


class _Deaths:
    """Counts dead workers per task, and ends the fill when one task kills all."""

    def __init__(self, work: Sequence[Task]):
        self._work, self._deaths = work, dict[int | None, int]()

    def count(self, index: int | None, error: Exception) -> None:
        """A worker died at a task; None: while it started."""
        self._deaths[index] = self._deaths.get(index, 0) + 1
        reason = str(error).strip().splitlines()[0]
        if self._deaths[index] < MAX_DEATHS:
            _log.warning("a Ray worker died, its work goes to another: %s", reason)
        elif index is None:
            raise WorkerError(
                f"{MAX_DEATHS} Ray workers could not start: {error}. Every node needs pretrain-assets and the "
                "module of the columns' function, in the versions of this one."
            ) from error
        else:
            raise WorkerError(
                f"Ray workers died {MAX_DEATHS} times at {self._work[index]}: {reason}. Most often for want of memory: "
                "lower the batch size, or raise cpus_per_worker, and run again: finished work is kept."
            ) from error


def connect(config: EngineConfig, *, extra_cpus: int = 0) -> bool:
    """Join the cluster that the configuration names, or start one here; False when this process has one already.

    Args:
        config: Address, workers and cores.
        extra_cpus: Cores that a cluster started here counts beside those of the workers.

    Raises:
        ConfigError: there is none at that address.
    """
    import ray

    if ray.is_initialized():
        return False
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if config.ray_address is None:
        num_cpus = math.ceil((config.workers or 0) * config.cpus_per_worker) or cores()
        options |= {
            "num_cpus": num_cpus + extra_cpus,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
        }
    try:
        with _own_sigterm(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="lance is not fork-safe")  # Ray's fork is followed by exec
            ray.init(address=config.ray_address or "local", **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"No Ray cluster at {config.ray_address or 'this machine'}: {error}. Give ray_address=auto on a node of "
            "the cluster, ray://host:10001 from outside, or none to start one here; a cluster that asks for a token "
            "needs RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH here."
        ) from error
    return True


def num_workers(config: EngineConfig, job: Job) -> int:
    """Workers to ask for: as configured, or as many as the cluster has room for now.

    Raises:
        ConfigError: a cluster started here has no room for even one.
    """
    import ray

    wanted = {"CPU": config.cpus_per_worker, "GPU": num_gpus(job)}
    room = [
        min(math.floor(node["Resources"].get(name, 0.0) / number + 1e-9) for name, number in wanted.items() if number)
        for node in ray.nodes()
        if node["Alive"]
    ]
    if not any(room):
        asked = f"{wanted['CPU']:g} cores and {wanted['GPU']:g} GPUs per worker for {', '.join(job.group.names)}"
        if config.ray_address is None:
            raise ConfigError(f"this machine has no {asked}. Lower cpus_per_worker, or give a cluster's ray_address.")
        _log.warning("no node of the Ray cluster has %s: waiting for one", asked)
    return config.workers or max(1, sum(room))


def num_gpus(job: Job) -> float:
    """GPUs that each worker of a job needs."""
    return job.group.num_gpus if isinstance(job.group, RowColumns) else 0.0


def new_worker(config: EngineConfig, gpus: float) -> Worker:
    """What a worker process on the cluster offers; Ray shows it its own GPUs only."""
    return Worker(num_threads=max(1, int(config.cpus_per_worker)), device="cuda:0" if gpus else "cpu")


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep this process's own answer to SIGTERM: `ray.init` would replace it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
