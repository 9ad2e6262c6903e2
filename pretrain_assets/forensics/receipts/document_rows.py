"""What is shown of single documents: where each is from, how it begins, which ingest brought it, what deleted it.

Invariant: each is read in the newest version that has it; of one that no version has, only what records say is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pretrain_assets.errors import TableError
from pretrain_assets.forensics.why import deletions
from pretrain_assets.table.delete import STAGE
from pretrain_assets.table.lineage import LineageRecord
from pretrain_assets.table.predicate import in_list

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

PREVIEW_CHARS = 160
SHOWN = ("doc_id", "source", "source_file", "n_chars", "n_tokens")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One document of those asked about."""

    id: int
    """The table's row number."""
    doc_id: str | None = None
    """The source's own id; None once no version has the row, and so for what follows."""
    source: str | None = None
    """Where the document comes from."""
    source_file: str | None = None
    """File that it was read from."""
    n_chars: int | None = None
    """Length in code points."""
    n_tokens: int | None = None
    """Length in tokens; None where it was not tokenized."""
    ingested: str
    """Tag of the ingest that it came with, or the version."""
    deleted: str | None
    """Tag of the deletion that took it out of the newest version, or what is known of it; None: it is there."""
    preview: str | None = None
    """How it begins; None where that is not wanted."""


def gone_row(history: Sequence[LineageRecord], row: int) -> tuple[Row, int]:
    """A row that no version has any more, and the version that it came with.

    Raises:
        TableError: there never was such a row.
    """
    ingests = [record for record in history if record.stage == "ingested" and record.rows]
    came = next((r for r in ingests if row < int(r.details.get("next_id", 0))), None)
    if came is None:
        last = max((int(r.details.get("next_id", 0)) for r in ingests), default=0) - 1
        known = f"ids given out so far are 0 to {last:,}" if last >= 0 else "no ingest gave out any"
        raise TableError(f"No row has the id {row}, and none had it: {known}. `pretrain search` finds documents.")
    made = [r for r in history if r.stage == STAGE and row in r.details.get("ids", ())]
    deleted = made[-1].tag if made else f"after {came.tag}, in a version that is no longer there"
    return Row(id=row, ingested=came.tag, deleted=deleted), came.version


def shown_rows(
    dataset: lance.LanceDataset, found: pa.Table, history: Sequence[LineageRecord], *, deleted_text: bool
) -> Iterator[Row]:
    """What is shown of rows, each read in the newest version that has it."""
    ingested = {r.version: r.tag for r in history if r.stage == "ingested" and r.rows}
    values: dict[int, dict[str, Any]] = {}
    following = dict(pairwise(int(entry["version"]) for entry in dataset.versions()))
    for version in sorted(set(found["last"].to_pylist())):
        opened = dataset.checkout_version(version)
        text = ["text"] if deleted_text or version == dataset.version else []
        columns = [name for name in (*SHOWN, *text) if name in opened.schema.names]
        mine = [row["id"] for row in found.select(["id", "last"]).to_pylist() if row["last"] == version]
        read = opened.to_table(columns=["id", *columns], filter=in_list("id", mine))
        values |= {row["id"]: row for row in read.to_pylist()}
    for row in found.select(["id", "last", "_row_created_at_version"]).to_pylist():
        shown = dict(values[row["id"]])
        text = shown.pop("text", None)
        created = row["_row_created_at_version"]
        yield Row(
            **shown,
            ingested=ingested.get(created, f"version {created}"),
            deleted=_deletion(history, row["id"], row["last"], following.get(row["last"])),
            preview=" ".join(text[: 4 * PREVIEW_CHARS].split())[:PREVIEW_CHARS] if text is not None else None,
        )


def _deletion(history: Sequence[LineageRecord], row: int, last: int, after: int | None) -> str | None:
    """Which deletion took a row away that version `last` has, and the next one that is there has not."""
    if after is None:
        return None
    tags = [record.tag for record in deletions(history, row, after=last, upto=after)]
    return ", ".join(tags) or f"version {after}, by something without a record"
