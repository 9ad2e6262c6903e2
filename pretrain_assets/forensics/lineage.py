"""The chain from a checkpoint back to the files: checkpoint -> tokenized -> deduped -> ingested, from the table alone.

Invariant: every link is read from a lineage record or a passport; Dagster's provenance tags say the same.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pretrain_assets.forensics.checkpoints import Checkpoint
from pretrain_assets.table.lineage import LineageRecord, Pin
from pretrain_assets.table.storage import Location
from pretrain_assets.table.versions import open_pin, record_of, records

UPSTREAM = {"tokenized": "deduped", "deduped": "ingested"}
"""The stage whose version a stage reads."""


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """A checkpoint and the records of the versions behind it, newest stage first."""

    checkpoint: Checkpoint
    """The model."""
    records: tuple[LineageRecord, ...]
    """tokenized, deduped, ingested."""
    ingests: tuple[LineageRecord, ...]
    """Every ingest that the version holds rows of, oldest first; the last is the chain's own."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready facts."""
        passport = self.checkpoint.passport
        return {
            "checkpoint": {
                "uri": self.checkpoint.uri,
                "recipe": passport["recipe"]["name"],
                "step": self.checkpoint.step,
                "pin": passport["pin"],
                "tag": passport["tag"],
                "filter": passport["filter"],
                "tokens_seen": passport["tokens_seen"],
            },
            "chain": [_facts(record) for record in self.records],
            "ingests": [_facts(record) for record in self.ingests],
        }


def _facts(record: LineageRecord) -> dict[str, Any]:
    return {**asdict(record), "pin": str(record.pin), "tag": record.tag}


def lineage_of(location: Location, checkpoint: Checkpoint) -> Lineage:
    """Follow a checkpoint's passport through the table's records.

    Raises:
        TableError: the table is another one, or a version's record is gone.
    """
    dataset = open_pin(location, checkpoint.pin)
    stage, version = "tokenized", checkpoint.pin.version
    found = [record_of(dataset, stage, version)]
    while stage in UPSTREAM:
        stage, version = UPSTREAM[stage], Pin.parse(found[-1].inputs[0]).version
        found.append(record_of(dataset, stage, version))
    ingests = [record for record in records(dataset, "ingested") if record.version <= found[-1].version]
    return Lineage(checkpoint=checkpoint, records=tuple(found), ingests=tuple(ingests))
