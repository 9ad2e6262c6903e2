"""Row mode: chosen columns of the rows in the order of the plan, without packing.

Invariant: the rows are those of LanceDB's `StreamingDataset(columns=...)` without `pack_sequences`, in its order: one
row of every owned split per cycle. The epoch is part of the order and of the state.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from pretrain_assets.errors import CheckpointError, ConfigError
from pretrain_assets.loader.plan import EpochPlan
from pretrain_assets.loader.read import fastest, take_rows
from pretrain_assets.loader.state import check_digest, checked_position, identity_of, state_at

if TYPE_CHECKING:
    import pyarrow as pa

    from pretrain_assets.loader.stream import BlockLoader


class RowLoader:
    """Streams rows of one rank's splits; a cycle is one row of every split."""

    def __init__(self, loader: BlockLoader, columns: Sequence[str]):
        """Read `columns` of the rows whose tokens `loader` would read.

        Raises:
            ConfigError: the table lacks a column, none is named, or documents are to be holes, which rows cannot be.
        """
        if loader.data.without:
            raise ConfigError("data.without makes holes in blocks; rows come whole: leave them out by data.filter")
        self._dataset = fastest(loader.planner.dataset)  # the loader's own may be a copy of the token column alone
        known = self._dataset.schema.names
        unknown = [name for name in columns if name not in known]
        if unknown or not columns:
            raise ConfigError(f"columns={list(columns)!r}: name at least one of the table's: {', '.join(known)}")
        self.loader, self.columns = loader, list(columns)

    def cycles_in(self, epoch: int) -> int:
        """Rows of every split of an epoch."""
        plan = self.loader.plan(epoch)
        return len(plan.order) // plan.num_splits

    def batches(
        self, epoch: int, start_cycle: int = 0, cycles_per_batch: int = 1
    ) -> Generator[pa.RecordBatch, None, None]:
        """Whole batches of an epoch from a cycle on, of `cycles_per_batch` rows of every owned split, cycle-major.

        Rows that fill no whole batch at the epoch's end are left out. About `window_tokens` tokens' worth of rows are
        read at once, and one such window ahead. Close the iterator (or exhaust it) to end its thread.

        Raises:
            TableError: a row is not there, or cannot be read.
        """
        plan = self.loader.plan(epoch)
        batches = max(0, self.cycles_in(epoch) - start_cycle) // cycles_per_batch
        rows_per_batch = cycles_per_batch * len(self.loader.splits)
        tokens_per_row = plan.rows.tokens / len(plan.rows)
        per_window = max(1, int(self.loader.settings.window_tokens / (tokens_per_row * rows_per_batch)))
        stop = start_cycle + batches * cycles_per_batch
        starts = range(start_cycle, stop, per_window * cycles_per_batch)
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="row-reader") as reader:
            windows = (reader.submit(self._window, plan, at, min(stop, at + starts.step)) for at in starts)
            coming = next(windows, None)
            while coming is not None:
                window, coming = coming.result(), next(windows, None)
                for first in range(0, window.num_rows, rows_per_batch):
                    (batch,) = window.slice(first, rows_per_batch).combine_chunks().to_batches()
                    yield batch

    def _window(self, plan: EpochPlan, start: int, stop: int) -> pa.Table:
        """Rows of the owned splits from one cycle to another, cycle-major."""
        splits = plan.offsets[self.loader.splits.start : self.loader.splits.stop]
        places = (np.arange(start, stop)[:, None] + splits).ravel()
        row_ids, back = np.unique(plan.rows.row_ids[plan.order[places]], return_inverse=True)  # a mixture repeats rows
        return take_rows(self._dataset, row_ids, self.columns).take(back)

    def state_at(self, epoch: int, cycle: int) -> dict[str, Any]:
        """The state of a stream that has handed out `cycle` rows of every split of an epoch; plain JSON."""
        state = state_at(self.loader, epoch, cycle)
        return state | {"data": self._identity}

    def position_from(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Epoch and cycle at which a stream goes on from a state: the arguments of `batches`.

        Raises:
            DataIdentityError: the state belongs to other data; lists every field that differs with both values.
            CheckpointError: it is no state.
        """
        epoch, cycle = checked_position(state, self._identity)
        check_digest(state["plan"], self.loader.plan(epoch), "This state cannot be loaded")
        if cycle > self.cycles_in(epoch):
            raise CheckpointError(f"The state's cycle={cycle} is past the {self.cycles_in(epoch)} of epoch {epoch}")
        return epoch, cycle

    @property
    def _identity(self) -> dict[str, Any]:
        return identity_of(self.loader) | {"reads": "rows"}
