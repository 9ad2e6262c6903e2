"""What the loader's benchmarks do with rounds: medians of what the cases answered, and a table of rates for people.

Invariant: a rate is the median over the rounds of tokens per second, each taken by the clock of `loader_cases.timed`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import harness
from benchmarks.harness import Case, Round

MODULE = "benchmarks.loader_cases"


def case(name: str, function: str, **arguments: Any) -> Case:
    """A case of `loader_cases`, or of another module when the function names one."""
    where = function if ":" in function else f"{MODULE}:{function}"
    return Case(name=name, function=where, arguments=arguments)


def numbers(rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians of the harness's numbers and of everything that the case answered, and the rate of each round."""
    answers = [one.answer for one in rounds]
    middle = {key: statistics.median(answer[key] for answer in answers) for key in answers[0]}
    whole = {key: round(value, 4 if key.endswith(("seconds", "per_block")) else None) for key, value in middle.items()}
    return {
        **harness.medians(rounds),
        **whole,
        "rounds_tokens_per_second": [round(answer["tokens_per_second"]) for answer in answers],
    }


def fastest(found: Mapping[str, Mapping[str, Any]], key: str = "tokens_per_second") -> str:
    """Name of the case with the most."""
    return max(found, key=lambda name: float(found[name][key]))


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Rates for people."""
    head = f"{'median of rounds':<34}{'M tokens/s':>11}{'M per cpu s':>12}{'first block s':>14}{'peak MB':>9}"
    lines = [head]
    for name, number in found.items():
        lines.append(
            f"{name:<34}{number['tokens_per_second'] / 1e6:>11.2f}{number['tokens_per_cpu_second'] / 1e6:>12.2f}"
            f"{number['first_block_seconds']:>14.3f}{number['sum_of_peaks_bytes'] / 1e6:>9.0f}"
        )
    return "\n".join(lines)
