"""Random small tables and the original StreamingDataset on them, for the loader's equality tests and field tests.

Invariant: a case is a value: building it twice gives the same table and the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lance
import numpy as np
import pyarrow as pa
import torch

from pretrain_assets.config import DataConfig, LoaderConfig, TokenizerIdentity
from pretrain_assets.loader.stream import Batch, BlockLoader
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location, open_lancedb
from pretrain_assets.table.versions import identified

FIELDS = {"id": pa.int64(), "is_dup": pa.bool_(), "input_ids": pa.list_(pa.int32()), "n_tokens": pa.int32()}
SCHEMA = identified(pa.schema(FIELDS), "t")
Where = tuple[Location, Pin]
Edit = tuple[Literal["delete", "append", "update", "compact"], int]
Blocks = tuple[torch.Tensor, torch.Tensor]
"""input_ids and doc_ids, each (cycles, splits, seq_len)."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A table, an order of its rows and a way to read it."""

    lengths: tuple[int | None, ...]
    rows_per_file: int = 1000
    edits: tuple[Edit, ...] = ()
    filter: str = "true"
    num_splits: int = 1
    seed: int = 0
    epoch: int = 0
    clump: int = 1
    seq_len: int = 16
    eos_id: int = 300
    pad_id: int = 301
    world_size: int = 1
    resumed_world_size: int = 1
    resumed_at: int = 0
    """Cycle of the resume, modulo the cycles there are."""
    cycles_per_batch: int = 1
    settings: LoaderConfig = field(default_factory=LoaderConfig)

    @property
    def data(self) -> DataConfig:
        return DataConfig(
            filter=self.filter,
            seq_len=self.seq_len,
            num_splits=self.num_splits,
            seed=self.seed,
            shuffle_clump_size=self.clump,
        )

    def build(self, folder: Path) -> Where:
        """Write the table and carry out the edits; the pin names the last version."""
        location = Location(database_uri=str(folder))
        lance.write_dataset(
            rows_of(self.lengths),
            location.uri,
            enable_stable_row_ids=True,
            data_storage_version="2.2",
            max_rows_per_file=self.rows_per_file,
        )
        for kind, number in self.edits:
            dataset = lance.dataset(location.uri)
            if kind == "delete":
                dataset.delete(f"id % {number + 2} = 1")
            elif kind == "append":
                more = rows_of(self.lengths[-number:], first_id=10_000 * dataset.version)
                lance.write_dataset(more, location.uri, mode="append")
            elif kind == "update":  # the row moves to another fragment, and filters see another value
                dataset.update({"is_dup": "NOT is_dup"}, where=f"id % {number + 2} = 0")
            else:
                dataset.optimize.compact_files(target_rows_per_fragment=10 * number)
        return location, Pin("t", lance.dataset(location.uri).version)

    def loader(self, where: Where, rank: int = 0, world_size: int = 1) -> BlockLoader:
        tokenizer = TokenizerIdentity(name="t", fingerprint="f", vocab_size=1, eos_id=self.eos_id, pad_id=self.pad_id)
        return BlockLoader(*where, self.data, tokenizer, rank=rank, world_size=world_size, settings=self.settings)

    def original(self, where: Where, blocks: int | str, rank: int = 0, world_size: int = 1, **changes: Any) -> Any:
        """LanceDB's StreamingDataset, given none of our arithmetic but the blocks per epoch."""
        from lancedb.streaming import StreamingDataset

        settings = {
            "num_splits": self.num_splits,
            "shuffle_seed": self.seed,
            "epoch": self.epoch,
            "rank": rank,
            "world_size": world_size,
            "columns": ["input_ids"],
            "shuffle_clump_size": self.clump,
            "filter": self.filter,
            "pack_sequences": self.seq_len,
            "eos_id": self.eos_id,
            "pad_id": self.pad_id,
            "blocks_per_epoch": blocks,
            "io_queue_depth": 1,
            "transform_parallelism": 1,
        }
        return StreamingDataset(open_lancedb(where[0], where[1].version), **{**settings, **changes})


def write_documents(
    folder: Path, documents: Sequence[Sequence[int]], *, rows_per_file: int = 1000, identity: str = "t"
) -> Where:
    """A table of the given documents, ids from 1000 on."""
    table = rows_of(tuple(map(len, documents)))
    at = table.schema.get_field_index("input_ids")
    table = table.set_column(at, table.schema.field(at), pa.array(documents, pa.list_(pa.int32())))
    table = table.cast(identified(table.schema, identity))
    location = Location(database_uri=str(folder))
    lance.write_dataset(table, location.uri, enable_stable_row_ids=True, max_rows_per_file=rows_per_file)
    return location, Pin(identity, 1)


def write_in_reading_order(folder: Path, case: Case, documents: Sequence[Sequence[int]]) -> Where:
    """A table of which the case reads the documents in the order given, split after split."""
    blank = write_documents(folder / "blank", [[]] * len(documents), identity="blank")
    places = case.loader(blank).plan(case.epoch).doc_ids - 1000
    return write_documents(folder, [documents[at] for at in np.argsort(places)])


def rows_of(lengths: tuple[int | None, ...], *, first_id: int = 1000) -> pa.Table:
    """Random documents, no two alike but by chance; a null length is a row not tokenized."""
    rng = np.random.default_rng(first_id)
    tokens = [None if n is None else rng.integers(0, 300, n).tolist() for n in lengths]
    ids = range(first_id, first_id + len(lengths))
    columns = [ids, [i % 10 == 3 for i in ids], tokens, lengths]
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)


def stacked(parts: list[Batch] | list[dict[str, torch.Tensor]], splits: int, seq_len: int) -> Blocks:
    """Batches of the loader, or blocks of the original, as int64 arrays by cycle and split."""
    found = []
    for name in ("input_ids", "doc_ids"):
        each = [part[name] if isinstance(part, dict) else getattr(part, name) for part in parts]
        found.append(torch.cat([torch.empty(0, dtype=torch.int64), *(tensor.flatten() for tensor in each)]))
    ids, docs = (tensor.reshape(-1, splits, seq_len) for tensor in found)
    return ids, docs


def emitted(
    loader: BlockLoader,
    epoch: int = 0,
    start_cycle: int = 0,
    cycles_per_batch: int = 1,
    *,
    dtype: Literal["int64", "int32"] = "int64",
) -> Blocks:
    """Everything that the loader yields of an epoch from a cycle on."""
    batches = list(loader.batches(epoch, start_cycle, cycles_per_batch, dtype=dtype))
    shape, wanted = (cycles_per_batch * len(loader.splits), loader.data.seq_len), getattr(torch, dtype)
    for batch in batches:
        assert batch.doc_ids is not None
        assert (batch.input_ids.shape, batch.input_ids.dtype) == (shape, wanted)
        assert (batch.doc_ids.shape, batch.doc_ids.dtype) == (shape, wanted)
    return stacked(batches, len(loader.splits), loader.data.seq_len)
