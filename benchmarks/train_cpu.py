"""Our training loop against a bare one on the CPU: what data, logging and checkpoints cost of a step.

Both train the same model class by the same optimizer with the same number of threads, each round in a process of its
own with the environment that `launch.local` gives. Ours is a whole `train.run`: blocks packed from a table, metrics,
console, a checkpoint on the way, written while training goes on. Bare is a plain loop over random ids that are in
memory already, and does nothing else. Rounds come in pairs, each pair in the other order; a ratio is of one pair.

The clock runs from the end of step 2 to the end of the last step, with logging, reading and the copy and the writing of
the checkpoint in between; evaluation comes before and after. `cpu_seconds_per_step` is processor time of the process,
all threads: what was done, and less noisy than wall time where other processes are at work.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import harness, loader_table, train_cpu_cases
from benchmarks.harness import Case, Round

STEPS, QUICK_STEPS = 54, 8
TARGETS = {"ours_vs_bare": 0.97}


def main() -> None:
    """Measure, and print."""
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, help="pairs of rounds (default 5; with --quick 1)")
    parser.add_argument("--steps", type=int, help=f"optimizer steps of a round (default {STEPS}, quick {QUICK_STEPS})")
    options = parser.parse_args()
    steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    with tempfile.TemporaryDirectory(prefix="benchmark-train-") as folder:
        report = run(Path(folder), steps, options.rounds or (1 if options.quick else 5))
    harness.finish(report, options)


def run(folder: Path, steps: int, rounds: int) -> harness.Report:
    """Make the table, then measure."""
    facts = loader_table.write(str(folder / "table"), train_cpu_cases.ROWS, train_cpu_cases.MEAN_TOKENS, 2)
    train_cpu_cases.use_launchers_environment()
    cases = [
        Case(name=name, function=f"benchmarks.train_cpu_cases:{name}", arguments={"steps": steps})
        for name in ("ours", "bare")
    ]
    found: dict[str, list[Round]] = {case.name: [] for case in cases}
    for at in range(rounds):
        for case in cases if at % 2 == 0 else cases[::-1]:
            more = {"database": str(folder / "table"), "run_dir": str(folder / f"run-{at}")}
            took = harness.measure(case.function, {**case.arguments, **(more if case.name == "ours" else {})})
            found[case.name].append(took)
            harness.say(f"round {at + 1}/{rounds}  {case.name:<6} {took.answer['tokens_per_second']:10.1f} tok/s")
    pairs = list(zip(found["ours"], found["bare"], strict=True))
    wall = [ours.answer["tokens_per_second"] / bare.answer["tokens_per_second"] for ours, bare in pairs]
    cpu = [bare.answer["cpu_seconds_per_step"] / ours.answer["cpu_seconds_per_step"] for ours, bare in pairs]
    return harness.Report(
        name="train_cpu",
        measurements={
            "table": facts,
            "model": train_cpu_cases.facts(steps),
            "wall_ratio_of_each_pair": [round(ratio, 4) for ratio in wall],
            "cpu_ratio_of_each_pair": [round(ratio, 4) for ratio in cpu],
            **{name: _numbers(some) for name, some in found.items()},
        },
        ratios={"ours_vs_bare": statistics.median(wall), "ours_vs_bare_cpu_seconds": statistics.median(cpu)},
        targets=TARGETS,
    )


def _numbers(rounds: list[Round]) -> dict[str, Any]:
    """Medians of the harness's numbers and of what the case answered."""
    keys = rounds[0].answer
    answered = {key: round(statistics.median(one.answer[key] for one in rounds), 4) for key in keys}
    each = [round(one.answer["tokens_per_second"], 1) for one in rounds]
    return {**harness.medians(rounds), **answered, "rounds_tokens_per_second": each}


if __name__ == "__main__":
    main()
