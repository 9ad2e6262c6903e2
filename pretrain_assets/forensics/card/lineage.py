"""A checkpoint's lineage as a graph: source files, the versions of the table, and the columns that each stage made.

Invariant: every node and number comes from a lineage record, the pinned schema or the passport. Of a place on a disk or
an object store only the last name is taken, so that the graph may be published.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timezone
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import DataConfig
from pretrain_assets.curate.sql import columns_in
from pretrain_assets.forensics.lineage import Lineage
from pretrain_assets.table.columns import COLUMNS
from pretrain_assets.table.lineage import LineageRecord
from pretrain_assets.table.schema import CODE_VERSION_KEY, STAGE_KEY
from pretrain_assets.table.versions import flow_place, records

if TYPE_CHECKING:
    import lance

WENT_ON = {
    *("in", "written", "unique", "kept", "measured", "not_contaminated", "tokenized", "embedded", "scored"),
    *("not_masked", "unchanged"),
}
"""Lines of a stage's ledger that are not rows left out or marked."""
MAX_INGESTS = 4
"""Ingests that are drawn one by one, the newest; those before them are one node."""
_PLACE = re.compile(r"""(?<![\w<./])(?!hf://)(?:[a-z][a-z0-9+]*://|~?/(?!/))[^\s'",;()<>`]+""")
"""An absolute path or a URL; what is named on the Hugging Face hub is public."""
_MEANINGS = {column.name: column.meaning for column in COLUMNS}


@dataclass(frozen=True, kw_only=True)
class Node:
    """A step of the data on its way to the model."""

    key: str
    """Unique in the graph, such as a tag."""
    kind: str
    """`files`, `ingest`, `stage`, `beside` (a stage whose columns the run uses, beside the chain) or `checkpoint`."""
    title: str
    """What it is: the stage, or the sources."""
    rows: int | None
    """Rows of the table there; of a checkpoint, rows that its filter keeps."""
    note: str = ""
    """What else there is to say, in a few words."""
    tag: str | None = None
    """Tag of the version that it made."""
    version: int | None = None
    """That version."""
    worked_on: int | None = None
    """Rows that the stage worked on in that version: fewer than all after an append."""
    marked: Mapping[str, int] = field(default_factory=dict)
    """Of these, rows that it left out or marked, by reason."""


@dataclass(frozen=True, kw_only=True)
class Edge:
    """What one node reads of another."""

    start: str
    """Key of the node that is read."""
    end: str
    """Key of the one that reads it."""
    label: str = ""
    """What is read, where it is not the whole version."""


@dataclass(frozen=True, kw_only=True)
class ColumnMade:
    """A column of the pinned version."""

    name: str
    """Its name."""
    type: str
    """Arrow type."""
    stage: str
    """Stage that made it."""
    tag: str | None
    """Version in which it was last written; None where no record says."""
    code_version: str | None
    """Of the code that computed it; None for what was ingested."""
    meaning: str
    """What a value is; empty for an extra column of the sources."""
    used: tuple[str, ...]
    """What the run reads it for: `filter`, `held-out filter`, `mixture`, `tokens`."""


@dataclass(frozen=True, kw_only=True)
class StageMade:
    """A stage with what it was told."""

    stage: str
    """Its name."""
    tag: str
    """The version it made, or stands at."""
    code_version: str
    """Of its code."""
    parameters: Mapping[str, Any]
    """Everything that changes the values written."""
    num_columns: int
    """Columns that it wrote."""


@dataclass(frozen=True, kw_only=True)
class DataLineage:
    """Where a checkpoint's data come from."""

    nodes: tuple[Node, ...]
    """In flow order: files, ingests, the chain, what stands beside it, the checkpoint."""
    edges: tuple[Edge, ...]
    """Which reads which."""
    stages: tuple[StageMade, ...]
    """Parameters of every stage in it, in flow order."""
    deletions: tuple[tuple[str, int], ...]
    """Tags of deletions before the pinned version, and the rows each took away."""
    committed: str | None
    """When the pinned version was committed, UTC; None where the table no longer says."""


def data_lineage(dataset: lance.LanceDataset, lineage: Lineage) -> DataLineage:
    """The graph of a checkpoint's lineage; `dataset` is the pinned version."""
    chain, known = list(reversed(lineage.records)), records(dataset)
    pin, data = lineage.checkpoint.pin, lineage.checkpoint.recipe.data
    beside = _beside(dataset, chain, known, [name for name, _ in columns_used(dataset, data)])
    nodes, edges = _ingests(lineage.ingests)
    nodes += [_stage(record) for record in chain[1:]]
    edges += [Edge(start=one.tag, end=other.tag) for one, other in pairwise(chain)]
    goal = _checkpoint(lineage)
    edges.append(Edge(start=chain[-1].tag, end=goal.key))
    for record, columns in beside:
        nodes.append(_stage(record, "beside"))
        read = max((r for r in chain if r.version <= record.version), key=lambda r: r.version, default=chain[0])
        edges += [Edge(start=read.tag, end=record.tag), Edge(start=record.tag, end=goal.key, label=", ".join(columns))]
    gone = [record for record in known if record.stage == "deleted" and record.version <= pin.version]
    times = {entry["version"]: entry["timestamp"] for entry in dataset.versions()}
    return DataLineage(
        nodes=(*nodes, goal),
        edges=tuple(edges),
        stages=tuple(
            StageMade(
                stage=record.stage,
                tag=record.tag,
                code_version=record.code_version,
                parameters=public(record.parameters),
                num_columns=len(record.columns),
            )
            for record in sorted([*chain, *(record for record, _ in beside)], key=lambda r: r.version)
        ),
        deletions=tuple((record.tag, record.ledger.get("deleted", record.rows)) for record in gone),
        committed=f"{times[pin.version].astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC" if pin.version in times else None,
    )


def columns_used(dataset: lance.LanceDataset, data: DataConfig) -> list[tuple[str, str]]:
    """Columns that a run reads, each with what for."""
    names = dataset.schema.names
    found = [(name, "filter") for name in columns_in(data.filter, names)]
    found += [(name, "held-out filter") for name in columns_in(data.held_out_filter, names)]
    found += [(name, "mixture") for part in data.mixture for name in columns_in(part.predicate, names)]
    found += [(name, "tokens") for name in (data.token_column, data.count_column) if name in names]
    return list(dict.fromkeys(found))


def columns_made(dataset: lance.LanceDataset, data: DataConfig) -> tuple[ColumnMade, ...]:
    """Every column of the pinned version, with who made it and what the run reads it for."""
    made = {name: record.tag for record in records(dataset) for name in record.columns if _before(record, dataset)}
    used = columns_used(dataset, data)
    return tuple(
        ColumnMade(
            name=column.name,
            type=str(column.type),
            stage=metadata.get(STAGE_KEY, b"ingested").decode(),
            tag=made.get(column.name),
            code_version=metadata[CODE_VERSION_KEY].decode() if CODE_VERSION_KEY in metadata else None,
            meaning=_MEANINGS.get(column.name, ""),
            used=tuple(purpose for name, purpose in used if name == column.name),
        )
        for column in dataset.schema
        for metadata in [column.metadata or {}]
    )


def public(value: Any) -> Any:
    """A plain JSON value in whose texts every place on a disk or store is only its last name."""
    if isinstance(value, Mapping):
        return {str(key): public(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [public(inner) for inner in value]
    return _PLACE.sub(lambda place: _last_name(place[0]), value) if isinstance(value, str) else value


def _last_name(place: str) -> str:
    name = place.rstrip("/.").rsplit("/", 1)[-1]
    return name + "." * (place.endswith("."))


def _before(record: LineageRecord, dataset: lance.LanceDataset) -> bool:
    return record.version <= dataset.version and record.rows > 0


def _beside(
    dataset: lance.LanceDataset, chain: Sequence[LineageRecord], known: Sequence[LineageRecord], used: Sequence[str]
) -> list[tuple[LineageRecord, list[str]]]:
    """Stages off the chain whose columns the run reads: the newest record up to the pinned version, and the columns."""
    in_chain = {record.stage for record in chain}
    stages: dict[str, list[str]] = {}
    for name in used:
        stage = (dataset.schema.field(name).metadata or {}).get(STAGE_KEY, b"ingested").decode()
        if stage not in in_chain:
            stages.setdefault(stage, []).append(name)
    newest = {r.stage: r for r in known if r.version <= dataset.version and r.stage in stages}
    ordered = sorted(newest.values(), key=lambda record: (flow_place(record.stage), record.stage))
    return [(record, stages[record.stage]) for record in ordered]


def _ingests(ingests: Sequence[LineageRecord]) -> tuple[list[Node], list[Edge]]:
    """Files and ingests; the oldest of many are one node."""
    shown, older = ingests[-MAX_INGESTS:], ingests[:-MAX_INGESTS]
    nodes, edges = [], []
    if older:
        earlier = Node(
            key="earlier",
            kind="ingest",
            title=f"{len(older):,} ingests",
            rows=older[-1].rows_total,
            note="earlier",
            tag=f"{older[0].tag} to {older[-1].tag}",
            version=older[-1].version,
        )
        nodes.append(earlier)
        edges.append(Edge(start=earlier.key, end=shown[0].tag))
    for record in shown:
        files = record.details.get("files") or []
        node = Node(
            key=f"files-{record.tag}",
            kind="files",
            title=", ".join(str(public(name)) for name in record.inputs) or "unnamed source",
            rows=record.ledger.get("in"),
            note=f"{len(files):,} file{'' if len(files) == 1 else 's'}" if files else "",
        )
        nodes += [node, _stage(record, "ingest")]
        edges.append(Edge(start=node.key, end=record.tag))
    edges += [Edge(start=one.tag, end=other.tag) for one, other in pairwise(shown)]
    return nodes, edges


def _stage(record: LineageRecord, kind: str = "stage") -> Node:
    marked = {
        name.removeprefix("left_out:"): rows for name, rows in record.ledger.items() if rows and name not in WENT_ON
    }
    return Node(
        key=record.tag,
        kind=kind,
        title=record.stage,
        tag=record.tag,
        version=record.version,
        rows=record.rows_total,
        worked_on=record.rows,
        marked=marked,
        note=f"{len(record.columns):,} column{'' if len(record.columns) == 1 else 's'}",
    )


def _checkpoint(lineage: Lineage) -> Node:
    passport, total = lineage.checkpoint.passport, lineage.records[0].rows_total
    kept = next((ledger["rows_in"] for ledger in passport["ledger"].values()), None)
    return Node(
        key="checkpoint",
        kind="checkpoint",
        title=str(passport["recipe"]["name"]),
        rows=kept,
        note=f"step {lineage.checkpoint.step:,}",
        marked={} if kept is None else {"outside the filter": total - kept},
    )
