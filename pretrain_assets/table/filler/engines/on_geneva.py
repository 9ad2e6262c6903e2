"""The Geneva engine: `add_columns` of a UDF and `backfill`, for shops that have LanceDB's Geneva (proprietary).

Invariant: Geneva never writes to the table. It works on a shallow clone beside it, which shares the table's input files
and commits as often as it likes; the columns are then copied into the same staged files that every engine makes.

A killed job leaves its clone, and the same job goes on there: Geneva keeps checkpoints in it.
"""

# No `from __future__ import annotations`: Geneva chooses what a function gets by the annotations of its arguments.

import dataclasses
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pretrain_assets.config import EngineConfig
from pretrain_assets.errors import ConfigError, PretrainError, WorkerError
from pretrain_assets.table.filler import columnfile, rows
from pretrain_assets.table.filler.engines import Session, local, on_ray
from pretrain_assets.table.filler.inputs import NAMED_COLUMNS
from pretrain_assets.table.filler.spec import BatchFunction, RowColumns, Worker
from pretrain_assets.table.filler.tasks import Job, Range, Report, State, Task
from pretrain_assets.table.storage import filesystem, join, storage_options

if TYPE_CHECKING:
    import lance

    from pretrain_assets.table.filler.columnfile import StagedFile

_log = logging.getLogger(__name__)

RESULT = "geneva_result"
"""Column of the clone that Geneva fills: a struct of the job's columns and of the reason why a row has none."""
REASON = "reason"
"""Empty for a row that was computed; NULL for one whose workers died, which Geneva leaves out."""
PLACE = "geneva_place"
"""Column of the clone without values. Geneva writes beside the first file of a fragment, so this one is put first."""


@contextmanager
def start(config: EngineConfig) -> Iterator[Session]:
    """An engine for ranges; everything else runs in processes on this machine.

    Raises:
        ConfigError: Geneva is not installed.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import geneva  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "engine=geneva needs Geneva, a proprietary package of LanceDB, which is not installed here: pip install "
            "'geneva==0.17.*' (in an environment of its own, on every node), or use engine=local or engine=ray."
        ) from error
    with local.start(dataclasses.replace(config, engine="local")) as here:
        session = GenevaSession(config, here)
        try:
            yield session
        finally:
            session.close()


class GenevaSession:
    """Computes ranges with Geneva, and runs other tasks in another session."""

    def __init__(self, config: EngineConfig, here: Session):
        self._config, self._here = config, here
        self._connected_here = False

    def run(self, job: Job, work: Sequence[Task], report: Report) -> list[list["StagedFile"]]:
        """All results, in the order of the tasks."""
        wanted = _unfinished(job, work)
        todo = [task for task in work if isinstance(task, Range) and task.fragment_id in wanted]
        if not todo:
            return self._here.run(job, work, report)
        results = dict(zip(todo, self._compute(job, todo, wanted, report), strict=True))
        return [results[task] if task in results else self._here.run(job, [task], report)[0] for task in work]

    def _compute(self, job: Job, todo: Sequence[Range], wanted: set[int], report: Report) -> list[list["StagedFile"]]:
        folder = join(job.uri.removesuffix(".lance") + ".staging", f"geneva-{job.group.names[0]}")
        try:
            clone = _clone(job, folder, wanted)
            self._backfill(job, folder, clone, todo)
            results = self._here.run(_copy(job, clone.uri), todo, report)
        except Exception:  # anything else is a stop: the next run goes on with the clone
            _remove(folder)
            raise
        _remove(folder)
        return results

    def _backfill(self, job: Job, folder: str, clone: "lance.LanceDataset", todo: Sequence[Range]) -> None:
        import geneva

        assert isinstance(job.group, RowColumns)
        # Geneva's own helpers take a few tenths of a core
        self._connected_here = on_ray.connect(self._config, extra_cpus=1) or self._connected_here
        batch_rows = _batch_rows(job, todo)
        gpus = on_ray.num_gpus(job)
        table = geneva.connect(folder, storage_options=storage_options(folder)).open_table(_clone_name(job))
        if not _is_declared(clone):
            function = geneva.udf(
                _Compute(job, on_ray.new_worker(self._config, gpus)),
                data_type=pa.struct(list(_results(job))),
                version=job.key,
                num_cpus=self._config.cpus_per_worker,
                num_gpus=gpus,
            )
            table.add_columns({RESULT: function})
        try:
            table.backfill(RESULT, concurrency=on_ray.num_workers(self._config, job), max_checkpoint_size=batch_rows)
        except Exception as error:
            raise _reason(error, job) from error
        lost = f"{RESULT}.{REASON} IS NULL"
        if num_lost := table.count_rows(lost):
            first = table.search().where(lost).select(["id"]).limit(1).to_arrow()["id"][0].as_py()
            raise WorkerError(
                f"Geneva's workers died again and again at {num_lost:,} rows, the first with id {first}: most often "
                "for want of memory. Lower the batch size, or raise cpus_per_worker."
            )

    def close(self) -> None:
        """Stop a cluster started here, or leave one that was joined."""
        if self._connected_here:
            import ray

            ray.shutdown()
            self._connected_here = False


class _Compute:
    """The function that Geneva calls with batches of the clone."""

    def __init__(self, job: Job, worker: Worker):
        self._job, self._worker = job, worker

    def __call__(self, batch: pa.RecordBatch) -> pa.Array:
        global _state
        if _state is None:
            _state = State(self._worker)
        results = _results(self._job)
        *values, reasons = rows.call(
            _state.function(self._job),
            batch.select(list(self._job.group.inputs)),
            results,
            error_name=REASON,
            nullable=self._job.group.nullable,
            on_error="null",
            describe=str,
        )
        return pa.StructArray.from_arrays([*values, reasons.fill_null("")], fields=list(results))


_state: State | None = None
"""One per worker process, as in the other engines."""


def _results(job: Job) -> pa.Schema:
    """The columns that the function makes, then the reason."""
    values = [pa.field(f.name, f.type) for f in job.outputs if f.name != job.error_name]
    return pa.schema([*values, pa.field(REASON, pa.string())])


def _copy(job: Job, clone_uri: str) -> Job:
    """The job that takes the columns from the clone."""
    import lance

    version = lance.dataset(clone_uri, storage_options=storage_options(clone_uri)).version
    group = RowColumns(outputs=job.group.outputs, inputs=(RESULT,), nullable=job.group.nullable, make=copying)
    return dataclasses.replace(job, key=f"{job.key}-copy", source=(clone_uri, version), group=group)


def copying(worker: Worker) -> BatchFunction:
    """The function that takes Geneva's struct apart; it fails at a row as the job's own function did."""
    del worker

    def copy(batch: pa.RecordBatch) -> list[pa.Array]:
        values: list[pa.Array] = batch.column(0).flatten()
        reasons = values.pop()
        reason = max(reasons.to_pylist())
        if reason:  # as the job's own function would raise; a batch is halved until this is a row's own
            kind, _, message = reason.partition(": ")
            raise type(kind, (Exception,), {})(message)
        return values

    return copy


def _unfinished(job: Job, work: Sequence[Task]) -> set[int]:
    """Fragments with rows that no earlier run has computed."""
    dataset = State(Worker(num_threads=1, device="cpu")).dataset(job)
    found = set()
    for task in work:
        if isinstance(task, Range) and task.fragment_id not in found:
            live = columnfile.live_offsets(dataset.get_fragment(task.fragment_id))
            done = sum(part.num_rows for part in task.finished_parts(job, live))
            if done < task.stop - task.start:
                found.add(task.fragment_id)
    return found


def _batch_rows(job: Job, todo: Sequence[Range]) -> int:
    """Rows per call: about the batch size in bytes, and no more than the columns ask for."""
    assert isinstance(job.group, RowColumns)
    num_rows = sum(task.stop - task.start for task in todo)
    num_bytes = max(1, sum(task.num_bytes for task in todo))
    return max(1, min(job.batch_bytes * num_rows // num_bytes, job.group.batch_rows or num_rows))


def _clone_name(job: Job) -> str:
    return f"{job.key}-{job.version}"


def _clone(job: Job, folder: str, wanted: set[int]) -> "lance.LanceDataset":
    """A shallow clone of the wanted fragments, or the one that a killed run of this job left."""
    import lance

    uri = join(folder, f"{_clone_name(job)}.lance")
    options = storage_options(uri)
    try:
        left = lance.dataset(uri, storage_options=options)
        if _is_declared(left) and wanted <= {f.fragment_id for f in left.get_fragments()}:
            _log.info("going on with %s", uri)
            return left
    except (ValueError, OSError):  # there is none
        pass
    _remove(folder)
    table = lance.dataset(job.uri, version=job.version, storage_options=options)
    clone = table.shallow_clone(uri, job.version, storage_options=options)
    unwanted = [f.fragment_id for f in clone.get_fragments() if f.fragment_id not in wanted]
    if unwanted:
        clone = _commit(clone, lance.LanceOperation.Delete([], unwanted, "true"))
    # Geneva hands all columns to the function: leave what it needs, and what names a row
    kept = {*job.group.inputs, "id", *NAMED_COLUMNS}
    clone.drop_columns([name for name in clone.schema.names if name not in kept])
    clone.add_columns(pa.schema([pa.field(PLACE, pa.bool_())]))
    fragments = [_with_place(clone, fragment) for fragment in clone.get_fragments()]
    return _commit(clone, lance.LanceOperation.Merge(fragments, clone.lance_schema, preserves_nullability=True))


def _with_place(clone: "lance.LanceDataset", fragment: "lance.LanceFragment") -> Any:
    """A fragment whose first file lies in the clone."""
    from lance.fragment import DataFile

    schema = pa.schema([pa.field(PLACE, pa.bool_())])
    writer = columnfile.ColumnWriter(clone.uri, f"{PLACE}-{fragment.fragment_id}.lance", schema)
    file = writer.close(fragment.physical_rows)
    ids = columnfile.leaf_ids(clone.lance_schema, [PLACE])
    metadata = fragment.metadata
    metadata.files = [DataFile(file.name, ids, [0], *columnfile.FILE_VERSION, file.num_bytes), *metadata.files]
    return metadata


def _commit(clone: "lance.LanceDataset", operation: Any) -> "lance.LanceDataset":
    import lance

    transaction = lance.Transaction(read_version=clone.version, operation=operation)
    return lance.LanceDataset.commit(clone.uri, transaction, storage_options=storage_options(clone.uri))


def _is_declared(clone: "lance.LanceDataset") -> bool:
    """Whether Geneva knows the function of the result column."""
    if RESULT not in clone.schema.names:
        return False
    return b"virtual_column.udf" in (clone.schema.field(RESULT).metadata or {})


def _remove(folder: str) -> None:
    fs, path = filesystem(folder)
    fs.invalidate_cache()
    if fs.exists(path):
        fs.rm(path, recursive=True)


def _reason(error: BaseException, job: Job) -> PretrainError:
    """The error of ours that made Geneva fail, wherever it is wrapped; or one with Geneva's own words."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, PretrainError):
            return inner
        inner = getattr(inner, "cause", None) or inner.__cause__ or inner.__context__
    return WorkerError(f"Geneva could not compute {', '.join(job.group.names)}: {error}")
