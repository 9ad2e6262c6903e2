"""Making plans: scan the rows that the filter keeps once, shuffle them once per epoch, share both between ranks.

Invariant: whoever asks first builds and everybody else maps the same files. A plan is named by what it is a function
of, so it is never out of date. Nothing larger than a scan batch is copied in memory besides the order being made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pretrain_assets.config import DataConfig
from pretrain_assets.errors import FilterError, TableError
from pretrain_assets.loader.mixture import SCAN_BATCH_ROWS, UInt32Array, assign, mix
from pretrain_assets.loader.parts import tally
from pretrain_assets.loader.plan import EpochPlan, Int64Array, KeptRows, places_of
from pretrain_assets.loader.store import ArrayStore, Writer, cache_folder
from pretrain_assets.plural import counted
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.predicate import check_predicate
from pretrain_assets.table.storage import Location, is_remote
from pretrain_assets.table.versions import content_digest, open_pin

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 1
"""Part of every plan's name; another layout or rule is another number."""
EPOCH_SEED_STRIDE = 100_003
"""Seed of epoch e is `seed + 100003 * e`, the rule of LanceDB's StreamingDataset."""


class Planner:
    """The plans of one table version, filter and order."""

    def __init__(self, location: Location, pin: Pin, data: DataConfig, *, setting: str = "data.filter"):
        self.dataset = open_pin(location, pin)
        self._pin, self._data, self._setting = pin, data, setting
        self._store = ArrayStore(cache_folder(), location.plans_uri if is_remote(location.uri) else None)
        self.plan = lru_cache(maxsize=2)(self._plan)

    def left_over(self, epoch: int) -> UInt32Array:
        """Places among the kept rows of the draws that an epoch leaves out for all splits to get equally many."""
        rows = self.rows
        stored = self._store.get(
            "left_over", self._plan_key(epoch), lambda writer: self._write_rest(writer, rows, epoch)
        )
        return np.asarray(stored.arrays["rows"])

    @cached_property
    def rows(self) -> KeptRows:
        """The rows that the filter keeps.

        Raises:
            FilterError: the predicate or the mixture cannot be used, or keeps a row without a token count.
        """
        return self._rows[0]

    @cached_property
    def _rows(self) -> tuple[KeptRows, str]:
        check_predicate(self.dataset, self._data.filter, setting=self._setting)
        stored = self._store.get("rows", self._rows_key, self._write_rows)
        rows = KeptRows(
            row_ids=stored.arrays["row_ids"],
            doc_ids=stored.arrays["doc_ids"],
            num_tokens=stored.arrays["num_tokens"],
            parts=stored.arrays.get("parts"),
            mixture=self._data.mixture,
            tokens=stored.facts["tokens"],
        )
        return rows, stored.digest

    @property
    def _rows_key(self) -> dict[str, Any]:
        data = self._data
        return {
            "format": FORMAT,
            "pin": str(self._pin),
            "content": content_digest(self.dataset),
            "filter": data.filter,
            "parts": [part.predicate for part in data.mixture],
            "count_column": data.count_column,
        }

    def _plan_key(self, epoch: int) -> dict[str, Any]:
        data = self._data
        return {
            **self._rows_key,
            "rows": self._rows[1],
            "weights": [part.weight for part in data.mixture],
            "seed": data.seed,
            "epoch": epoch,
            "num_splits": data.num_splits,
            "shuffle_clump_size": data.shuffle_clump_size,
        }

    def _plan(self, epoch: int) -> EpochPlan:
        data = self._data
        rows, rows_digest = self._rows
        key = self._plan_key(epoch)
        stored = self._store.get("plan", key, lambda writer: self._write_plan(writer, rows, epoch, rows_digest))
        return EpochPlan(
            epoch=epoch,
            seq_len=data.seq_len,
            num_splits=data.num_splits,
            rows=rows,
            order=stored.arrays["order"],
            ends=stored.arrays["ends"],
            holes=self._holes(rows, epoch, stored.arrays),
            holes_from=self._holes_from(epoch),
            drawn=stored.arrays.get("drawn"),
            digest=stored.digest,
        )

    def _holes(self, rows: KeptRows, epoch: int, arrays: Mapping[str, npt.NDArray[Any]]) -> Int64Array:
        """Places of the documents in `data.without`; not those that end before it holds."""
        data = self._data
        if not data.without or epoch < data.without_from[0]:
            return np.empty(0, np.int64)
        places = places_of(data.without, rows, arrays["order"])
        return places[arrays["ends"][places] > self._holes_from(epoch) * data.seq_len]

    def _holes_from(self, epoch: int) -> int:
        since, cycle = self._data.without_from
        return cycle if epoch == since else 0

    def _write_rows(self, writer: Writer) -> Mapping[str, Any]:
        """Scan row id, document id and token count of the rows that the filter keeps."""
        data, dataset = self._data, self.dataset
        count = dataset.count_rows(data.filter)
        if count == 0:
            raise FilterError(
                f"{self._setting}={data.filter!r} keeps none of the {dataset.count_rows():,} rows; widen the filter"
            )
        row_ids = writer.array("row_ids", np.uint64, (count,))
        doc_ids = writer.array("doc_ids", np.int64, (count,))
        num_tokens = writer.array("num_tokens", np.int32, (count,))
        at = tokens = 0
        for batch in self._scan():
            place = slice(at, at + batch.num_rows)
            row_ids[place], doc_ids[place] = batch["_rowid"].to_numpy(), batch["id"].to_numpy()
            num_tokens[place] = batch[data.count_column].to_numpy()
            at += batch.num_rows
            tokens += int(num_tokens[place].sum(dtype=np.int64)) + batch.num_rows
        assert at == count, f"the scan of version {dataset.version} gave {at:,} rows after counting {count:,}"
        if data.mixture:
            parts = assign(dataset, data.filter, data.mixture, count_column=data.count_column)
            writer.array("parts", np.uint8, (count,))[:] = parts
        return {"tokens": tokens}

    def _scan(self) -> Iterator[pa.RecordBatch]:
        column = self._data.count_column
        scanner = self.dataset.scanner(
            columns=["id", column],
            filter=self._data.filter,
            with_row_id=True,
            scan_in_order=True,
            batch_size=SCAN_BATCH_ROWS,
        )
        for batch in scanner.to_batches():
            if batch[column].null_count:
                missing = self.dataset.count_rows(f"({self._data.filter}) AND {column} IS NULL")
                row_id = batch["_rowid"].filter(batch[column].is_null())[0].as_py()
                raise FilterError(
                    f"{self._setting}={self._data.filter!r} keeps {counted(missing, 'row')} whose {column} is NULL, "
                    f"first row id {row_id}: never tokenized, or could not be (see {self._data.token_column}_error). "
                    "Run the tokenized stage (`pretrain tokenize`) and train on its version, or add "
                    f"`AND {column} IS NOT NULL` to the filter."
                )
            if batch.num_rows and batch[column].to_numpy().min() < 0:
                row_id = batch["_rowid"][int(batch[column].to_numpy().argmin())]
                raise TableError(f"{column} is negative at row id {row_id}. Run the tokenized stage again.")
            yield batch

    def _write_plan(self, writer: Writer, rows: KeptRows, epoch: int, rows_digest: str) -> Mapping[str, Any]:
        """Lay out one epoch.

        Raises:
            FilterError: fewer rows than splits.
        """
        data, positions = self._data, self._drawn(rows, epoch)
        if positions is not None and rows.parts is not None:
            drawn = tally(rows.num_tokens, rows.parts, positions, num_parts=len(data.mixture))
            writer.array("drawn", np.int64, drawn.shape)[:] = drawn
        count = len(rows) if positions is None else len(positions)
        per_split = count // data.num_splits
        if per_split == 0:
            raise FilterError(
                f"{self._setting}={data.filter!r} gives {count} rows, fewer than num_splits={data.num_splits}: every "
                f"split needs a row. Widen the filter, or lower num_splits to {count} or less."
            )
        planned = per_split * data.num_splits
        order, ends = writer.array("order", np.uint32, (planned,)), writer.array("ends", np.int64, (planned,))
        shuffled = self._shuffled(count, epoch)[:planned]
        order[:] = shuffled if positions is None else positions[shuffled]
        for split in range(data.num_splits):
            of_split = slice(split * per_split, (split + 1) * per_split)
            np.cumsum(rows.num_tokens[order[of_split]].astype(np.int64) + 1, out=ends[of_split])
        return {"rows": rows_digest, "rows_drawn": count}

    def _write_rest(self, writer: Writer, rows: KeptRows, epoch: int) -> Mapping[str, Any]:
        """What `_write_plan` leaves out."""
        positions = self._drawn(rows, epoch)
        count = len(rows) if positions is None else len(positions)
        shuffled = self._shuffled(count, epoch)[count - count % self._data.num_splits :]
        rest = np.sort(shuffled if positions is None else positions[shuffled])
        writer.array("rows", np.uint32, rest.shape)[:] = rest
        return {}

    def _drawn(self, rows: KeptRows, epoch: int) -> UInt32Array | None:
        """What the mixture draws for an epoch: places among the kept rows; None without a mixture: each once."""
        if rows.parts is None:
            return None
        weights = [part.weight for part in self._data.mixture]
        return mix(rows.num_tokens, rows.parts, weights, rows.row_ids, seed=self._data.seed, epoch=epoch)

    def _shuffled(self, count: int, epoch: int) -> UInt32Array:
        """The order of so many draws, the last of which may be left over."""
        from pretrain_assets.loader.permutation import permutation

        seed = self._data.seed + epoch * EPOCH_SEED_STRIDE
        return permutation(count, seed=seed, clump_size=self._data.shuffle_clump_size)
