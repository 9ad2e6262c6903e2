"""The default engine: worker processes on this machine, or the calling process where workers would not pay.

Invariant: workers are spawned (Lance and forks do not mix), hold no lock that their death could leave taken, and end
with the process that started them, however it ends.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import multiprocessing
import multiprocessing.util
import os
import pickle
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import EngineConfig
from pretrain_assets.errors import ConfigError, WorkerError
from pretrain_assets.table.filler.engines import Session
from pretrain_assets.table.filler.spec import RowColumns, Worker
from pretrain_assets.table.filler.tasks import Job, Range, Report, State, Task

if TYPE_CHECKING:
    from pretrain_assets.table.filler.columnfile import StagedFile

_log = logging.getLogger(__name__)

MAX_DEATHS = 5
"""Times that a task may be at work while a worker dies; all at work then count, since nobody knows the culprit."""
POLL_SECONDS = 0.2
"""How often progress is collected from the workers."""


@contextmanager
def start(config: EngineConfig) -> Iterator[Session]:
    """An engine whose pool is started by the first job that is worth it."""
    session = LocalSession(config)
    try:
        yield session
    finally:
        session.close()


class LocalSession:
    """Runs tasks in a pool of spawned processes, or right here."""

    def __init__(self, config: EngineConfig):
        self._config = config
        self._pool: _Pool | None = None

    def run(self, job: Job, work: Sequence[Task], report: Report) -> list[list[StagedFile]]:
        """All results, in the order of the tasks."""
        gpus = _gpu_slots(job)
        num_workers = self._num_workers(job, work, gpus)
        if num_workers == 1 and self._pool is None:
            return run_here(job, work, report, Worker(num_threads=self._threads(), device=_device(gpus)))
        if self._pool is None or self._pool.size < num_workers or self._pool.gpus != gpus:
            _check_travels(job)
            self.close()
            self._pool = _Pool(num_workers, max(1, int(self._config.cpus_per_worker)), gpus)
        return self._pool.run(job, work, report)

    def close(self) -> None:
        """Stop the workers."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _threads(self) -> int:
        """Threads of a lone worker: all cores, unless one worker was asked for."""
        return cores() if self._config.workers is None else max(1, int(self._config.cpus_per_worker))

    def _num_workers(self, job: Job, work: Sequence[Task], gpus: Sequence[str]) -> int:
        most = self._config.workers or len(gpus) or max(1, int(cores() / self._config.cpus_per_worker))
        if self._config.workers is None and not gpus and isinstance(job.group, RowColumns):
            num_bytes = sum(task.num_bytes for task in work if isinstance(task, Range))
            most = min(most, num_bytes // job.group.worker_bytes)
        return max(1, min(most, len(work)))


def run_here(job: Job, work: Sequence[Task], report: Report, worker: Worker) -> list[list[StagedFile]]:
    """Run tasks one after the other in the calling process, neighbouring ranges as one: nobody shares them."""
    state = State(worker)
    results: list[list[StagedFile]] = []

    def run_of(task: Task) -> object:
        return task.fragment_id if isinstance(task, Range) and not task.begun else id(task)

    for _, same in itertools.groupby(work, key=run_of):
        first, *rest = same
        if isinstance(first, Range) and rest:
            last = rest[-1]
            assert isinstance(last, Range)
            first = dataclasses.replace(first, stop=last.stop, num_bytes=first.num_bytes * (1 + len(rest)))
        results += [first.run(job, state, report), *([] for _ in rest)]
    return results


def _check_travels(job: Job) -> None:
    """Refuse a function that cannot be handed to another process, before any is started."""
    try:
        pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"the function of {', '.join(job.group.names)} cannot be handed to worker processes: {error}. Define it at "
            "the top of a module (functools.partial of one is fine), or compute in this process: workers=1."
        ) from error


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpu_slots(job: Job) -> list[str]:
    """One entry per worker that fits on this machine's GPUs, naming its GPU; empty when the columns ask for none.

    Raises:
        ConfigError: they ask for one and none is visible.
    """
    share = job.group.num_gpus if isinstance(job.group, RowColumns) else 0.0
    if not share:
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    driver = Path("/proc/driver/nvidia/gpus")
    there = [str(at) for at in range(len(list(driver.iterdir())))] if driver.is_dir() else []
    visible = [name.strip() for name in named.split(",") if name.strip()] if named is not None else there
    if not visible:
        raise ConfigError(
            f"columns {', '.join(job.group.names)} ask for {share:g} GPU per worker, and this machine shows none. Run "
            "it on a GPU node, or on a Ray cluster that has GPUs: engine=ray."
        )
    if share >= 1:
        size = int(share)
        return [",".join(visible[at : at + size]) for at in range(0, len(visible) - size + 1, size)]
    return [name for name in visible for _ in range(int(1 / share))]


def _device(gpus: Sequence[str]) -> str:
    return "cuda:0" if gpus else "cpu"


class _Pool:
    """A pool of spawned workers that outlives the death of any of them."""

    def __init__(self, size: int, threads: int, gpus: Sequence[str]):
        self.size, self.gpus = size, list(gpus)
        self._threads = threads
        self._executor: ProcessPoolExecutor | None = None

    def run(self, job: Job, work: Sequence[Task], report: Report) -> list[list[StagedFile]]:
        results: dict[int, list[StagedFile]] = {}
        deaths = [0] * len(work)
        while len(results) < len(work):
            at_work = self._until_death(job, work, results, report)
            for index in at_work:
                deaths[index] += 1
                if deaths[index] >= MAX_DEATHS:
                    raise WorkerError(
                        f"worker processes died {MAX_DEATHS} times while at {work[index]}: most often for want of "
                        "memory: lower the batch size or the number of workers. (A script of your own must start the "
                        'fill under `if __name__ == "__main__":`, since workers import it.) Finished work is kept.'
                    )
            if at_work:
                _log.warning("a worker process died; its work goes to another (%d pieces at work then)", len(at_work))
        return [results[index] for index in range(len(work))]

    def _until_death(
        self, job: Job, work: Sequence[Task], results: dict[int, list[StagedFile]], report: Report
    ) -> list[int]:
        """Run what has no result yet; returns the tasks at work when a worker died, or none when all are done."""
        executor = self._open()
        todo = iter([index for index in range(len(work)) if index not in results])
        running: dict[Future[list[StagedFile]], int] = {}
        try:
            while True:
                while len(running) < 2 * self.size and (index := next(todo, None)) is not None:
                    running[executor.submit(_run_task, job, work[index])] = index
                if not running:
                    self._drain(report)
                    return []
                done, _ = wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                self._drain(report)
                for future in done:
                    results[running[future]] = future.result()
                    del running[future]
        except BrokenProcessPool:
            for future, index in running.items():  # some may have ended well just before
                if future.done() and future.exception() is None:
                    results[index] = future.result()
            self.close()
            return [index for index in running.values() if index not in results]

    def _open(self) -> ProcessPoolExecutor:
        if self._executor is None:
            context = multiprocessing.get_context("spawn")
            self._received, self._sent = context.Pipe(duplex=False)
            self._stop = context.RawValue("b", 0)
            self._turns, turns = context.Pipe(duplex=False)
            os.write(turns.fileno(), bytes(range(self.size)))
            self._executor = ProcessPoolExecutor(
                self.size,
                mp_context=context,
                initializer=_begin,
                initargs=(self._threads, self.gpus, self._turns, self._sent, self._stop),
            )
        return self._executor

    def _drain(self, report: Report) -> None:
        while self._received.poll():
            rows, num_bytes, was_finished = self._received.recv()
            report(rows, num_bytes, was_finished)

    def close(self) -> None:
        if self._executor is None:
            return
        self._stop.value = 1  # workers stop after the batch they are at, and keep what they have
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._executor = None
        for end in (self._received, self._sent, self._turns):
            end.close()


_state: State
_report: Report


def _begin(threads: int, gpus: Sequence[str], turns: Connection, sent: Connection, stop: Any) -> None:
    """Make a worker of this process.

    What it shares with others needs no lock, which a killed worker would keep: one small write to a pipe, one byte read
    from a pipe and one byte of shared memory are each atomic.
    """
    import signal

    global _state, _report
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the one who started us decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    multiprocessing.util.Finalize(None, os._exit, (0,), exitpriority=0)  # tearing modules down takes 0.35 s
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if gpus:
        (turn,) = os.read(turns.fileno(), 1)
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[turn % len(gpus)]
    _state = State(Worker(num_threads=threads, device=_device(gpus)))

    def report(rows: int, num_bytes: int, was_finished: bool) -> None:
        sent.send((rows, num_bytes, was_finished))
        if stop.value:
            raise KeyboardInterrupt

    _report = report


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_task(job: Job, task: Task) -> list[StagedFile]:
    return task.run(job, _state, _report)
