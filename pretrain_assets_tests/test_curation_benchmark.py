"""The curation benchmark's frame, its part on exact duplicates, and its corpus, short of measuring anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import curation, curation_exact, debian_corpus, harness
from benchmarks.harness import Round

LONG = "word " * 60
PAGE = f"""<html><head><title>no text</title><style>p {{}}</style></head><body>
<nav>menu {LONG}</nav><p>before <b>any</b> heading</p>
<h1>One &amp; only</h1><p>A   paragraph\n over lines {LONG}</p><ul><li>first</li><li>second</li></ul>
<pre>  kept\n    as it is</pre><table><tr><td>1</td><td>2</td></tr></table>
<h4>deep</h4>same section<br>new line
<h2>Short</h2><p>too short</p>
<h2>Two</h2><script>var x = "{LONG}"</script>{LONG}<footer>end</footer></body></html>"""


def test_a_page_is_split_at_its_headings() -> None:
    one, two = debian_corpus.sections(PAGE)
    words = LONG.strip()
    assert one == (
        f"One & only\n\nA paragraph over lines {words}\n\nfirst\n\nsecond\n\n  kept\n    as it is\n\n"
        "1 2\n\ndeep\n\nsame section\nnew line"
    )
    assert two == f"Two\n\n{words}"


@pytest.mark.parametrize(
    ("path", "left_out"),
    [
        ("usr/share/doc/handbook/html/pt-BR/index.html", True),
        ("usr/share/doc/handbook/html/en-US/index.html", False),
        ("usr/share/doc/linux/html/translations/zh_CN/a.html", True),
        ("usr/share/doc/faq/index.de.html", True),
        ("usr/share/doc/faq/index.zh-cn.html", True),
        ("usr/share/doc/faq/index.en.html", False),
        ("usr/share/doc/django/_modules/a.html", True),
        ("usr/share/doc/go/index.html", False),
    ],
)
def test_foreign_pages_and_source_code_are_left_out(path: str, left_out: bool) -> None:
    assert bool(debian_corpus.LEFT_OUT.search(path)) == left_out


def test_part_of_a_corpus_is_spread_over_it(tmp_path: Path) -> None:
    whole = debian_corpus.write_bundled(tmp_path / "whole.parquet", 4_000_000)
    assert 3_500_000 < debian_corpus.text_bytes(debian_corpus.documents(whole)) <= 4_000_000
    part = debian_corpus.documents(whole, 500_000)
    assert 400_000 < debian_corpus.text_bytes(part) <= 500_000
    sources = set(debian_corpus.documents(whole)["source"].to_pylist())
    assert set(part["source"].to_pylist()) == sources and len(sources) == 5


def test_without_apt_the_corpus_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(debian_corpus.CorpusError, match="there is no apt-get here: use --quick"):
        debian_corpus.build(tmp_path, 1)
    for name in ("apt-get", "dpkg"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'E: Unable to locate package' >&2; exit 100\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(debian_corpus.CorpusError, match=r"none of postgresql.*Unable to locate.*apt-get update"):
        debian_corpus.build(tmp_path, 1)


def test_a_duplicate_that_one_way_misses_is_named(tmp_path: Path) -> None:
    rounds = {}
    for name, rows in ((curation_exact.OURS, [3, 5]), (curation_exact.MD5, [3, 5]), (curation_exact.XXH3, [3, 9])):
        path = str(tmp_path / f"{len(rounds)}.npy")
        np.save(path, np.array(rows))
        rounds[name] = [measured(cpu_seconds, path) for cpu_seconds in (1.0, 2.0 + len(rounds), 4.0)]
    facts, ratios, targets = curation_exact.compare(rounds, tmp_path)
    assert facts["exact: results"]["first_rows_that_differ"] == {curation_exact.XXH3: [5, 9]}
    assert ratios == {"exact_vs_md5_loop": 1.0, "exact_vs_xxh3_loop": 1.0, "exact_same_duplicates": 0.0}
    report = harness.Report(name="curation", measurements=facts, ratios=ratios, targets=targets)
    assert report.met == {"exact_vs_md5_loop": False, "exact_same_duplicates": False}
    numbers = curation.numbers(rounds[curation_exact.OURS])
    assert (numbers["text_bytes"], numbers["mb_per_cpu_second"]) == (8_000_000, 4.0)


def measured(cpu_seconds: float, path: str) -> Round:
    answer = {"bytes": 8_000_000, "rows": 10, "duplicates": path, "digest": path}
    sizes = {"bytes_written": 0, "peak_pss_bytes": 1, "sum_of_peaks_bytes": 1, "processes": 1}
    return Round(seconds=cpu_seconds, cpu_seconds=cpu_seconds, answer=answer, **sizes)


@pytest.mark.slow
def test_a_quick_run_measures_every_case_and_prints_the_contract() -> None:
    command = [sys.executable, "-m", "benchmarks.curation", "--quick", "--json"]
    done = subprocess.run(command, cwd=harness.ROOT, check=True, capture_output=True, text=True)
    document = json.loads(done.stdout.splitlines()[-1])
    measurements = document["measurements"]
    assert "parts_missing" not in measurements
    for name in curation.PARTS:
        ours = [case for case in measurements if case.startswith(f"{name}: ours")]
        assert ours and all(measurements[case]["mb_per_cpu_second"] > 0 for case in ours[:1])
    for equal in ("exact_same_duplicates", "contamination_recall", "tokenize_same_ids"):
        assert document["met"][equal]
