"""Versions and tags: who made a version, under which tag, and how to open exactly that one.

Invariant: every version a stage commits carries the tag `<stage>-v<N>` with its lineage record; `heal` restores a tag
that a killed process did not get to write. Retention takes a tag away only once its record stands in the metadata of
the tag `history`, so no record is ever lost, and a record that stands there is never made a tag again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pretrain_assets.errors import TableError
from pretrain_assets.table.lineage import RECORD_KEY, LineageRecord, Pin, digest
from pretrain_assets.table.storage import Location, open_dataset

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

TABLE_ID_KEY = b"pretrain.table_id"
"""Key of the table's identity in the metadata of its `id` column (lancedb 0.40 panics on metadata of the schema)."""

CURATION = ("deduped", "near_deduped", "quality", "decontaminated")
"""Stages of curation in flow order; each reads the newest version of those before it."""
STAGES = (
    *("ingested", *CURATION, "masked", "model_scored"),
    *("tokenized", "embedded", "loss_measured", "indexed", "deleted", "maintained"),
)
"""Stages that make versions, in flow order; the last two at any time."""
VERBS = {
    "ingested": "ingest",
    "deduped": "dedup",
    "near_deduped": "near-dedup",
    "quality": "quality",
    "decontaminated": "decontaminate",
    "masked": "mask",
    "model_scored": "score",
    "tokenized": "tokenize",
    "embedded": "embed",
    "loss_measured": "measure-loss",
    "indexed": "index",
    "deleted": "delete",
    "maintained": "maintain",
}
"""The `pretrain` verb that runs each stage, for messages."""

HEALED_VERSIONS = 100
"""So many of the newest versions are looked at for tags that were left unwritten: every commit of a stage looks."""
HISTORY_TAG = "history"
"""Its metadata holds the lineage records whose own tags were released, by tag; it names some version that stays."""

_TAG = re.compile(r"^(?P<stage>[a-z][a-z0-9_]*)-v(?P<version>\d+)$")
_log = logging.getLogger(__name__)


def table_id(dataset: lance.LanceDataset) -> str:
    """The table's identity.

    Raises:
        TableError: the table was not made by this project.
    """
    schema = dataset.schema
    value = (schema.field("id").metadata or {}).get(TABLE_ID_KEY) if "id" in schema.names else None
    if value is None:
        raise TableError(
            f"{dataset.uri} carries no pretrain_assets identity: it was made by something else. "
            "Ingest into a new table name, or into a new database_uri."
        )
    return str(value.decode())


def identified(schema: pa.Schema, identity: str) -> pa.Schema:
    """The schema of a new table that has this identity."""
    at = schema.get_field_index("id")
    return schema.set(at, schema.field(at).with_metadata({TABLE_ID_KEY: identity.encode()}))


def open_pin(location: Location, pin: Pin) -> lance.LanceDataset:
    """Open exactly the version that a pin names, refusing a table that was recreated since.

    Raises:
        TableError: another table stands there now, or the version was cleaned up.
    """
    try:
        dataset = open_dataset(location, pin.version)
    except TableError as error:
        newest = open_dataset(location)
        _require_identity(location, table_id(newest), pin)
        if pin.version >= newest.version or pin.version in (entry["version"] for entry in newest.versions()):
            raise
        raise TableError(
            f"{location.uri} has no version {pin.version} any more: maintenance freed it, so nothing that is pinned to "
            "it can be asked of this table; a copy from before still can (--database). `pretrain versions` lists what "
            "is there."
        ) from error
    _require_identity(location, table_id(dataset), pin)
    return dataset


def _require_identity(location: Location, found: str, pin: Pin) -> None:
    if found != pin.table_id:
        raise TableError(
            f"{location.uri} is not the table of pin {pin}: its identity is {found}. The table was recreated; "
            "point to the old database, or run the stage again on the new one."
        )


def content_digest(dataset: lance.LanceDataset) -> str:
    """Digest of what a version's rows are made of.

    Two versions may have the same table id and number, where a table was copied and both copies were written to; but
    the name of a data file is never used twice.
    """
    fragments = [fragment.metadata.to_json() for fragment in dataset.get_fragments()]
    files = [([(file["path"], file["fields"]) for file in f["files"]], f["deletion_file"]) for f in fragments]
    return digest([[(field.name(), field.id()) for field in dataset.lance_schema.fields()], files])


def tag_version(dataset: lance.LanceDataset, record: LineageRecord) -> None:
    """Tag the record's version as `<stage>-v<N>` and store the record in the tag's metadata."""
    tags = dataset.tags.list()
    if record.tag not in tags:
        try:
            dataset.tags.create(record.tag, record.version)
        except (ValueError, OSError):  # another process restored it just now
            tags = dataset.tags.list()
            if record.tag not in tags:
                raise
    if record.tag in tags and tags[record.tag]["version"] != record.version:
        raise TableError(f"Tag {record.tag} already names version {tags[record.tag]['version']} of {dataset.uri}")
    dataset.tags.replace_metadata(record.tag, {RECORD_KEY: record.to_json()})


def stage_tags(tags: Mapping[str, Any]) -> dict[str, str]:
    """The tags that stages made, with their stages: `<stage>-v<N>` with a record, or of a stage known here.

    Anything else, `paper-v1` for one, is the tag of a person or of a run.
    """
    matches = {name: _TAG.match(name) for name in tags}
    return {
        name: match["stage"]
        for name, match in matches.items()
        if match and (match["stage"] in STAGES or RECORD_KEY in (tags[name].get("metadata") or {}))
    }


def records(dataset: lance.LanceDataset, stage: str | None = None) -> list[LineageRecord]:
    """Lineage records (of one stage), oldest first; those of versions cleaned up since as well."""
    tags = dataset.tags.list()
    texts = {**_archived(tags), **_standing(tags)}
    found = [record for record in map(LineageRecord.from_json, texts.values()) if stage in (None, record.stage)]
    return sorted(found, key=lambda record: (record.version, flow_place(record.stage)))


def flow_place(stage: str) -> int:
    """Place of a stage in the flow, from 0; `tokenized_byte` stands where `tokenized` does."""
    return next((at for at, name in enumerate(STAGES) if f"{stage}_".startswith(f"{name}_")), len(STAGES))


def release_tags(dataset: lance.LanceDataset, names: Sequence[str]) -> None:
    """Take tags of stages away, after their records were put where they stay. A kill at any point loses no record."""
    tags = dataset.tags.list()
    here = [name for name in names if name in tags]
    if HISTORY_TAG not in tags:
        dataset.tags.create(HISTORY_TAG, dataset.version)
    elif tags[HISTORY_TAG]["version"] != dataset.version:
        dataset.tags.update(HISTORY_TAG, dataset.version)  # a version that stays, this one being the newest
    if here:
        released = {name: text for name, text in _standing(tags).items() if name in here}
        dataset.tags.replace_metadata(HISTORY_TAG, {**_archived(tags), **released})
    for name in here:
        dataset.tags.delete(name)


def _standing(tags: dict[str, Any]) -> dict[str, str]:
    """Records in the metadata of their own tags, by tag."""
    texts = {name: (tags[name].get("metadata") or {}).get(RECORD_KEY) for name in stage_tags(tags)}
    return {name: text for name, text in texts.items() if text}


def _archived(tags: dict[str, Any]) -> dict[str, str]:
    """Records whose tags were released, by tag."""
    return dict((tags.get(HISTORY_TAG) or {}).get("metadata") or {})


def latest_record(dataset: lance.LanceDataset, stage: str) -> LineageRecord | None:
    """The newest record of a stage, or None when it has not run on this table."""
    found = records(dataset, stage)
    return found[-1] if found else None


def record_of(dataset: lance.LanceDataset, stage: str, version: int) -> LineageRecord:
    """The record of one stage at one version.

    Raises:
        TableError: the stage has no such version.
    """
    for record in records(dataset, stage):
        if record.version == version:
            return record
    have = ", ".join(record.tag for record in records(dataset, stage)) or "none"
    raise TableError(f"{dataset.uri} has no version {version} made by stage {stage!r}; it has: {have}")


def find_record(location: Location, stage: str, tag: str | None = None) -> LineageRecord:
    """The newest record of a stage, or the one with this tag.

    Raises:
        TableError: the stage has not run, or has no such tag.
    """
    found = records(open_dataset(location), stage)
    if not found:
        raise TableError(f"{location.uri}: the {stage} stage has made no version. Run `pretrain {_verb(stage)}` first.")
    for record in reversed(found):
        if tag is None or record.tag == tag:
            return record
    have = ", ".join(record.tag for record in found)
    raise TableError(f"{location.uri} has no tag {tag!r} of the {stage} stage; it has: {have}")


def _verb(stage: str) -> str:
    """The verb that runs a stage, also one of several beside each other, such as `tokenized_byte`."""
    if stage.startswith("tokenized_"):
        return f"tokenize --beside {stage.removeprefix('tokenized_')} --tokenizer NAME"
    return VERBS[STAGES[flow_place(stage)]]


def heal(location: Location) -> lance.LanceDataset:
    """Open the newest version, first restoring tags that a killed process left unwritten."""
    dataset = open_dataset(location)
    tags = dataset.tags.list()
    known = {**_archived(tags), **_standing(tags)}
    # the version of a record with rows was made by that record's stage; others may have been adopted, or be nobody's
    explained = {record.version for record in map(LineageRecord.from_json, known.values()) if record.rows}
    first = max(1, dataset.version - HEALED_VERSIONS + 1)
    for version in sorted(set(range(first, dataset.version + 1)) - explained):
        record = _record_in_transaction(dataset, version)
        if record is not None and record.tag not in known:
            _log.info("restoring tag %s, left unwritten by an interrupted run", record.tag)
            tag_version(dataset, record)
    return dataset


def _record_in_transaction(dataset: lance.LanceDataset, version: int) -> LineageRecord | None:
    try:
        transaction = dataset.read_transaction(version)
    except (ValueError, OSError):  # cleaned up: its tag, if it had one, holds the record
        return None
    text = (transaction.transaction_properties or {}).get(RECORD_KEY) if transaction else None
    return LineageRecord.from_json(text, version=version) if text else None
