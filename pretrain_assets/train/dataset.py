"""The loader as a PyTorch `IterableDataset`, for `DataLoader` and torchdata's `StatefulDataLoader`.

Invariant: the stream, and the place at which a state goes on, are the same for every number of workers. Nothing that is
open travels to a worker: each opens the table itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from pretrain_assets.config import DataConfig, LoaderConfig, TokenizerIdentity
from pretrain_assets.convert import require
from pretrain_assets.errors import CheckpointError, ConfigError
from pretrain_assets.loader.state import position_from, state_at
from pretrain_assets.loader.stream import DEFAULTS, BlockLoader, check_world_size
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location
from pretrain_assets.train.iterations import Iterations, Position, Turn, in_worker, worker

Item = dict[str, Tensor]
OUTPUTS = {"dtype", "doc_ids", "position_ids", "cu_seqlens", "pin_memory"}
"""Arguments of `BlockLoader.batches` that say what a batch holds."""


class PackedDataset(IterableDataset[Item]):
    """Blocks of one rank's splits of a pinned table version, as dicts of tensors named as in `Batch`.

    With `cycles_per_batch`, an item is a whole batch, for `DataLoader(dataset, batch_size=None)`: worker w of W makes
    the batches w, w + W, ..., which DataLoader hands out in turn, so that W does not change the stream. Without it, an
    item is one block and the workers share the rank's splits, as with LanceDB's `StreamingDataset`.

    Workers must not be forked: pass `multiprocessing_context="spawn"` or `"forkserver"`. Every iteration is the next
    epoch, unless `set_epoch` names another. A loaded state holds for the first iteration only; one taken at the very
    end of an epoch makes that iteration empty.

    State: in a process without workers, `state_dict` is exact. `StatefulDataLoader` asks each worker for its own, which
    is the state the iteration began with and the number of items that this worker has handed out since; only a
    StatefulDataLoader with equal settings can go on from it. What a plain DataLoader's consumer has taken only the
    consumer knows: `state_after` makes the state of it, for any number of workers and ranks, and for `BlockLoader`.
    """

    def __init__(
        self,
        location: Location,
        pin: Pin,
        data: DataConfig,
        tokenizer: TokenizerIdentity,
        *,
        cycles_per_batch: int | None = None,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        settings: LoaderConfig = DEFAULTS,
        outputs: Mapping[str, Any] | None = None,
    ):
        """Remember what to read; nothing is opened before it is needed.

        Args:
            location: The table.
            pin: Version to read.
            data: Rows and order.
            tokenizer: Tokenizer of the token column.
            cycles_per_batch: Blocks of every owned split per item; None for single blocks.
            epoch: Epoch of the first iteration.
            rank: This process's rank.
            world_size: Number of ranks.
            settings: How blocks are read.
            outputs: Further arguments of `BlockLoader.batches`, such as `{"position_ids": True}`.
        """
        super().__init__()
        check_world_size(data.num_splits, world_size, rank)
        cycles = 1 if cycles_per_batch is None else cycles_per_batch
        require(cycles >= 1, "cycles_per_batch", cycles, "use at least 1")
        unknown = set(outputs or {}) - OUTPUTS
        require(not unknown, "outputs", sorted(unknown), f"name some of {', '.join(sorted(OUTPUTS))}")
        if cycles_per_batch is None and (outputs or {}).get("cu_seqlens"):
            raise ConfigError("cu_seqlens are made for whole batches: set cycles_per_batch, or leave them out")
        self._source = (location, pin, data, tokenizer)
        self._num_splits, self._rank, self._world_size, self._settings = data.num_splits, rank, world_size, settings
        self._cycles_per_batch, self._outputs = cycles_per_batch, dict(outputs or {})
        self._iterations = Iterations(Position(epoch, 0, 0))
        self._forget()

    def _forget(self) -> None:
        """What belongs to one process."""
        self._process = os.getpid()
        self._loader: BlockLoader | None = None
        self._loaded: Position | None = None
        self._position: Position | None = None

    def __getstate__(self) -> dict[str, Any]:
        own = ("_process", "_loader", "_loaded", "_position")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def set_epoch(self, epoch: int) -> None:
        """Make an epoch, from its start, the next iteration."""
        self._restart(Position(epoch, 0, 0))

    def __iter__(self) -> Iterator[Item]:
        """The items of the next iteration, of this worker if in one; opens nothing before the first is asked for.

        Raises:
            ConfigError: the workers cannot share the splits, or were forked.
        """
        turn, resumed = self._iterations.turn(), self._loaded
        position = resumed or turn.position
        _, workers = worker()
        if position.items and not resumed and workers > 1:
            raise ConfigError("The state loaded lies inside a cycle, where only num_workers=0 or 1 can go on from it")
        self._loaded, self._position = None, position
        turn = turn._replace(position=position if workers == 1 else position._replace(items=0))
        # A StatefulDataLoader that was saved at its end makes workers for the finished epoch, only to drop them. All of
        # them say here that it is over, before those of the next epoch are made.
        if resumed and not self._steps(position):
            self._iterations.begin(turn)
        return self._items(position, turn)

    def _items(self, position: Position, turn: Turn) -> Iterator[Item]:
        self._iterations.begin(turn)  # at the first request: by then every worker of this iteration has been made
        make = self._blocks if self._cycles_per_batch is None else self._batches
        for item in make(position, self._steps(position)):
            self._position = position = position._replace(items=position.items + 1)
            yield item
        self._position = None

    def _steps(self, position: Position) -> range:
        """Cycles at which the items that are left to this worker begin (the cycles of its blocks)."""
        number, workers = worker()
        loader = self._open()
        cycles = loader.plan(position.epoch).cycles_per_epoch
        if self._cycles_per_batch is None:
            return range(position.cycle + position.items // len(loader.splits), cycles)
        whole = (cycles - position.cycle) // self._cycles_per_batch
        done = range(whole)[number::workers][position.items :]
        return range(
            position.cycle + done.start * self._cycles_per_batch,
            position.cycle + done.stop * self._cycles_per_batch,
            done.step * self._cycles_per_batch,
        )

    def _batches(self, position: Position, steps: range) -> Iterator[Item]:
        assert self._cycles_per_batch is not None
        alone = worker()[1] == 1  # all batches are this process's: one stream, read ahead
        for start in steps[:1] if alone else steps:
            yield from self._stream(position.epoch, start, self._cycles_per_batch, None if alone else 1)

    def _blocks(self, position: Position, steps: range) -> Iterator[Item]:
        owned = len(self._open().splits)
        first = position.items % owned
        for cycle in self._stream(position.epoch, steps.start, 1, None):
            for place in range(first, owned):
                yield {name: tensor[place].clone() for name, tensor in cycle.items()}
            first = 0

    def _stream(self, epoch: int, start: int, cycles_per_batch: int, max_batches: int | None) -> Iterator[Item]:
        batches = self._open().batches(epoch, start, cycles_per_batch, max_batches=max_batches, **self._outputs)
        with contextlib.closing(batches):
            for batch in batches:
                tensors = ((field.name, getattr(batch, field.name)) for field in fields(batch))
                yield {name: tensor for name, tensor in tensors if tensor is not None}

    def state_dict(self) -> dict[str, Any]:
        """Where this process's stream stands: the last one begun, or the next one where that is over; plain JSON.

        Raises:
            CheckpointError: the last iteration was made by workers, of whose consumer this process knows nothing.
        """
        if not in_worker() and self._iterations.in_workers:
            raise CheckpointError(
                "The stream was made by DataLoader workers, and how much of it was taken only its consumer knows: use "
                "`state_after(num_batches)`, or torchdata's StatefulDataLoader."
            )
        return self._state(self._position or self._loaded or self._iterations.next)

    def state_after(self, num_batches: int) -> dict[str, Any]:
        """The state after the consumer took `num_batches` items of the iteration that began last; plain JSON.

        Counted from where the iteration began: the start of its epoch, or the state loaded into this dataset (a
        StatefulDataLoader that was resumed counts on from before). Holds for any number of workers and ranks. Single
        blocks must make up whole cycles, and with several workers batch_size must divide the splits of a worker.

        Raises:
            CheckpointError: the blocks do not make up whole cycles.
        """
        require(num_batches >= 0, "num_batches", num_batches, "use 0 or more")
        begun = self._iterations.last
        position = self._folded(begun._replace(items=begun.items + num_batches))
        if position.items:
            splits = self._num_splits // self._world_size
            raise CheckpointError(
                f"{num_batches} blocks end inside a cycle of {splits} splits, where no other number of workers could "
                f"go on. Take a multiple of {splits} blocks, or whole batches (`cycles_per_batch`)."
            )
        return self._state(position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the rest of a state's epoch the next iteration.

        Raises:
            DataIdentityError: the state belongs to other data; lists every field that differs with both values.
            CheckpointError: it is no state, or that of another worker than this one.
        """
        whole = {name: value for name, value in state.items() if name != "worker"}
        shape = self._shape()
        made_by = dict(state.get("worker", shape | {"items": 0}))
        items = made_by.pop("items")
        if made_by != shape:
            raise CheckpointError(
                f"This state was made by {made_by} and cannot be loaded by {shape}. Use a DataLoader with the same "
                "num_workers, ranks and cycles_per_batch, or save `state_after(num_batches)`, which fits any."
            )
        position = Position(*position_from(self._open(), whole), items)
        if in_worker():
            self._loaded, self._position = position, None
        else:
            self._restart(position)

    def _restart(self, position: Position) -> None:
        self._iterations.restart(position)
        self._position = None

    def _state(self, position: Position) -> dict[str, Any]:
        _, workers = worker()
        epoch, cycle, items = position if workers > 1 else self._folded(position)
        state = state_at(self._open(), epoch, cycle)
        return state | {"worker": self._shape() | {"items": items}} if items else state

    def _folded(self, position: Position) -> Position:
        """The same place with as few items as possible after the cycle, where one process hands out all of them."""
        epoch, cycle, items = position
        if self._cycles_per_batch is not None:
            return Position(epoch, cycle + items * self._cycles_per_batch, 0)
        cycles, items = divmod(items, self._num_splits // self._world_size)
        return Position(epoch, cycle + cycles, items)

    def _shape(self) -> dict[str, int | None]:
        """What a number of items of one worker depends on."""
        number, workers = worker()
        ranks = {"rank": self._rank, "world_size": self._world_size}
        return {"worker": number, "num_workers": workers, "cycles_per_batch": self._cycles_per_batch} | ranks

    def _open(self) -> BlockLoader:
        """This process's loader."""
        if self._process != os.getpid():
            raise ConfigError(
                "DataLoader workers were forked, which Lance does not survive: pass multiprocessing_context='spawn' "
                "or 'forkserver'"
            )
        if self._loader is None:
            rank, world_size = self._rank, self._world_size
            number, workers = worker()
            if self._cycles_per_batch is None and workers > 1:  # workers own splits as ranks do
                if self._num_splits // world_size % workers:
                    raise ConfigError(
                        f"num_workers={workers} cannot share the {self._num_splits // world_size} splits of a rank "
                        "equally; use a number that divides them, or whole batches (`cycles_per_batch`)"
                    )
                rank, world_size = rank * workers + number, world_size * workers
            self._loader = BlockLoader(*self._source, rank=rank, world_size=world_size, settings=self._settings)
        return self._loader
