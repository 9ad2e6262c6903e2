"""Documents that share runs of a text's tokens: which of them comes first, and what exactly stands where in each.

Invariant: a run that is shown stands in the document, token by token, and `times_seen` counts only what was trained on
to the run's last token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from pretrain_assets.forensics.attribution.passage import characters_of
from pretrain_assets.forensics.attribution.trainings import Trainings, steps_at
from pretrain_assets.forensics.attribution.verbatim import (
    Int32s,
    Reading,
    Run,
    covered,
    places_of,
    resolved,
    rows_with,
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


def likely(one: Reading, shown: Iterable[Run]) -> set[int]:
    """Rows to look at: those that hold some runs, as far as they are known, and `LOOKED_AT` others with the rarest."""
    bits, weights = one.bits, dict[int, float]()
    for run, rows in one.runs.items():
        for i in rows.ids:
            weights[i] = weights.get(i, 0.0) + float(bits[run.start : run.stop].sum())
    rarest = islice(sorted(weights, key=lambda i: (-weights[i], i)), LOOKED_AT)
    return {*rarest, *(i for run in shown for i in rows_with(one, run).ids)}


def look(
    location: Location,
    checkpoint: Checkpoint,
    one: Reading,
    shown: Iterable[Run],
    parts: Mapping[int, Sequence[Exposure]],
) -> tuple[dict[int, float], dict[Run, list[int]]]:
    """How many bits of the text stand in each of the likely rows, and when some runs were trained on in all of them.

    Args:
        location: The table.
        checkpoint: Whose version is read.
        one: What was read.
        shown: The runs.
        parts: What the checkpoint was trained on of the rows that are `likely`.
    """
    shared, steps = dict[int, float](), {run: list[int]() for run in shown}
    for i, tokens in documents_of(location, checkpoint, likely(one, steps)):
        shared[i] = round(float(one.bits[covered(one, runs_in(one, tokens))].sum()), 6)
        for run, at in steps.items():
            for place in places_of(tokens, one.passage.ids[run.start : run.stop]):
                at += steps_at(parts.get(i, ()), place + run.tokens)
    return shared, steps


def sources_of(
    location: Location,
    checkpoint: Checkpoint,
    one: Reading,
    ids: Sequence[int],
    *,
    codec: Tokenizer,
    trained: Trainings,
    parts: Mapping[int, Sequence[Exposure]],
    bm25: Mapping[int, float],
    cosine: Mapping[int, float],
) -> tuple[Source, ...]:
    """What stands where in each of some documents, in the order given."""
    field = open_pin(location, checkpoint.pin).schema.field(checkpoint.recipe.data.token_column)
    text_column = making_parameters(field).get("text_column", "text")
    rows = rows_by_id(location, checkpoint.pin, ids, ["doc_id", "source", text_column])
    seen = seen_by(location, pin=checkpoint.pin, recipe=checkpoint.recipe, step=checkpoint.step, ids=ids)
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
            covered_seen_tokens=int(covered(one, runs_in(one, tokens[: trained.reached(i, len(tokens))])).sum()),
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
        ids = one.passage.ids[run.start : run.stop]
        places = places_of(tokens, ids)
        steps = [step for place in places for step in steps_at(parts, place + run.tokens)]
        matches.append(
            Match(
                start=run.start,
                tokens=run.tokens,
                bits=float(one.bits[run.start : run.stop].sum()),
                text=codec.decode(ids.tolist()),
                characters=one.passage.span(run.start, run.tokens),
                document_start=places[0],
                document_characters=None
                if characters is None
                else (int(characters[places[0]]), int(characters[places[0] + run.tokens])),
                occurrences=len(places),
                times_seen=len(steps),
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
