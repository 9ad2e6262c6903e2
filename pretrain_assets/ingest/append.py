"""Append documents to the table: one commit per ingest, whatever the number of files.

Invariant: ids are dense in the order of the files and never used twice; files that are in the table are skipped; a
killed or failed ingest leaves the table at its last version, and the next one goes on where it was.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import IngestConfig
from pretrain_assets.errors import InputError
from pretrain_assets.ingest.commit import STAGE, Base, commit, find_base
from pretrain_assets.ingest.documents import Layout
from pretrain_assets.ingest.journal import Entry, Journal
from pretrain_assets.ingest.preflight import preflight
from pretrain_assets.ingest.sources import SourceFile, list_files
from pretrain_assets.ingest.write import Target, UnitWriter
from pretrain_assets.progress import Progress
from pretrain_assets.table.lease import hold
from pretrain_assets.table.lineage import LineageRecord, StageResult, digest
from pretrain_assets.table.storage import Location
from pretrain_assets.table.versions import latest_record, table_id, tag_version

if TYPE_CHECKING:
    import lance

CODE_VERSION = "1"
"""Raise it when the same files give other values."""

_log = logging.getLogger(__name__)


def ingest(location: Location, config: IngestConfig, *, run_id: str | None = None) -> StageResult:
    """Read every file that is not in the table yet, and commit all of them as one version tagged `ingested-v<N>`.

    Returns the new record, or the last one with `changed=False` when no file is new or none has a usable row.

    Raises:
        InputError: a source, file or row that cannot be used, or a file that changed since it was ingested.
        ConfigError: an extra column that the table cannot take.
        BusyError: another ingest is running, or maintenance.
        CommitError: another ingest committed meanwhile; run again.
    """
    with hold(location, "ingest"):
        return _ingest(location, config, run_id)


def _ingest(location: Location, config: IngestConfig, run_id: str | None) -> StageResult:
    started = time.monotonic()
    base = find_base(location)
    files = _new_files(list_files(config), base.known)
    if not files and base.record is not None and base.dataset is not None:
        Journal(location).clear()
        adopted = _after_deletion(base.dataset, base, run_id)
        if adopted is not None:
            return StageResult(record=adopted, changed=False)
        _log.info("ingested: nothing new in %s; still at %s", ", ".join(config.sources), base.record.pin)
        return StageResult(record=base.record, changed=False)
    layout, total = preflight(files, config, base.dataset.schema if base.dataset is not None else None)
    entries = _write(location, base, layout, files, total)
    record = _record(base, layout, entries, run_id)
    if record.rows == 0:
        Journal(location).clear()
        return _no_rows(base, record)
    dataset = commit(location, base, layout.schema, entries, record)
    seconds = round(time.monotonic() - started, 3)
    record = replace(record, version=dataset.version, rows_total=dataset.count_rows(), seconds=seconds)
    tag_version(dataset, record)
    Journal(location).clear()
    _log.info("ingested: %s rows, version %d, tag %s", f"{record.rows:,}", record.version, record.tag)
    return StageResult(record=record, changed=True)


def _after_deletion(dataset: lance.LanceDataset, base: Base, run_id: str | None) -> LineageRecord | None:
    """Where rows were deleted since the last ingest, the stage moves on to the newest version: a tag, no commit.

    So later stages look at what is left, and no stage needs a version that still has the deleted rows.
    """
    deleted = latest_record(dataset, "deleted")
    if base.record is None or deleted is None or deleted.version <= base.record.version:
        return None
    record = replace(
        base.record,
        version=dataset.version,
        run_id=run_id,
        rows=0,
        rows_total=dataset.count_rows(),
        bytes_added=0,
        ledger={"in": 0, "written": 0},
        seconds=0.0,
        details={"files": [], "next_id": base.next_id},
    )
    tag_version(dataset, record)
    _log.info("ingested: nothing new, but rows were deleted (%s); moves on to %s", deleted.tag, record.tag)
    return record


def _new_files(files: Sequence[SourceFile], known: dict[str, tuple[str, int]]) -> list[SourceFile]:
    for file in files:
        fingerprint, version = known.get(file.name, (file.fingerprint, 0))
        if fingerprint != file.fingerprint:
            raise InputError(
                f"{file.name} changed since it was ingested in version {version} (its fingerprint was {fingerprint}, "
                f"now {file.fingerprint}). Ingested documents are never replaced: give the new documents as a new "
                "file, or ingest the changed file under a new name; the next stage marks exact duplicates."
            )
    return [file for file in files if file.name not in known]


def _parameters(config: IngestConfig) -> dict[str, Any]:
    """The settings that change what is written."""
    return {
        "sources": list(config.sources),
        "text_column": config.text_column,
        "id_column": config.id_column,
        "score_column": config.score_column,
        "source_column": config.source_column,
        "extra_columns": list(config.extra_columns),
        "on_bad_row": config.on_bad_row,
    }


def _write(
    location: Location, base: Base, layout: Layout, files: Sequence[SourceFile], total: int | None
) -> list[Entry]:
    """Data files of all units, from the journal where an interrupted ingest finished them."""
    identity = table_id(base.dataset) if base.dataset is not None else uuid.uuid4().hex
    target = Target(location=location, dataset=base.dataset, table_id=identity, first_id=base.next_id)
    parameters = {**_parameters(layout.config), "sources": None}
    table = "new" if base.dataset is None else identity
    key = digest([table, base.next_id, CODE_VERSION, parameters, str(layout.schema)])
    with Progress("ingest", total=total) as progress:
        return UnitWriter(target, layout, Journal(location), progress).write(files, key)


def _record(base: Base, layout: Layout, entries: Sequence[Entry], run_id: str | None) -> LineageRecord:
    """The record before its commit: version, total and seconds are what they will be if nobody else commits."""
    ledger: Counter[str] = Counter({"in": 0, "written": 0})
    for entry in entries:
        ledger.update(entry.ledger)
    return LineageRecord(
        stage=STAGE,
        table_id=entries[0].table_id,
        version=base.dataset.version + 1 if base.dataset is not None else 1,
        inputs=layout.config.sources,
        columns=tuple(layout.schema.names),
        parameters=_parameters(layout.config),
        code_version=CODE_VERSION,
        run_id=run_id,
        rows=ledger["written"],
        rows_total=(base.dataset.count_rows() if base.dataset is not None else 0) + ledger["written"],
        bytes_added=sum(size for entry in entries for _, size in entry.data_files),
        ledger=dict(ledger),
        seconds=0.0,
        details={"files": [file for entry in entries for file in entry.files], "next_id": entries[-1].next_id},
    )


def _no_rows(base: Base, record: LineageRecord) -> StageResult:
    """No usable row is an error for a new table, and nothing to do for one that exists."""
    if base.record is None:
        raise InputError(
            f"No source has a usable row, so there is no table to make: {', '.join(record.inputs)} gave "
            f"{record.ledger}. Check the sources and text_column={record.parameters['text_column']!r}."
        )
    _log.warning("ingested: no new file has a usable row (%s); still at %s", record.ledger, base.record.pin)
    return StageResult(record=base.record, changed=False)
