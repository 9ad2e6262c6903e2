"""Tokenization: ours with both fast engines against the way that published examples use, `AutoTokenizer(texts)`.

Each goes from Arrow batches of the stage's own size to Arrow arrays of GPT-2's ids, over text that it has not seen
before. Ours is the stage's batch function (`tokenize.columns.encoding`). The published way reads a part of the
documents, spread over all, since it takes minutes for all, and its ids are compared with ours document by document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import debian_corpus, harness
from benchmarks.harness import Case, Round

if TYPE_CHECKING:
    import pyarrow as pa

DEFAULT, FAST, PUBLISHED = "tokens: ours, default", "tokens: ours, fast", "tokens: AutoTokenizer"
TARGETS = {"tokenize_default_vs_transformers": 6.0, "tokenize_fast_vs_transformers": 25.0, "tokenize_same_ids": 1.0}
PUBLISHED_BYTES, QUICK_PUBLISHED_BYTES, QUICK_BYTES = 12 << 20, 1 << 19, 6 << 20
LISTED = 10
"""Documents named where ids differ."""


def cases(corpus: Path, scratch: Path, quick: bool) -> list[Case]:
    """Ours with tiktoken and, where it is installed, with fastokens; and the published way."""
    if quick:  # a megabyte is too little to be timed
        corpus = debian_corpus.write_bundled(scratch / "tokens.parquet", QUICK_BYTES)
    shared = {"corpus": str(corpus), "compared_bytes": QUICK_PUBLISHED_BYTES if quick else PUBLISHED_BYTES}
    engines = {DEFAULT: "tiktoken"} | ({FAST: "fastokens"} if find_spec("fastokens") else {})
    ours = [
        Case(name=name, function="benchmarks.curation_tokens:ours", arguments={**shared, "engine": engine})
        for name, engine in engines.items()
    ]
    return [*ours, Case(name=PUBLISHED, function="benchmarks.curation_tokens:published", arguments=shared)]


def compare(
    rounds: Mapping[str, list[Round]], scratch: Path
) -> tuple[dict[str, Any], dict[str, float], dict[str, float]]:
    """Speeds against each other, and whether all give the same ids."""
    del scratch
    expected = rounds[PUBLISHED][0].answer["digests"]
    same = {
        name: [sum(a == b for a, b in zip(one.answer["digests"], expected, strict=True)) for one in some]
        for name, some in rounds.items()
    }
    facts = {
        "documents_compared": len(expected),
        "documents_with_the_same_ids": {name: min(counts) for name, counts in same.items()},
        "first_documents_that_differ": {
            name: [
                at
                for at, pair in enumerate(zip(some[0].answer["digests"], expected, strict=True))
                if pair[0] != pair[1]
            ][:LISTED]
            for name, some in rounds.items()
            if min(same[name]) < len(expected)
        },
        "million_tokens_per_cpu_second": {
            name: round(max(one.answer["tokens"] / one.cpu_seconds for one in some) / 1e6, 3)
            for name, some in rounds.items()
        },
        "fast_engine_installed": FAST in rounds,
    }
    ratios = {"tokenize_default_vs_transformers": harness.ratio(rounds[DEFAULT], rounds[PUBLISHED])}
    if FAST in rounds:
        ratios["tokenize_fast_vs_transformers"] = harness.ratio(rounds[FAST], rounds[PUBLISHED])
    ratios["tokenize_same_ids"] = min(min(counts) for counts in same.values()) / max(1, len(expected))
    return {"tokens: results": facts}, ratios, TARGETS


def ours(corpus: str, compared_bytes: int, engine: str) -> Callable[[], Any]:
    """The stage's batch function."""
    from pretrain_assets.table.filler.spec import Worker
    from pretrain_assets.tokenize import load_tokenizer
    from pretrain_assets.tokenize.columns import encoding

    function = encoding("gpt2", engine, load_tokenizer("gpt2").identity, Worker(num_threads=1, device="cpu"))
    table = debian_corpus.documents(Path(corpus))
    rows = debian_corpus.spread_rows(table, compared_bytes).tolist()
    return _work(lambda batch: function(batch)[0], table, rows)


def published(corpus: str, compared_bytes: int) -> Callable[[], Any]:
    """A list of texts through `AutoTokenizer`, and its lists through `pa.array`."""
    import pyarrow as pa
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(files("pretrain_assets") / "data" / "gpt2"))
    tokenizer.model_max_length = 10**9  # or it warns of long documents
    table = debian_corpus.documents(Path(corpus), compared_bytes)

    def function(batch: pa.RecordBatch) -> pa.Array:
        return pa.array(tokenizer(batch.column(0).to_pylist())["input_ids"], pa.list_(pa.int32()))

    return _work(function, table, list(range(table.num_rows)))


def _work(function: Callable[[pa.RecordBatch], pa.Array], table: pa.Table, compared: list[int]) -> Callable[[], Any]:
    """Encode all documents; of some, a digest of the ids."""
    import pyarrow as pa

    from pretrain_assets.config import TokenizeConfig

    num_bytes = debian_corpus.text_bytes(table)
    rows = max(1, int(table.num_rows * TokenizeConfig.batch_bytes / max(1, num_bytes)))
    batches = table.select(["text"]).combine_chunks().to_batches(max_chunksize=rows)
    function(pa.record_batch({"text": ["What is built at the first call, such as pools of threads."]}))

    def work() -> dict[str, Any]:
        arrays = [function(batch) for batch in batches]
        return {
            "bytes": num_bytes,
            "tokens": sum(len(array.values) for array in arrays),
            "digests": list(digests(pa.chunked_array(arrays), compared)),
        }

    return work


def digests(column: pa.ChunkedArray, rows: list[int]) -> Iterator[str]:
    """A digest of the ids of some rows, in order."""
    starts, chunk, at = 0, 0, 0
    for row in rows:
        while row >= starts + len(column.chunk(chunk)):
            starts += len(column.chunk(chunk))
            chunk += 1
        at = row - starts
        ids = column.chunk(chunk)[at].values.to_numpy()
        yield hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()
