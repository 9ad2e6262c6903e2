"""Forensics on real English text: what every kind of question takes, what indexes cost, and other ways beside ours.

The text is that of `benchmarks.debian_corpus`, at least 100 MB; `--quick` takes bundled documents on the same code
path. It goes through the project's own stages. The embedding is fitted to it (`benchmarks.forensics_model`), so that
nothing else is downloaded, and the run that is asked about has trained one epoch of it (`benchmarks.forensics_build`).

Measured: each kind of question at least 50 times in one warm process, kinds in turn, and checked against a known answer
(`benchmarks.forensics_questions`); each verb once from a cold start; the indexes, and what an append adds to them;
`where` and `seen` on two million documents; and in turn with ours (`benchmarks.forensics_peers`): replaying the loader,
comparing tokens in numpy, LanceDB's own hybrid query, and exact search.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import debian_corpus, harness

FULL_BYTES, QUICK_BYTES = 100_000_000, 2_500_000
"""At least this much text, and at most this much."""
FULL: dict[str, int] = {
    "queries": 50,
    "seconds": 15,
    "verbs": 99,
    "large_rows": 2_000_000,
    "exact_below": 10_000,
    "sample": 10_000,
    "rounds": 5,
}
"""Queries of each kind, most seconds for each, verbs started cold, rows of the large table, vectors from which on they
are indexed (50 thousand by default, more than this corpus has), documents of the sample of clusters, and rounds of the
slower comparisons."""
QUICK = {
    **FULL,
    "queries": 4,
    "seconds": 1,
    "verbs": 2,
    "large_rows": 200_000,
    "exact_below": 1_000,
    "sample": 500,
    "rounds": 2,
}
LIMIT_SECONDS, CLI_SECONDS, RECALL = 2.0, 5.0, 0.9
CERTAIN = ("phrase", "sql", "where", "seen", "ledger", "receipt", "contamination in time", "neighbours")
"""Kinds with one right answer; the others rank, and their share of known documents among ten hits is measured."""


def main() -> None:
    """Measure, and print."""
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--corpus", type=Path, help="folder for the packages and the text (default: a cache folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmark-forensics-") as scratch:
        if options.quick:
            corpus = debian_corpus.write_bundled(Path(scratch) / "corpus.parquet", QUICK_BYTES)
        else:
            corpus = debian_corpus.build(options.corpus or debian_corpus.default_folder(), FULL_BYTES)
        report = run(corpus, Path(scratch), QUICK if options.quick else FULL)
    harness.finish(report, options)


def run(corpus: Path, scratch: Path, size: Mapping[str, int]) -> harness.Report:
    """Build, ask, compare, append; each in a process of its own."""
    folder, large = str(scratch / "corpus"), str(scratch / "large")
    text, on_corpus, on_large = {"corpus": str(corpus)}, {"folder": folder}, {"folder": large}
    often = {"count": size["queries"], "seconds": size["seconds"]}
    found: dict[str, harness.Round] = {}

    def measure(name: str, function: str, **arguments: Any) -> Any:
        found[name] = harness.measure(f"benchmarks.forensics_{function}", arguments)
        harness.say(f"{name:<24} {found[name].seconds:8.2f} s, {found[name].cpu_seconds:7.2f} of processors")
        return found[name].answer

    def index(name: str) -> dict[str, Any]:
        answer = measure(name, "build:index", **on_corpus, exact_below=size["exact_below"])
        return {**answer, "bytes_per_row": round(answer["bytes"] / max(1, answer["rows"]), 1)}

    stages = measure("stages", "build:corpus_table", **text, **on_corpus)
    indexes = {"text": index("text index")}
    rows = measure("embedding", "build:embedding", **text, **on_corpus)
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
    cold = measure("cold starts", "questions:cold_starts", **on_corpus, most=size["verbs"])
    appended = measure("append", "build:append", **text, **on_corpus)
    indexes["append"] = {**index("index of the append"), "appended_rows": appended["rows"]}
    facts_large = measure("large table", "build:large_table", **on_large, rows=size["large_rows"])
    asked_large = measure("questions on it", "questions:ask_large", **on_large, **often)
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


def scores(
    asked: Mapping[str, Any], asked_large: Mapping[str, Any], cold: Mapping[str, float], peers: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    """What the targets are about, and the targets."""
    replay, tokens, hybrid, vectors = peers.values()
    ratios = {
        "where_of_the_large_table_under_2s": 1e3 * LIMIT_SECONDS / asked_large["where"]["p95_ms"],
        "seen_of_the_large_table_under_2s": 1e3 * LIMIT_SECONDS / asked_large["seen"]["p95_ms"],
        "slowest_question_under_2s": 1e3 * LIMIT_SECONDS / max(kind["p95_ms"] for kind in asked.values()),
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
