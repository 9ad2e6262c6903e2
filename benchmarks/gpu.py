"""The trainer on one GPU: the correctness ladder, then tok/s and MFU of GPT-2 124M and 354M. `gpu.sh` starts it.

Every case runs in a process of its own (`benchmarks.gpu_ladder`, `benchmarks.gpu_speed`): running out of memory, a
failed compilation or a broken device ends that case alone. The JSON object is written again after every number, so
that a run that is cut off keeps what it has. Cases that do not fit into the time left are named under `skipped`.

Needs PyTorch, numpy and pyarrow; with Lance the loader itself is measured too. On a device whose peak is not known, and
in `--smoke` (a tiny model on the CPU), there is no MFU and no target is met.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import harness

BUDGET_SECONDS = 450.0
"""Of all cases together; the script promises 8 minutes."""

TARGETS = {"mfu_124m": 0.45, "mfu_354m": 0.50}
"""Least MFU, 6N + 12LdT over the dense bf16 peak, on one H100- or H200-class device."""

SAMPLE = Path(__file__).parent / "packed_blocks.npy"
"""Real packed blocks that come with the checkout (`pretrain pack-sample`)."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One child process."""

    name: str
    """Key of what it finds."""
    module: str
    """Module that it runs."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """What the module gets, plain JSON."""
    seconds: float
    """What it takes on an H200: a guess, by which it is left out when it would not fit, or ended at three times as
    many."""


def main() -> int:
    """Measure; the exit code is 1 when a check of the ladder failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="the same path on the CPU with a tiny model")
    parser.add_argument("--blocks", type=Path, default=SAMPLE, help="packed blocks, from `pretrain pack-sample`")
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds for all cases [%(default)g]")
    options = parser.parse_args()
    run = Run(options.budget, Path(os.environ.get("OUT") or harness.RESULTS) / "gpu.json", smoke=options.smoke)
    for step in smoke_steps(options.blocks) if options.smoke else steps(options.blocks):
        run.take(step)
    print(harness.table(run.document()), flush=True)
    print(json.dumps(run.document()), flush=True)
    return 1 if run.failed_checks else 0


def steps(blocks: Path) -> list[Step]:
    """All cases, the most wanted first."""
    small, large = "gpt2_124m", "gpt2_354m"
    loader = "loader" if find_spec("lance") else None
    sources = [name for name in ("synthetic", "packed", loader) if name]
    return [
        Step(name="ladder", module="gpu_ladder", seconds=75),
        _speed(small, 32, blocks, 80, sources=sources),
        _speed(large, 16, blocks, 110),
        _speed(small, 64, blocks, 65),
        _speed(large, 32, blocks, 110),
        _speed(small, 32, blocks, 35, compiled=False),
        _speed(small, 32, blocks, 60, cudnn=False),
        _speed(large, 16, blocks, 60, compiled=False),
        _speed(small, 32, blocks, 90, document_mask=True, sources=["packed"]),
        _speed(small, 16, blocks, 60),
        _speed(small, 32, blocks, 60, chunked_loss=True),
        _speed(small, 64, blocks, 150, compile_mode="max-autotune-no-cudagraphs"),
    ]


def smoke_steps(blocks: Path) -> list[Step]:
    """The same cases in small, for the CPU; no time is expected of it, so none is ended early."""
    return [
        Step(name="ladder", module="gpu_ladder", arguments={"smoke": True}, seconds=100),
        _speed("gpt2_124m", 2, blocks, 100, smoke=True, sources=["synthetic", "packed"]),
    ]


def _speed(
    recipe: str,
    micro_batch: int,
    blocks: Path,
    seconds: float,
    *,
    compiled: bool = True,
    sources: Sequence[str] = ("synthetic",),
    **more: Any,
) -> Step:
    words = [recipe.removeprefix("gpt2_"), "compiled" if compiled else "eager", f"{micro_batch} blocks"]
    words += [name if value is True else f"{name}={value}" for name, value in more.items() if name != "smoke"]
    arguments = {"recipe": recipe, "micro_batch": micro_batch, "compiled": compiled, "sources": list(sources)}
    return Step(
        name=", ".join(words),
        module="gpu_speed",
        arguments=arguments | {"blocks": str(blocks) if blocks.exists() else None} | more,
        seconds=seconds,
    )


class Run:
    """What has been found so far, in memory and on disk."""

    def __init__(self, budget_seconds: float, path: Path, *, smoke: bool):
        self._deadline = time.monotonic() + budget_seconds
        self._path, self._started = path, time.monotonic()
        self.measurements: dict[str, Any] = {"command": " ".join(["benchmarks/gpu.sh", *sys.argv[1:]])}
        self.measurements |= {"smoke": smoke, "skipped": []}
        self._save()

    def take(self, step: Step) -> None:
        """Run a step if it fits into the time left, and keep what it says as it says it."""
        left = self._deadline - time.monotonic()
        if left < step.seconds:
            self.measurements["skipped"].append(f"{step.name}: needs about {step.seconds:.0f} s of {left:.0f} s left")
            harness.say(f"skipped {self.measurements['skipped'][-1]}")
            self._save()
            return
        harness.say(f"-- {step.name} ({left:.0f} s left)")
        found: dict[str, Any] = self.measurements.setdefault(step.name, {})
        began, limit = time.monotonic(), min(left, 3 * step.seconds)
        process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.{step.module}", json.dumps(step.arguments)],
            cwd=harness.ROOT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # with the compiler's workers, which are to end with it
        )
        assert process.stdout is not None
        alarm = _end_after(process, limit)
        with process.stdout as lines:
            for line in lines:
                name, value = json.loads(line)
                found[name] = value
                harness.say(f"   {name}: {json.dumps(value)}")
                self._save()
        code = process.wait()
        alarm.set()
        if code:
            timed_out = time.monotonic() - began >= limit
            found["failed"] = f"ended after {limit:.0f} s" if timed_out else f"exit code {code}; see its output"
        found["wall_seconds"] = round(time.monotonic() - began, 1)
        self._save()

    @property
    def failed_checks(self) -> list[str]:
        """Checks of the ladder that were not passed; `failed` when it did not come to its end."""
        ladder = self.measurements.get("ladder", {})
        wrong = [name for name, value in ladder.items() if isinstance(value, dict) and value.get("ok") is False]
        return wrong + (["failed"] if "failed" in ladder else [])

    def document(self) -> dict[str, Any]:
        """The JSON object of the contract."""
        self.measurements["total_seconds"] = round(time.monotonic() - self._started, 1)
        report = harness.Report(
            name="gpu", measurements=self.measurements, ratios=ratios(self.measurements), targets=TARGETS
        )
        document = report.document()
        document["machine"]["gpu"] = self.measurements.get("ladder", {}).get("device", {}).get("name")
        return document

    def _save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.document(), indent=2) + "\n")
        os.replace(temporary, self._path)


def ratios(measurements: dict[str, Any]) -> dict[str, float]:
    """Best MFU by model, and what compilation, real blocks and the loader make of the speed; only what was measured."""
    found: dict[str, float] = {}
    best: dict[tuple[str, str], float] = {}
    for name, value in measurements.items():
        if not isinstance(value, dict) or "synthetic" not in value:
            continue
        model, kind, *_ = name.split(", ")
        speed = value["synthetic"]["tokens_per_second"]
        best[model, kind] = max(speed, best.get((model, kind), 0.0))
        share = value["synthetic"]["mfu"]
        if share is not None:
            found[f"mfu_{model}"] = max(share, found.get(f"mfu_{model}", 0.0))
        for source in (one for one in ("packed", "loader") if "tokens_per_second" in value.get(one, {})):
            found.setdefault(f"{source}_vs_synthetic_{model}", value[source]["tokens_per_second"] / speed)
    for model, kind in best:
        if kind == "compiled" and (model, "eager") in best:
            found[f"compiled_vs_eager_{model}"] = best[model, "compiled"] / best[model, "eager"]
    return found


def _end_after(process: subprocess.Popen[str], seconds: float) -> Any:
    """End a child and everything it started after so many seconds, unless the event returned is set before."""
    import threading

    over = threading.Event()

    def wait() -> None:
        if not over.wait(seconds):
            os.killpg(process.pid, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
    return over


if __name__ == "__main__":
    sys.exit(main())
