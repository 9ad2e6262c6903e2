"""The column filler: compute the columns a stage owns, for the rows that lack them, as exactly one new version.

How: look at what is missing; stage one column file per fragment under a deterministic name, by any engine; commit once;
read back; tag. A killed fill finds its finished work by name and goes on. Nothing that exists is rewritten.

Why two commit operations: new rows of one column group are a `DataReplacement`, which commutes with appends, deletes
and index builds. New columns, or columns made anew by other code or parameters, also change the schema, and `Merge`
changes both in one version (declaring first would make two); several column groups need it too, since a
`DataReplacement` takes one file per fragment. A `Merge` that loses a race is planned again from the staged files.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import TYPE_CHECKING

from pretrain_assets.config import EngineConfig
from pretrain_assets.errors import CommitError
from pretrain_assets.table.filler import columnfile, columnread, engines, operations
from pretrain_assets.table.filler.plan import Plan, make_plan
from pretrain_assets.table.filler.spec import Fill
from pretrain_assets.table.filler.staging import reader, stage
from pretrain_assets.table.lease import hold
from pretrain_assets.table.lineage import RECORD_KEY, LineageRecord, Pin, StageResult
from pretrain_assets.table.storage import Location, filesystem, storage_options
from pretrain_assets.table.versions import heal, table_id, tag_version

if TYPE_CHECKING:
    import lance

_log = logging.getLogger(__name__)

COMMIT_TRIES = 8
"""Commits tried before giving up; each retry re-plans and reuses every staged file."""
EXAMPLES = 10
"""Failed rows named in the record; the column with the reasons has them all."""


def fill(
    location: Location,
    spec: Fill,
    *,
    input_pin: Pin,
    run_id: str | None = None,
    engine: EngineConfig | None = None,
) -> StageResult:
    """Bring a stage's columns up to date for the rows of `input_pin`.

    One new version if anything was missing; otherwise none, and the previous record is returned. If nothing is missing
    but the input is newer than the stage's last version, the stage adopts the input's version: a new tag, no commit.

    Args:
        location: The table.
        spec: Columns, code and parameters.
        input_pin: Version the stage was asked to work from; rows appended later are left to the next run.
        run_id: Dagster run id for the lineage record.
        engine: Where the columns are computed; None: processes on this machine.

    Raises:
        TableError: `input_pin` names another table, or a version that is gone.
        ColumnError: a row cannot be computed, and `spec.on_error` is `raise`.
        WorkerError: workers die at the same rows again and again.
        BusyError: another process fills the same columns, or maintains the table.
        CommitError: another writer kept winning; staged files stay for the next try.
    """
    with hold(location, f"fill {spec.stage}"), engines.start(engine or EngineConfig()) as session:
        return _fill(location, spec, input_pin, run_id, session)


def _fill(location: Location, spec: Fill, input_pin: Pin, run_id: str | None, session: engines.Session) -> StageResult:
    from lance.commit import CommitConflictError

    started = time.monotonic()
    heal(location)
    for attempt in range(COMMIT_TRIES):
        plan = make_plan(location, spec, input_pin)
        for names, changes in plan.changes.items() if attempt == 0 else ():  # a forgotten option may have caused it
            _log.warning("%s: every row is computed anew, made otherwise before (%s)", names, "; ".join(changes))
        stage(plan, session)
        if not plan.filled and not plan.remake:
            return _nothing_to_fill(plan, input_pin, run_id)
        record = _record(plan, input_pin, run_id, time.monotonic() - started)
        _check_sizes(plan)
        try:
            committed = _commit(location, plan, record)
        except CommitConflictError as error:
            _log.info("another writer committed first; re-planning (%d of %d): %s", attempt + 1, COMMIT_TRIES, error)
            continue
        return _finish(committed, plan, record, time.monotonic() - started)
    raise CommitError(
        f"{spec.stage} lost {COMMIT_TRIES} commits in a row to other writers of {location.uri}. The computed column "
        "files are kept; run the same command again when the table is quiet."
    )


def _check_sizes(plan: Plan) -> None:
    """Look at the staged files once more: a worker that outlived its killed driver could have written one again."""
    sizes = columnfile.sizes(plan.dataset.uri)
    for file in (file for work in plan.work for file in work.staged.values()):
        if sizes.get(file.name) != file.num_bytes:
            raise CommitError(
                f"{file.name} was {file.num_bytes} bytes when staged and is {sizes.get(file.name)} now: a worker "
                "of a killed run may have written it again. Nothing was committed; run the same command again."
            )


def _commit(location: Location, plan: Plan, record: LineageRecord) -> lance.LanceDataset:
    import lance

    written = [work for work in plan.work if work.staged]
    if plan.schema_changes or len(written) != 1:
        operation = operations.merge_operation(
            plan.dataset,
            [work.outputs for work in plan.work],
            [work.staged for work in plan.work],
            remade=[work.remake for work in plan.work],
        )
    else:
        operation = operations.replacement_operation(plan.dataset, written[0].outputs, written[0].staged)
    transaction = lance.Transaction(
        read_version=plan.dataset.version,
        operation=operation,
        transaction_properties={RECORD_KEY: record.to_json()},
    )
    return lance.LanceDataset.commit(location.uri, transaction, storage_options=storage_options(location.uri))


def _finish(committed: lance.LanceDataset, plan: Plan, record: LineageRecord, seconds: float) -> StageResult:
    for work in plan.work:
        columnread.read_back(committed, list(work.staged), work.judged)
    record = dataclasses.replace(
        record,
        version=committed.version,
        rows_total=committed.count_rows(),
        seconds=round(seconds, 3),
    )
    tag_version(committed, record)
    for name in plan.joined_parts:
        fs, path = filesystem(columnfile.data_path(committed.uri, name))
        fs.rm_file(path)
    _log.info("%s: %s rows, version %d, tag %s", record.stage, f"{record.rows:,}", record.version, record.tag)
    return StageResult(record=record, changed=True)


def _record(plan: Plan, input_pin: Pin, run_id: str | None, seconds: float) -> LineageRecord:
    spec, rows = plan.spec, sum(fragment.count_rows() for fragment in plan.filled)
    failed, examples = _failures(plan)
    written = {"in": rows, "written": rows - sum(failed.values())}
    ledger = spec.summarize(reader(plan, plan.filled)) if spec.summarize else written
    return LineageRecord(
        stage=spec.stage,
        table_id=table_id(plan.dataset),
        version=0,  # unknown before the commit; `heal` and `_finish` fill it in
        inputs=(str(input_pin),),
        columns=tuple(f.name for f in plan.fields),
        parameters=spec.parameters,
        code_version=spec.code_version,
        run_id=run_id,
        rows=rows,
        rows_total=plan.dataset.count_rows(),
        bytes_added=sum(file.num_bytes for work in plan.work for file in work.staged.values()),
        ledger={**ledger, **failed},
        seconds=round(seconds, 3),
        details={
            "planned": {"version": plan.dataset.version, "rows": plan.dataset.count_rows()},
            **_limits(spec),
            **spec.facts,
            **({"max_failed_share": spec.max_failed_share, "failed": examples} if failed else {}),
        },
    )


def _limits(spec: Fill) -> dict[str, object]:
    return {"limits": dict(spec.limits)} if spec.limits else {}


def _failures(plan: Plan) -> tuple[dict[str, int], list[dict[str, object]]]:
    """Failed rows by kind of error, and the first of them with their reasons."""
    import pyarrow.compute as pc

    counts: dict[str, int] = {}
    examples: list[dict[str, object]] = []
    read = reader(plan, plan.filled)
    for work in plan.work:
        if work.error_name is None or plan.spec.on_error == "raise" or not work.staged:
            continue
        reasons = read(work.error_name)
        if reasons.null_count == len(reasons):
            continue
        failed = pc.is_valid(reasons)
        kinds = pc.value_counts(pc.list_element(pc.split_pattern(reasons.filter(failed), ":"), 0)).to_pylist()
        counts.update({f"failed:{kind['values']}": kind["counts"] for kind in kinds})
        first = zip(read("id").filter(failed)[:EXAMPLES], reasons.filter(failed)[:EXAMPLES], strict=True)
        examples += [{"id": row_id.as_py(), "reason": reason.as_py()} for row_id, reason in first]
    return counts, examples


def _nothing_to_fill(plan: Plan, input_pin: Pin, run_id: str | None) -> StageResult:
    previous = plan.previous
    if previous is not None and previous.version >= input_pin.version:
        _log.info("%s: nothing new, still %s", previous.stage, previous.tag)
        current = dataclasses.replace(previous, details={**previous.details, **_limits(plan.spec)})
        if current != previous:
            tag_version(plan.dataset, current)
        return StageResult(record=current, changed=False)
    record = dataclasses.replace(
        _record(plan, input_pin, run_id, 0.0), version=input_pin.version, rows_total=plan.input_rows
    )
    tag_version(plan.dataset, record)
    _log.info("%s: no value missing, adopts version %d of its input", record.stage, record.version)
    return StageResult(record=record, changed=False)
