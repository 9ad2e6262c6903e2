"""Near duplicates: ours against datasketch and rensa, on the same documents, among which pairs of known similarity.

All go from texts to the row that each near duplicate repeats: 5-word shingles, 112 values in 14 bands of 8, candidates
verified by the estimated Jaccard index (0.75), the first row wins. The words are normalised outside the clock, so that
all three see the same shingles (ours normalises again). datasketch and rensa are used as their documentation says:
`MinHash.update_batch` and `MinHashLSH`, `RMinHash.from_token_sets` and `RMinHashLSH`; "rensa on flat hashes" gets our
compiled 64-bit shingles instead of Python strings (`digest_matrix_from_flat_token_hashes`), its fastest way that uses
every shingle, and ends with which rows share a band. The alternatives get the same few documents; ours is also measured
on all of them.

Planted at the end are pairs of Jaccard index 0.5 to 0.95: what each finds of them is printed beside the theory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from benchmarks import debian_corpus, harness
from benchmarks.harness import Case, Round

if TYPE_CHECKING:
    import pyarrow as pa

OURS, FEW = "near: ours", "near: ours, few documents"
DATASKETCH, RENSA, FLAT = "near: datasketch", "near: rensa", "near: rensa on flat hashes"
MIN_VS_DATASKETCH, MIN_VS_RENSA = 10.0, 3.0
FEW_BYTES, QUICK_BYTES = 8 << 20, 1 << 18
PLANTED = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
PAIRS, QUICK_PAIRS = 200, 20
SHINGLES = 190
"""Of each planted text."""
VALUES, BANDS, BAND_ROWS, THRESHOLD, NGRAM = 112, 14, 8, 0.75, 5
SURE = 0.9
"""True Jaccard index from which a pair that one way found ought to be found by all: theory says 0.9993."""
NONE = -1


def cases(corpus: Path, scratch: Path, quick: bool) -> list[Case]:
    """Ours on all documents and on few, and the alternatives on the few."""
    few = QUICK_BYTES if quick else FEW_BYTES
    wanted = [(OURS, "ours", few if quick else None)]
    wanted += [] if quick else [(FEW, "ours", few)]
    wanted += [(DATASKETCH, "datasketch", few)] if find_spec("datasketch") else []
    wanted += [(RENSA, "rensa", few)] if find_spec("rensa") else []
    wanted += [(FLAT, "rensa_flat", few)] if find_spec("rensa") and not quick else []
    return [
        Case(
            name=name,
            function=f"benchmarks.curation_near:{function}",
            arguments={
                "corpus": str(corpus),
                "max_bytes": max_bytes,
                "pairs": QUICK_PAIRS if quick else PAIRS,
                "partners": str(scratch / f"near-{place}.npy"),
            },
        )
        for place, (name, function, max_bytes) in enumerate(wanted)
    ]


def compare(
    rounds: Mapping[str, list[Round]], scratch: Path
) -> tuple[dict[str, Any], dict[str, float], dict[str, float]]:
    """Speeds against each other, what each finds of the planted pairs, and whether they agree on the others."""
    del scratch
    few = FEW if FEW in rounds else OURS
    answers = {name: rounds[name][-1].answer for name in (few, DATASKETCH, RENSA) if name in rounds}
    partners = {name: np.load(answer["partners"]) for name, answer in answers.items()}
    similar = Similarity(answers[few])
    facts: dict[str, Any] = {f"{name}: results": similar.facts(found) for name, found in partners.items()}
    sure = similar.sure(partners)
    shares = {name: float((found[sure] != NONE).mean()) if len(sure) else 1.0 for name, found in partners.items()}
    facts["near: theory"] = {"planted_found": theory()}
    facts["near: agreement"] = {"rows_that_repeat_surely": len(sure), "share_found": shares}
    facts["near: documents_per_cpu_second"] = {
        name: round(some[-1].answer["rows"] / some[-1].cpu_seconds) for name, some in rounds.items()
    }
    keys = {"near_vs_datasketch": DATASKETCH, "near_vs_rensa": RENSA, "near_vs_rensa_flat": FLAT}
    if missing := [name for name in keys.values() if name not in rounds and (few == FEW or name != FLAT)]:
        facts["near: not_installed"] = missing
    ratios = {key: harness.ratio(rounds[few], rounds[name]) for key, name in keys.items() if name in rounds}
    ratios["near_share_of_sure_pairs"] = shares[few]
    ratios["near_within_theory"] = float(
        within_theory(facts[f"{few}: results"]["planted_found"], answers[few]["pairs"])
    )
    targets = {
        "near_vs_datasketch": MIN_VS_DATASKETCH,
        "near_vs_rensa": MIN_VS_RENSA,
        **({"near_vs_rensa_flat": 1.0} if few == FEW else {}),  # left out of the quick run
        "near_share_of_sure_pairs": 0.99,
        "near_within_theory": 1.0,
    }
    return facts, ratios, targets


def theory() -> dict[str, float]:
    """Share of planted pairs to be found, by similarity."""
    from pretrain_assets.curate.lsh import detection_probability

    return {
        str(s): round(detection_probability(s, bands=BANDS, rows_per_band=BAND_ROWS, threshold=THRESHOLD), 4)
        for s in PLANTED
    }


def within_theory(found: Mapping[str, float], pairs: int) -> bool:
    """Whether every share is that of theory, five standard errors and two pairs either way, or of a steeper curve."""
    return all(
        (found[at] <= share + _tolerance(share, pairs) or float(at) >= THRESHOLD)
        and (found[at] >= share - _tolerance(share, pairs) or float(at) < THRESHOLD)
        for at, share in theory().items()
    )


def _tolerance(share: float, pairs: int) -> float:
    return float(5 * (share * (1 - share) / pairs) ** 0.5 + 2 / pairs)


class Similarity:
    """True Jaccard indices between the documents of a case."""

    def __init__(self, answer: Mapping[str, Any]):
        from pretrain_assets.curate import minhash

        self._pairs = int(answer["pairs"])
        texts = normalised(answer["corpus"], answer["max_bytes"], self._pairs)
        self._rows = len(texts)
        self._sets, lengths = minhash.shingle_sets(texts, ngram_words=NGRAM, min_words=NGRAM)
        self._edges = np.concatenate([[0], lengths]).cumsum()

    def of(self, left: int, right: int) -> float:
        """Of two rows."""
        from pretrain_assets.curate.lsh import jaccard

        spans = (self._sets[self._edges[row] : self._edges[row + 1]] for row in (left, right))
        return float(jaccard(*spans))

    def facts(self, partners: npt.NDArray[np.int64]) -> dict[str, Any]:
        """How many rows repeat another, how similar they truly are, and the share of planted pairs that were found."""
        first = self._rows - 2 * self._pairs * len(PLANTED)
        true = np.array([self.of(int(row), partners[row]) for row in np.flatnonzero(partners[:first] != NONE)])
        seconds = partners[first + 1 :: 2].reshape(len(PLANTED), self._pairs)
        right = (seconds == np.arange(first, self._rows, 2).reshape(seconds.shape)).mean(axis=1)
        return {
            "near_duplicates": len(true),
            "true_similarity_mean": round(float(true.mean()), 4) if len(true) else None,
            "true_similarity_least": round(float(true.min()), 4) if len(true) else None,
            "planted_found": dict(zip(map(str, PLANTED), right.round(4).tolist(), strict=True)),
        }

    def sure(self, partners: Mapping[str, npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
        """Rows for which some way names a row that is truly very similar."""
        return np.array(
            [
                row
                for row in range(self._rows)
                if any(found[row] != NONE and self.of(row, found[row]) >= SURE for found in partners.values())
            ],
            np.int64,
        )


def ours(corpus: str, max_bytes: int | None, pairs: int, partners: str) -> Callable[[], Any]:
    """The stage's two functions, without a table around them."""
    import pyarrow as pa

    from pretrain_assets.config import NearDedupConfig
    from pretrain_assets.curate.near_dedup import judging, signing
    from pretrain_assets.table.filler.spec import Worker

    config = NearDedupConfig(bands=BANDS, rows_per_band=BAND_ROWS, threshold=THRESHOLD, ngram_words=NGRAM)

    def find(texts: pa.Array) -> npt.NDArray[np.int64]:
        rows = max(1, len(texts) * config.batch_bytes // max(1, texts.nbytes))
        sign = signing(config, Worker(num_threads=1, device="cpu"))
        batches = [pa.record_batch([texts[at : at + rows]], ["text"]) for at in range(0, len(texts), rows)]
        ids, none = pa.array(np.arange(len(texts))), pa.array(np.zeros(len(texts), bool))
        columns = {"minhash": [sign(batch)[0] for batch in batches], "id": [ids], "is_dup": [none]}
        judged = judging(config, Columns(columns))(pa.record_batch([ids, none], ["id", "is_dup"]))
        return judged[0].fill_null(NONE).to_numpy()  # type: ignore[no-any-return]

    find(pa.array(["a b c d e f", "a b c d e f"]))  # numba compiles, once per machine
    return _work(find, corpus, max_bytes, pairs, partners)


class Columns:
    """Reads columns as the filler's reader does."""

    def __init__(self, columns: Mapping[str, list[pa.Array]]):
        self._columns = columns

    def __call__(self, name: str) -> pa.ChunkedArray:
        import pyarrow as pa

        return pa.chunked_array(self._columns[name])

    def batches(self, name: str) -> Iterator[pa.Array]:
        return iter(self._columns[name])


def datasketch(corpus: str, max_bytes: int | None, pairs: int, partners: str) -> Callable[[], Any]:
    """`MinHashLSH` with `MinHash` objects, candidates verified by `jaccard`."""
    from datasketch import MinHash, MinHashLSH

    def find(texts: pa.Array) -> npt.NDArray[np.int64]:
        lsh = MinHashLSH(num_perm=VALUES, params=(BANDS, BAND_ROWS))
        kept: dict[int, Any] = {}
        found = np.full(len(texts), NONE)
        for row, text in enumerate(texts.to_pylist()):
            sketch = MinHash(num_perm=VALUES)
            sketch.update_batch([shingle.encode() for shingle in _shingles(text)])
            _first_wins(row, sketch, lsh.query(sketch), kept, found)
            if row in kept:
                lsh.insert(row, sketch, check_duplication=False)
        return found

    return _work(find, corpus, max_bytes, pairs, partners)


def rensa(corpus: str, max_bytes: int | None, pairs: int, partners: str) -> Callable[[], Any]:
    """`RMinHashLSH` with `RMinHash` objects from sets of strings, candidates verified by `jaccard`."""
    from rensa import RMinHash, RMinHashLSH

    def find(texts: pa.Array) -> npt.NDArray[np.int64]:
        lsh = RMinHashLSH(threshold=THRESHOLD, num_perm=VALUES, num_bands=BANDS)
        kept: dict[int, Any] = {}
        found = np.full(len(texts), NONE)
        for start in range(0, len(texts), 1000):
            sets = [_shingles(text) for text in texts[start : start + 1000].to_pylist()]
            for row, sketch in enumerate(RMinHash.from_token_sets(sets, num_perm=VALUES, seed=1), start):
                _first_wins(row, sketch, lsh.query(sketch), kept, found)
                if row in kept:
                    lsh.insert(row, sketch)
        return found

    return _work(find, corpus, max_bytes, pairs, partners)


def rensa_flat(corpus: str, max_bytes: int | None, pairs: int, partners: str) -> Callable[[], Any]:
    """Signatures of our shingles and which rows share a band: less than the others do, nothing verified or named."""
    import pyarrow as pa
    from rensa import RMinHash, RMinHashLSH

    from pretrain_assets.curate import minhash

    def find(texts: pa.Array) -> npt.NDArray[np.int64]:
        lsh = RMinHashLSH(threshold=THRESHOLD, num_perm=VALUES, num_bands=BANDS)
        for start in range(0, len(texts), 1000):
            some = texts[start : start + 1000]
            hashes, lengths = minhash.shingle_sets(some, ngram_words=NGRAM, min_words=NGRAM)
            edges = np.concatenate([[0], lengths]).cumsum().astype(np.uint64)
            digests = RMinHash.digest_matrix_from_flat_token_hashes(hashes, edges, VALUES, 1)
            lsh.insert_matrix_and_query_duplicate_flags(digests, start)
        return np.full(len(texts), NONE)

    find(pa.array(["a b c d e f"], pa.large_string()))  # numba compiles, once per machine
    return _work(find, corpus, max_bytes, pairs, partners)


def _first_wins(row: int, sketch: Any, candidates: Any, kept: dict[int, Any], found: npt.NDArray[np.int64]) -> None:
    """Note the most similar kept candidate, the first of equals, or keep the row."""
    similar = [(sketch.jaccard(kept[other]), -other) for other in candidates]
    best, partner = max(similar, default=(0.0, 0))
    if best >= THRESHOLD:
        found[row] = -partner
    else:
        kept[row] = sketch


def _shingles(text: str) -> list[str]:
    """The shingles of a text of normalised words; of a short one, the whole."""
    words = text.split()
    return [" ".join(words[at : at + NGRAM]) for at in range(max(1, len(words) - NGRAM + 1))]


def normalised(corpus: str, max_bytes: int | None, pairs: int) -> pa.Array:
    """Documents with their words as ours folds them, but for marks before digits; then the planted pairs."""
    import pyarrow as pa

    from pretrain_assets.curate.folded_words import DROPPED, fold_table

    table = {code: None if to == DROPPED else int(to) for code, to in enumerate(fold_table())}
    texts = [" ".join(text.translate(table).split()) for text in debian_corpus.texts(Path(corpus), max_bytes)]
    planted = [text for similarity in PLANTED for number in range(pairs) for text in _pair(similarity, number)]
    return pa.array(texts + planted, pa.large_string())


def _pair(similarity: float, number: int) -> tuple[str, str]:
    """Two texts of `SHINGLES` shingles each whose Jaccard index is this, to the nearest shingle."""
    draw = random.Random(f"{similarity} {number}")
    shared = round(2 * SHINGLES * similarity / (1 + similarity))
    first, other = ([f"w{draw.randrange(10**9)}" for _ in range(SHINGLES + NGRAM - 1)] for _ in range(2))
    return " ".join(first), " ".join(first[: shared + NGRAM - 1] + other[: SHINGLES - shared])


def _work(
    find: Callable[[pa.Array], npt.NDArray[np.int64]], corpus: str, max_bytes: int | None, pairs: int, partners: str
) -> Callable[[], Any]:
    texts = normalised(corpus, max_bytes, pairs)
    num_bytes = sum(len(text.as_buffer()) for text in texts)

    def work() -> dict[str, Any]:
        np.save(partners, find(texts))
        facts = {"corpus": corpus, "max_bytes": max_bytes, "pairs": pairs, "partners": partners}
        return {"bytes": num_bytes, "rows": len(texts), **facts}

    return work
