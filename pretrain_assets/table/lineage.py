"""Lineage records: what a stage did, in one JSON document stored with the version it made.

The same record goes into the transaction properties of the commit and into the metadata of the tag that names the
version, so the table explains itself without Dagster and survives the clean-up of old transactions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

RECORD_KEY = "pretrain.record"
"""Key of the record in transaction properties and in tag metadata."""


@dataclass(frozen=True, order=True)
class Pin:
    """An exact version of an exact table. Written everywhere as `table-id@version`."""

    table_id: str
    """UUID made when the table was created: a recreated table is never mistaken for the old one."""
    version: int
    """LanceDB version number."""

    def __str__(self) -> str:
        return f"{self.table_id}@{self.version}"

    @staticmethod
    def parse(text: str) -> Pin:
        """Read `table-id@version` back."""
        table_id, _, version = text.rpartition("@")
        if not table_id or not version.isdigit():
            raise ValueError(f"Not a pin: {text!r} (expected table-id@version)")
        return Pin(table_id, int(version))


@dataclass(frozen=True, kw_only=True)
class LineageRecord:
    """What one stage did to make one version: its inputs, columns, parameters and ledger."""

    stage: str
    """Stage name, also the prefix of its tags: ingested, deduped, tokenized, indexed."""
    table_id: str
    """Identity of the table."""
    version: int
    """Version that this record describes."""
    inputs: tuple[str, ...]
    """Pins read by the stage (`table-id@version`); for ingest, the names of the sources."""
    columns: tuple[str, ...]
    """Columns written."""
    parameters: dict[str, Any]
    """Everything that changes the values written, as plain JSON."""
    code_version: str
    """Version of the code that computed the columns."""
    run_id: str | None
    """Dagster run id, or None when run by hand."""
    rows: int
    """Rows written by this stage in this version."""
    rows_total: int
    """Rows of the table at this version."""
    bytes_added: int
    """Bytes of the data files that this version added."""
    ledger: dict[str, int]
    """Counts that close: `in` equals the sum of everything else."""
    seconds: float
    """Wall-clock seconds that the stage worked."""
    details: dict[str, Any] = field(default_factory=dict)
    """Stage-specific facts, such as the fingerprints of ingested files."""

    @property
    def pin(self) -> Pin:
        """The pin of the version described."""
        return Pin(self.table_id, self.version)

    @property
    def tag(self) -> str:
        """The tag that names this version for this stage."""
        return f"{self.stage}-v{self.version}"

    def to_json(self) -> str:
        """One JSON document, keys sorted."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, ensure_ascii=False)

    @staticmethod
    def from_json(text: str, *, version: int | None = None) -> LineageRecord:
        """Read a record back; `version` fills in what a transaction could not know before its commit."""
        values = json.loads(text)
        if version is not None:
            values["version"] = version
        values["inputs"] = tuple(values["inputs"])
        values["columns"] = tuple(values["columns"])
        return LineageRecord(**values)


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """What a stage answers: the record of its current version, and whether this call made it."""

    record: LineageRecord
    """Record of the version the stage stands at."""
    changed: bool
    """False when there was nothing to do and no version was made."""

    @property
    def pin(self) -> Pin:
        """Pin of the version the stage stands at."""
        return self.record.pin


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(value: Any) -> str:
    """First 16 hex digits of the SHA-256 of a plain JSON value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]
