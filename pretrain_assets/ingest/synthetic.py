"""Synthetic documents with planted duplicates, for tests and demonstrations of the next stages.

Invariant: row `i` is a pure function of (seed, i). Of every 20 rows, 17 are originals, 2 are exact copies and 1 is a
near copy (one word in a hundred replaced) of an earlier original: 85%, 10% and 5%. Original texts never repeat.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

    from pretrain_assets.config import IngestConfig

GENERATOR_VERSION = 1
"""Part of the fingerprint: raise it when the same (rows, seed) gives other documents."""

ROWS_PER_BATCH = 1024
_KINDS = ("original",) * 17 + ("copy",) * 2 + ("near_copy",)
_SYLLABLES = tuple(consonant + vowel for consonant in "bdlmrst" for vowel in "aeiou")
_VOCABULARY_SIZE = 4096


def kind(row: int) -> str:
    """`original`, `copy` or `near_copy`."""
    return _KINDS[row % len(_KINDS)]


def original_of(row: int, seed: int) -> int:
    """The row whose text this row holds or varies: itself for an original, an earlier original for a copy."""
    if kind(row) == "original":
        return row
    cycle, place = divmod(int(_generator(seed, row).integers(row // len(_KINDS) * 17 + 17)), 17)
    return cycle * len(_KINDS) + place


def text_of(row: int, seed: int) -> str:
    """The text of one row."""
    words = _original_words(original_of(row, seed), seed)
    if kind(row) == "near_copy":
        words[50::100] = [f"{word}x" for word in words[50::100]]
    return " ".join(words)


def size_of(path: str) -> int:
    """Rows of the synthetic source with path `rows:seed`."""
    return int(path.split(":")[0])


def read_synthetic(path: str, config: IngestConfig) -> Iterator[pa.RecordBatch]:
    """Batches of `rows:seed` of up to 1,024 rows, under the column names that the config looks for."""
    import pyarrow as pa

    rows, seed = map(int, path.split(":"))
    for start in range(0, rows, ROWS_PER_BATCH):
        block = range(start, min(start + ROWS_PER_BATCH, rows))
        columns = {
            config.text_column: pa.array([text_of(row, seed) for row in block], pa.string()),
            config.id_column: pa.array([f"synthetic-{seed}-{row}" for row in block], pa.string()),
            config.source_column: pa.array(["synthetic"] * len(block), pa.string()),
            config.score_column: pa.array([row % 51 / 10 for row in block], pa.float32()),
        }
        yield pa.RecordBatch.from_pydict(columns)


def _generator(seed: int, row: int) -> np.random.Generator:
    return np.random.default_rng((seed, row))


def _original_words(row: int, seed: int) -> list[str]:
    """60 to 400 words, frequent ones more often (rank falls with the cube of a uniform number)."""
    generator = _generator(seed, row)
    ranks = (generator.random(generator.integers(60, 401)) ** 3 * _VOCABULARY_SIZE).astype(int)
    vocabulary = _vocabulary()
    return [vocabulary[rank] for rank in ranks]


@lru_cache(maxsize=1)
def _vocabulary() -> tuple[str, ...]:
    """Different words of two or three syllables, short ones first."""
    words = []
    for rank in range(_VOCABULARY_SIZE):
        rest, word = rank, ""
        while rest or len(word) < 4:
            rest, syllable = divmod(rest, len(_SYLLABLES))
            word += _SYLLABLES[syllable]
        words.append(word)
    return tuple(words)
