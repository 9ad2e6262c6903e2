"""Receipts: where documents are, which models saw them, the last clean checkpoint, what training from there costs.

Invariant: the same question about the same table and runs gives the same receipt, digest included: what is hashed holds
no clock or host. How a document begins is shown while the newest version has it, and afterwards only if that is asked.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pretrain_assets import __version__
from pretrain_assets.config import MaintainConfig
from pretrain_assets.forensics.pins import pinned_by_runs
from pretrain_assets.forensics.receipts.document_rows import Row
from pretrain_assets.forensics.receipts.documents import Asked, Documents, find_documents
from pretrain_assets.forensics.receipts.witnesses import Witness, find_witnesses
from pretrain_assets.table.lineage import canonical_json
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.upkeep.retention import plan_retention
from pretrain_assets.table.versions import content_digest

if TYPE_CHECKING:
    from pretrain_assets.forensics.receipts.erasure import Erasure

PATHS = ("table", "runs")
"""What says where this was asked, and is not hashed."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A version that has some of the documents."""

    version: int
    """Version number."""
    rows: int
    """How many of them."""
    reasons: tuple[str, ...]
    """What keeps it; empty: `pretrain maintain` frees it once it is old enough."""
    content: str
    """Digest of what the version's rows are made of; see `table.versions.content_digest`."""

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of people and runs, which `pretrain release` takes away."""
        return tuple(reason.removeprefix("tag ") for reason in self.reasons if reason.startswith("tag "))


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """Everything that is known about some documents."""

    table: str
    """Uri of the table."""
    runs: str
    """Folder of the runs that were asked."""
    pin: str
    """The newest version, at which was asked."""
    request: dict[str, Any]
    """What was asked for, without the words in it."""
    num_rows: int
    """Documents."""
    num_there: int
    """Of these, how many the newest version has."""
    ids: str
    """SHA-256 of their ids, ascending, separated by commas."""
    rows: tuple[Row, ...]
    """The first of them."""
    copies: tuple[int, ...]
    """Ids of rows with the same content that are not among them, the first ones."""
    num_copies: int
    """How many those are."""
    near_copies: tuple[int, ...]
    """Ids of rows that near-deduplication found to repeat one of them, or to be repeated: a hint, not the same text."""
    unhashed: int
    """Rows of the table that were never compared with others, so that there may be more copies."""
    versions: tuple[Holder, ...]
    """Versions that have some of them, oldest first."""
    witnesses: tuple[Witness, ...]
    """Every training run on this table, and what it saw of them."""
    inputs: dict[str, str]
    """SHA-256 of the run.json and passports that the answer was computed from."""
    notes: tuple[str, ...]
    """What could not be asked or read, and why."""
    code_version: str = __version__
    """Version of this program."""
    erasure: Erasure | None = None
    """What was deleted and the proof of its absence, where that was asked for; see `forensics.receipts.erasure`."""

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of all of it but the paths."""
        facts = {name: value for name, value in asdict(self).items() if name not in PATHS}
        return hashlib.sha256(canonical_json(facts).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready facts, with the digest."""
        return {**asdict(self), "receipt_digest": self.digest}


def receipt(location: Location, runs_uri: str, asked: Asked, *, deleted_text: bool = False) -> Receipt:
    """Answer for some documents, changing nothing.

    Args:
        location: The table.
        runs_uri: Folder of all training runs.
        asked: Which documents.
        deleted_text: Show how they begin also where only older versions have them.

    Raises:
        TableError: no such document, or no such table.
        FilterError: `where` is not a predicate of the table.
    """
    return receipt_of(location, runs_uri, asked, find_documents(location, asked, deleted_text=deleted_text))


def receipt_of(location: Location, runs_uri: str, asked: Asked, documents: Documents) -> Receipt:
    """The receipt of documents that were found before."""
    found = find_witnesses(location, runs_uri, documents)
    unreadable = [f"run {one}; whether it saw the documents is not known" for one in found.unreadable]
    return Receipt(
        table=location.uri,
        runs=runs_uri,
        pin=str(documents.newest),
        request=asked.plain,
        num_rows=len(documents),
        num_there=len(documents.there),
        ids=hashlib.sha256(",".join(map(str, documents.ids.tolist())).encode()).hexdigest(),
        rows=documents.rows,
        copies=documents.copies,
        num_copies=documents.num_copies,
        near_copies=documents.near_copies,
        unhashed=documents.unhashed,
        versions=holders(location, runs_uri, documents),
        witnesses=found.runs,
        inputs=found.inputs,
        notes=(*documents.notes, *unreadable),
    )


def holders(location: Location, runs_uri: str, documents: Documents) -> tuple[Holder, ...]:
    """The versions that have some of the documents, and what keeps each."""
    dataset = open_dataset(location)
    pinned = pinned_by_runs(runs_uri, documents.newest.table_id)
    kept = plan_retention(dataset, MaintainConfig(older_than_seconds=0, keep_last=1), pinned_by_runs=pinned).kept
    reasons = {entry.version: entry.reasons for entry in kept}
    found = []
    for entry in dataset.versions():
        version = int(entry["version"])
        rows = int(documents.held_by(version).sum())
        if rows:
            content = content_digest(dataset.checkout_version(version))
            found.append(Holder(version=version, rows=rows, reasons=reasons.get(version, ()), content=content))
    return tuple(found)
