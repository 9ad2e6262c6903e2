"""The evidence for an evaluation item in a document: its words there, and the first step that trained on those words.

Invariant: what is known of a document as a whole is never said of the words; where their tokens are not known, the
answer is None with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain_assets.errors import TokenizerError
from pretrain_assets.forensics.checkpoints import Checkpoint
from pretrain_assets.forensics.exposure import seen_by
from pretrain_assets.loader.exposure import Exposure, exposures
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.lookup import rows_by_id
from pretrain_assets.table.schema import making_parameters, tokenizer_identity
from pretrain_assets.table.storage import Location
from pretrain_assets.table.versions import open_pin

EXCERPT_CHARACTERS = 300
MATCH = ("contamination_item", "contamination_overlap", "contamination_start", "contamination_stop")


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """An item in one document that holds it."""

    item: str
    """`set/id`."""
    document: int
    """The table's `id`."""
    doc_id: str | None
    """The source's own id; None where the table does not say."""
    source: str | None
    """Where the document comes from."""
    overlap: float | None
    """Share of the item's n-grams that the document has; None where it holds more of another item, whose words were
    noted instead."""
    excerpt: str | None
    """The longest run of the item's words there, its first `EXCERPT_CHARACTERS`; None as `overlap`."""
    first_step: int | None
    """First step that trained on the document; None if none did."""
    words_step: int | None
    """First step that trained on a token of that run; None if none did, or it cannot be told."""
    words: str
    """`trained on`, `not reached`, why it cannot be told, or why the document was not trained on."""


def sightings(
    location: Location,
    checkpoint: Checkpoint,
    schedule: Schedule,
    found: Sequence[tuple[str, int]],
    *,
    searched: Pin,
    last_step: int,
) -> tuple[Sighting, ...]:
    """Look at some items in one document each.

    Args:
        location: The table.
        checkpoint: Of the run.
        schedule: Of the run.
        found: Items, each with the `id` of a document that holds it.
        searched: Version whose contamination columns are read.
        last_step: Steps of the run that count.
    """
    ids = [document for _, document in found]
    rows = rows_by_id(location, searched, ids, ["doc_id", "source", "text", *MATCH])
    tokens = _Tokens(location, checkpoint)
    token_ids = rows_by_id(location, checkpoint.pin, ids, [tokens.column]) if tokens.num_bytes is not None else {}
    spans = exposures(schedule, ids, last_step=last_step)
    never = [document for document in ids if not spans[document]]
    seen = seen_by(location, pin=checkpoint.pin, recipe=checkpoint.recipe, step=last_step, ids=never)

    def look_at(item: str, document: int) -> Sighting:
        row, there = rows[document], spans[document] or []
        best = row["contamination_item"] == item
        start, stop = (row["contamination_start"], row["contamination_stop"]) if best else (0, 0)
        if document in seen:
            step, words = None, seen[document].reason
        elif best:
            step, words = tokens.first_step(token_ids.get(document, {}), row["text"], start, stop, there)
        else:
            step, words = None, f"{row['contamination_item']} is noted there"
        return Sighting(
            item=item,
            document=document,
            doc_id=row.get("doc_id"),
            source=row.get("source"),
            overlap=row["contamination_overlap"] if best else None,
            excerpt=row["text"][start:stop][:EXCERPT_CHARACTERS] if best else None,
            first_step=there[0].step if there else None,
            words_step=step,
            words=words,
        )

    return tuple(look_at(item, document) for item, document in found)


class _Tokens:
    """From characters of a text to its tokens, where each token is known as bytes."""

    def __init__(self, location: Location, checkpoint: Checkpoint):
        self.column = checkpoint.recipe.data.token_column
        dataset = open_pin(location, checkpoint.pin)
        made_from = making_parameters(dataset.schema.field(self.column)).get("text_column", "text")
        self.num_bytes: npt.NDArray[np.int64] | None = None
        """UTF-8 bytes of every token id; None where they are not known."""
        self.why_not = f"its tokens are those of {made_from}" if made_from != "text" else "its tokenizer is not here"
        if made_from == "text":
            from pretrain_assets.tokenize.pretrained import tokenizer_of

            try:
                self.num_bytes = tokenizer_of(tokenizer_identity(dataset, self.column)).token_bytes()
                self.why_not = "its tokens are not known as bytes"
            except (TokenizerError, ImportError):
                pass

    def first_step(
        self, row: dict[str, Any], text: str, start: int, stop: int, spans: Sequence[Exposure]
    ) -> tuple[int | None, str]:
        """The first step that trained on a token of characters `start` to `stop`; None with why it cannot be told."""
        if self.num_bytes is None:
            return None, self.why_not
        ends = np.cumsum(self.num_bytes[np.asarray(row[self.column], np.int64)])
        if not len(ends) or ends[-1] != len(text.encode()):
            return None, "its tokens do not spell its text"
        first, last = (len(text[:at].encode()) for at in (start, stop))
        begin, end = (int(np.searchsorted(ends, at, side="right")) for at in (first, last - 1))
        steps = [span.step for span in spans if span.doc_start <= end and begin < span.doc_start + span.tokens]
        return (min(steps), "trained on") if steps else (None, "not reached")
