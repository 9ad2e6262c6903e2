"""Comparisons of `benchmarks.forensics`: ours and another way to the same answer, in turn, on the same data.

Invariant: both answers are compared; a difference is a number below its target, never an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import forensics_build as build
from benchmarks.forensics_questions import documents

if TYPE_CHECKING:
    import lance
    import numpy.typing as npt

OPENING = 32
"""Tokens by which a document is known where a loader is replayed."""
READ_ROWS = 500
"""Documents in which both ways look for verbatim runs, spread over all."""
LEAST = 8
"""Tokens of the shortest run that counts."""
Runs = dict[tuple[int, int], tuple[int, list[int]]]
"""By first token of the text and number of tokens: how many rows hold the run, and the first of them."""


def every(folder: str, rounds: int, count: int, sample: int) -> Callable[[], Any]:
    """All comparisons, one after another in one process, and the facts of the table that they are made on."""
    ways = {
        "where, and replaying the loader": replayed(folder, rounds),
        "attribution, and every token with every token": verbatim(folder, rounds),
        "hybrid, and LanceDB's own": hybrid(folder, count),
        "vector index, and exact search": vectors(folder, 4 * count),
        "clusters": clusters(folder, sample),
        "table": build.table_facts(folder),
    }
    return lambda: {name: way() for name, way in ways.items()}


def replayed(folder: str, rounds: int) -> Callable[[], Any]:
    """`where`, against replaying the loader until the document comes: its step and place in the block."""
    import lance  # noqa: F401
    import torch  # noqa: F401

    def work() -> dict[str, Any]:
        from pretrain_assets.forensics.where import where
        from pretrain_assets.loader.read import fastest
        from pretrain_assets.table.versions import open_pin

        location, checkpoint = build.location_in(folder), build.checkpoint_in(folder)
        dataset = fastest(open_pin(location, checkpoint.pin))

        def ours(doc: int) -> tuple[int, int, int]:
            found = where(None, [doc], location=location, runs_uri=build.runs_in(folder))
            first = found.documents[0].seen[0]
            return first.step, first.block, first.offset

        def theirs(doc: int) -> tuple[int, int, int] | None:
            return _replay(location, checkpoint, _tokens_of(dataset, doc)[:OPENING])

        whole = [document["id"] for document in documents(location, checkpoint, 4 * rounds)]
        ids = [i for i in whole if len(_tokens_of(dataset, i)) > OPENING]
        fits = [i for i in ids if ours(i)[2] + OPENING <= checkpoint.recipe.data.seq_len]
        return without_answers(compared(ours, theirs, fits[:: max(1, len(fits) // rounds)][:rounds]))

    return work


def verbatim(folder: str, rounds: int) -> Callable[[], Any]:
    """Runs of a text's tokens in documents: our automaton, against comparing every token with every token in numpy."""
    import lance  # noqa: F401

    def work() -> dict[str, Any]:
        from pretrain_assets.config import TokenizerIdentity, from_dict
        from pretrain_assets.forensics.attribution.passage import passages_of
        from pretrain_assets.forensics.attribution.verbatim import ROWS_PER_RUN, reading
        from pretrain_assets.table.versions import open_pin
        from pretrain_assets.tokenize.pretrained import tokenizer_of

        location, checkpoint = build.location_in(folder), build.checkpoint_in(folder)
        dataset = open_pin(location, checkpoint.pin)
        rows = dataset.count_rows()
        lists = dataset.take(
            list(range(0, rows, max(1, rows // READ_ROWS)))[:READ_ROWS], columns=["id", "input_ids"]
        ).combine_chunks()
        ids, column = lists["id"].to_numpy(), lists["input_ids"].chunk(0)
        tokens, offsets = column.flatten().to_numpy(), column.offsets.to_numpy().astype(np.int64)
        codec = tokenizer_of(from_dict(TokenizerIdentity, checkpoint.passport["tokenizer"]), None)

        def ours(text: str) -> Runs:
            one = reading(passages_of(codec, text)[0], least=LEAST)
            one.add(ids, tokens, offsets)
            return {(run.start, run.tokens): (rows.count, rows.ids) for run, rows in one.runs.items()}

        def theirs(text: str) -> Runs:
            passage = passages_of(codec, text)[0]
            found = _runs_naively(passage.ids, passage.words, tokens, offsets)
            return {run: (len(rows), ids[rows[:ROWS_PER_RUN]].tolist()) for run, rows in found.items()}

        here = dataset.to_table(columns=["text"], filter=f"id IN ({', '.join(map(str, ids[:: len(ids) // 5 - 1]))})")
        texts = [text[len(text) // 3 :][:300] + " and " + text[:300] for text in here["text"].to_pylist()]
        return {**without_answers(compared(ours, theirs, texts[:rounds])), "rows": len(ids), "tokens": len(tokens)}

    return work


def hybrid(folder: str, count: int) -> Callable[[], Any]:
    """Our hybrid search, against LanceDB's own hybrid query: ten hits with their texts of the same version, by the same
    indexes, as many partitions, candidates and vectors compared exactly."""
    import lance  # noqa: F401
    import lancedb  # noqa: F401

    def work() -> dict[str, Any]:
        from lancedb.rerankers import RRFReranker

        from pretrain_assets.forensics.retrieval.rerank import K
        from pretrain_assets.forensics.retrieval.search import CANDIDATES, search
        from pretrain_assets.forensics.retrieval.vectors import (
            METRIC,
            PROBES,
            REFINE_FACTOR,
            encode,
            has_index,
            vector_column,
        )
        from pretrain_assets.table.storage import open_dataset, open_lancedb

        location = build.location_in(folder)
        model, pin = build.model_in(folder), build.newest(location)
        dataset = open_dataset(location, pin.version)
        table, column = open_lancedb(location, pin.version), vector_column(dataset)

        def ours(query: str) -> list[int]:
            hits = search(location, query, pin=pin, limit=10, mode="hybrid", model=model)
            return [hit.id for hit in hits]

        def theirs(query: str) -> list[int]:
            asked = table.search(query_type="hybrid", vector_column_name=column.name, fts_columns="text")
            asked = asked.vector(encode(column, [query], model=model)[0]).text(query).distance_type(METRIC)
            asked = asked.nprobes(PROBES).refine_factor(REFINE_FACTOR).rerank(RRFReranker(K)).limit(CANDIDATES)
            rows = asked.select(["id", "doc_id", "source", "text"]).to_arrow().slice(0, 10).to_pylist()
            return [row["id"] for row in rows]

        queries = [document["phrase"] for document in documents(location, build.checkpoint_in(folder), count)]
        found = compared(ours, theirs, queries)
        pairs = found.pop("answers")
        shared = [len(set(one) & set(other)) / max(1, len(other)) for one, other in pairs]
        return {**found, "hits_shared": round(float(np.mean(shared)), 4), "by_index": has_index(dataset, column)}

    return work


def vectors(folder: str, count: int) -> Callable[[], Any]:
    """The vector index, against reading every vector: recall@10, and the time of one query; then of many at once."""
    import lance  # noqa: F401

    def work() -> dict[str, Any]:
        from pretrain_assets.forensics.retrieval.vectors import has_index, nearest, vector_column
        from pretrain_assets.table.storage import open_dataset

        location, checkpoint = build.location_in(folder), build.checkpoint_in(folder)
        dataset = open_dataset(location)
        column = vector_column(dataset)
        chosen = ", ".join(str(document["id"]) for document in documents(location, checkpoint, count))
        stored = dataset.to_table(columns=[column.name], filter=f"id IN ({chosen})").column(0).combine_chunks()
        queries = np.asarray(stored.flatten(), np.float32).reshape(-1, column.dims)
        queries = queries[queries.any(axis=1)]

        def asked(exact: bool) -> Callable[[npt.NDArray[np.float32]], Any]:
            def ask(query: npt.NDArray[np.float32]) -> Any:
                return nearest(dataset, column, query[None], limit=11, exact=exact).similarity[0].tolist()

            return ask

        found = compared(asked(False), asked(True), list(queries))
        pairs = [(np.array(one[1:]), np.array(other[1:])) for one, other in found.pop("answers")]
        recall = float(np.mean([(one >= other[-1] - 1e-3).mean() for one, other in pairs]))
        started = time.monotonic()
        nearest(dataset, column, queries, limit=11, exact=True)
        many = (time.monotonic() - started) / len(queries)
        facts = {"has_index": has_index(dataset, column), "recall_at_10": round(recall, 4)}
        return {**found, **facts, "exact_many_at_once_ms": round(1e3 * many, 3)}

    return work


def clusters(folder: str, sample: int) -> Callable[[], Any]:
    """Near duplicates of a sample by vectors: what came of it, and how long it took."""
    import lance  # noqa: F401

    def work() -> dict[str, Any]:
        from pretrain_assets.forensics.retrieval.clusters import find_clusters

        started = time.monotonic()
        found = find_clusters(build.location_in(folder), sample=sample, shown=0)
        at = found.at(0.9)
        return {
            "seconds": round(time.monotonic() - started, 2),
            "asked": found.asked,
            "share_with_neighbour_at_0.9": at.share,
            "flagged": found.agreement.flagged,
            "flagged_found": found.agreement.flagged_found,
            "exact": found.method.exact,
        }

    return work


def compared(ours: Callable[[Any], Any], theirs: Callable[[Any], Any], asked: Sequence[Any]) -> dict[str, Any]:
    """Both ways in turn, after one question to warm up; medians, the ratio of the pairs, and how many answers agree."""
    seconds: list[tuple[float, float]] = []
    answers = []
    ours(asked[0]), theirs(asked[0])
    for one in asked:
        started = time.monotonic()
        mine = ours(one)
        between = time.monotonic()
        other = theirs(one)
        seconds.append((between - started, time.monotonic() - between))
        answers.append((mine, other))
    times = np.array(seconds)
    return {
        "queries": len(asked),
        "ours_ms": round(1e3 * float(np.median(times[:, 0])), 2),
        "theirs_ms": round(1e3 * float(np.median(times[:, 1])), 2),
        "times_as_fast": round(float(np.median(times[:, 1] / times[:, 0])), 2),
        "same": round(sum(one == other for one, other in answers) / len(asked), 4),
        "answers": answers,
    }


def without_answers(found: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a comparison alone."""
    return {name: value for name, value in found.items() if name != "answers"}


def _replay(location: Any, checkpoint: Any, opening: npt.NDArray[np.int32]) -> tuple[int, int, int] | None:
    """Stream the run's blocks as a trainer does, until one holds these tokens in a row."""
    from pretrain_assets.config import TokenizerIdentity, from_dict
    from pretrain_assets.loader.stream import BlockLoader

    recipe = checkpoint.recipe
    identity = from_dict(TokenizerIdentity, checkpoint.passport["tokenizer"])
    loader = BlockLoader(location, checkpoint.pin, recipe.data, identity)
    wanted, batches = opening.tobytes(), loader.batches(0, 0, recipe.cycles_per_step, dtype="int32", doc_ids=False)
    try:
        for step, batch in enumerate(batches, 1):
            for place, block in enumerate(batch.input_ids.reshape(-1, recipe.data.seq_len).numpy()):
                at = block.tobytes().find(wanted)
                if at >= 0 and at % 4 == 0:
                    return step, (step - 1) * recipe.blocks_per_step + place, at // 4
    finally:
        batches.close()
    return None


def _runs_naively(
    text: npt.NDArray[np.int32],
    words: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
) -> dict[tuple[int, int], list[int]]:
    """Longest runs that documents share with a text, by their first token in it and length: the documents of each.

    By the table of longest common suffixes, a row of it at a time; of each place in the documents the longest one is
    kept, with the first place of the text that it ends at. Where the next place does not go on with it, a run ends.
    """
    first = np.zeros(len(tokens) + 1, np.bool_)
    first[offsets] = True
    longest, best, ends = (np.zeros(len(tokens), np.int32) for _ in range(3))
    for at, token in enumerate(text):
        before = np.concatenate([[0], longest[:-1]])
        before[first[:-1]] = 0
        longest = np.where(tokens == token, before + 1, 0).astype(np.int32)
        better = longest > best
        best[better], ends[better] = longest[better], at
    goes_on = ~first[1:] & (np.append(best[1:], 0) == best + 1)
    places = np.flatnonzero((best > 0) & ~goes_on)
    found: dict[tuple[int, int], list[int]] = {}
    for place, row in zip(places.tolist(), (np.searchsorted(offsets, places, "right") - 1).tolist(), strict=True):
        start, stop = int(ends[place] + 1 - best[place]), int(ends[place] + 1)
        if words[stop] - words[start] >= LEAST:
            rows = found.setdefault((start, stop - start), [])
            rows += [row] if row not in rows[-1:] else []
    return found


def _tokens_of(dataset: lance.LanceDataset, doc: int) -> npt.NDArray[np.int32]:
    found = dataset.to_table(columns=["input_ids"], filter=f"id = {doc}")["input_ids"]
    return np.asarray(found.combine_chunks().flatten(), np.int32)
