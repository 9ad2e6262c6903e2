"""The column filler: compute the columns a stage owns, for the rows that lack them, as exactly one new version.

How: look at what is missing; stage one column file per fragment under a deterministic name; commit once; read back;
tag. A killed fill finds its finished fragments by name and goes on. Nothing that exists is rewritten.

Why two commit operations: new rows of one column group are a `DataReplacement`, which commutes with appends, deletes
and index builds. New columns, or columns made anew by other code or parameters, also change the schema, and `Merge`
changes both in one version (declaring first would make two); several column groups need it too, since a
`DataReplacement` takes one file per fragment. A `Merge` that loses a race is planned again from the staged files.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pretrain_assets.errors import CommitError
from pretrain_assets.progress import Progress
from pretrain_assets.table import columnfile, operations
from pretrain_assets.table.columnfile import StagedFile
from pretrain_assets.table.lineage import RECORD_KEY, LineageRecord, Pin, StageResult
from pretrain_assets.table.schema import same_making
from pretrain_assets.table.storage import Location, open_dataset, storage_options
from pretrain_assets.table.versions import heal, latest_record, open_pin, table_id, tag_version

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

_log = logging.getLogger(__name__)

COMMIT_TRIES = 8
"""Commits tried before giving up; each retry re-plans and reuses every staged file."""

BatchFunction = Callable[["pa.RecordBatch"], Sequence["pa.Array"]]
"""Input columns of some rows in, one array per output column out, same length and order."""


class ColumnReader(Protocol):
    """Reads any column of the rows being worked on, files staged by an earlier group included."""

    def __call__(self, name: str) -> pa.ChunkedArray:
        """All live values of a column in row order; NULL where a computed column has no value yet."""


@dataclass(frozen=True, kw_only=True)
class ColumnGroup:
    """Columns computed together, and how."""

    outputs: pa.Schema
    """Fields written, narrowest last, their making in the metadata (`schema.computed_field`)."""
    inputs: tuple[str, ...]
    """Columns of the table that the batch function is given."""
    prepare: Callable[[ColumnReader], BatchFunction]
    """Builds the batch function once per fill; heavy state such as a tokenizer is loaded here."""
    whole_table: bool = False
    """The values of a row depend on earlier rows too, so a staged file is reusable only while all of them stay."""


@dataclass(frozen=True, kw_only=True)
class Fill:
    """A stage that computes columns."""

    stage: str
    """Stage name."""
    groups: tuple[ColumnGroup, ...]
    """Column groups in the order they are computed."""
    code_version: str
    """Version of the code that computes the values; a change recomputes every row."""
    parameters: dict[str, Any]
    """Parameters that change the values, as plain JSON; a change recomputes every row."""
    batch_bytes: int
    """Bytes of input held per batch."""
    summarize: Callable[[ColumnReader], dict[str, int]] | None = None
    """Ledger of the rows filled, from the columns just computed; must close on `in`. None: all rows are `written`."""

    @property
    def fields(self) -> list[pa.Field]:
        """All fields written, group by group."""
        return [f for group in self.groups for f in group.outputs]


@dataclass(kw_only=True)
class _Plan:
    """What one fill has to do on one version of the table."""

    dataset: lance.LanceDataset
    fragments: list[lance.LanceFragment]
    """Fragments that lack values."""
    remake: bool
    """The columns are new, or made by other code or parameters: every fragment, and the schema changes."""
    input_rows: int
    """Rows of the input version."""
    staged: list[dict[int, StagedFile]] = field(default_factory=list)
    """Per group: fragment id to staged file."""


def fill(location: Location, spec: Fill, *, input_pin: Pin, run_id: str | None = None) -> StageResult:
    """Bring a stage's columns up to date for the rows of `input_pin`.

    One new version if anything was missing; otherwise none, and the previous record is returned. If nothing is missing
    but the input is newer than the stage's last version, the stage adopts the input's version: a new tag, no commit.

    Args:
        location: The table.
        spec: Columns, code and parameters.
        input_pin: Version the stage was asked to work from; rows appended later are left to the next run.
        run_id: Dagster run id for the lineage record.

    Raises:
        TableError: `input_pin` names another table, or a version that is gone.
        CommitError: another writer kept winning; staged files stay for the next try.
    """
    from lance.commit import CommitConflictError

    started = time.monotonic()
    heal(location)
    for attempt in range(COMMIT_TRIES):
        plan = _plan(location, spec, input_pin)
        if not plan.fragments and not plan.remake:
            return _nothing_to_fill(plan, spec, input_pin, run_id)
        _stage(plan, spec)
        record = _record(plan, spec, input_pin, run_id, time.monotonic() - started)
        try:
            committed = _commit(location, plan, spec, record)
        except CommitConflictError as error:
            _log.info("another writer committed first; re-planning (%d of %d): %s", attempt + 1, COMMIT_TRIES, error)
            continue
        return _finish(committed, plan, spec, record, time.monotonic() - started)
    raise CommitError(
        f"{spec.stage} lost {COMMIT_TRIES} commits in a row to other writers of {location.uri}. The computed column "
        "files are kept; run the same command again when the table is quiet."
    )


def missing_fragments(dataset: lance.LanceDataset, groups: Sequence[ColumnGroup]) -> list[lance.LanceFragment]:
    """Fragments that lack values: no file carries a field, or compaction stored NULLs for it.

    A stage's function never returns NULL for a live row, so a stored NULL always means "not computed". Columns of a
    group are written together, so NULLs are looked for in its last column only: put the narrowest last.
    """
    leaves = columnfile.leaf_ids(dataset.lance_schema, [f.name for group in groups for f in group.outputs])
    null = " OR ".join(f"{group.outputs.names[-1]} IS NULL" for group in groups)
    missing = []
    for fragment in dataset.get_fragments():
        carried = {leaf for file in fragment.metadata.files for leaf in file.fields}
        if not carried.issuperset(leaves) or fragment.count_rows(null):
            missing.append(fragment)
    return missing


def _plan(location: Location, spec: Fill, input_pin: Pin) -> _Plan:
    dataset = open_dataset(location)
    existing = {f.name: f for f in dataset.schema}
    remake = not all(f.name in existing and same_making(existing[f.name], f) for f in spec.fields)
    candidates = dataset.get_fragments() if remake else missing_fragments(dataset, spec.groups)
    pinned = open_pin(location, input_pin)
    wanted = _fragments_of(dataset, pinned)
    return _Plan(
        dataset=dataset,
        fragments=[f for f in candidates if f.fragment_id in wanted],
        remake=remake,
        input_rows=pinned.count_rows(),
    )


def _fragments_of(dataset: lance.LanceDataset, pinned: lance.LanceDataset) -> set[int]:
    """Fragments of the newest version that hold the pinned rows; all of them if compaction moved rows since."""
    now = {fragment.fragment_id for fragment in dataset.get_fragments()}
    then = {fragment.fragment_id for fragment in pinned.get_fragments()}
    return then if then <= now else now


def _stage(plan: _Plan, spec: Fill) -> None:
    rows = sum(fragment.count_rows() for fragment in plan.fragments)
    for group in spec.groups:
        names = ", ".join(group.outputs.names)
        key = {
            "code_version": spec.code_version,
            "parameters": spec.parameters,
            "outputs": [f"{f.name}:{f.type}" for f in group.outputs],
            "inputs": list(group.inputs),
        }
        with Progress(f"{spec.stage}: {names}", total=rows) as progress:
            plan.staged.append(
                columnfile.stage(
                    plan.dataset,
                    plan.fragments,
                    outputs=group.outputs,
                    inputs=group.inputs,
                    make_function=lambda group=group: group.prepare(  # type: ignore[misc]
                        _reader(plan, spec, plan.dataset.get_fragments())
                    ),
                    key=key,
                    whole_table=group.whole_table,
                    batch_bytes=spec.batch_bytes,
                    progress=progress,
                )
            )


def _reader(plan: _Plan, spec: Fill, fragments: Sequence[lance.LanceFragment]) -> ColumnReader:
    groups = zip(spec.groups, plan.staged, strict=False)
    staged = {name: files for group, files in groups for name in group.outputs.names}
    columns = {f.name: f for f in [*plan.dataset.schema, *spec.fields]}
    made_otherwise = {f.name for f in spec.fields} if plan.remake else set()
    return lambda name: columnfile.read_column(
        plan.dataset,
        fragments,
        columns[name],
        staged=staged.get(name, {}),
        in_table=name not in made_otherwise,
    )


def _commit(location: Location, plan: _Plan, spec: Fill, record: LineageRecord) -> lance.LanceDataset:
    import lance

    outputs = [group.outputs for group in spec.groups]
    if plan.remake or len(outputs) > 1:
        operation = operations.merge_operation(plan.dataset, outputs, plan.staged, remake=plan.remake)
    else:
        operation = operations.replacement_operation(plan.dataset, outputs[0], plan.staged[0])
    transaction = lance.Transaction(
        read_version=plan.dataset.version,
        operation=operation,
        transaction_properties={RECORD_KEY: record.to_json()},
    )
    return lance.LanceDataset.commit(location.uri, transaction, storage_options=storage_options(location.uri))


def _finish(
    committed: lance.LanceDataset, plan: _Plan, spec: Fill, record: LineageRecord, seconds: float
) -> StageResult:
    filled = tuple(fragment.fragment_id for fragment in plan.fragments)
    columnfile.read_back(committed, filled, [f.name for f in spec.fields])
    record = dataclasses.replace(
        record,
        version=committed.version,
        rows_total=committed.count_rows(),
        seconds=round(seconds, 3),
    )
    tag_version(committed, record)
    _log.info("%s: %s rows, version %d, tag %s", spec.stage, f"{record.rows:,}", record.version, record.tag)
    return StageResult(record=record, changed=True)


def _record(plan: _Plan, spec: Fill, input_pin: Pin, run_id: str | None, seconds: float) -> LineageRecord:
    rows = sum(fragment.count_rows() for fragment in plan.fragments)
    written = {"in": rows, "written": rows}
    return LineageRecord(
        stage=spec.stage,
        table_id=table_id(plan.dataset),
        version=0,  # unknown before the commit; `heal` and `_finish` fill it in
        inputs=(str(input_pin),),
        columns=tuple(f.name for f in spec.fields),
        parameters=spec.parameters,
        code_version=spec.code_version,
        run_id=run_id,
        rows=rows,
        rows_total=plan.dataset.count_rows(),
        bytes_added=sum(file.num_bytes for files in plan.staged for file in files.values()),
        ledger=spec.summarize(_reader(plan, spec, plan.fragments)) if spec.summarize else written,
        seconds=round(seconds, 3),
    )


def _nothing_to_fill(plan: _Plan, spec: Fill, input_pin: Pin, run_id: str | None) -> StageResult:
    previous = latest_record(plan.dataset, spec.stage)
    if previous is not None and previous.version >= input_pin.version:
        _log.info("%s: nothing new, still %s", spec.stage, previous.tag)
        return StageResult(record=previous, changed=False)
    record = dataclasses.replace(
        _record(plan, spec, input_pin, run_id, 0.0), version=input_pin.version, rows_total=plan.input_rows
    )
    tag_version(plan.dataset, record)
    _log.info("%s: no value missing, adopts version %d of its input", spec.stage, record.version)
    return StageResult(record=record, changed=False)
