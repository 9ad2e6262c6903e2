"""A table of two million rows and about a hundred versions: what is asked of it all the time must answer at once.

Questions: list every version; exact token sums under a filter, by source; which fragments lack values, when none does
and when one does; a whole fill that finds nothing to do. There is no alternative to compare with; the ratios say how
many such answers fit in one second, and each is checked against arithmetic. The table has no text.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from benchmarks import harness, scale_cases
from benchmarks.harness import Case

FULL = {"rows": 2_000_000, "fragments": 8, "appends": 33, "rows_per_append": 3_000}
QUICK = {"rows": 200_000, "fragments": 8, "appends": 10, "rows_per_append": 1_000}
TARGETS = {
    "version_listings_per_second": 2.0,
    "token_sums_per_second": 2.0,
    "looks_for_missing_work_per_second_none_missing": 2.0,
    "looks_for_missing_work_per_second_one_fragment_missing": 2.0,
    "fills_without_work_per_second": 2.0,
}
"""Well under a second: half of one."""


def main() -> None:
    """Measure, and print."""
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, help="rounds of each case (default 7; with --quick 2)")
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 7)
    with tempfile.TemporaryDirectory(prefix="benchmark-scale-") as folder:
        report = run(Path(folder), QUICK if options.quick else FULL, rounds)
    harness.finish(report, options)


def run(folder: Path, size: dict[str, int], rounds: int) -> harness.Report:
    """Build the table, and the same with one more fragment; then ask."""
    from pretrain_assets.table.storage import Location, open_dataset

    whole, lacking = folder / "whole", folder / "lacking"
    location = Location(database_uri=str(whole))
    harness.say(f"building a table of {size['rows']:,} rows")
    started = time.monotonic()
    scale_cases.build(location, **size)
    built = time.monotonic() - started
    shutil.copytree(whole, lacking, copy_function=os.link)
    scale_cases.append(Location(database_uri=str(lacking)), size["rows"], size["rows_per_append"])

    def case(name: str, function: str, database: Path) -> Case:
        return Case(name=name, function=f"benchmarks.scale_cases:{function}", arguments={"database": str(database)})

    cases = [
        case("list versions", "list_all_versions", whole),
        case("token sums by source", "token_sums", whole),
        case("look for missing: none", "find_missing", whole),
        case("look for missing: one fragment", "find_missing", lacking),
        case("fill without work", "fill_again", whole),
    ]
    dataset = open_dataset(location)
    versions = len(dataset.versions())
    found = harness.interleaved(cases, rounds)
    expected = [versions, scale_cases.expected_tokens(size["rows"]), [0, 0], [1, 1], False]
    for one, answer in zip(cases, expected, strict=True):
        answers = [round_.answer for round_ in found[one.name]]
        assert answers == [answer] * rounds, f"{one.name}: expected {answer}, got {answers}"
    numbers = {name: harness.medians(some) for name, some in found.items()}
    per_second = [1 / numbers[one.name]["seconds"] for one in cases]
    facts = {"rows": dataset.count_rows(), "versions": versions, "fragments": len(dataset.get_fragments())}
    return harness.Report(
        name="scale",
        measurements={**facts, "build_seconds": round(built, 2), **numbers},
        ratios=dict(zip(TARGETS, per_second, strict=True)),
        targets=TARGETS,
    )


if __name__ == "__main__":
    main()
