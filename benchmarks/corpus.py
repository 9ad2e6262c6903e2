"""Text to measure with: the bundled documents, repeated until there is enough, every copy another text.

Invariant: file `i` of a corpus is a pure function of (file_bytes, i). One row in twenty keeps the text of the first
copy, so that there are exact duplicates to find; the others turn their words by a step that grows with the copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

EXACT_EVERY = 20
TURN_WORDS = 7
"""Words by which each copy turns its document further; copies stay ordinary language, cut at another place."""


def write_files(folder: Path, *, num_files: int, file_bytes: int, first: int = 0) -> list[Path]:
    """Parquet files of about `file_bytes` of UTF-8 text each, numbered from `first`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number in range(first, first + num_files):
        texts, sources = zip(*_rows(number, file_bytes), strict=True)
        ids = [f"benchmark-{number}-{row}" for row in range(len(texts))]
        scores = pa.array([row % 51 / 10 for row in range(len(texts))], pa.float32())
        path = folder / f"part-{number:04d}.parquet"
        pq.write_table(pa.table({"text": texts, "id": ids, "source": sources, "score": scores}), path)
        written.append(path)
    return written


def _rows(number: int, file_bytes: int) -> Iterator[tuple[str, str]]:
    """Texts and sources of one file; files begin at different documents and copies."""
    documents = _documents()
    written, row = 0, 0
    at = number * 1009
    while written < file_bytes:
        text, source = documents[at % len(documents)]
        turned = text if row % EXACT_EVERY == EXACT_EVERY - 1 else _turned(text, number * 1000 + at // len(documents))
        yield turned, source
        written += len(turned.encode())
        at, row = at + 1, row + 1


def _turned(text: str, copy: int) -> str:
    words = text.split(" ")
    start = copy * TURN_WORDS % len(words)
    return " ".join([f"({copy})", *words[start:], *words[:start]])


@lru_cache(maxsize=1)
def _documents() -> list[tuple[str, str]]:
    import pyarrow.parquet as pq

    with (files("pretrain_assets") / "data" / "public_domain_docs.parquet").open("rb") as file:
        table = pq.read_table(file, columns=["text", "source"])
    return list(zip(table["text"].to_pylist(), table["source"].to_pylist(), strict=True))
