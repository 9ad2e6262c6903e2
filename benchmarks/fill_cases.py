"""What `benchmarks.fill` runs in processes of its own: our filler and `add_columns` with the same batch functions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    from pretrain_assets.table.filler.spec import BatchFunction, Fill, RowColumns
    from pretrain_assets.table.storage import Location

COLUMNS = {"hash": ["content_hash"], "tokens": ["input_ids", "n_tokens"]}
APPEND_SECONDS = 60.0


def ours(what: str, workers: int | None, range_bytes: int | None, database: str) -> Callable[[], Any]:
    """Our filler, from the call to the tagged version."""
    from pretrain_assets.config import EngineConfig
    from pretrain_assets.table.filler import tasks
    from pretrain_assets.table.filler.fill import fill
    from pretrain_assets.table.versions import find_record

    location = _location(database)
    pin = find_record(location, "ingested").pin
    tasks.RANGE_BYTES = range_bytes or tasks.RANGE_BYTES

    def work() -> None:
        assert fill(location, _spec(what), input_pin=pin, engine=EngineConfig(workers=workers)).changed

    return work


def add_columns(what: str, threads: int, database: str) -> Callable[[], Any]:
    """Lance's `add_columns` with the same function, at its default batch size."""
    from pretrain_assets.table.filler.spec import Worker
    from pretrain_assets.table.storage import open_dataset

    location, group = _location(database), _group(what)

    def work() -> None:
        function = group.make(Worker(num_threads=threads, device="cpu"))  # loads the tokenizer
        open_dataset(location).add_columns(_udf(group, function), read_columns=["text"])

    return work


def beside_append(who: str, database: str) -> Callable[[], Any]:
    """Compute hashes while another thread appends one row after the first batch; then again, until all rows have one.

    Returns:
        Whether the first attempt committed, its error, and how many rows were computed until all had a value.
    """
    from pretrain_assets.config import EngineConfig
    from pretrain_assets.table.filler.fill import fill
    from pretrain_assets.table.filler.spec import Worker
    from pretrain_assets.table.lineage import Pin
    from pretrain_assets.table.storage import open_dataset
    from pretrain_assets.table.versions import table_id

    location = _location(database)
    begun, appended = threading.Event(), threading.Event()
    group, rows = _group("hash"), 0
    function = group.make(Worker(num_threads=1, device="cpu"))

    def counting(batch: pa.RecordBatch) -> Any:
        nonlocal rows
        rows += batch.num_rows
        begun.set()
        assert appended.wait(APPEND_SECONDS), "the append did not come through"
        return function(batch)

    def append() -> None:
        begun.wait()
        _append_one(location)
        appended.set()

    def attempt() -> None:
        dataset = open_dataset(location)
        if who == "add_columns":
            dataset.add_columns(_udf(group, counting), read_columns=["text"])
            return
        spec = _spec("hash")
        spec = replace(spec, groups=(replace(group, make=lambda worker: counting),))
        pin = Pin(table_id(dataset), dataset.version)
        fill(location, spec, input_pin=pin, engine=EngineConfig(workers=1))

    def work() -> dict[str, Any]:
        threading.Thread(target=append, daemon=True).start()
        started, error = time.monotonic(), None
        try:
            attempt()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}".splitlines()[0][:160]
        seconds = time.monotonic() - started
        attempt()
        missing = open_dataset(location).count_rows("content_hash IS NULL")
        return {
            "committed": error is None,
            "error": error,
            "first_attempt_seconds": round(seconds, 3),
            "rows": open_dataset(location).count_rows(),
            "rows_computed_until_all_filled": rows,
            "rows_missing_at_the_end": missing,
        }

    return work


def _append_one(location: Location) -> None:
    """One more row, as any writer of the table would append it."""
    import lance

    from pretrain_assets.table.storage import open_dataset

    dataset = open_dataset(location)
    row = dataset.take([0])
    last = dataset.count_rows()
    row = row.set_column(row.schema.get_field_index("id"), row.schema.field("id"), [[last]])
    lance.write_dataset(row, location.uri, mode="append")


def _spec(what: str) -> Fill:
    """The stage's own declaration; of deduplication only the group that reads text, which `add_columns` can do too."""
    from pretrain_assets.config import DedupConfig, TokenizeConfig
    from pretrain_assets.curate import dedup
    from pretrain_assets.tokenize import columns
    from pretrain_assets.tokenize.tokenizers import load_tokenizer

    if what == "tokens":
        return columns._fill(load_tokenizer("gpt2").identity, TokenizeConfig())
    spec = dedup._fill(DedupConfig())
    return replace(spec, groups=spec.groups[:1], summarize=None)


def _group(what: str) -> RowColumns:
    from pretrain_assets.table.filler.spec import RowColumns

    group = _spec(what).groups[0]
    assert isinstance(group, RowColumns)
    return group


def _udf(group: RowColumns, function: BatchFunction) -> Any:
    """The batch function as Lance wants it."""
    import lance
    import pyarrow as pa

    outputs = pa.schema([pa.field(f.name, f.type) for f in group.outputs])

    @lance.batch_udf(output_schema=outputs)  # type: ignore[untyped-decorator]
    def udf(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch(list(function(batch)), schema=outputs)

    return udf


def _location(database: str) -> Location:
    import lance.file  # noqa: F401  imports are a second of their own, once per process: not part of the work

    from pretrain_assets.table.filler.engines import local  # noqa: F401
    from pretrain_assets.table.storage import Location

    return Location(database_uri=database)
