"""Staging: from a plan to one finished column file per fragment, by any engine. Nothing here commits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pretrain_assets.progress import Progress
from pretrain_assets.table.filler import columnfile, columnread, tasks
from pretrain_assets.table.filler.columnfile import StagedFile
from pretrain_assets.table.filler.engines import Session
from pretrain_assets.table.filler.plan import GroupWork, Plan
from pretrain_assets.table.filler.spec import BatchFunction, ColumnReader, TableColumns, Worker
from pretrain_assets.table.filler.tasks import Job, Range, Report, State
from pretrain_assets.table.lineage import digest

if TYPE_CHECKING:
    import lance
    import pyarrow as pa


def stage(plan: Plan, session: Session) -> None:
    """Compute every column group of the plan, in order, reusing what an earlier run finished."""
    for work in plan.work:
        group, function = work.group, None
        if isinstance(group, TableColumns) and (work.fragments or plan.may_be_outdated):
            function = group.make(reader(plan, plan.dataset.get_fragments()))
            if plan.may_be_outdated:
                work.fragments = _with_outdated(plan, work, function)
        if work.fragments:
            _stage_group(plan, work, session, function)


@dataclass(frozen=True)
class _PlanReader:
    """Reads columns of a plan's fragments, from the files staged so far where there are any."""

    plan: Plan
    fragments: Sequence[lance.LanceFragment]

    def __call__(self, name: str) -> pa.ChunkedArray:
        import pyarrow as pa

        return pa.chunked_array(list(self.batches(name)), self._field(name).type)

    def batches(self, name: str) -> Iterator[pa.Array]:
        ours = next((work for work in self.plan.work if name in work.outputs.names), None)
        return columnread.column_batches(
            self.plan.dataset,
            self.fragments,
            self._field(name),
            staged=ours.staged if ours else {},
            in_table=name in self.plan.dataset.schema.names and not (ours and ours.remake),
        )

    def _field(self, name: str) -> pa.Field:
        ours = {f.name: f for f in self.plan.fields}
        return ours[name] if name in ours else self.plan.dataset.schema.field(name)


def reader(plan: Plan, fragments: Sequence[lance.LanceFragment]) -> ColumnReader:
    """Reads columns of these fragments, from the files staged so far where there are any."""
    return _PlanReader(plan, fragments)


def _stage_group(plan: Plan, work: GroupWork, session: Session, function: BatchFunction | None) -> None:
    key = _key(plan, work)
    whole_table = isinstance(work.group, TableColumns)
    stems = columnfile.stems(plan.dataset, work.fragments, work.group.inputs, key, whole_table=whole_table)
    fragments = plan.dataset.get_fragments()
    committed = {columnfile.stem_of(file.path) for fragment in fragments for file in fragment.metadata.files}
    assert not committed.intersection(stems.values()), f"{plan.dataset.uri}: a committed file would be written again"
    starts = columnfile.staged_parts(plan.dataset.uri)
    job = Job(
        key=digest(key),
        uri=plan.dataset.uri,
        version=plan.dataset.version,
        group=work.group,
        outputs=work.outputs,
        judged=work.judged,
        error_name=work.error_name,
        on_error=plan.spec.on_error,
        batch_bytes=plan.spec.batch_bytes,
    )
    ranges = [
        piece
        for fragment in work.fragments
        for stem in [stems[fragment.fragment_id]]
        for piece in tasks.cut(plan.dataset, fragment, work.group, stem, starts.get(stem, []))
    ]
    names = work.group.names
    label = f"{plan.spec.stage}: {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
    with Progress(label, total=sum(f.count_rows() for f in work.fragments)) as progress:

        def report(rows: int, num_bytes: int, was_finished: bool) -> None:
            if was_finished:
                progress.skip(rows)
            else:
                progress.update(rows, num_bytes)

        results = session.run(job, ranges, report) if function is None else _run_here(job, ranges, report, function)
        work.staged, joins = tasks.joined(ranges, results)
        for join, files in zip(joins, session.run(job, joins, report) if joins else [], strict=True):
            work.staged[join.fragment_id] = files[0]
            plan.joined_parts += [part.name for part in join.parts]


def _key(plan: Plan, work: GroupWork) -> dict[str, Any]:
    """All that makes the values, for names; not batch sizes, engines or numbers of workers, which change none."""
    return {
        "code_version": plan.spec.code_version,
        "parameters": plan.spec.parameters,
        "outputs": [f"{f.name}:{f.type}" for f in work.outputs],
        "inputs": list(work.group.inputs),
        "on_error": plan.spec.on_error,
        "last_version": plan.previous.version if plan.previous else 0,
    }


def _run_here(job: Job, ranges: Sequence[Range], report: Report, function: BatchFunction) -> list[list[StagedFile]]:
    state = State(Worker(num_threads=1, device="cpu"))
    state.use(job, function)
    return [piece.run(job, state, report) for piece in ranges]


def _with_outdated(plan: Plan, work: GroupWork, function: BatchFunction) -> list[lance.LanceFragment]:
    """The group's fragments, and those that hold a value which the function gives otherwise now."""
    missing = {fragment.fragment_id for fragment in work.fragments}
    return [f for f in plan.wanted if f.fragment_id in missing or _is_outdated(f, work, function)]


def _is_outdated(fragment: lance.LanceFragment, work: GroupWork, function: BatchFunction) -> bool:
    inputs, names = list(work.group.inputs), list(work.group.names)
    for batch in fragment.scanner(columns=inputs + names, batch_size=columnfile.READ_BATCH_ROWS).to_batches():
        now = function(batch.select(inputs))
        if any(not array.equals(batch.column(name)) for name, array in zip(names, now, strict=True)):
            return True
    return False
