"""The chain from a checkpoint back to the files: checkpoint -> tokenized -> deduped -> ingested, from the table alone.

Invariant: every link is read from a lineage record or a passport; Dagster's provenance tags say the same.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pretrain_assets.errors import TableError
from pretrain_assets.forensics.checkpoints import Checkpoint
from pretrain_assets.forensics.subject import table_of
from pretrain_assets.table.lineage import LineageRecord, Pin
from pretrain_assets.table.storage import Location
from pretrain_assets.table.versions import flow_place, open_pin, record_of, records

if TYPE_CHECKING:
    import lance


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """A checkpoint and the records of the versions behind it, newest stage first."""

    checkpoint: Checkpoint
    """The model."""
    records: tuple[LineageRecord, ...]
    """tokenized, the stages of curation that it has been through, ingested."""
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


def _input_of(dataset: lance.LanceDataset, record: LineageRecord) -> LineageRecord:
    """The record behind a record's input: of the latest stage before it that stands at that version."""
    version = Pin.parse(record.inputs[0]).version
    for earlier in reversed(records(dataset)):
        if earlier.version == version and flow_place(earlier.stage) < flow_place(record.stage):
            return earlier
    raise TableError(f"{record.tag} was made from version {version}, of which no stage before it has a record")


def lineage_of(location: Location, checkpoint: Checkpoint) -> Lineage:
    """Follow a checkpoint's passport through the table's records.

    Raises:
        TableError: the table is another one, or a version's record is gone.
    """
    location = table_of(checkpoint.run_dir, checkpoint.pin, location)
    dataset = open_pin(location, checkpoint.pin)
    stage = str(checkpoint.passport["tag"]).rpartition("-v")[0]  # tokenized, or tokenized_byte beside it
    found = [record_of(dataset, stage, checkpoint.pin.version)]
    while found[-1].stage != "ingested":
        found.append(_input_of(dataset, found[-1]))
    ingests = [record for record in records(dataset, "ingested") if record.version <= found[-1].version]
    return Lineage(checkpoint=checkpoint, records=tuple(found), ingests=tuple(ingests))
