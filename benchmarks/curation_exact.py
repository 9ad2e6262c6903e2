"""Exact duplicates: ours against the loop that published examples use, and against the same loop with a faster hash.

Each goes from Arrow batches of the stage's own size to the row numbers of the duplicates: every row whose text, white
space normalised, an earlier row has too. Ours are the stage's functions, `normalise.content_hashes` and the comparison
of `curate.dedup`, without a table around them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from benchmarks import debian_corpus, harness
from benchmarks.harness import Case, Round

if TYPE_CHECKING:
    import pyarrow as pa

    Rows = npt.NDArray[np.int64]

OURS, MD5, XXH3 = "exact: ours", "exact: md5 loop", "exact: xxh3 loop"
MIN_RATIO = 3.0
QUICK_COPIES = 8
"""A megabyte is too little to be timed, and has no duplicates."""
LISTED = 10
"""Rows named where results differ."""


def cases(corpus: Path, scratch: Path, quick: bool) -> list[Case]:
    """Ours and the two loops."""
    functions = {OURS: "ours", MD5: "md5_loop", XXH3: "xxh3_loop"}
    return [
        Case(
            name=name,
            function=f"benchmarks.curation_exact:{function}",
            arguments={
                "corpus": str(corpus),
                "copies": QUICK_COPIES if quick else 1,
                "duplicates": str(scratch / f"exact-{function}.npy"),
            },
        )
        for name, function in functions.items()
    ]


def compare(
    rounds: Mapping[str, list[Round]], scratch: Path
) -> tuple[dict[str, Any], dict[str, float], dict[str, float]]:
    """Speeds against each other, and whether all find the same duplicates."""
    del scratch
    found: dict[str, Rows] = {name: np.load(some[-1].answer["duplicates"]) for name, some in rounds.items()}
    differing = {name: np.setxor1d(found[OURS], rows) for name, rows in found.items() if name != OURS}
    steady = all(len({one.answer["digest"] for one in some}) == 1 for some in rounds.values())
    facts = {
        "rows": rounds[OURS][0].answer["rows"],
        "duplicates": len(found[OURS]),
        "same_in_every_round": steady,
        "rows_that_differ": {name: len(rows) for name, rows in differing.items()},
        "first_rows_that_differ": {name: rows[:LISTED].tolist() for name, rows in differing.items() if len(rows)},
    }
    ratios = {
        "exact_vs_md5_loop": harness.ratio(rounds[OURS], rounds[MD5]),
        "exact_vs_xxh3_loop": harness.ratio(rounds[OURS], rounds[XXH3]),
        "exact_same_duplicates": float(steady and not any(map(len, differing.values()))),
    }
    return {"exact: results": facts}, ratios, {"exact_vs_md5_loop": MIN_RATIO, "exact_same_duplicates": 1.0}


def ours(corpus: str, copies: int, duplicates: str) -> Callable[[], Any]:
    """The stage's two functions."""
    import pyarrow as pa

    from pretrain_assets.config import DedupConfig
    from pretrain_assets.curate.dedup import compared, hash_batch

    table, batches = _read(corpus, copies)

    def find() -> Rows:
        hashes = pa.chunked_array([hash_batch(batch)[0] for batch in batches])
        columns = {"content_hash": hashes, "id": pa.chunked_array([np.arange(table.num_rows)])}
        compare = compared(_Columns(columns), memory_bytes=DedupConfig.memory_bytes)
        flags = [compare(pa.record_batch([ids], ["id"]))[1] for ids in columns["id"].chunks]
        return np.flatnonzero(np.concatenate(flags))

    small = hash_batch(pa.record_batch([pa.array(["compile"])], ["text"]))  # which numba does once per machine
    compared(_Columns({"content_hash": pa.chunked_array(small), "id": pa.chunked_array([[0]])}), memory_bytes=1 << 20)
    return _work(find, table, duplicates)


class _Columns:
    """Reads columns as the filler's reader does."""

    def __init__(self, columns: Mapping[str, pa.ChunkedArray]):
        self._columns = columns

    def __call__(self, name: str) -> pa.ChunkedArray:
        return self._columns[name]

    def batches(self, name: str) -> Iterator[pa.Array]:
        return iter(self._columns[name].chunks)


def md5_loop(corpus: str, copies: int, duplicates: str) -> Callable[[], Any]:
    """A set of md5 digests, in a loop over Python strings."""
    return _loop(lambda content: hashlib.md5(content).digest(), corpus, copies, duplicates)


def xxh3_loop(corpus: str, copies: int, duplicates: str) -> Callable[[], Any]:
    """The same with xxh3-128."""
    import xxhash

    return _loop(xxhash.xxh3_128_digest, corpus, copies, duplicates)


def _loop(digest: Callable[[bytes], bytes], corpus: str, copies: int, duplicates: str) -> Callable[[], Any]:
    table, batches = _read(corpus, copies)

    def find() -> Rows:
        seen: set[bytes] = set()
        later, row = [], 0
        for batch in batches:
            for text in batch.column(0).to_pylist():
                key = digest(" ".join(text.split()).encode())
                if key in seen:
                    later.append(row)
                seen.add(key)
                row += 1
        return np.array(later, np.int64)

    return _work(find, table, duplicates)


def _read(corpus: str, copies: int) -> tuple[pa.Table, list[pa.RecordBatch]]:
    """All documents, some times over, and their texts in batches of the size that the stage works in."""
    import pyarrow as pa

    from pretrain_assets.config import DedupConfig

    one = debian_corpus.documents(Path(corpus)).select(["text"])
    table = pa.concat_tables([one] * copies).combine_chunks()
    rows = max(1, int(table.num_rows * DedupConfig.batch_bytes / max(1, debian_corpus.text_bytes(table))))
    return table, table.to_batches(max_chunksize=rows)


def _work(find: Callable[[], Rows], table: pa.Table, duplicates: str) -> Callable[[], Any]:
    num_bytes = debian_corpus.text_bytes(table)

    def work() -> dict[str, Any]:
        rows = find()
        np.save(duplicates, rows)
        digest = hashlib.sha256(rows.tobytes()).hexdigest()
        return {"bytes": num_bytes, "rows": table.num_rows, "duplicates": duplicates, "digest": digest}

    return work
