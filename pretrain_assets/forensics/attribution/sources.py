"""Documents that share runs of a text's tokens: which of them comes first, and what exactly stands where in each.

Invariant: a run that is shown stands in the document, token by token, and `times_seen` counts only what was trained on
to the run's last token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from pretrain_assets.forensics.attribution.automaton import places_of
from pretrain_assets.forensics.attribution.passage import characters_of
from pretrain_assets.forensics.attribution.trainings import Trainings, parts_of, steps_at
from pretrain_assets.forensics.attribution.verbatim import (
    Int32s,
    Reading,
    Rows,
    Run,
    covered,
    resolved,
    runs_in,
    token_batches,
)
from pretrain_assets.forensics.checkpoints import Checkpoint
from pretrain_assets.forensics.exposure import SeenBy, seen_by
from pretrain_assets.loader.exposure import Exposure
from pretrain_assets.table.lookup import rows_by_id
from pretrain_assets.table.schema import making_parameters
from pretrain_assets.table.storage import Location
from pretrain_assets.table.versions import open_pin

if TYPE_CHECKING:
    from pretrain_assets.forensics.attribution.influence import Influence
    from pretrain_assets.tokenize import Tokenizer

LOOKED_AT = 200
"""Documents whose tokens are read again to rank them: those with the rarest runs, beside the rows of what is shown."""
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
    first_step: int | None
    """At which step first; None if never."""


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
    covered_seen_tokens: int
    """As many, in the part of it that the checkpoint was trained on."""
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


def likely(one: Reading, shown: Mapping[Run, Rows]) -> set[int]:
    """Rows to look at: those known to hold some runs, and `LOOKED_AT` others with the rarest."""
    bits, weights = one.bits, dict[int, float]()
    for run, rows in one.runs.items():
        for i in {*rows.ids, *rows.seen}:
            weights[i] = weights.get(i, 0.0) + float(bits[run.start : run.stop].sum())
    rarest = islice(sorted(weights, key=lambda i: (-weights[i], i)), LOOKED_AT)
    return {*rarest, *(i for rows in shown.values() for i in rows.ids)}


def look(
    location: Location,
    checkpoint: Checkpoint,
    one: Reading,
    shown: Mapping[Run, Rows],
    parts: Mapping[int, Sequence[Exposure]],
) -> tuple[dict[int, float], dict[Run, Counter[int]]]:
    """How many bits of the text stand in each of the likely rows; and the steps that trained on some runs, how often.

    Args:
        location: The table.
        checkpoint: Whose version is read.
        one: What was read.
        shown: The runs, and the rows in which to look for them.
        parts: What the checkpoint was trained on of the rows that are `likely`.
    """
    alike = {_tokens(one, run).tobytes(): run for run in shown}  # a text may repeat itself
    shared, steps = dict[int, float](), {run: Counter[int]() for run in alike.values()}
    trained = {run: {i for i in shown[run].ids if i in parts} for run in steps}
    for i, tokens in documents_of(location, checkpoint, likely(one, shown)):
        shared[i] = round(float(one.bits[covered(one, runs_in(one, tokens))].sum()), 6)
        for run, ids in trained.items():
            if i in ids:
                places = places_of(tokens, _tokens(one, run))
                steps[run].update(steps_at(parts[i], places + run.tokens))
    return shared, {run: steps[alike[_tokens(one, run).tobytes()]] for run in shown}


def _tokens(one: Reading, run: Run) -> Int32s:
    return one.passage.ids[run.start : run.stop]


def sources_of(
    location: Location,
    checkpoint: Checkpoint,
    one: Reading,
    ids: Sequence[int],
    *,
    codec: Tokenizer,
    trained: Trainings,
    bm25: Mapping[int, float],
    cosine: Mapping[int, float],
) -> tuple[Source, ...]:
    """What stands where in each of some documents, in the order given."""
    field = open_pin(location, checkpoint.pin).schema.field(checkpoint.recipe.data.token_column)
    text_column = making_parameters(field).get("text_column", "text")
    rows = rows_by_id(location, checkpoint.pin, ids, ["doc_id", "source", text_column])
    seen = seen_by(location, pin=checkpoint.pin, recipe=checkpoint.recipe, step=checkpoint.step, ids=ids)
    parts = parts_of(location, checkpoint, ids)
    reached = dict(zip(ids, trained.of(np.array(ids, np.int64)).tolist(), strict=True))
    found = {}
    for i, tokens in documents_of(location, checkpoint, ids):
        text = rows[i].get(text_column)
        inside = covered(one, runs_in(one, tokens))
        found[i] = Source(
            id=i,
            doc_id=rows[i].get("doc_id"),
            source=rows[i].get("source"),
            preview=None if text is None else " ".join(text[: 4 * PREVIEW_CHARS].split())[:PREVIEW_CHARS],
            num_tokens=len(tokens),
            covered_tokens=int(inside.sum()),
            covered_seen_tokens=int(covered(one, runs_in(one, tokens[: reached[i]])).sum()),
            bits=float(one.bits[inside].sum()),
            matches=_matches(one, tokens, text or "", codec, parts.get(i, ())),
            bm25=bm25.get(i),
            cosine=cosine.get(i),
            seen=seen[i],
        )
    return tuple(found[i] for i in ids if i in found)


def _matches(one: Reading, tokens: Int32s, text: str, codec: Tokenizer, parts: Sequence[Exposure]) -> tuple[Match, ...]:
    characters = characters_of(codec, text, tokens)
    matches = []
    for run in resolved(one, runs_in(one, tokens)):
        ids = _tokens(one, run)
        places = places_of(tokens, ids)
        steps = steps_at(parts, places + run.tokens)
        matches.append(
            Match(
                start=run.start,
                tokens=run.tokens,
                bits=float(one.bits[run.start : run.stop].sum()),
                text=codec.decode(ids.tolist()),
                characters=one.passage.span(run.start, run.tokens),
                document_start=int(places[0]),
                document_characters=None
                if characters is None
                else (int(characters[places[0]]), int(characters[places[0] + run.tokens])),
                occurrences=len(places),
                times_seen=steps.total(),
                first_step=min(steps, default=None),
            )
        )
    return tuple(matches)


def documents_of(location: Location, checkpoint: Checkpoint, ids: Collection[int]) -> Iterable[tuple[int, Int32s]]:
    """Documents and their tokens, one after another."""
    dataset = open_pin(location, checkpoint.pin)
    for some, tokens, offsets, _ in token_batches(dataset, checkpoint.recipe.data.token_column, ids):
        for at, i in enumerate(some.tolist()):
            yield i, tokens[offsets[at] : offsets[at + 1]]
