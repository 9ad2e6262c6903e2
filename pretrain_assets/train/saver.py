"""Saving in the background: a step waits only until its tensors are copied to host memory.

Invariant: at most one save is under way, it talks to the other ranks in a group of its own, and what fails on one rank
fails on all of them at the same save.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from pretrain_assets.config import ExecutionConfig
from pretrain_assets.errors import CheckpointError, PretrainError
from pretrain_assets.launch.contract import PASSPORT_NAME, FileFacts, persistently, storage_fault
from pretrain_assets.table.storage import is_remote
from pretrain_assets.train import checkpoint
from pretrain_assets.train.distributed import World
from pretrain_assets.train.shards import Piece, Snapshot

T = TypeVar("T")


class Saver:
    """Writes the checkpoints of a run; all ranks call each method together."""

    def __init__(self, run_dir: str, world: World, execution: ExecutionConfig):
        self._run_dir, self._world, self._execution = run_dir, world, execution
        self._group = world.new_host_group()
        self._snapshots: dict[str, Snapshot] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None

    @property
    def failed(self) -> bool:
        """Whether the save under way has failed on this rank; `wait` then raises on all of them."""
        future = self._under_way
        return future is not None and future.done() and future.exception() is not None

    def save(self, step: int, pieces: Mapping[str, Mapping[str, Piece]], passport: Mapping[str, Any] | None) -> None:
        """Save a step once the save before it is done; on disk when this returns, or later if asynchronous.

        Args:
            step: Steps trained.
            pieces: What this rank writes, by name, by the file's name.
            passport: What the checkpoint carries about its data, on the main rank.

        Raises:
            CheckpointError: this or the save before it cannot be written; the checkpoints before are intact.
        """
        self.wait()
        for kind, tensors in pieces.items():
            self._snapshots.setdefault(kind, Snapshot()).take(tensors)
        self._under_way = self._thread.submit(self._save, step, passport)
        if not self._execution.async_checkpoint:
            self.wait()

    def wait(self) -> None:
        """Wait for the save under way.

        Raises:
            CheckpointError: it failed.
        """
        future, self._under_way = self._under_way, None
        if future is not None:
            future.result()

    def close(self) -> None:
        """Let the save under way end, well or badly."""
        with contextlib.suppress(Exception):
            self.wait()
        self._thread.shutdown()

    def _save(self, step: int, passport: Mapping[str, Any] | None) -> None:
        try:
            parts = self._all(lambda: self._write(step, passport))
            files = {name: facts for part in parts for name, facts in part.items()}
            self._all(lambda: self._persistently(lambda: self._finish(step, files)) if self._world.is_main else None)
        except CheckpointError as error:
            self._all(lambda: checkpoint.discard_unfinished(self._run_dir) if self._world.is_main else None)
            raise CheckpointError(
                f"Cannot write checkpoint {checkpoint.checkpoint_uri(self._run_dir, step)}: {str(error).rstrip('.')}. "
                "Earlier checkpoints are intact: the same run, started again, goes on from the newest."
            ) from error

    def _write(self, step: int, passport: Mapping[str, Any] | None) -> dict[str, FileFacts]:
        """Write this rank's files."""
        place = f"{self._world.rank + 1:05d}-of-{self._world.size:05d}"
        files = {}
        if self._world.is_main:
            self._persistently(lambda: checkpoint.begin(self._run_dir, step))
        contents: dict[str, Callable[[], Iterable[bytes | memoryview]]] = {
            f"{kind}-{place}.safetensors": snapshot.chunks for kind, snapshot in self._snapshots.items()
        }
        if passport is not None:
            text = json.dumps(passport, indent=2, ensure_ascii=False).encode()
            contents[PASSPORT_NAME] = lambda: [text]
        for name, chunks in contents.items():
            files[name] = self._persistently(partial(self._write_file, step, name, chunks))
        return files

    def _write_file(self, step: int, name: str, chunks: Callable[[], Iterable[bytes | memoryview]]) -> FileFacts:
        return checkpoint.write_file(self._run_dir, step, name, chunks())

    def _persistently(self, work: Callable[[], T]) -> T:
        return persistently(self._run_dir, work)

    def _finish(self, step: int, files: Mapping[str, FileFacts]) -> None:
        """Make the written files count, and remove what they replace; on the main rank."""
        checkpoint.commit(self._run_dir, step, files)
        keep_last, keep_every = self._execution.keep_last, self._execution.keep_every
        checkpoint.prune(self._run_dir, step, keep_last=keep_last, keep_every=keep_every)

    def _all(self, work: Callable[[], T]) -> list[T]:
        """Do something on every rank; what each found, or an error on all of them if one failed."""
        found: T | None = None
        fault = None
        try:
            found = work()
        except Exception as error:  # whatever it is, the other ranks wait to hear of it
            of_storage = isinstance(error, OSError) or is_remote(self._run_dir)
            plain = isinstance(error, PretrainError) or not of_storage
            fault = (str(error) or type(error).__name__) if plain else storage_fault(self._run_dir, error)
        answers: list[tuple[Any, str | None]] = [(found, fault)]
        if self._group is not None:
            answers = [(None, None)] * self._world.size
            dist.all_gather_object(answers, (found, fault), group=self._group)
        faults = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text is not None]
        if faults:
            raise CheckpointError("; ".join(faults))
        return [value for value, _ in answers]
