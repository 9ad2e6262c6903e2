"""Search over exactly the rows of a pinned version: words and phrases, SQL, vectors, or both together; each hit with
what a checkpoint saw of it.

Invariant: a hit is a row that the pinned version holds; rows appended since never appear in an answer about it, `where`
means what it meant there, and rows of it that cannot be searched any more are counted (`Found.missing`).
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pretrain_assets.curate.filters import expand
from pretrain_assets.curate.sql import columns_in
from pretrain_assets.errors import ConfigError
from pretrain_assets.forensics.checkpoints import Checkpoint
from pretrain_assets.forensics.exposure import SeenBy, schedule_of, seen_by
from pretrain_assets.forensics.indexes.searchable import Searchable, for_text, for_vectors, within
from pretrain_assets.forensics.retrieval.query import TextQuery, parse, preview
from pretrain_assets.forensics.retrieval.rankings import Ranking, by_model, by_text, by_vector, vector_of
from pretrain_assets.forensics.retrieval.rerank import fuse
from pretrain_assets.forensics.retrieval.vectors import encode
from pretrain_assets.forensics.subject import table_of
from pretrain_assets.loader.exposure import exposures
from pretrain_assets.plural import counted
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.lookup import rows_by_id
from pretrain_assets.table.predicate import check_predicate
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.versions import open_pin

if TYPE_CHECKING:
    import lance

MODES = ("text", "vector", "hybrid")
MOST_HITS = 10_000
"""More are no answer to read; SQL over the table gives all of them."""
CANDIDATES = 50
"""Of each ranking that is fused, or ranked again by a model."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Hit:
    """One document found."""

    id: int
    """The table's row number."""
    doc_id: str
    """The source's own id."""
    source: str
    """Where the document comes from."""
    score: float
    """What hits are ordered by, higher is nearer: the last of `scores`; 0 for plain SQL, which keeps table order."""
    scores: dict[str, float] = field(default_factory=dict)
    """By kind, as far as it was found by it: `bm25`, `cosine`, then `rrf` of those two, then `reranker`."""
    ranks: dict[str, int] = field(default_factory=dict)
    """Place in each of those rankings, from 1."""
    preview: str
    """The text around the words found, or its beginning; white space folded."""
    matches: tuple[tuple[int, int], ...] = ()
    """Where words that were asked for stand in the preview: start and stop of each."""
    seen: SeenBy | None = None
    """What the checkpoint saw of it; None when no checkpoint was asked about."""
    next_step: int | None = None
    """First step after the checkpoint at which its run, as scheduled, trains on it; None: never, or not asked."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """An answer."""

    pin: Pin
    """The version whose rows were searched."""
    mode: str
    """`text`, `vector`, `hybrid` or `sql`."""
    hits: list[Hit]
    """The nearest first."""
    searched: dict[str, int]
    """Version whose index or vectors were asked, by ranking."""
    asked: int
    """The newest version that was asked anything."""
    missing: int = 0
    """Rows of the pinned version that were deleted before it, so that no search finds them."""
    without_vectors: int = 0
    """Rows of it whose vectors were not made yet, so that no search by vectors finds them."""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON values, its notes included."""
        return {"pin": str(self.pin), **{k: v for k, v in asdict(self).items() if k != "pin"}, "notes": self.notes}

    @property
    def notes(self) -> list[str]:
        """What a reader has to know of the answer, in sentences."""
        of, notes = f"of version {self.pin.version}", []
        if self.without_vectors:
            rows = counted(self.without_vectors, "row")
            have = "has" if self.without_vectors == 1 else "have"
            notes.append(f"{rows} {of} {have} no vector yet: `pretrain embed` makes them.")
        if self.missing:
            rows = counted(self.missing, "row")
            notes.append(f"{rows} {of} cannot be searched: deleted since, before version {self.asked}, which is asked.")
        return notes


def search(
    location: Location,
    query: str,
    *,
    pin: Pin,
    limit: int = 5,
    where: str | None = None,
    mode: str = "text",
    **how: Any,
) -> list[Hit]:
    """The hits of `find`, which also says what it asked; what a reader has to know is logged.

    Raises:
        ConfigError, FilterError, TableError, ModelError: as `find`.
    """
    found = find(location, query, pin=pin, limit=limit, where=where, mode=mode, **how)
    for note in found.notes:
        _log.warning("%s", note)
    return found.hits


def search_seen(location: Location, query: str, *, checkpoint: Checkpoint, **how: Any) -> list[Hit]:
    """Search the rows that a checkpoint was pinned to, with what it saw of each hit; `how` is as for `find`.

    Raises:
        ConfigError, FilterError, TableError, ModelError: as `find`.
    """
    location = table_of(checkpoint.run_dir, checkpoint.pin, location)
    return with_exposures(location, search(location, query, pin=checkpoint.pin, **how), checkpoint)


def find(
    location: Location,
    query: str,
    *,
    pin: Pin,
    limit: int = 5,
    where: str | None = None,
    mode: str = "text",
    like: int | None = None,
    model: str | None = None,
    rerank: str | None = None,
) -> Found:
    """Search the rows of a pinned version.

    Args:
        location: The table.
        query: Words, stemmed, and phrases in double quotes, which must occur. Empty with `where`: rows in table order;
            empty with `like`: by that vector alone.
        pin: Version whose rows are searched.
        limit: Number of hits, 1 to 10,000.
        where: SQL predicate that hits must satisfy, over columns and named filters, as the pinned version has them;
            one over columns made since, such as `loss_demo > 8`, as the newest version has them.
        mode: `text` (BM25), `vector` (cosine with the query's vector), or `hybrid`: both, by reciprocal rank fusion.
        like: Compare vectors with this document's instead of the query's; it is no hit itself.
        model: Folder or hub name of the model that made the vectors, where its name alone does not find it.
        rerank: Folder or hub name of a cross-encoder that orders the best 50 anew.

    Raises:
        ConfigError: nothing to search for, a quote that is not closed, a limit or mode that is none.
        FilterError: `where` is not a predicate of the pinned version.
        TableError: there is no index yet, or it is older than the pinned version; no vectors; no document `like`.
        ModelError: the model is not found, or is another one than made the vectors.
    """
    if not 1 <= limit <= MOST_HITS:
        raise ConfigError(f"limit={limit}: give a number from 1 to {MOST_HITS:,}; SQL over the table gives more rows.")
    if mode not in MODES:
        raise ConfigError(f"mode={mode!r}: use one of {', '.join(MODES)}.")
    where, judge = _predicate(location, pin, where)
    words = parse(query) if query.strip() and mode != "vector" else None
    if words is None and like is None and (mode == "text" or not query.strip()):
        if where is None:
            raise ConfigError("The query is empty: give one or more words, or only a predicate with --where.")
        pinned = open_pin(location, pin)
        table = Searchable(dataset=pinned if judge is None else judge, pinned=pinned)
        rows = table.dataset.scanner(columns=["id"], filter=f"({where}) AND {within(pinned)}", limit=limit).to_table()
        ranking = [(one, 0.0) for one in rows["id"].to_pylist()]
        return _found(location, pin, "sql", {"": ranking}, limit, None, {"": table})
    rankings: dict[str, Ranking] = {}
    asked: dict[str, Searchable] = {}
    fused = words is not None and (mode == "hybrid" or like is not None)
    number = max(limit, CANDIDATES) if fused or rerank else limit
    if words is not None:
        asked["bm25"] = replace(for_text(location, pin, phrases=bool(words.phrases)), judge=judge)
        rankings["bm25"] = by_text(asked["bm25"], words, number, where)
    if mode != "text" or like is not None:
        found, column = for_vectors(location, pin)
        asked["cosine"] = replace(found, judge=judge)
        vector = encode(column, [query], model=model) if like is None else vector_of(asked["cosine"], column, like)
        rankings["cosine"] = by_vector(asked["cosine"], column, vector, number, where, but=like)
    if fused:
        rankings["rrf"] = fuse({name: [one for one, _ in ranking] for name, ranking in rankings.items()})[:number]
    if rerank is not None:
        rankings["reranker"] = by_model(location, pin, rerank, query, [one for one, _ in _last(rankings)])
    kind = "hybrid" if fused else "text" if words is not None else "vector"
    return _found(location, pin, kind, rankings, limit, words, asked)


def with_exposures(location: Location, hits: list[Hit], checkpoint: Checkpoint) -> list[Hit]:
    """The hits with what a checkpoint saw of each, and the step at which its run, as scheduled, comes to it next."""
    if not hits:
        return []
    pin, recipe, step, ids = checkpoint.pin, checkpoint.recipe, checkpoint.step, [hit.id for hit in hits]
    seen = seen_by(location, pin=pin, recipe=recipe, step=step, ids=ids)
    schedule = schedule_of(location, pin, recipe)
    total = schedule.total_steps(max_steps=recipe.train.max_steps, epochs=recipe.train.epochs)
    spans = exposures(schedule, ids, last_step=total) if total > step else {}
    later = {one: min((s.step for s in mine or () if s.step > step), default=None) for one, mine in spans.items()}
    return [replace(hit, seen=seen[hit.id], next_step=later.get(hit.id)) for hit in hits]


def _predicate(location: Location, pin: Pin, where: str | None) -> tuple[str | None, lance.LanceDataset | None]:
    """A predicate in plain SQL, checked; and the newest version, where the pinned one lacks a column of it."""
    pinned = open_pin(location, pin)
    if where is None:
        return None, None
    newest = open_dataset(location)
    judge = newest if set(columns_in(where, newest.schema.names)) - set(pinned.schema.names) else None
    dataset = pinned if judge is None else judge
    plain = expand(where, dataset.schema.names, setting="where")
    check_predicate(dataset, plain, setting="where", written=where)
    return plain, judge


def _last(rankings: dict[str, Ranking]) -> Ranking:
    return list(rankings.values())[-1]


def _found(
    location: Location,
    pin: Pin,
    mode: str,
    rankings: dict[str, Ranking],
    limit: int,
    words: TextQuery | None,
    asked: dict[str, Searchable],
) -> Found:
    """The first of the last ranking, with their texts and their places in each."""
    first = [one for one, _ in _last(rankings)[:limit]]
    rows = rows_by_id(location, pin, first, ["doc_id", "source", "text"])
    scores = {name: dict(ranking) for name, ranking in rankings.items() if name}
    ranks = {name: {one: rank for rank, one in enumerate(found, 1)} for name, found in scores.items()}
    hits = []
    for one in first:
        mine = {name: found[one] for name, found in scores.items() if one in found}
        shown = preview(rows[one]["text"], words)
        hits.append(
            Hit(
                id=one,
                doc_id=rows[one]["doc_id"],
                source=rows[one]["source"],
                score=list(mine.values())[-1] if mine else 0.0,
                scores=mine,
                ranks={name: ranks[name][one] for name in mine},
                preview=shown.text,
                matches=shown.matches,
            )
        )
    return Found(
        pin=pin,
        mode=mode,
        hits=hits,
        searched={name: one.dataset.version for name, one in asked.items() if name},
        asked=max(one.version for one in asked.values()),
        missing=max(one.missing for one in asked.values()),
        without_vectors=asked["cosine"].without_vectors if "cosine" in asked else 0,
    )
