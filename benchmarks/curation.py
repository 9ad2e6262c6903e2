"""Curation and tokenization against the published ways, on the same real English text, all cases in turn.

The text is that of `benchmarks.debian_corpus`; `--quick` takes some of the bundled documents on the same code path.
Every case runs in a process of its own, once a round, over at least five rounds. Printed for each: medians, peak memory
and MB of text per CPU second (processor seconds of the process and its workers, so per core). Ratios are medians of
rounds: ours and the alternative of one round against each other.

Contract of a part, `benchmarks/curation_NAME.py` for each name in `PARTS`:

    def cases(corpus: Path, scratch: Path, quick: bool) -> list[harness.Case]
    def compare(rounds: Mapping[str, list[harness.Round]], scratch: Path)
            -> tuple[dict[str, Any], dict[str, float], dict[str, float]]

- `corpus` is a parquet file with `text`, `source` and `doc_id`; read it by `debian_corpus.documents(corpus, max_bytes)`
  or `debian_corpus.texts(corpus, max_bytes)`. What is too slow for all of it takes `max_bytes`: rows spread over it.
- `Case.name` is "PART: ours" and "PART: NAME OF THE ALTERNATIVE", such as "exact: md5 loop", unique over all parts.
  `Case.function` names a function of the part's module (or of one beside it); it prepares outside the clock (imports,
  reading, compiling and loading what a run of hours would pay once) and returns the work. See `benchmarks.child`.
- The work returns plain JSON, and in it `bytes`: the UTF-8 bytes of text that it went through. What `compare` needs to
  say that results are equal is in there too: a digest, counts. What is large goes to a file in `scratch`, a folder that
  lives until `compare` was called; give its path to the case as an argument.
- One thread each, unless a case says otherwise in its name. `harness.ratio(rounds[OURS], rounds[THEIRS])` gives how
  many times the MB per CPU second of theirs ours reaches, of which the targets speak.
- `cases` leaves out an alternative that is not installed; `compare` gets the cases that ran (at least a round of each)
  and names what is missing in its measurements. A target whose ratio is missing is printed as missed.
- `compare` returns measurements (facts on equality, every difference listed with its reason or counted by reason; keys
  begin with the part's name), ratios (more is better; equality as a share, 1.0 when equal) and targets (minimum by key
  of ratios). It raises nothing about results: a difference is a number below its target.
- `quick`: at most 8 seconds for the whole part, the start of its processes (half a second and the imports) included.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import debian_corpus, harness
from benchmarks.harness import Round

PARTS = ("exact", "near", "quality", "contamination", "tokens")
FULL_BYTES, QUICK_BYTES = 100_000_000, 1_000_000
"""At least this much text, and at most this much."""
ROUNDS = 5


def main() -> None:
    """Measure, and print."""
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, help=f"rounds of each case (default {ROUNDS}; with --quick 1)")
    parser.add_argument("--parts", help=f"only these, with commas: {','.join(PARTS)}")
    parser.add_argument("--corpus", type=Path, help="folder for the packages and the text (default: a cache folder)")
    options = parser.parse_args()
    names = options.parts.split(",") if options.parts else PARTS
    if unknown := set(names) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    folder = options.corpus or debian_corpus.default_folder()
    with tempfile.TemporaryDirectory(prefix="benchmark-curation-") as scratch:
        if options.quick:
            corpus = debian_corpus.write_bundled(Path(scratch) / "corpus.parquet", QUICK_BYTES)
        else:
            corpus = debian_corpus.build(folder, FULL_BYTES)
        rounds = options.rounds or (1 if options.quick else ROUNDS)
        report = run(corpus, Path(scratch), rounds, names, quick=options.quick)
    harness.finish(report, options)


def run(corpus: Path, scratch: Path, rounds: int, names: Sequence[str], *, quick: bool) -> harness.Report:
    """Measure all cases of these parts in turn, then let each part compare its own."""
    modules = {name: module for name in names if (module := part(name)) is not None}
    cases = {name: module.cases(corpus, scratch, quick) for name, module in modules.items()}
    found = harness.interleaved([case for some in cases.values() for case in some], rounds)
    measurements: dict[str, Any] = {"corpus": debian_corpus.facts(corpus)}
    measurements |= {name: numbers(some) for name, some in found.items()}
    if missing := [name for name in names if name not in modules]:
        measurements["parts_missing"] = missing
    ratios: dict[str, float] = {}
    targets: dict[str, float] = {}
    for name, module in modules.items():
        facts, reached, wanted = module.compare({case.name: found[case.name] for case in cases[name]}, scratch)
        for into, more in ((measurements, facts), (ratios, reached), (targets, wanted)):
            assert not into.keys() & more, f"{name} gives a key that is taken: {sorted(into.keys() & more)}"
            into.update(more)
    return harness.Report(name="curation", measurements=measurements, ratios=ratios, targets=targets)


def part(name: str) -> ModuleType | None:
    """The module of a part; None where there is none."""
    module = f"benchmarks.curation_{name}"
    return importlib.import_module(module) if importlib.util.find_spec(module) else None


def numbers(rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians of one case, and its speed."""
    speed = statistics.median(harness.megabytes_per_cpu_second(one) for one in rounds)
    return {**harness.medians(rounds), "text_bytes": rounds[0].answer["bytes"], "mb_per_cpu_second": round(speed, 3)}


if __name__ == "__main__":
    main()
