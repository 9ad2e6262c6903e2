"""Which epoch an iteration of a dataset gives: a few numbers that the dataset and its DataLoader workers share.

Invariant: once an iteration has begun, in whatever process, the next one is the next epoch from its start; unless the
dataset was told otherwise in the meantime.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Position(NamedTuple):
    """Where the stream of one process stands."""

    epoch: int
    """Epoch, from 0."""
    cycle: int
    """Cycle at which its iteration began."""
    items: int
    """Items that the process has handed out since."""


class Turn(NamedTuple):
    """An iteration that has not begun yet."""

    position: Position
    """Where it begins."""
    restarts: int
    """How often the dataset had been told where to begin."""


class Iterations:
    """The iteration that comes next and the one that began last, in memory that spawned workers share."""

    def __init__(self, first: Position):
        self._numbers = torch.zeros((3, 3), dtype=torch.int64)  # next; last; restarts, in workers
        self._numbers.untyped_storage().share_memory_()
        self._given: Turn | None = None
        self.restart(first)

    def __getstate__(self) -> tuple[torch.Tensor, Turn]:
        # A worker may start when another one has begun already, but all are made before: what was next then is theirs.
        return self._numbers, self._next()

    def __setstate__(self, state: tuple[torch.Tensor, Turn]) -> None:
        self._numbers, self._given = state

    def restart(self, first: Position) -> None:
        """Make a position the start of the next iteration, whatever still goes on elsewhere."""
        self._numbers[:2] = torch.tensor(first)
        self._numbers[2] = torch.tensor([int(self._numbers[2, 0]) + 1, 0, 0])

    def turn(self) -> Turn:
        """The next iteration; in a worker that was just made, the one that it was made for."""
        turn, self._given = self._given or self._next(), None
        if not in_worker():
            self._numbers[2, 1] = 0
        return turn

    def begin(self, turn: Turn) -> None:
        """Say that an iteration has begun; all of its workers say the same. Nothing after a restart."""
        if turn.restarts == int(self._numbers[2, 0]):
            self._numbers[1] = torch.tensor(turn.position)
            self._numbers[0] = torch.tensor([turn.position.epoch + 1, 0, 0])
            self._numbers[2, 1] = in_worker()

    @property
    def next(self) -> Position:
        """Where the next iteration begins."""
        return self._next().position

    @property
    def last(self) -> Position:
        """Where the iteration that began last has begun; the next one where none has."""
        return Position(*self._numbers[1].tolist())

    @property
    def in_workers(self) -> bool:
        """Whether the iteration that began last is made by DataLoader workers."""
        return bool(self._numbers[2, 1])

    def _next(self) -> Turn:
        return Turn(Position(*self._numbers[0].tolist()), int(self._numbers[2, 0]))


def in_worker() -> bool:
    """Whether this process is a DataLoader worker."""
    return torch.utils.data.get_worker_info() is not None


def worker() -> tuple[int, int]:
    """Number of this DataLoader worker, and how many there are; (0, 1) outside of workers."""
    info: Any = torch.utils.data.get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)
