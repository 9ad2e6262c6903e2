"""The table that `benchmarks.scale` asks questions of, and the questions, each run in a process of its own.

Invariant: every value is a function of the row's id, so that each answer is checked against arithmetic on the ids.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import lance
    import numpy.typing as npt
    import pyarrow as pa

    from pretrain_assets.table.filler.spec import BatchFunction, Fill, Worker
    from pretrain_assets.table.lineage import Pin
    from pretrain_assets.table.storage import Location

SOURCES = 20
MIN_SCORE = 3.0
FILTER = f"NOT is_dup AND score >= {MIN_SCORE}"


def build(location: Location, *, rows: int, fragments: int, appends: int, rows_per_append: int) -> None:
    """A table that was compacted once, then grew by `appends` nights of ingest, deduplication and tokenization.

    The first fragments carry the computed columns in their own files, as a compaction leaves them, so that looking for
    missing values means reading; those of the nights carry the filler's files.
    """
    import lance

    from pretrain_assets.table.storage import open_dataset

    base = rows - appends * rows_per_append
    lance.write_dataset(
        _table(0, base),
        location.uri,
        data_storage_version="2.2",
        enable_stable_row_ids=True,
        max_rows_per_file=-(-base // fragments),
    )
    for stage in ("ingested", "deduped", "tokenized"):
        _record(open_dataset(location), stage, base)
    for night in range(appends):
        append(location, base + night * rows_per_append, rows_per_append)
        for stage in ("deduped", "tokenized"):
            _fill(location, stage)


def append(location: Location, first: int, rows: int) -> None:
    """One ingest: rows without values in the computed columns, tagged."""
    import lance

    from pretrain_assets.table.storage import open_dataset

    lance.write_dataset(_table(first, rows).select(["id", "source", "score"]), location.uri, mode="append")
    _record(open_dataset(location), "ingested", rows)


def list_all_versions(database: str) -> Callable[[], Any]:
    """Open the table and list every version with what it added and who made it."""
    from pretrain_assets.table.history import list_versions
    from pretrain_assets.table.storage import open_dataset

    location = _location(database)
    return lambda: len(list_versions(open_dataset(location)))


def token_sums(database: str) -> Callable[[], Any]:
    """Exact tokens of the rows that a filter keeps, by source."""
    from pretrain_assets.table.storage import open_dataset

    location = _location(database)
    query = f"SELECT source, sum(n_tokens) AS tokens FROM dataset WHERE {FILTER} GROUP BY source"

    def work() -> int:
        batches = open_dataset(location).sql(query).build().to_batch_records()
        return sum(tokens for batch in batches for tokens in batch.column("tokens").to_pylist())

    return work


def find_missing(database: str) -> Callable[[], Any]:
    """Which fragments lack a stage's values: what every fill does first."""
    from pretrain_assets.table.filler.plan import make_plan

    location = _location(database)

    def work() -> list[int]:
        plans = [make_plan(location, spec(stage), _newest(location)) for stage in ("deduped", "tokenized")]
        return [len(work.fragments) for plan in plans for work in plan.work]

    return work


def fill_again(database: str) -> Callable[[], Any]:
    """The tokenizing stage on a table where nothing is missing, from the call to its answer."""
    location = _location(database)
    return lambda: _fill(location, "tokenized").changed


def expected_tokens(rows: int) -> int:
    """The sum that `token_sums` must give."""
    ids = np.arange(rows, dtype=np.int64)
    kept = ~_is_dup(ids) & (_score(ids) >= np.float32(MIN_SCORE))
    return int(_n_tokens(ids)[kept].sum(dtype=np.int64))


def spec(stage: str) -> Fill:
    """A stage that computes one column from the ids."""
    import pyarrow as pa

    from pretrain_assets.table.filler.spec import Fill, RowColumns
    from pretrain_assets.table.schema import computed_field

    name, arrow_type, make = {
        "deduped": ("is_dup", pa.bool_(), make_is_dup),
        "tokenized": ("n_tokens", pa.int32(), make_n_tokens),
    }[stage]
    output = computed_field(name, arrow_type, stage=stage, code_version="1", parameters={})
    group = RowColumns(outputs=pa.schema([output]), inputs=("id",), make=make)
    return Fill(stage=stage, groups=(group,), code_version="1", parameters={}, batch_bytes=32 << 20)


def make_is_dup(worker: Worker) -> BatchFunction:
    """Function of the column `is_dup`."""
    import pyarrow as pa

    del worker
    return lambda batch: [pa.array(_is_dup(batch.column(0).to_numpy()))]


def make_n_tokens(worker: Worker) -> BatchFunction:
    """Function of the column `n_tokens`."""
    import pyarrow as pa

    del worker
    return lambda batch: [pa.array(_n_tokens(batch.column(0).to_numpy()))]


def _is_dup(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = ids % 13 == 5
    return found


def _n_tokens(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    return (ids * 7919 % 1500 + 1).astype(np.int32)


def _score(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    return (ids % 51 / 10).astype(np.float32)


def _table(first: int, rows: int) -> pa.Table:
    import pyarrow as pa

    from pretrain_assets.table.versions import identified

    ids = np.arange(first, first + rows, dtype=np.int64)
    names = pa.array([f"source-{number}" for number in range(SOURCES)])
    fields = [pa.field("id", pa.int64()), pa.field("source", pa.string()), pa.field("score", pa.float32())]
    fields += [group.outputs.field(0) for stage in ("deduped", "tokenized") for group in spec(stage).groups]
    columns = [ids, names.take(pa.array(ids % SOURCES)), _score(ids), _is_dup(ids), _n_tokens(ids)]
    return pa.table(columns, schema=identified(pa.schema(fields), str(uuid.uuid5(uuid.NAMESPACE_DNS, "benchmark"))))


def _record(dataset: lance.LanceDataset, stage: str, rows: int) -> None:
    from pretrain_assets.table.lineage import LineageRecord
    from pretrain_assets.table.versions import table_id, tag_version

    record = LineageRecord(
        stage=stage,
        table_id=table_id(dataset),
        version=dataset.version,
        inputs=("benchmark",),
        columns=("id", "source", "score"),
        parameters={},
        code_version="1",
        run_id=None,
        rows=rows,
        rows_total=dataset.count_rows(),
        bytes_added=1,
        ledger={"in": rows, "written": rows},
        seconds=0.0,
    )
    tag_version(dataset, record)


def _fill(location: Location, stage: str) -> Any:
    from pretrain_assets.config import EngineConfig
    from pretrain_assets.table.filler.fill import fill

    return fill(location, spec(stage), input_pin=_newest(location), engine=EngineConfig(workers=1))


def _newest(location: Location) -> Pin:
    from pretrain_assets.table.lineage import Pin
    from pretrain_assets.table.storage import open_dataset
    from pretrain_assets.table.versions import table_id

    dataset = open_dataset(location)
    return Pin(table_id(dataset), dataset.version)


def _location(database: str) -> Location:
    import lance  # noqa: F401  imports are a second of their own, once per process: not part of any answer

    from pretrain_assets.table.filler.engines import local  # noqa: F401
    from pretrain_assets.table.storage import Location

    return Location(database_uri=database)
