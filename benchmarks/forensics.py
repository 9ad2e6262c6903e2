"""Forensics on real English text: what every kind of question takes, what indexes cost, and other ways beside ours.

The text is that of `benchmarks.debian_corpus`, at least 100 MB; `--quick` takes bundled documents on the same code
path, in one process. It goes through the project's own stages. The embedding is fitted to it
(`benchmarks.forensics_model`), so that nothing else is downloaded, and the run that is asked about has trained one
epoch of it (`benchmarks.forensics_build`).

Measured: each kind of question 50 times, or for 15 seconds, in one warm process, kinds in turn, and checked against a
known answer (`benchmarks.forensics_questions`); the indexes, and what an append adds to them; `where` and `seen` on two
million documents; each verb once from a cold start; and in turn with ours (`benchmarks.forensics_peers`): replaying the
loader, comparing tokens in numpy, LanceDB's own hybrid query, and exact search.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import child, debian_corpus, harness

FULL_BYTES, QUICK_BYTES = 100_000_000, 1_000_000
"""At least this much text, and at most this much."""
FULL: dict[str, Any] = {
    "apart": True,
    "queries": 50,
    "seconds": 15,
    "verbs": 99,
    "workers": None,
    "large_rows": 2_000_000,
    "exact_below": 10_000,
    "sample": 10_000,
    "rounds": 5,
}
"""Whether each case has a process of its own, queries of each kind, most seconds for each, verbs started cold, worker
processes of a stage (None: one per core), rows of the large table, vectors from which on they are indexed (50 thousand
by default, more than this corpus has), documents of the sample of clusters, and rounds of the slower comparisons."""
QUICK = {
    **FULL,
    "apart": False,
    "queries": 3,
    "seconds": 1,
    "verbs": 1,
    "workers": 1,
    "large_rows": 100_000,
    "exact_below": 1_000,
    "sample": 300,
    "rounds": 2,
}
LIMIT_SECONDS, CLI_SECONDS, RECALL = 2.0, 5.0, 0.9
ATTRIBUTION_SECONDS = 5.0
"""For the one kind that reads every token of the table."""
CERTAIN = ("phrase", "sql", "where", "seen", "ledger", "receipt", "contamination in time", "neighbours")
"""Kinds with one right answer; the others rank, and their share of known documents among ten hits is measured."""


def main() -> None:
    """Measure, and print."""
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--corpus", type=Path, help="folder for the packages and the text (default: a cache folder)")
    options = parser.parse_args()
    lacking = [package for package in ("sklearn", "model2vec") if not find_spec(package)]
    if lacking:
        parser.error(f"the embedding is made with {' and '.join(lacking)}: pip install 'pretrain-assets[bench]'")
    with tempfile.TemporaryDirectory(prefix="benchmark-forensics-") as scratch:
        if options.quick:
            corpus = debian_corpus.write_bundled(Path(scratch) / "corpus.parquet", QUICK_BYTES)
        else:
            corpus = debian_corpus.build(options.corpus or debian_corpus.default_folder(), FULL_BYTES)
        report = run(corpus, Path(scratch), QUICK if options.quick else FULL)
    if options.quick:
        del report.targets["where_vs_replay"]  # a few steps are replayed in no time
    harness.finish(report, options)


def run(corpus: Path, scratch: Path, size: Mapping[str, Any]) -> harness.Report:
    """Build, ask, compare, append."""
    folder, large = str(scratch / "corpus"), str(scratch / "large")
    text, on_corpus, on_large = {"corpus": str(corpus)}, {"folder": folder}, {"folder": large}
    often, workers = {"count": size["queries"], "seconds": size["seconds"]}, {"workers": size["workers"]}
    found: dict[str, harness.Round] = {}

    def measure(name: str, function: str, **arguments: Any) -> Any:
        found[name] = (harness.measure if size["apart"] else here)(f"benchmarks.forensics_{function}", arguments)
        harness.say(f"{name:<24} {found[name].seconds:8.2f} s, {found[name].cpu_seconds:7.2f} of processors")
        return found[name].answer

    def index(name: str) -> dict[str, Any]:
        answer = measure(name, "build:index", **on_corpus, exact_below=size["exact_below"])
        return {**answer, "bytes_per_row": round(answer["bytes"] / max(1, answer["rows"]), 1)}

    stages = measure("stages", "build:corpus_table", **text, **on_corpus, **workers)
    indexes = {"text": index("text index")}
    rows = measure("embedding", "build:embedding", **text, **on_corpus, **workers)
    indexes["vectors"] = index("vector index")
    indexes["vectors"]["bytes_per_row"] = round(indexes["vectors"]["bytes"] / rows, 1)
    asked = measure("questions", "questions:ask_all", **on_corpus, **often)
    peers = measure(
        "comparisons",
        "peers:every",
        **on_corpus,
        rounds=size["rounds"],
        count=size["queries"],
        sample=size["sample"],
    )
    clusters, facts = peers.pop("clusters"), peers.pop("table")
    appended = measure("append", "build:append", **text, **on_corpus, **workers)
    indexes["append"] = {**index("index of the append"), "appended_rows": appended["rows"]}
    facts_large = measure("large table", "build:large_table", **on_large, rows=size["large_rows"])
    asked_large = measure("questions on it", "questions:ask_large", **on_large, **often)
    cold = measure("cold starts", "questions:cold_starts", **on_corpus, large=large, most=size["verbs"])
    return harness.Report(
        name="forensics",
        measurements={
            **{f"process: {name}": harness.medians([one]) for name, one in found.items()},
            "corpus": {**debian_corpus.facts(corpus), **facts},
            "large table": facts_large,
            "stages_seconds": stages,
            **{f"index: {name}": some for name, some in indexes.items()},
            **{f"question: {kind}": some for kind, some in asked.items()},
            **{f"question on the large table: {kind}": some for kind, some in asked_large.items()},
            "cold_start_seconds": cold,
            "clusters": clusters,
            **peers,
        },
        **scores(asked, asked_large, cold, peers),
    )


def here(function: str, arguments: Mapping[str, Any]) -> harness.Round:
    """Run a case in this process, which saves the imports; its memory is that of the largest case so far."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder, contextlib.redirect_stdout(sys.stderr):
        answer_file = Path(folder) / "answer.json"
        child.main(function, json.dumps(arguments), str(answer_file))
        found = json.loads(answer_file.read_text())
    peak = found.pop("peak_rss_bytes")
    return harness.Round(**found, peak_pss_bytes=peak, sum_of_peaks_bytes=peak, processes=1)


def scores(
    asked: Mapping[str, Any], asked_large: Mapping[str, Any], cold: Mapping[str, float], peers: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    """What the targets are about, and the targets."""
    replay, tokens, hybrid, vectors = peers.values()
    ratios = {
        "where_of_the_large_table_under_2s": 1e3 * LIMIT_SECONDS / asked_large["where"]["p95_ms"],
        "seen_of_the_large_table_under_2s": 1e3 * LIMIT_SECONDS / asked_large["seen"]["p95_ms"],
        "attribution_under_5s": 1e3 * ATTRIBUTION_SECONDS / asked["attribution"]["p95_ms"],
        "slowest_other_question_under_2s": 1e3
        * LIMIT_SECONDS
        / max(kind["p95_ms"] for name, kind in asked.items() if name != "attribution"),
        "slowest_cold_start_under_5s": CLI_SECONDS / max(cold.values()),
        "right_answers": min(
            kinds[name]["right"] for kinds in (asked, asked_large) for name in CERTAIN if name in kinds
        ),
        "recall_at_10_over_0.9": vectors["recall_at_10"] / RECALL,
        "where_vs_replay": replay["times_as_fast"],
        "where_same_as_replay": replay["same"],
        "attribution_vs_numpy": tokens["times_as_fast"],
        "attribution_same_as_numpy": tokens["same"],
        "hybrid_vs_lancedb": hybrid["times_as_fast"],
        "hybrid_hits_shared_with_lancedb": hybrid["hits_shared"],
        "vector_index_vs_exact": vectors["times_as_fast"],
        "attribution_first": asked["attribution"]["right"],
    }
    without = {"hybrid_hits_shared_with_lancedb", "vector_index_vs_exact", "attribution_first", "hybrid_vs_lancedb"}
    return {"ratios": ratios, "targets": {name: 1.0 for name in ratios if name not in without}}


if __name__ == "__main__":
    main()
