"""Filling columns: our filler with one worker and with one per core, against Lance's own `add_columns` with a function.

Both call the same batch functions on the same table: `content_hash` (the part of exact deduplication that reads text)
and `input_ids` with `n_tokens` (GPT-2). Each round works on a fresh copy of the table made of hard links, in a process
of its own; the copies share the page cache, which making the table has warmed. `add_columns` runs in one process: it
gets the tokenizer with one thread, and with a thread per core. All cases must give the same values.

A last measurement asks what is left of the work when a row is appended while it goes on.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import corpus, harness
from benchmarks.faults_check import digests
from benchmarks.fill_cases import COLUMNS
from benchmarks.harness import Case

FULL_BYTES = 384 << 20
QUICK_BYTES = 8 << 20
NUM_FILES = 4
QUICK_RANGE_BYTES = 1 << 20
"""Small tables are cut small, so that two workers have as many ranges to share as in the full run."""
TARGETS = {
    "tokenize_scaling_1_to_2": 1.6,
    "tokenize_2_workers_vs_add_columns_2_threads": 1.0,
    "tokenize_1_worker_vs_add_columns_1_thread": 1.0,
    "hash_ours_vs_add_columns": 1.0,
    "ours_commits_beside_append": 1.0,
}


def main() -> None:
    """Measure, and print."""
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, help="rounds of each case (default 5; with --quick 1)")
    parser.add_argument("--text-bytes", type=int, help="bytes of text (default 384 MiB; with --quick 8 MiB)")
    options = parser.parse_args()
    text_bytes = options.text_bytes or (QUICK_BYTES if options.quick else FULL_BYTES)
    rounds = options.rounds or (1 if options.quick else 5)
    with tempfile.TemporaryDirectory(prefix="benchmark-fill-") as folder:
        report = run(Path(folder), text_bytes, rounds, QUICK_RANGE_BYTES if options.quick else None)
    harness.finish(report, options)


def cases(range_bytes: int | None) -> list[Case]:
    """Ours and the alternative in turn."""

    def ours(name: str, what: str, workers: int | None) -> Case:
        arguments = {"what": what, "workers": workers, "range_bytes": range_bytes}
        return Case(name=name, function="benchmarks.fill_cases:ours", arguments=arguments)

    def theirs(name: str, what: str, threads: int) -> Case:
        arguments = {"what": what, "threads": threads}
        return Case(name=name, function="benchmarks.fill_cases:add_columns", arguments=arguments)

    return [
        ours("hash: ours", "hash", None),
        theirs("hash: add_columns", "hash", 1),
        ours("tokenize: ours, 2 workers", "tokens", 2),
        theirs("tokenize: add_columns, 2 threads", "tokens", 2),
        ours("tokenize: ours, 1 worker", "tokens", 1),
        theirs("tokenize: add_columns, 1 thread", "tokens", 1),
    ]


def run(folder: Path, text_bytes: int, rounds: int, range_bytes: int | None) -> harness.Report:
    """Make the table, then measure every case on copies of it."""
    facts = make_table(folder, text_bytes)
    copy, digest_of = folder / "copy", dict[str, set[str]]()

    def fresh(case: Case) -> Mapping[str, Any]:
        del case
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder / "table", copy, copy_function=os.link)
        return {"database": str(copy)}

    before = harness.files_of(folder / "table")
    added: dict[str, dict[str, int]] = {}

    def look(case: Case) -> None:
        new = {path: size for path, size in harness.files_of(copy).items() if path not in before}
        added[case.name] = {"bytes_added": sum(new.values()), "files_added": len(new)}
        what = str(case.arguments["what"])
        digest_of.setdefault(what, set()).add(str(digests(_open(copy), COLUMNS[what])))

    found = harness.interleaved(cases(range_bytes), rounds, before=fresh, after=look)
    assert all(len(digest) == 1 for digest in digest_of.values()), f"the cases computed different values: {digest_of}"
    numbers = {name: {**harness.medians(some), **added[name]} for name, some in found.items()}
    beside = {}
    for who in ("ours", "add_columns"):
        case = Case(name=who, function="benchmarks.fill_cases:beside_append", arguments={"who": who})
        beside[f"{who} beside an append"] = harness.interleaved([case], 1, before=fresh)[who][0].answer
    return harness.Report(
        name="fill",
        measurements={**facts, **numbers, **beside},
        ratios=_ratios({name: number["seconds"] for name, number in numbers.items()}, beside),
        targets=TARGETS,
    )


def _ratios(seconds: Mapping[str, float], beside: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    return {
        "tokenize_scaling_1_to_2": seconds["tokenize: ours, 1 worker"] / seconds["tokenize: ours, 2 workers"],
        "tokenize_2_workers_vs_add_columns_2_threads": (
            seconds["tokenize: add_columns, 2 threads"] / seconds["tokenize: ours, 2 workers"]
        ),
        "tokenize_1_worker_vs_add_columns_1_thread": (
            seconds["tokenize: add_columns, 1 thread"] / seconds["tokenize: ours, 1 worker"]
        ),
        "hash_ours_vs_add_columns": seconds["hash: add_columns"] / seconds["hash: ours"],
        "ours_commits_beside_append": float(beside["ours beside an append"]["committed"]),
        "add_columns_commits_beside_append": float(beside["add_columns beside an append"]["committed"]),
    }


def make_table(folder: Path, text_bytes: int) -> dict[str, int]:
    """Ingest text of that size into a table in `folder/table`."""
    from pretrain_assets.config import IngestConfig
    from pretrain_assets.ingest.append import ingest
    from pretrain_assets.table.storage import Location

    harness.say(f"making a table of {text_bytes / 1e6:,.0f} MB of text")
    files = corpus.write_files(folder / "sources", num_files=NUM_FILES, file_bytes=text_bytes // NUM_FILES)
    location = Location(database_uri=str(folder / "table"))
    ingest(location, IngestConfig(sources=tuple(map(str, files))))
    dataset = _open(folder / "table")
    query = "SELECT sum(octet_length(text)) AS bytes FROM dataset"
    fragments = dataset.get_fragments()
    return {
        "rows": dataset.count_rows(),
        "text_bytes": dataset.sql(query).build().to_batch_records()[0]["bytes"][0].as_py(),
        "table_bytes": sum(int(file.file_size_bytes) for fragment in fragments for file in fragment.metadata.files),
        "fragments": len(fragments),
    }


def _open(database: Path) -> Any:
    from pretrain_assets.table.storage import Location, open_dataset

    return open_dataset(Location(database_uri=str(database)))


if __name__ == "__main__":
    main()
