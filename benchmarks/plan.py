"""Making the plan of an epoch: seconds and peak memory of building it, of another rank opening it, and of LanceDB's.

The table has ids, a filter column and token counts. Every build starts with an empty cache folder; then another
process opens what was built, as the other ranks of a node do; then LanceDB's `StreamingDataset` is constructed on the
same rows, which each of its ranks does by itself. Both keep 19 of 20 rows, in 128 splits, for 8 ranks. Opening the
table is part of each; imports are not.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import harness, plan_cases
from benchmarks.harness import Case

ROWS, QUICK_ROWS = 17_500_000, 1_000_000
BUILD_SECONDS, SECOND_RANK_SECONDS, PEAK_BYTES = 30.0, 1.0, 1e9
TARGETS = {"build_under_30s": 1.0, "build_peak_under_1gb": 1.0, "second_rank_under_1s": 1.0}


def main() -> None:
    """Measure, and print."""
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, help="rounds of each case (default 5; with --quick 1)")
    parser.add_argument("--rows", type=int, help=f"rows (default {ROWS:,}; with --quick {QUICK_ROWS:,})")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmark-plan-") as folder:
        rows = options.rows or (QUICK_ROWS if options.quick else ROWS)
        report = run(Path(folder), rows, options.rounds or (1 if options.quick else 5))
    harness.finish(report, options)


def run(folder: Path, rows: int, rounds: int) -> harness.Report:
    """Make the table, then measure."""
    harness.say(f"making a table of {rows:,} rows")
    database, cache = str(folder / "table"), folder / "cache"
    facts: dict[str, Any] = {"table": plan_cases.write(database, rows)}
    names = {"build": "build", "second rank": "second_rank", "streaming dataset": "streaming_dataset"}
    cases = [
        Case(name=name, function=f"benchmarks.plan_cases:{function}", arguments={"database": database})
        for name, function in names.items()
    ]

    def fresh(case: Case) -> Mapping[str, Any]:
        if case.name == "build":
            shutil.rmtree(cache, ignore_errors=True)
        return {} if case.name == "streaming dataset" else {"cache": str(cache)}

    found = harness.interleaved(cases, rounds, before=fresh)
    (plan,) = {str(one.answer): one.answer for one in [*found["build"], *found["second rank"]]}.values()
    assert {one.answer for one in found["streaming dataset"]} == {plan["documents"]}, "the rows differ from LanceDB's"
    numbers = {name: harness.medians(some) for name, some in found.items()}
    facts |= {"plan": plan, "cache_bytes": sum(harness.files_of(cache).values())}
    build, second, theirs = (numbers[name] for name in names)
    return harness.Report(
        name="plan",
        measurements={**facts, **numbers},
        ratios={
            "build_under_30s": BUILD_SECONDS / build["seconds"],
            "build_peak_under_1gb": PEAK_BYTES / build["sum_of_peaks_bytes"],
            "second_rank_under_1s": SECOND_RANK_SECONDS / second["seconds"],
            "build_vs_streaming_dataset_seconds": theirs["seconds"] / build["seconds"],
            "build_vs_streaming_dataset_peak": theirs["sum_of_peaks_bytes"] / build["sum_of_peaks_bytes"],
            "second_rank_vs_streaming_dataset_seconds": theirs["seconds"] / second["seconds"],
        },
        targets=TARGETS,
    )


if __name__ == "__main__":
    main()
