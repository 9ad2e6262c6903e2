"""Reading blocks: our loader against LanceDB's `StreamingDataset`, the limits of the same reads, and other formats.

One table of random documents on local disk, in the page cache; 16 and 128 owned splits, one rank. Every case runs in a
process of its own, interleaved with the others. `StreamingDataset` is tuned first, by a small grid; it reads for some
seconds after its first block, ours and the limits read the whole epoch. Before the clock runs, the blocks of both are
compared. The plan is built once before: what is measured is the second opening and later ones. A bare take reads the
rows of the same windows with the same reader and drops them; a scan reads the column in storage order.

The other formats need their tokens written first: the bytes and seconds of that are measured too. MosaicML Streaming
is left out unless it can be imported, from the folder that --peers-path names:
    pip install --target DIR --no-deps mosaicml-streaming brotli python-snappy cramjam zstd catalogue pillow
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness, loader_table
from benchmarks.harness import Case
from benchmarks.loader_cases import URING
from benchmarks.loader_measure import case, numbers, table
from benchmarks.loader_peers import MDS_REQUIREMENTS

SPLITS = (16, 128)
PEERS = {  # its cases, by what has to be written first
    "mds": ("mds",),
    "memmap": ("memmap",),
    "parquet": ("parquet sequential", "parquet random"),
    "lance_blocks": ("lance blocks",),
}
Knobs = Mapping[str, Any]
TUNED: Knobs = {"read_batch_size": 8, "io_queue_depth": 1, "transform_parallelism": 1}
DEFAULTS: Knobs = {"read_batch_size": 64, "io_queue_depth": 4, "transform_parallelism": None}
GRID: tuple[Knobs, ...] = (
    TUNED,
    {**TUNED, "uring": True},
    {**TUNED, "read_batch_size": 16},
    {**TUNED, "read_batch_size": 16, "uring": True},
    {**TUNED, "read_batch_size": 64},
    {**TUNED, "read_batch_size": 64, "io_queue_depth": 4},
)
TARGETS = {
    "ours_vs_streaming_16": 40.0,
    "ours_vs_streaming_128": 80.0,
    "ours_vs_streaming_16_per_cpu_second": 30.0,
    "ours_vs_streaming_128_per_cpu_second": 30.0,
    "ours_vs_bare_take_16": 0.55,
    "ours_vs_bare_take_128": 0.55,
    "first_block_under_1s": 1.0,
}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is measured."""

    rows: int
    """Documents of about 900 tokens."""
    streaming_seconds: Mapping[int, float]
    """Seconds that `StreamingDataset` reads after its first block, by splits: long enough to use up what was ready."""
    peer_seconds: float
    """Seconds that a peer reads at most."""
    rounds: int
    """Rounds of each case."""
    compared: Mapping[int, int]
    """Blocks compared with those of `StreamingDataset`, by splits."""
    peers: Sequence[str]
    """Other formats to read."""
    is_full: bool
    """Also the grid, int32, and the other tables."""


FULL = Scale(
    rows=100_000,
    streaming_seconds={16: 3.0, 128: 8.0},
    peer_seconds=2.5,
    rounds=5,
    compared={16: 512, 128: 512},
    peers=tuple(PEERS),
    is_full=True,
)
QUICK = Scale(
    rows=6_000,
    streaming_seconds={16: 1.0, 128: 1.0},
    peer_seconds=0.5,
    rounds=1,
    compared={16: 256},
    peers=("memmap",),
    is_full=False,
)
OTHERS = {"short documents": (400_000, 100, 1), "50 fragments": (100_000, 900, 50)}
"""Rows, mean tokens and fragments of more tables, where ours is compared with the bare take only."""
OTHER_ROUNDS = 3


def main() -> None:
    """Measure, and print."""
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, help="rounds of each case (default 5; with --quick 1)")
    parser.add_argument("--rows", type=int, help="documents (default 100,000; with --quick 6,000)")
    parser.add_argument("--peers-path", metavar="DIR", help="folder of site packages with MosaicML Streaming")
    options = parser.parse_args()
    scale = QUICK if options.quick else FULL
    peers_path = str(Path(options.peers_path).resolve()) if options.peers_path else None
    with tempfile.TemporaryDirectory(prefix="benchmark-loader-") as folder:
        os.environ["PRETRAIN_CACHE_DIR"] = str(Path(folder) / "cache")
        report, found = run(Path(folder), scale, options.rows or scale.rows, options.rounds or scale.rounds, peers_path)
    print(table(found), flush=True)
    harness.finish(report, options)


def run(
    folder: Path, scale: Scale, rows: int, rounds: int, peers_path: str | None
) -> tuple[harness.Report, dict[str, dict[str, Any]]]:
    """Make the table and the peers' copies, compare the blocks, tune the alternative, then measure every case.

    Returns:
        The report, and its cases alone.
    """
    database = str(folder / "table")
    harness.say(f"making a table of {rows:,} documents")
    facts: dict[str, Any] = {"table": loader_table.write(database, rows, 900, 1)}
    facts["plans"] = _check(database, scale.compared)
    facts["blocks_equal_to_streaming_dataset"] = dict(scale.compared)
    blocks = {splits: facts["plans"][str(splits)]["blocks"] for splits in SPLITS}
    tuned: dict[int, Knobs] = dict.fromkeys(SPLITS, TUNED)
    if scale.is_full:
        facts["streaming_grid"] = {}
        for splits in SPLITS:
            tuned[splits], rates = _tune(database, splits, blocks[splits], scale)
            facts["streaming_grid"][f"{splits} splits, tokens per second"] = rates
    facts["streaming_tuned"] = {f"{splits} splits": knobs_name(tuned[splits]) for splits in SPLITS}
    peers = [peer for peer in scale.peers if peer != "mds" or _is_importable("streaming", peers_path)]
    if "mds" in scale.peers and "mds" not in peers:
        facts["left_out"] = f"mds: pip install --target DIR --no-deps {MDS_REQUIREMENTS}; then --peers-path DIR"
        harness.say(facts["left_out"])
    facts["prepared"] = {peer: _prepare(peer, database, folder, peers_path) for peer in peers}
    cases = [one for splits in SPLITS for one in _loaders(database, splits, blocks[splits], tuned[splits], scale)]
    cases += [case("scan", "scan", database=database)]
    cases += [_peer(name, peer, folder, peers_path, scale) for peer in peers for name in PEERS[peer]]
    found = {name: numbers(some) for name, some in harness.interleaved(cases, rounds).items()}
    for name, made in OTHERS.items() if scale.is_full else ():
        found |= _other(folder / name.replace(" ", "-"), name, *made)
    report = harness.Report(name="loader", measurements={**facts, **found}, ratios=_ratios(found), targets=TARGETS)
    return report, found


def _loaders(database: str, splits: int, blocks: int, tuned: Knobs, scale: Scale) -> list[Case]:
    """Ours, the alternative and the limit at some number of splits."""
    seconds = scale.streaming_seconds[splits]
    cases = [
        case(f"ours {splits}", "ours", database=database, splits=splits, dtype="int64", doc_ids=True),
        _streaming(f"streaming tuned {splits}", database, splits, blocks, tuned, seconds),
        case(f"bare take {splits}", "bare_take", database=database, splits=splits),
    ]
    if scale.is_full:
        ids_only = {"database": database, "splits": splits, "dtype": "int32", "doc_ids": False}
        cases.append(case(f"ours int32 ids {splits}", "ours", **ids_only))
    return cases


def _streaming(name: str, database: str, splits: int, blocks: int, knobs: Knobs, seconds: float) -> Case:
    plain = {key: value for key, value in knobs.items() if key != "uring"}
    where = URING + database if "uring" in knobs else database
    return case(name, "streaming", database=where, splits=splits, blocks=blocks, seconds=seconds, **plain)


def _tune(database: str, splits: int, blocks: int, scale: Scale) -> tuple[Knobs, dict[str, int]]:
    """The fastest setting of the grid, and the rate of each."""
    seconds = scale.streaming_seconds[splits]
    cases = {
        knobs_name(knobs): _streaming(knobs_name(knobs), database, splits, blocks, knobs, seconds)
        for knobs in (*GRID, DEFAULTS)
    }
    found = harness.interleaved(list(cases.values()), 1)
    rates = {name: round(rounds[0].answer["tokens_per_second"]) for name, rounds in found.items()}
    best = max(rates, key=lambda name: rates[name])
    return next(knobs for knobs in (*GRID, DEFAULTS) if knobs_name(knobs) == best), rates


def knobs_name(knobs: Knobs) -> str:
    """Settings in words."""
    return ", ".join(f"{key} {value}" for key, value in knobs.items())


def _peer(name: str, peer: str, folder: Path, peers_path: str | None, scale: Scale) -> Case:
    more = {"peers_path": peers_path} if peer == "mds" else {}
    function = f"benchmarks.loader_peers:{name.replace(' ', '_')}"
    return case(name, function, folder=str(folder / peer), seconds=scale.peer_seconds, **more)


def _prepare(peer: str, database: str, folder: Path, peers_path: str | None) -> dict[str, Any]:
    """Write a peer's copy of the tokens."""
    arguments = {"peer": peer, "database": database, "folder": str(folder / peer), "peers_path": peers_path}
    made = harness.measure("benchmarks.loader_peers:prepare", arguments)
    harness.say(f"prepared {peer}: {made.answer / 1e6:,.0f} MB in {made.seconds:.1f} s")
    return {"bytes": made.answer, "seconds": round(made.seconds, 2)}


def _check(database: str, compared: Mapping[int, int]) -> dict[str, Any]:
    """Build the plans, compare blocks with the alternative's, and say what the plans hold."""
    arguments = {"database": database, "blocks": {splits: compared.get(splits, 0) for splits in SPLITS}}
    facts: dict[str, Any] = harness.measure("benchmarks.loader_cases:check", arguments).answer
    return facts


def _other(database: Path, name: str, rows: int, mean_tokens: int, fragments: int) -> dict[str, dict[str, Any]]:
    """Ours and the bare take on another table."""
    harness.say(f"making a table of {name}")
    loader_table.write(str(database), rows, mean_tokens, fragments)
    _check(str(database), {})
    splits = SPLITS[0]
    cases = [
        case(f"ours, {name}", "ours", database=str(database), splits=splits, dtype="int64", doc_ids=True),
        case(f"bare take, {name}", "bare_take", database=str(database), splits=splits),
    ]
    return {key: numbers(rounds) for key, rounds in harness.interleaved(cases, OTHER_ROUNDS).items()}


def _ratios(found: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    def rate(name: str, key: str = "tokens_per_second") -> float:
        return float(found[name][key])

    ratios: dict[str, float] = {}
    for splits in SPLITS:
        for suffix, key in (("", "tokens_per_second"), ("_per_cpu_second", "tokens_per_cpu_second")):
            theirs = rate(f"streaming tuned {splits}", key)
            ratios[f"ours_vs_streaming_{splits}{suffix}"] = rate(f"ours {splits}", key) / theirs
        ratios[f"ours_vs_bare_take_{splits}"] = rate(f"ours {splits}") / rate(f"bare take {splits}")
    ratios["first_block_under_1s"] = 1.0 / max(rate(f"ours {splits}", "first_block_seconds") for splits in SPLITS)
    first = SPLITS[0]
    for name in ("scan", *(name for names in PEERS.values() for name in names)):
        if name in found:
            ratios[f"ours_vs_{name.replace(' ', '_')}_{first}"] = rate(f"ours {first}") / rate(name)
    for name in OTHERS:
        if f"ours, {name}" in found:
            ratios[f"ours_vs_bare_take_{name.replace(' ', '_')}"] = rate(f"ours, {name}") / rate(f"bare take, {name}")
    return ratios


def _is_importable(name: str, path: str | None) -> bool:
    return importlib.machinery.PathFinder.find_spec(name, [*([path] if path else []), *sys.path]) is not None


if __name__ == "__main__":
    main()
