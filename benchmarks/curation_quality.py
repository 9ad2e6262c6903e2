"""Quality rules: ours against datatrove's four filters, on the same documents, row by row.

Ours makes all columns of `gopher_`, `c4_` and `fineweb_` at once, from Arrow batches of the stage's own size.
datatrove's filters run one after another: three of them with words by `str.split`, as ours, and all four with its
default, spaCy's words. C4's filter splits lines by white space as ours and counts sentences by spaCy's rules, which is
where its verdicts may differ. Verdicts of ours are those of `quality_rules`, asked of a table in SQL. A second pair
counts addresses, and the whole stage, which tells languages too, is measured alone.
"""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import debian_corpus, harness
from benchmarks.harness import Case, Round

if TYPE_CHECKING:
    import pyarrow as pa

OURS, SPLIT, SPACY = "quality: ours", "quality: datatrove, str.split", "quality: datatrove, spaCy"
PII, PII_THEIRS, STAGE = "quality: ours, PII", "quality: datatrove, PII", "quality: ours, whole stage"
MAX_BYTES = {SPLIT: 6 << 20, SPACY: 2 << 20, PII_THEIRS: 6 << 20}
QUICK_MAX_BYTES = {SPLIT: 200_000, SPACY: 40_000, PII_THEIRS: 200_000}
QUICK_COPIES = 4
"""A megabyte is too little to be timed."""
SETS = ("gopher_quality", "gopher_repetition", "fineweb", "c4", "fineweb_c4")
BY_SENTENCES = ("c4", "fineweb_c4")
MIN_RATIO, MIN_SAME = 10.0, 0.99
LISTED = 5
"""Rows named where results differ."""

Reasons = dict[str, list[str | None]]
"""By set of rules: why each document is left out, None where it is kept."""


def cases(corpus: Path, scratch: Path, quick: bool) -> list[Case]:
    """Ours, and datatrove's where it is installed."""
    functions = {OURS: "ours", STAGE: "whole_stage", PII: "pii"}
    arguments: dict[str, dict[str, Any]] = {name: {"copies": QUICK_COPIES if quick else 1} for name in functions}
    if importlib.util.find_spec("datatrove") and importlib.util.find_spec("spacy"):
        functions |= {SPLIT: "datatrove_filters", SPACY: "datatrove_filters", PII_THEIRS: "datatrove_pii"}
        for name, most in (QUICK_MAX_BYTES if quick else MAX_BYTES).items():
            arguments[name] = {"max_bytes": most}
        arguments[SPLIT] |= {"splitter": "str.split", "reasons": str(scratch / "quality-split.json")}
        arguments[SPACY] |= {"splitter": "spaCy", "reasons": str(scratch / "quality-spacy.json")}
    return [
        Case(
            name=name,
            function=f"benchmarks.curation_quality:{function}",
            arguments={"corpus": str(corpus), **arguments[name]},
        )
        for name, function in functions.items()
    ]


def compare(
    rounds: Mapping[str, list[Round]], scratch: Path
) -> tuple[dict[str, Any], dict[str, float], dict[str, float]]:
    """Speeds against each other, and whether the same documents are kept for the same reasons."""
    targets = {"quality_vs_datatrove_str_split": MIN_RATIO}
    targets |= {f"quality_same_{name}": MIN_SAME if name in BY_SENTENCES else 1.0 for name in SETS}
    if SPLIT not in rounds:
        return {"quality: missing": "datatrove and spacy: pip install 'pretrain-assets[bench]'"}, {}, targets
    ratios = {
        "quality_vs_datatrove_str_split": harness.ratio(rounds[OURS], rounds[SPLIT]),
        "quality_vs_datatrove_spacy": harness.ratio(rounds[OURS], rounds[SPACY]),
        "quality_pii_vs_datatrove": harness.ratio(rounds[PII], rounds[PII_THEIRS]),
    }
    facts: dict[str, Any] = {}
    for case in (SPLIT, SPACY):
        answer = rounds[case][-1].answer
        theirs: Reasons = json.loads(Path(answer["reasons"]).read_text())
        ours = our_reasons(debian_corpus.texts(Path(answer["corpus"]), answer["max_bytes"]), scratch)
        verdicts = {name: _differences(ours[name], reasons) for name, reasons in theirs.items()}
        facts[f"{case}: verdicts"] = verdicts
        same_words = [name for name in verdicts if case == SPLIT or name in BY_SENTENCES]
        ratios |= {f"quality_same_{name}": verdicts[name]["same_share"] for name in same_words}
    facts["quality: why verdicts differ"] = {
        "gopher and fineweb with spaCy": "punctuation marks are words there, and contractions two words",
        "c4 and fineweb_c4": "sentences end by spaCy's rules there, within module.Name too; before white space here",
    }
    return facts, ratios, targets


def _differences(ours: Sequence[str | None], theirs: Sequence[str | None]) -> dict[str, Any]:
    """How many documents have the same verdict, and the others by both reasons."""
    differing = [
        row for row, (one, other) in enumerate(zip(ours, theirs, strict=True)) if (one is None) != (other is None)
    ]
    kinds = Counter(f"{theirs[row] or 'kept'} there, {ours[row] or 'kept'} here" for row in differing)
    reasons = sum(one != other for one, other in zip(ours, theirs, strict=True)) - len(differing)
    return {
        "documents": len(ours),
        "kept_here": ours.count(None),
        "kept_there": theirs.count(None),
        "same_share": 1 - len(differing) / max(1, len(ours)),
        "same_verdict_other_reason": reasons,
        "differences": dict(kinds.most_common()),
        "first_rows_that_differ": differing[:LISTED],
    }


def our_reasons(texts: list[str], scratch: Path) -> Reasons:
    """The verdicts of `quality_rules` on the columns that our code makes."""
    import lance
    import pyarrow as pa

    from pretrain_assets.curate.quality_rules import RULES, reason

    batch = pa.record_batch([pa.array(texts)], ["text"])
    columns = _stage()(batch)
    table = pa.table({**columns, "id": range(len(texts)), "n_chars": [len(text) for text in texts]})
    dataset = lance.write_dataset(table, str(scratch / "quality.lance"), mode="overwrite")
    query = ", ".join(f"{reason(RULES[name])} AS {name}" for name in SETS)
    batches = dataset.sql(f"SELECT id, {query} FROM dataset ORDER BY id").build().to_batch_records()
    found = pa.Table.from_batches(batches)
    return {name: found[name].to_pylist() for name in SETS}


def _stage() -> Callable[[pa.RecordBatch], dict[str, pa.Array]]:
    from pretrain_assets.config import QualityConfig
    from pretrain_assets.curate.quality import measuring, outputs
    from pretrain_assets.table.filler.spec import Worker

    config = QualityConfig()
    measure, names = measuring(config, Worker(num_threads=1, device="cpu")), outputs(config).names
    return lambda batch: dict(zip(names, measure(batch), strict=True))


def ours(corpus: str, copies: int) -> Callable[[], Any]:
    """All columns of the rules."""
    from pretrain_assets.config import QualityConfig
    from pretrain_assets.curate.quality_numbers import rule_numbers
    from pretrain_assets.curate.words import text_bytes

    return _over_batches(
        lambda batch: rule_numbers(*text_bytes(batch.column(0)), QualityConfig.stop_words), corpus, copies
    )


def pii(corpus: str, copies: int) -> Callable[[], Any]:
    """The two columns of addresses."""
    from pretrain_assets.curate.pii import pii_numbers
    from pretrain_assets.curate.words import text_bytes

    return _over_batches(lambda batch: pii_numbers(batch.column(0), *text_bytes(batch.column(0))), corpus, copies)


def whole_stage(corpus: str, copies: int) -> Callable[[], Any]:
    """All columns of the stage: rules, language, addresses."""
    return _over_batches(_stage(), corpus, copies)


def _over_batches(function: Callable[[pa.RecordBatch], object], corpus: str, copies: int) -> Callable[[], Any]:
    import pyarrow as pa

    from pretrain_assets.config import QualityConfig

    table = pa.concat_tables([debian_corpus.documents(Path(corpus)).select(["text"])] * copies).combine_chunks()
    size = debian_corpus.text_bytes(table)
    batches = table.to_batches(max_chunksize=max(1, int(table.num_rows * QualityConfig.batch_bytes / max(1, size))))
    function(pa.record_batch([pa.array(["compile"])], ["text"]))

    def work() -> dict[str, Any]:
        for batch in batches:
            function(batch)
        return {"bytes": size, "rows": table.num_rows}

    return work


def datatrove_filters(corpus: str, max_bytes: int, splitter: str, reasons: str) -> Callable[[], Any]:
    """datatrove's filters with their defaults, over documents in memory."""
    from datatrove.data import Document
    from datatrove.pipeline.filters import c4_filters, fineweb_quality_filter
    from datatrove.pipeline.filters import gopher_quality_filter as gopher_quality
    from datatrove.pipeline.filters import gopher_repetition_filter as gopher_repetition

    filters = {
        "gopher_quality": gopher_quality.GopherQualityFilter(),
        "gopher_repetition": gopher_repetition.GopherRepetitionFilter(),
        "fineweb": fineweb_quality_filter.FineWebQualityFilter(),
        "c4": c4_filters.C4QualityFilter(),
        "fineweb_c4": c4_filters.C4QualityFilter(filter_no_terminal_punct=False),
    }
    if splitter == "str.split":
        for module in (gopher_quality, gopher_repetition, fineweb_quality_filter):
            module.split_into_words = lambda text, language: text.split()
        filters = {name: one for name, one in filters.items() if name not in BY_SENTENCES}
    texts = debian_corpus.texts(Path(corpus), max_bytes)
    for one in filters.values():
        one.filter(Document(text="One sentence. " * 60, id=""))  # loads its tokenizer

    def work() -> dict[str, Any]:
        found: Reasons = {name: [] for name in filters}
        for text in texts:
            for name, one in filters.items():
                kept = one.filter(Document(text=text, id=""))
                found[name].append(None if kept is True else kept[1])
        Path(reasons).write_text(json.dumps(found))
        size = sum(len(text.encode()) for text in texts)
        return {"bytes": size, "rows": len(texts), "reasons": reasons, "corpus": corpus, "max_bytes": max_bytes}

    return work


def datatrove_pii(corpus: str, max_bytes: int) -> Callable[[], Any]:
    """datatrove's formatter, which replaces addresses."""
    from datatrove.pipeline.formatters.pii import PIIFormatter

    formatter, texts = PIIFormatter(), debian_corpus.texts(Path(corpus), max_bytes)

    def work() -> dict[str, Any]:
        changed = sum(formatter.format(text) != text for text in texts)
        return {"bytes": sum(len(text.encode()) for text in texts), "rows": len(texts), "changed": changed}

    return work
