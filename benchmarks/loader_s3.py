"""The same reads from an object store with latency: tokens per second, requests per block, share of local speed kept.

A table of random documents on local disk, and the same folder behind `benchmarks.s3_stub` on 127.0.0.1, which makes
every request wait 20 ms; 16 owned splits, one rank; the shuffle by single documents and by clumps of 32 rows.
`StreamingDataset` is tuned on the store first, by a small grid, for each of the two. As in `benchmarks.loader`, ours
is timed from the request for the first block on and the alternative from its first block on; requests are counted while
the clock runs. The table is large, so that the documents of a window lie apart as in a corpus. The stub works on the
same cores as what it serves: rates here are lower bounds, for ours more than for the alternative.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import harness, loader_table, s3_stub
from benchmarks.harness import Case
from benchmarks.loader import DEFAULTS, TUNED, Knobs, knobs_name
from benchmarks.loader_measure import case, fastest, numbers, table

SPLITS = 16
CLUMPS = (1, 32)
LATENCY_SECONDS = 0.020
BUCKET = "bucket"
GRID: tuple[Knobs, ...] = (
    {**TUNED, "read_batch_size": 64},
    {**TUNED, "read_batch_size": 64, "io_queue_depth": 4},
    {**TUNED, "read_batch_size": 256, "io_queue_depth": 2},
    {**TUNED, "read_batch_size": 16, "io_queue_depth": 4},
    DEFAULTS,
)
QUICK_GRID = GRID[1:2]
ROWS, QUICK_ROWS = 200_000, 15_000
SECONDS, QUICK_SECONDS = 10.0, 2.0
"""That each case reads."""
COMPARED = 128
"""Blocks compared with those of `StreamingDataset`."""
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1"}


def main() -> None:
    """Measure, and print."""
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, help="rounds of each case (default 5; with --quick 1)")
    parser.add_argument("--rows", type=int, help=f"documents (default {ROWS:,}; with --quick {QUICK_ROWS:,})")
    options = parser.parse_args()
    rows = options.rows or (QUICK_ROWS if options.quick else ROWS)
    rounds = options.rounds or (1 if options.quick else 5)
    with (
        tempfile.TemporaryDirectory(prefix="benchmark-loader-s3-") as folder,
        s3_stub.served(Path(folder) / "store", LATENCY_SECONDS) as endpoint,
    ):
        os.environ |= {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint, "PRETRAIN_CACHE_DIR": f"{folder}/cache"}
        report, found = run(Path(folder), endpoint, rows, rounds, quick=options.quick)
    print(table(found), flush=True)
    harness.finish(report, options)


def run(
    folder: Path, endpoint: str, rows: int, rounds: int, *, quick: bool
) -> tuple[harness.Report, dict[str, dict[str, Any]]]:
    """Make the table, build its plans, tune the alternative, then measure every case.

    Returns:
        The report, and its cases alone.
    """
    harness.say(f"making a table of {rows:,} documents")
    local, remote = str(folder / "store" / BUCKET / "table"), f"s3://{BUCKET}/table"
    facts: dict[str, Any] = {"table": loader_table.write(local, rows, 900, 1)}
    facts["latency_ms"] = round(LATENCY_SECONDS * 1000)
    seconds = QUICK_SECONDS if quick else SECONDS
    cases, grids = list[Case](), dict[str, dict[str, int]]()
    for clump in CLUMPS:
        name = f"clump {clump}"
        arguments = {"database": remote, "blocks": {SPLITS: COMPARED}, "clump": clump}
        facts[f"plan, {name}"] = harness.measure("benchmarks.loader_cases:check", arguments).answer[str(SPLITS)]
        shared = {"splits": SPLITS, "clump": clump}
        stream = {"database": remote, **shared, "blocks": facts[f"plan, {name}"]["blocks"], "endpoint": endpoint}
        grid = {
            knobs_name(knobs): case(knobs_name(knobs), "streaming", seconds=seconds, **stream, **knobs)
            for knobs in (QUICK_GRID if quick else GRID)
        }
        if len(grid) > 1:
            rates = {key: some[0].answer for key, some in harness.interleaved(list(grid.values()), 1).items()}
            grids[name] = {key: round(rate["tokens_per_second"]) for key, rate in rates.items()}
            best = grid[fastest(rates)]
        else:
            (best,) = grid.values()
        facts[f"tuned, {name}"] = best.name
        whole = {"dtype": "int64", "doc_ids": True, "seconds": seconds, **shared}
        cases += [
            case(f"ours local, {name}", "ours", database=local, **whole),
            case(f"ours, {name}", "ours", database=remote, endpoint=endpoint, **whole),
            Case(name=f"streaming tuned, {name}", function=best.function, arguments=best.arguments),
        ]
    if grids:
        facts["streaming_grid, tokens per second"] = grids
    found = {name: numbers(some) for name, some in harness.interleaved(cases, rounds).items()}
    report = harness.Report(name="loader_s3", measurements={**facts, **found}, ratios=_ratios(found), targets={})
    return report, found


def _ratios(found: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    ratios: dict[str, float] = {}
    for clump in CLUMPS:
        mine, local, theirs = (found[f"{who}, clump {clump}"] for who in ("ours", "ours local", "streaming tuned"))
        rates = [float(number["tokens_per_second"]) for number in (mine, local, theirs)]
        ratios[f"ours_vs_streaming_clump_{clump}"] = rates[0] / rates[2]
        ratios[f"share_of_local_speed_kept_clump_{clump}"] = rates[0] / rates[1]
        requests = [float(number["requests_per_block"]) for number in (theirs, mine)]
        if all(requests):  # a small table may be read whole before the first block, and no request be counted
            ratios[f"requests_per_block_streaming_vs_ours_clump_{clump}"] = requests[0] / requests[1]
    return ratios


if __name__ == "__main__":
    main()
