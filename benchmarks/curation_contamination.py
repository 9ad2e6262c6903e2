"""Contamination: ours against a plain loop over sets of n-grams in Python, and against datatrove's filter.

All search the same documents for the 300 bundled GSM8K items. In one document of twenty an item was planted, chosen by
the document's id: its question and answer, its question in capitals and broken lines, or the question's first half.
Ours and the loop have one policy for words, and both find the share of every text's n-grams, so their contaminated
documents must be the same. datatrove knows no shares: it drops a document at the first n-gram that it finds; it is
compared with the documents in which ours finds any.
"""

from __future__ import annotations

import importlib.util
import json
import unicodedata
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from benchmarks import debian_corpus, harness
from benchmarks.harness import Case, Round

if TYPE_CHECKING:
    import pyarrow as pa

OURS, LOOP, DATATROVE = "contamination: ours", "contamination: Python sets", "contamination: datatrove"
MIN_RATIO = 20.0
PLANTED_EVERY = 20
LOOP_BYTES, DATATROVE_BYTES = 16 << 20, 2 << 20
"""Text that the slow ways get: rows spread over the whole."""
QUICK_DATATROVE_BYTES = 256 << 10
LISTED = 10
"""Documents named where results differ."""


def cases(corpus: Path, scratch: Path, quick: bool) -> list[Case]:
    """Ours, the loop, and datatrove where it is installed."""
    chosen: list[tuple[str, str, int | None]] = [(OURS, "ours", None), (LOOP, "loop", LOOP_BYTES)]
    if importlib.util.find_spec("datatrove") and importlib.util.find_spec("spacy"):
        chosen.append((DATATROVE, "datatrove", QUICK_DATATROVE_BYTES if quick else DATATROVE_BYTES))
    documents = _plant(corpus, scratch / "contamination.parquet")
    return [
        Case(
            name=name,
            function=f"benchmarks.curation_contamination:{function}",
            arguments={
                "corpus": str(documents),
                "max_bytes": most,
                "found": str(scratch / f"contamination-{function}.json"),
            },
        )
        for name, function, most in chosen
    ]


def compare(
    rounds: Mapping[str, list[Round]], scratch: Path
) -> tuple[dict[str, Any], dict[str, float], dict[str, float]]:
    """Speeds against each other, and whether the documents found are the same, and those with an item planted."""
    found = {name: json.loads(Path(some[-1].answer["found"]).read_text()) for name, some in rounds.items()}
    ours = found[OURS]
    planted, flagged = _planted_in(scratch / "contamination.parquet"), set(ours["contaminated"])
    facts: dict[str, Any] = {
        "documents": len(ours["searched"]),
        "planted": len(planted),
        "planted_found": len(planted & set(ours["any"])),
        "contaminated": len(flagged),
        "false_alarms": sorted(set(ours["any"]) - planted)[:LISTED],
    }
    ratios = {"contamination_recall": facts["planted_found"] / max(1, len(planted))}
    targets = {"contamination_recall": 1.0, "contamination_vs_python_sets": MIN_RATIO, "contamination_same": 1.0}
    for name, key, column in ((LOOP, "python_sets", "contaminated"), (DATATROVE, "datatrove", "any")):
        if name not in rounds:
            facts[f"{key}_missing"] = "not installed: pip install 'pretrain-assets[bench]'"
            continue
        searched = set(found[name]["searched"])
        here, there = set(ours[column]) & searched, set(found[name][column])
        facts[f"{key}_searched"], facts[f"{key}_found"] = len(searched), len(there)
        facts[f"only_ours_not_{key}"] = sorted(here - there)[:LISTED]
        facts[f"only_{key}"] = sorted(there - here)[:LISTED]
        ratios[f"contamination_vs_{key}"] = harness.ratio(rounds[OURS], rounds[name])
        same = len(here & there) / max(1, len(here | there))
        ratios["contamination_same" if name == LOOP else f"contamination_same_as_{key}"] = same
    return {"contamination: results": facts}, ratios, targets


def ours(corpus: str, max_bytes: int | None, found: str) -> Callable[[], Any]:
    """The stage's batch function, on batches of the stage's own size."""
    import pyarrow as pa

    from pretrain_assets.config import ContaminationConfig
    from pretrain_assets.curate.contamination import searching
    from pretrain_assets.curate.eval_sets import read_eval_sets
    from pretrain_assets.table.filler.spec import Worker

    config = ContaminationConfig()
    sets = tuple(one.fingerprint for one in read_eval_sets(config.eval_sets))
    search = searching(config, sets, Worker(num_threads=1, device="cpu"))
    search(pa.record_batch([pa.array(["compile"])], ["text"]))  # which numba does once per machine
    table = debian_corpus.documents(Path(corpus), max_bytes)
    rows = max(1, int(table.num_rows * config.batch_bytes / max(1, debian_corpus.text_bytes(table))))
    batches = table.select(["text"]).to_batches(max_chunksize=rows)

    def find() -> tuple[list[bool], list[bool]]:
        columns = [search(batch) for batch in batches]
        overlap, flags = (pa.chunked_array([made[at] for made in columns]) for at in (2, 5))
        return [share > 0 for share in overlap.to_pylist()], flags.to_pylist()

    return _work(find, table, found)


def loop(corpus: str, max_bytes: int | None, found: str) -> Callable[[], Any]:
    """Every n-gram of every document, as a tuple of words, looked up in a dictionary of those of the items' texts."""
    from pretrain_assets.config import ContaminationConfig
    from pretrain_assets.curate.eval_sets import read_eval_sets

    config, table = ContaminationConfig(), debian_corpus.documents(Path(corpus), max_bytes)
    texts = [text for one in read_eval_sets(config.eval_sets) for item in one.items for text in item.texts]
    index: dict[tuple[str, ...], list[int]] = {}
    totals = []
    for number, text in enumerate(texts):
        grams = _ngrams(_words(text), config.ngram) or {tuple(_words(text))}
        assert min(map(len, grams)) == config.ngram, "the loop knows no shorter texts"
        totals.append(len(grams))
        for gram in grams:
            index.setdefault(gram, []).append(number)

    def overlap(text: str) -> float:
        counts: dict[int, int] = {}
        for gram in _ngrams(_words(text), config.ngram):
            for number in index.get(gram, ()):
                counts[number] = counts.get(number, 0) + 1
        return max((count / totals[number] for number, count in counts.items()), default=0.0)

    def find() -> tuple[list[bool], list[bool]]:
        shares = [overlap(text) for text in table["text"].to_pylist()]
        return [share > 0 for share in shares], [share >= config.min_overlap for share in shares]

    return _work(find, table, found)


def _words(text: str) -> list[str]:
    """Words by the policy of `plain_words`, without its rule for scripts that have no spaces."""
    if not text.isascii():
        text = unicodedata.normalize("NFKD", text)
        text = "".join(c for c in text if unicodedata.category(c)[0] != "M" and unicodedata.category(c) != "Cf")
        text = text.translate({0x2018: None, 0x2019: None, 0x02BC: None})
    text = text.casefold().replace("'", "")
    return "".join(c if c.isalnum() else " " for c in text).split()


def _ngrams(words: list[str], size: int) -> set[tuple[str, ...]]:
    return set(zip(*(words[start:] for start in range(size)), strict=False))


def datatrove(corpus: str, max_bytes: int | None, found: str) -> Callable[[], Any]:
    """Its filter with n-grams of the same length, over an index made of the same texts."""
    import tempfile

    import numpy as np
    import xxhash
    from datatrove.data import Document
    from datatrove.pipeline.decont.n_grams import NGramsDecontConfig, NGramsDecontFilter, NGramsDecontIndexer
    from datatrove.utils.text import TextNormConfig

    from pretrain_assets.config import ContaminationConfig
    from pretrain_assets.curate.eval_sets import read_eval_sets

    table = debian_corpus.documents(Path(corpus), max_bytes)
    folder = tempfile.mkdtemp(dir=Path(found).parent)
    norm = TextNormConfig(norm_numbers=False, norm_weekdays=False, norm_monthnames=False)
    config = NGramsDecontConfig(n_grams=ContaminationConfig().ngram, find_overlap_ngrams=False, norm_config=norm)
    made = NGramsDecontFilter(folder, config)
    made.hash_func = lambda ngram: xxhash.xxh64_intdigest(ngram.encode())  # its own fails with xxhash 4
    # the indexer cannot be made without lighteval, of which its hashing has no need
    indexer: Any = SimpleNamespace(config=config, tokenizer=made.tokenizer, hash_func=made.hash_func)
    texts = [text for one in read_eval_sets(("bundled",)) for item in one.items for text in item.texts]
    hashes = {hashed for text in texts for hashed in NGramsDecontIndexer.compute_hashes(indexer, text)}
    np.array(sorted(hashes), config.hash_config.np_descr).tofile(Path(folder) / "gsm8k.index.hashes")
    made.load_index_hashes()

    def find() -> tuple[list[bool], list[bool]]:
        rows = enumerate(table["text"].to_pylist())
        kept = [made.filter(Document(text=text, id=str(row))) is True for row, text in rows]
        return [not one for one in kept], []

    return _work(find, table, found)


def _plant(corpus: Path, path: Path) -> Path:
    """A copy of the corpus with an item of GSM8K in some of its documents."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from pretrain_assets.curate.eval_sets import read_eval_sets

    items = read_eval_sets(("bundled",))[0].items
    table = debian_corpus.documents(corpus)
    texts = []
    for doc_id, text in zip(table["doc_id"].to_pylist(), table["text"].to_pylist(), strict=True):
        if _is_planted(doc_id):
            number, half = _number(doc_id) // PLANTED_EVERY, len(text) // 2
            text = f"{text[:half]}\n{_planted(items[number % 300].texts, number // 300)}\n{text[half:]}"
        texts.append(text)
    at = table.schema.get_field_index("text")
    pq.write_table(table.set_column(at, "text", pa.array(texts, pa.string())), path)
    return path


def _planted_in(path: Path) -> set[str]:
    return {doc_id for doc_id in debian_corpus.documents(path)["doc_id"].to_pylist() if _is_planted(doc_id)}


def _is_planted(doc_id: str) -> bool:
    return _number(doc_id) % PLANTED_EVERY == 0


def _number(doc_id: str) -> int:
    return zlib.crc32(doc_id.encode())


def _planted(texts: tuple[str, ...], number: int) -> str:
    question, answer = texts
    words = question.split()
    return (f"{question}\n{answer}", "\n".join(words).upper(), " ".join(words[: max(13, len(words) // 2)]))[number % 3]


def _work(find: Callable[[], tuple[list[bool], list[bool]]], table: pa.Table, found: str) -> Callable[[], Any]:
    num_bytes = debian_corpus.text_bytes(table)
    doc_ids = table["doc_id"].to_pylist()

    def work() -> dict[str, Any]:
        some, flags = find()
        chosen = {"any": some, "contaminated": flags}
        lists = {name: [doc_ids[row] for row, flag in enumerate(flags) if flag] for name, flags in chosen.items()}
        Path(found).write_text(json.dumps({"searched": doc_ids, **lists}))
        return {"bytes": num_bytes, "found": found}

    return work
