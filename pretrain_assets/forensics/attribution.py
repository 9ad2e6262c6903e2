"""Where a text may come from: the rows that share runs of its tokens, and whether a checkpoint has seen them.

Invariant: a document is a source only of what stands in it word for word, and only if the checkpoint was trained on
it; everything else is shown as what it is, near by words or by vectors, or not seen, with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pretrain_assets.errors import ConfigError, PretrainError, TableError
from pretrain_assets.forensics import candidates
from pretrain_assets.forensics.checkpoints import Checkpoint
from pretrain_assets.forensics.exposure import SeenBy, schedule_of, seen_by
from pretrain_assets.forensics.passage import Passage, passage_of, passages_of
from pretrain_assets.forensics.verbatim import (
    Reading,
    Run,
    covered,
    places_of,
    read_rows,
    reading,
    resolved,
    rows_with,
    runs_in,
    token_batches,
    union,
)
from pretrain_assets.loader.exposure import exposures
from pretrain_assets.table.lookup import rows_by_id
from pretrain_assets.table.query import sql_rows
from pretrain_assets.table.storage import Location
from pretrain_assets.table.versions import open_pin

if TYPE_CHECKING:
    import lance

    from pretrain_assets.forensics.influence import Influence
    from pretrain_assets.tokenize import Tokenizer

MIN_TOKENS, MIN_BYTES = 8, 32
"""Tokens of the shortest run that counts: a clause of English; and where tokens are single bytes."""
EXACT_TOKENS = 400_000_000
"""Tokens of a version up to which all rows are read unless asked otherwise: some five seconds on two cores."""
LOOKED_AT = 200
"""Documents that are looked at one by one: those that share the rarest runs, and the candidates."""
ROWS_ASKED = 4_096
"""Rows with runs of which is asked whether they were seen, those with the rarest first."""
PREVIEW_CHARS = 160


@dataclass(frozen=True, kw_only=True)
class Match:
    """A run of the text's tokens in one document."""

    start: int
    """Index of its first token in the text."""
    tokens: int
    """Tokens."""
    bits: float
    """-log2 of its unigram probability over the tokens read: the higher, the less it can be chance."""
    text: str
    """The run."""
    characters: tuple[int, int] | None
    """Where it stands in the text: first character, and the one after its last. None where not known."""
    document_start: int
    """Index of its first token in the document, at its first place there."""
    document_characters: tuple[int, int] | None
    """The same in characters of the document."""
    occurrences: int
    """Places of the document that it stands at."""
    times_seen: int
    """How often the checkpoint was trained on all of its tokens there: over all draws, and all these places."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A document that shares something with the text."""

    id: int
    """The table's row number."""
    doc_id: str | None
    """The source's own id; None where the table has none."""
    source: str | None
    """Where it comes from; None where the table does not say."""
    preview: str | None
    """How it begins, white space folded; None where the table has no text."""
    num_tokens: int
    """Tokens of the document."""
    covered_tokens: int
    """Tokens of the text that stand in it, in runs of at least `min_tokens`."""
    bits: float
    """-log2 of the unigram probability of those: what documents are ranked by."""
    matches: tuple[Match, ...]
    """Those runs, the rarest first, no token in two of them."""
    bm25: float | None
    """Similarity by words; None where it was not among the hits, or there is no index."""
    cosine: float | None
    """Similarity by vectors; None where it was not asked, or the table has none."""
    seen: SeenBy
    """What the checkpoint saw of it, or why nothing."""
    influence: Influence | None = None
    """What a gradient step on it does to the loss on the text; None where it was not asked."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A run of the text's tokens in any rows."""

    start: int
    """Index of its first token in the text."""
    tokens: int
    """Tokens."""
    bits: float
    """-log2 of its unigram probability over the tokens read."""
    text: str
    """The run."""
    characters: tuple[int, int] | None
    """Where it stands in the text; None where not known."""
    rows: int
    """Rows that hold it."""
    ids: tuple[int, ...]
    """Them, or the first ones."""
    rows_seen: int
    """How many of `ids` the checkpoint has seen."""
    times_seen: int
    """How often, all together."""
    first_step: int | None
    """At which step first; None if never."""


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """Where a text may come from."""

    checkpoint: str
    """Folder of the checkpoint."""
    step: int
    """Optimizer steps done by it."""
    pin: str
    """Version whose rows were read."""
    tokenizer: str
    """Name of its tokenizer."""
    prompt: str | None
    """What the model was given, if it wrote the text."""
    text: str
    """The text that is attributed."""
    num_tokens: int
    """Its tokens."""
    min_tokens: int
    """Tokens of the shortest run that counts."""
    exact: bool
    """Whether all rows of the version were read, not only candidates."""
    rows_in_version: int
    """Rows of the version."""
    rows_read: int
    """Rows whose tokens were read."""
    tokens_read: int
    """Their tokens."""
    rows_without_tokens: int
    """Rows among them without tokens: nothing can be said of them."""
    candidates_by_words: int
    """Candidates by BM25."""
    candidates_by_vectors: int
    """Candidates by cosine."""
    covered_tokens: int
    """Tokens of the text in runs that stand in rows that the checkpoint has seen."""
    covered_unseen_tokens: int
    """Further tokens, in runs that stand only in rows that it has not seen."""
    spans: tuple[Span, ...]
    """Runs in rows that it has seen, the rarest first, no token in two of them."""
    unseen_spans: tuple[Span, ...]
    """Runs with a token that is in none of those, in rows that it has not seen."""
    sources: tuple[Source, ...]
    """Documents, the likeliest source first."""
    notes: tuple[str, ...]
    """What could not be done, and what to do about it."""
    seconds: float
    """Time it took, without the generation."""

    @property
    def best(self) -> Source | None:
        """The document that holds most of the text of those that the checkpoint has seen."""
        return next((one for one in self.sources if one.matches and one.seen.times), None)
