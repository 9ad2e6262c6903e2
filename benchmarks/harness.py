"""What all benchmarks share: rounds in processes of their own, facts about the machine, and the JSON contract.

Invariant: cases are interleaved (A B C A B C ...), each round in a fresh process, and a number is the median over all
rounds. A missed target is printed and stands in the JSON object like a met one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.child import peak_rss_bytes

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    *(
        "pretrain-assets",
        "pylance",
        "lancedb",
        "pyarrow",
        "numpy",
        "numba",
        "tiktoken",
        "xxhash",
        "ray",
        "geneva",
        "torch",
    ),
    *("transformers", "tokenizers", "fastokens", "datasketch", "rensa", "datatrove", "spacy"),
    *("model2vec", "scikit-learn"),
)
SAMPLE_SECONDS = 0.5
LOAD_AT_START = os.getloadavg()
"""Of the whole machine: near 0 when nothing else was at work."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to measure."""

    name: str
    """Key of its numbers."""
    function: str
    """`module:function`, see `benchmarks.child`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Its arguments, plain JSON."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one run of a case took."""

    seconds: float
    """Wall-clock seconds of the work, preparation left out."""
    cpu_seconds: float
    """Processor seconds of the process and of its workers that ended."""
    bytes_written: int
    """Bytes handed to the disk by the process and its workers, temporary files included (`ru_oublock`)."""
    peak_pss_bytes: int
    """Largest sum of proportional set sizes over all processes at one moment; shared pages count once."""
    sum_of_peaks_bytes: int
    """Sum of every process's own peak of resident memory, as if at one moment; shared pages count each time."""
    processes: int
    """Processes seen, the driver included."""
    answer: Any
    """What the work returned."""


@dataclass(kw_only=True)
class Report:
    """Everything one benchmark found."""

    name: str
    """The benchmark."""
    measurements: dict[str, Any]
    """Numbers as measured; the unit is the end of each key."""
    ratios: dict[str, float]
    """What the targets are about; more is better."""
    targets: dict[str, float]
    """Minimum of ratios, by key."""

    @property
    def met(self) -> dict[str, bool]:
        """Whether each target was reached; one that was not measured was not."""
        return {key: self.ratios.get(key, 0.0) >= minimum for key, minimum in self.targets.items()}

    def document(self) -> dict[str, Any]:
        """The JSON object of the contract (DESIGN.md, section 9)."""
        return {
            "name": self.name,
            "commit": commit(),
            "machine": machine(),
            "versions": versions(),
            "measurements": self.measurements,
            "ratios": {key: round(value, 4) for key, value in self.ratios.items()},
            "targets": self.targets,
            "met": self.met,
        }


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the same code path on less data, in under 50 seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--save", action="store_true", help="write it to benchmarks/results/NAME.json as well")
    return parser


def say(line: str) -> None:
    """Progress, for people."""
    print(line, file=sys.stderr, flush=True)


def finish(report: Report, options: argparse.Namespace) -> None:
    """Print the table, then what was asked for."""
    document = report.document()
    print(table(document), flush=True)
    if options.save:
        command = " ".join(["python", "-m", f"benchmarks.{report.name}", *sys.argv[1:]])
        path = RESULTS / f"{report.name}{'-quick' if options.quick else ''}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"command": command, **document}, indent=2) + "\n")
        print(f"saved to {path.relative_to(ROOT)}", flush=True)
    if options.json:
        print(json.dumps(document), flush=True)


def interleaved(
    cases: Sequence[Case],
    rounds: int,
    *,
    before: Callable[[Case], Mapping[str, Any]] | None = None,
    after: Callable[[Case], None] | None = None,
) -> dict[str, list[Round]]:
    """Every case once per round, in turn.

    Args:
        cases: What to measure.
        rounds: Rounds of each.
        before: Called before each run, outside the clock; returns more arguments for it, such as a fresh copy.
        after: Called after each run, to look at what it left.
    """
    found: dict[str, list[Round]] = {case.name: [] for case in cases}
    for at in range(rounds):
        for case in cases:
            more = before(case) if before else {}
            found[case.name].append(measure(case.function, {**case.arguments, **more}))
            if after:
                after(case)
            say(f"round {at + 1}/{rounds}  {case.name:<28} {found[case.name][-1].seconds:8.3f} s")
    return found


def medians(rounds: Sequence[Round]) -> dict[str, Any]:
    """Median of every number, and the seconds of each round."""
    numbers = [asdict(one) for one in rounds]
    keys = [key for key in numbers[0] if key != "answer"]
    middle = {key: statistics.median(number[key] for number in numbers) for key in keys}
    whole = {key: round(value, 4) if key.endswith("seconds") else round(value) for key, value in middle.items()}
    return {**whole, "rounds_seconds": [round(one.seconds, 4) for one in rounds]}


def megabytes_per_cpu_second(one: Round) -> float:
    """Speed on one core, in 10^6 bytes; of a case whose answer says the `bytes` that it went through."""
    return float(one.answer["bytes"] / 1e6 / max(one.cpu_seconds, 1e-9))


def ratio(ours: Sequence[Round], theirs: Sequence[Round]) -> float:
    """How many times the speed of theirs ours reaches on one core: median over rounds that ran beside each other."""
    pairs = zip(ours, theirs, strict=True)
    return statistics.median(megabytes_per_cpu_second(one) / megabytes_per_cpu_second(other) for one, other in pairs)


def measure(function: str, arguments: Mapping[str, Any]) -> Round:
    """Run a case in a process of its own and watch its memory.

    Raises:
        RuntimeError: the process failed.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        answer_file = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "benchmarks.child", function, json.dumps(arguments), str(answer_file)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr)
        watch = _Watch(process.pid)
        code = process.wait()
        watch.end()
        if code:
            raise RuntimeError(f"{function} with {dict(arguments)} failed with exit code {code}")
        found = json.loads(answer_file.read_text())
    watch.peaks[process.pid] = max(watch.peaks.get(process.pid, 0), found.pop("peak_rss_bytes"))
    return Round(
        **found,
        peak_pss_bytes=watch.peak_pss,
        sum_of_peaks_bytes=sum(watch.peaks.values()),
        processes=len(watch.peaks),
    )


class _Watch:
    """Samples the memory of a process and all its descendants."""

    def __init__(self, pid: int):
        self.peaks: dict[int, int] = {}
        self.peak_pss = 0
        self._pid, self._ended = pid, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop sampling."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        import psutil

        while not self._ended.wait(SAMPLE_SECONDS):
            try:
                root = psutil.Process(self._pid)
                tree = [root, *root.children(recursive=True)]
            except psutil.Error:
                continue
            self.peak_pss = max(self.peak_pss, sum(map(self._sample, tree)))

    def _sample(self, process: Any) -> int:
        """Proportional set size now; notes the process's own peak on the way."""
        import psutil

        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
            self.peaks[process.pid] = max(self.peaks.get(process.pid, 0), peak_rss_bytes(status))
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            return 1024 * next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
        except (psutil.Error, OSError, StopIteration):  # it ended meanwhile
            return 0


def files_of(folder: str | Path) -> dict[str, int]:
    """Size of every file below a folder, by relative path."""
    base = Path(folder)
    return {str(path.relative_to(base)): path.stat().st_size for path in base.rglob("*") if path.is_file()}


def commit() -> str:
    """Commit of this checkout, with `-dirty` when tracked or new files differ from it."""
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("-dirty" if _git("status", "--porcelain", "--", ".", ":!benchmarks/results") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def machine() -> dict[str, Any]:
    """Facts that numbers depend on; no host name and no path."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu_model": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_average_at_start": [round(load, 2) for load in LOAD_AT_START],
        "time_utc": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages at work; those not installed are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def table(document: Mapping[str, Any]) -> str:
    """The same numbers for people."""
    facts = document["machine"]
    lines = [
        f"\n{document['name']} at {document['commit'][:19]} on {facts['cores']} cores of {facts['cpu_model']}, "
        f"{facts['memory_gib']} GiB, load {facts['load_average_at_start'][0]} at the start",
        "",
    ]
    cases = {key: value for key, value in document["measurements"].items() if isinstance(value, dict)}
    if any("rounds_seconds" in value for value in cases.values()):
        lines.append(
            f"{'median of rounds':<30}{'seconds':>10}{'cpu s':>9}{'peak MB':>9}{'sum of peaks':>14}{'wrote MB':>10}"
            + ("   MB/cpu s" if any("mb_per_cpu_second" in value for value in cases.values()) else "")
        )
    for key, value in cases.items():
        if "rounds_seconds" in value:
            lines.append(
                f"{key:<30}{value['seconds']:>10.3f}{value['cpu_seconds']:>9.2f}{value['peak_pss_bytes'] / 1e6:>9.0f}"
                f"{value['sum_of_peaks_bytes'] / 1e6:>14.0f}{value['bytes_written'] / 1e6:>10.1f}"
                + (f"{value['mb_per_cpu_second']:>11.1f}" if "mb_per_cpu_second" in value else "")
            )
    for key, value in document["measurements"].items():
        if key not in cases or "rounds_seconds" not in value:
            lines.append(f"{key:<44} {_plain(value)}")
    lines.append("")
    lines += [
        f"{key:<44} {'n/a':>10}  MISSED: not measured" for key in document["targets"] if key not in document["ratios"]
    ]
    for key, value in document["ratios"].items():
        minimum = document["targets"].get(key)
        verdict = "" if minimum is None else f"target >= {minimum:g}: {'met' if document['met'][key] else 'MISSED'}"
        lines.append(f"{key:<44} {value:>10.3f}  {verdict}")
    return "\n".join(lines)


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)
