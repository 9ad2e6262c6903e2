"""Where a text may come from: the rows that share runs of its tokens, and whether a checkpoint has seen them.

Invariant: a document is a source only of what stands in it word for word, and only if the checkpoint was trained on
it; everything else is shown as what it is, near by words or by vectors, or not seen, with the reason.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pretrain_assets.config import TokenizerIdentity, from_dict
from pretrain_assets.convert import require
from pretrain_assets.errors import ConfigError, PretrainError, TableError
from pretrain_assets.forensics.attribution.candidates import by_vectors, by_words, pieces_of
from pretrain_assets.forensics.attribution.passage import generated, passages_of
from pretrain_assets.forensics.attribution.sources import Source, likely, look, sources_of
from pretrain_assets.forensics.attribution.trainings import parts_of, trainings
from pretrain_assets.forensics.attribution.verbatim import (
    Reading,
    Rows,
    Run,
    covered,
    read_rows,
    reading,
    resolved,
    rows_with,
    union,
)
from pretrain_assets.forensics.attribution.verdict import verdict
from pretrain_assets.forensics.checkpoints import Checkpoint
from pretrain_assets.forensics.retrieval.rerank import fuse
from pretrain_assets.forensics.subject import table_of
from pretrain_assets.table.query import sql_rows
from pretrain_assets.table.storage import Location
from pretrain_assets.table.versions import open_pin

if TYPE_CHECKING:
    from pretrain_assets.tokenize import Tokenizer

MIN_TOKENS, MIN_BYTES = 8, 32
"""Tokens of the shortest run that counts: a clause of English; and where tokens are single bytes."""
BYTE_IDS = 512
"""Vocabularies up to so many ids are taken for those of bytes."""
EXACT_TOKENS = 100_000_000
"""Tokens of a version up to which all rows are read unless asked otherwise: 20 to 40 M a second and core."""
MOST_TOKENS = 50_000
"""Of a text: it takes some 300 bytes for each, and time for each run that is found."""


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
    at_least: bool
    """Whether it may be in more of them."""
    ids: tuple[int, ...]
    """Them, or some: those first that it was trained on in."""
    times_seen: int
    """How often the checkpoint was trained on all of its tokens in those: over all draws, and all places in a row."""
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
    prompt_ids: tuple[int, ...]
    """The prompt's token ids."""
    text: str
    """The text that is attributed."""
    ids: tuple[int, ...]
    """Its token ids: as written, or as they would stand after a space where that finds more."""
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
    """Tokens of the text in runs that the checkpoint was trained on."""
    covered_unseen_tokens: int
    """Further tokens, in runs that stand only where it was not trained on."""
    spans: tuple[Span, ...]
    """The runs that it was trained on, the rarest first, no token in two of them."""
    unseen_spans: tuple[Span, ...]
    """Runs with a token that is in none of those, where it was not trained on."""
    sources: tuple[Source, ...]
    """Documents, the likeliest source first."""
    notes: tuple[str, ...]
    """What could not be done, and what to do about it."""
    seconds: float
    """Time it took, without the generation."""

    @property
    def verdict(self) -> str:
        """What it amounts to, in sentences with their evidence and thresholds."""
        return verdict(self)


def attribute(
    location: Location,
    checkpoint: Checkpoint,
    *,
    text: str | None = None,
    ids: Sequence[int] = (),
    prompt_ids: Sequence[int] = (),
    min_tokens: int | None = None,
    limit: int = 5,
    exact: bool | None = None,
    tokenizer: str | None = None,
    model: str | None = None,
) -> Attribution:
    """Find the rows that a text may come from.

    Args:
        location: The table.
        checkpoint: Whose pinned version is read, and whose exposures are told.
        text: The text; it may begin and end inside a document.
        ids: Instead of it, token ids that the model wrote.
        prompt_ids: What it was given before them, which is not attributed.
        min_tokens: Tokens of the shortest run that counts; None: `MIN_TOKENS`, or `MIN_BYTES` where those are bytes.
        limit: Most documents to show.
        exact: Read all rows, or the candidates alone; None: all, of a version of up to `EXACT_TOKENS`.
        tokenizer: Where an `hf:` tokenizer is, as for `tokenizer_of`.
        model: Where the model is that made the table's vectors, as for `vectors.encode`.

    Raises:
        ConfigError: there is no text, or a setting that cannot work.
        TableError: the version is gone, or there are neither candidates nor leave to read all rows.
        TokenizerError: the checkpoint's tokenizer is not found.
    """
    from pretrain_assets.tokenize.pretrained import tokenizer_of

    require(min_tokens is None or min_tokens >= 1, "min_tokens", min_tokens, "use 1 or more")
    started, pin, data = time.monotonic(), checkpoint.pin, checkpoint.recipe.data
    location = table_of(checkpoint.run_dir, checkpoint.pin, location)
    dataset = open_pin(location, pin)
    identity = from_dict(TokenizerIdentity, checkpoint.passport["tokenizer"])
    codec = tokenizer_of(identity, tokenizer)
    passages = [generated(codec, ids, after=prompt_ids)] if text is None else passages_of(codec, text)
    num_tokens = len(passages[0].ids)
    if not num_tokens:
        raise ConfigError("There is nothing to attribute: the text is empty. Give some words, or another prompt.")
    if num_tokens > MOST_TOKENS:
        raise ConfigError(f"The text has {num_tokens:,} tokens: give at most {MOST_TOKENS:,} at once, part by part.")
    least = min_tokens or (MIN_TOKENS if identity.vocab_size > BYTE_IDS else MIN_BYTES)
    pieces = pieces_of(passages[0].text)
    notes: list[str] = []

    def near(find: Callable[..., dict[int, float]], **how: object) -> dict[int, float]:
        try:
            return find(location, pin, pieces, **how)
        except PretrainError as error:
            if how.get("model") is not None:  # which was named for this alone
                raise
            notes.append(str(error))
            return {}

    by_bm25, by_cosine = near(by_words), near(by_vectors, model=model)
    in_version = sql_rows(dataset, f"SELECT count(*) AS num_rows, sum({data.count_column}) AS tokens FROM dataset")[0]
    exact = (in_version["tokens"] or 0) <= EXACT_TOKENS if exact is None else exact
    scores = dict(fuse({"bm25": _ordered(by_bm25), "cosine": _ordered(by_cosine)}))
    if not exact and not scores:
        raise TableError(
            f"There are no candidates to read: {' '.join(notes) or 'no document shares a word with the text.'} "
            f"--exact reads all {in_version['tokens']:,} tokens of version {pin.version}."
        )
    readings = [reading(passage, least=least) for passage in passages]
    trained = trainings(location, checkpoint)
    read_rows(dataset, data.token_column, readings, trained, None if exact else scores)
    one = max(readings, key=lambda one: int(covered(one, one.runs).sum()))
    seen_runs, unseen_runs = _parted(one)
    inside, outside = covered(one, seen_runs), covered(one, unseen_runs)
    seen_shown, unseen_shown = resolved(one, seen_runs), resolved(one, unseen_runs)
    shown_rows = {run: rows_with(one, run) for run in (*seen_shown, *unseen_shown)}
    parts = parts_of(location, checkpoint, likely(one, shown_rows))
    shared, steps = look(location, checkpoint, one, shown_rows, parts)

    def likeliest(i: int) -> tuple[float, ...]:
        draws = sum(part.doc_start == 0 for part in parts.get(i, ()))  # each begins at the first token
        return (-shared.get(i, 0.0), -draws if shared.get(i) else 0, -scores.get(i, 0.0), i)

    shown = sorted({*shared, *scores}, key=likeliest)[:limit]
    return Attribution(
        checkpoint=checkpoint.uri,
        step=checkpoint.step,
        pin=str(pin),
        tokenizer=identity.name,
        prompt=codec.decode(prompt_ids) if prompt_ids else None,
        prompt_ids=tuple(prompt_ids),
        text=one.passage.text,
        ids=tuple(one.passage.ids.tolist()),
        min_tokens=least,
        exact=exact,
        rows_in_version=in_version["num_rows"],
        rows_read=one.num_rows,
        tokens_read=one.num_tokens,
        rows_without_tokens=one.without_tokens,
        candidates_by_words=len(by_bm25),
        candidates_by_vectors=len(by_cosine),
        covered_tokens=int(inside.sum()),
        covered_unseen_tokens=int((outside & ~inside).sum()),
        spans=tuple(_span(one, run, codec, shown_rows[run], steps[run]) for run in seen_shown),
        unseen_spans=tuple(_span(one, run, codec, shown_rows[run], Counter()) for run in unseen_shown),
        sources=sources_of(
            location,
            checkpoint,
            one,
            shown,
            codec=codec,
            trained=trained,
            bm25=near(by_words, among=shown) if by_bm25 else {},
            cosine=near(by_vectors, among=shown, model=model) if by_cosine else {},
        ),
        notes=tuple(notes),
        seconds=round(time.monotonic() - started, 3),
    )


def _ordered(scores: Mapping[int, float]) -> list[int]:
    """Ids, those with the highest scores first."""
    return sorted(scores, key=lambda i: (-scores[i], i))


def _parted(one: Reading) -> tuple[list[Run], list[Run]]:
    """The runs that the checkpoint was trained on, and those with a further token that stand in rows only otherwise."""
    seen = union(one, [run for run, rows in one.runs.items() if rows.seen])
    inside = covered(one, seen)
    return seen, [run for run in union(one, one.runs) if not inside[run.start : run.stop].all()]


def _span(one: Reading, run: Run, codec: Tokenizer, rows: Rows, steps: Counter[int]) -> Span:
    return Span(
        start=run.start,
        tokens=run.tokens,
        bits=float(one.bits[run.start : run.stop].sum()),
        text=codec.decode(one.passage.ids[run.start : run.stop].tolist()),
        characters=one.passage.span(run.start, run.tokens),
        rows=rows.count,
        at_least=rows.at_least,
        ids=tuple(rows.ids),
        times_seen=steps.total(),
        first_step=min(steps, default=None),
    )
