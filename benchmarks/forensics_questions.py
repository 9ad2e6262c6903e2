"""The questions of `benchmarks.forensics`: every kind asked many times in one warm process, in turn, and checked.

Invariant: a question is made of a document that the run has trained on, so that its right answer is known beforehand.
Kinds take turns, so that what else happens on the machine meets all of them alike.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import forensics_build as build
from pretrain_assets.table.storage import Location

if TYPE_CHECKING:
    from pretrain_assets.forensics.checkpoints import Checkpoint

Document = Mapping[str, Any]
PASSAGE_CHARS = 600
"""Of a text that is attributed: some 130 tokens."""
WORDS = re.compile(r"\b[a-z]{5,}(?: [a-z]{5,}){2}\b")
"""Three words with one space between them, none of them short: stop words are in no index."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of question."""

    ask: Callable[[Document], Any]
    """Asks about a document."""
    is_right: Callable[[Any, Document], bool]
    """Whether that is the answer."""
    after: str | None = None
    """Kind whose answer about the document it needs; when that one's time is up, so is its own."""


def ask_all(folder: str, count: int, seconds: float) -> Callable[[], Any]:
    """Each kind `count` times, or as often as `seconds` of it allow.

    Returns, by kind: queries, median and 95th percentile of milliseconds, those of the first one (which opens, loads
    and plans), and the share of right answers.
    """
    import lance  # noqa: F401  imports are no part of the work
    import model2vec  # noqa: F401

    def work() -> dict[str, Any]:
        location, checkpoint = build.location_in(folder), build.checkpoint_in(folder)
        asked = documents(location, checkpoint, count)
        return measured(kinds(location, checkpoint, folder), asked, seconds)

    return work


def ask_large(folder: str, count: int, seconds: float) -> Callable[[], Any]:
    """`where` and `seen` on the large table; its plan is there."""
    import lance  # noqa: F401

    def work() -> dict[str, Any]:
        from pretrain_assets.table.storage import open_dataset

        location, checkpoint = build.location_in(folder), build.checkpoint_in(folder)
        rows = open_dataset(location).count_rows()
        asked = [{"id": at * (rows // count) // 20 * 20 + 1} for at in range(count)]
        every = kinds(location, checkpoint, folder)
        return measured({name: every[name] for name in ("where", "seen")}, asked, seconds)

    return work


def documents(location: Location, checkpoint: Checkpoint, count: int) -> list[Document]:
    """Documents spread over those that the run has trained on, each with a phrase of its own words."""
    from pretrain_assets.forensics.exposure import seen_by
    from pretrain_assets.table.versions import open_pin

    dataset, found, recipe = open_pin(location, checkpoint.pin), [], checkpoint.recipe
    kept = dataset.to_table(columns=["id"], filter=f"({recipe.data.filter}) AND NOT is_near_dup")["id"].to_pylist()
    spread = [kept[at * len(kept) // (2 * count)] for at in range(2 * count)]
    seen = seen_by(location, pin=checkpoint.pin, recipe=recipe, step=checkpoint.step, ids=spread)
    chosen = ", ".join(str(i) for i, by in seen.items() if by.times)
    columns = ["id", "text", "source", "n_chars"]
    for row in dataset.to_table(columns=columns, filter=f"id IN ({chosen})").to_pylist():
        middle = len(row["text"]) // 2
        phrase = WORDS.search(row["text"], middle) or WORDS.search(row["text"])
        if phrase:
            found.append({**row, "phrase": phrase[0], "passage": row["text"][middle:][:PASSAGE_CHARS]})
    return found[:count]


def kinds(location: Location, checkpoint: Checkpoint, folder: str) -> dict[str, Kind]:
    """Every kind of question, by name."""
    from pretrain_assets.forensics.attribution.attribution import attribute
    from pretrain_assets.forensics.contamination.contamination import contamination_in_time
    from pretrain_assets.forensics.ledger import ledger_of
    from pretrain_assets.forensics.receipts.documents import Asked
    from pretrain_assets.forensics.receipts.receipt import receipt
    from pretrain_assets.forensics.retrieval.neighbours import neighbours_of
    from pretrain_assets.forensics.retrieval.search import search_seen
    from pretrain_assets.forensics.seen import seen_at
    from pretrain_assets.forensics.where import where

    runs, model = build.runs_in(folder), build.model_in(folder)

    def searched(mode: str, query: Callable[[Document], str], sql: Callable[[Document], str | None]) -> Kind:
        def ask(document: Document) -> Any:
            how = {"mode": mode, "where": sql(document), "limit": 10, "model": model if mode != "text" else None}
            return search_seen(location, query(document), checkpoint=checkpoint, **how)  # type: ignore[arg-type]

        return Kind(ask=ask, is_right=lambda hits, document: document["id"] in {hit.id for hit in hits})

    def whereabouts(document: Document) -> Any:
        return where(None, [document["id"]], location=location, runs_uri=runs)

    steps: dict[int, int] = {}

    def seen(document: Document) -> Any:
        return seen_at(None, steps[document["id"]], location=location, runs_uri=runs, limit=None)

    def is_seen(found: Any, document: Document) -> bool:
        steps.setdefault(document["id"], found.documents[0].seen[0].step)
        return bool(found.documents[0].times == 1)

    return {
        "text": searched("text", lambda document: document["phrase"], lambda _: None),
        "phrase": searched("text", lambda document: f'"{document["phrase"]}"', lambda _: None),
        "sql": searched("text", lambda _: "", lambda d: f"source = '{d['source']}' AND n_chars = {d['n_chars']}"),
        "vector": searched("vector", lambda document: document["text"], lambda _: None),
        "hybrid": searched("hybrid", lambda document: document["phrase"], lambda _: None),
        "where": Kind(ask=whereabouts, is_right=is_seen),
        "seen": Kind(
            ask=seen,
            is_right=lambda found, document: document["id"] in {part.id for part in found.parts},
            after="where",
        ),
        "ledger": Kind(ask=lambda _: ledger_of(location, checkpoint), is_right=lambda found, _: not found.gaps),
        "receipt": Kind(
            ask=lambda document: receipt(location, runs, Asked(docs=(str(document["id"]),))),
            is_right=lambda found, document: found.num_there == 1 and len(found.witnesses) == 1,
        ),
        "attribution": Kind(
            ask=lambda document: attribute(location, checkpoint, text=document["passage"], model=model),
            is_right=lambda found, document: found.sources[0].id == document["id"],
        ),
        "contamination in time": Kind(
            ask=lambda _: contamination_in_time(location, checkpoint), is_right=lambda found, _: not found.unsearched
        ),
        "neighbours": Kind(
            ask=lambda document: neighbours_of(location, document["id"], limit=10, checkpoint=checkpoint),
            is_right=lambda found, _: len(found.neighbours) == 10,
        ),
    }


def measured(every: Mapping[str, Kind], asked: list[Document], seconds: float) -> dict[str, Any]:
    """Ask each kind about each document, in turn."""
    times: dict[str, list[float]] = {name: [] for name in every}
    right = dict.fromkeys(every, 0)
    for number, document in enumerate(asked, 1):
        for name, kind in every.items():
            if sum(times[name][1:]) > seconds or (kind.after and len(times[kind.after]) < number):
                continue
            started = time.monotonic()
            answer = kind.ask(document)
            times[name].append(time.monotonic() - started)
            right[name] += kind.is_right(answer, document)
    return {
        name: {
            "queries": len(found),
            "median_ms": round(1e3 * float(np.median(found[1:] or found)), 2),
            "p95_ms": round(1e3 * float(np.percentile(found[1:] or found, 95)), 2),
            "first_ms": round(1e3 * found[0], 2),
            "right": round(right[name] / len(found), 4),
        }
        for name, found in times.items()
    }


def cold_starts(folder: str, large: str, most: int) -> Callable[[], Any]:
    """Each verb once (the first `most` of each table), as a person types it: a process of its own from start to end."""
    document = documents(build.location_in(folder), build.checkpoint_in(folder), 1)[0]
    one, model = str(document["id"]), build.model_in(folder)
    verbs = {
        "seen": ["seen", "--step", "3"],
        "where": ["where", "--doc", one],
        "ledger": ["ledger"],
        "search (text)": ["search", document["phrase"]],
        "search (hybrid)": ["search", document["phrase"], "--mode", "hybrid", "--model", model],
        "attribute": ["attribute", "--text", document["passage"], "--model", model],
        "receipt": ["receipt", "--doc", one],
        "contamination": ["contamination", "--checkpoint", build.RECIPE.name],
        "neighbours": ["neighbours", "--doc", one],
        "lineage": ["lineage"],
    }
    on_large = {"where (large table)": ["where", "--doc", "1"], "seen (large table)": ["seen", "--step", "3"]}

    def work() -> dict[str, float]:
        return {
            name: _typed(at, words)
            for at, some in ((folder, verbs), (large, on_large))
            for name, words in list(some.items())[:most]
        }

    return work


def _typed(folder: str, words: list[str]) -> float:
    """Seconds of a verb."""
    base = [sys.executable, "-m", "pretrain_assets", "--database", build.location_in(folder).database_uri]
    command = [*base, "--runs", build.runs_in(folder), *words]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    seconds = time.monotonic() - started
    assert not done.returncode, f"{' '.join(words)}: {done.stderr[-2000:]}"
    return round(seconds, 2)
