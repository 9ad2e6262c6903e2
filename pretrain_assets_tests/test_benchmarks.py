"""The benchmarks' own machinery: the JSON contract, rounds in processes, what the fault campaign would notice."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pytest

from benchmarks import corpus, faults_check, gpu, harness, loader_cases, loader_table, s3_stub, scale_cases
from benchmarks.harness import Case, Report
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets_tests.tables import append, make_table

KEYS = ["name", "commit", "machine", "versions", "measurements", "ratios", "targets", "met"]
MEBIBYTE = 1 << 20
HERE = "pretrain_assets_tests.test_benchmarks"


def hungry(mebibytes: int) -> Callable[[], Any]:
    """A case that holds memory in its own process and as much in a worker."""

    def work() -> int:
        held = bytearray(mebibytes * MEBIBYTE)
        code = f"import time; held = bytearray({mebibytes * MEBIBYTE}); time.sleep(0.6)"
        subprocess.run([sys.executable, "-c", code], check=True)
        return len(held)

    return work


def broken() -> Callable[[], Any]:
    return lambda: 1 // 0


def quick(name: str) -> Callable[[], Any]:
    time.sleep(0.2)  # preparation is not timed
    return lambda: name


def report() -> Report:
    ratios = {"fast": 2.0, "slow": 0.5, "no target": 1.0}
    return Report(name="sample", measurements={"rows": 3}, ratios=ratios, targets={"fast": 1.0, "slow": 1.0})


def test_the_last_line_is_the_contract_and_a_missed_target_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    harness.finish(report(), harness.arguments("").parse_args(["--json"]))
    printed = capsys.readouterr().out
    document = json.loads(printed.splitlines()[-1])
    assert list(document) == KEYS
    assert document["met"] == {"fast": True, "slow": False}
    assert "target >= 1: MISSED" in printed
    assert document["versions"]["pylance"] == lance.__version__
    assert socket.gethostname() not in json.dumps(document)
    assert str(harness.ROOT) not in json.dumps(document)


def test_a_result_is_saved_with_the_command_that_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["sample", "--quick", "--save"])
    harness.finish(report(), harness.arguments("").parse_args())
    saved = json.loads((tmp_path / "sample-quick.json").read_text())
    assert saved["command"] == "python -m benchmarks.sample --quick --save"
    assert list(saved) == ["command", *KEYS]
    assert "saved to sample-quick.json" in capsys.readouterr().out


def test_memory_is_counted_over_a_process_and_its_workers() -> None:
    found = harness.measure(f"{HERE}:hungry", {"mebibytes": 100})
    assert found.answer == 100 * MEBIBYTE
    assert found.processes == 2
    assert found.seconds >= 0.6
    assert 200 * MEBIBYTE <= found.peak_pss_bytes <= found.sum_of_peaks_bytes < 400 * MEBIBYTE


@pytest.mark.slow
def test_cases_are_run_in_turn_and_only_their_work_is_timed() -> None:
    order: list[str] = []
    cases = [Case(name=name, function=f"{HERE}:quick", arguments={"name": name}) for name in "ab"]
    found = harness.interleaved(
        cases, 2, before=lambda case: order.append(case.name) or {}, after=lambda case: order.append("after")
    )
    assert order == ["a", "after", "b", "after"] * 2
    assert [one.answer for one in found["b"]] == ["b", "b"]
    assert harness.medians(found["a"])["seconds"] < 0.2


def test_a_failing_case_is_an_error_and_no_number() -> None:
    with pytest.raises(RuntimeError, match=r"broken with \{\} failed with exit code 1"):
        harness.measure(f"{HERE}:broken", {})


def test_the_corpus_is_as_large_as_asked_different_and_the_same_every_time(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    texts = []
    for attempt in ("one", "two"):
        corpus.write_files(tmp_path / attempt, num_files=2, file_bytes=200_000)
        texts.append(pq.read_table(tmp_path / attempt)["text"].to_pylist())
    assert texts[0] == texts[1]
    assert 400_000 <= sum(len(text.encode()) for text in texts[0]) < 600_000
    assert len(set(texts[0])) == len(texts[0])
    later = corpus.write_files(tmp_path / "later", num_files=1, file_bytes=200_000, first=2)
    assert not set(pq.read_table(later[0])["text"].to_pylist()) & set(texts[0])


def test_the_campaign_would_notice_lost_rows_changed_values_and_leftovers(tmp_path: Path) -> None:
    location = make_table(tmp_path, [f"text {row}" for row in range(100)])
    before, columns = faults_check.facts(open_dataset(location)), faults_check.digests(open_dataset(location))
    assert (before.rows, before.sum_of_ids) == (100, 4950)
    append(location, ["one more"])
    assert faults_check.facts(open_dataset(location)).rows == 101
    open_dataset(location).delete("id = 100")
    assert faults_check.facts(open_dataset(location)) == before
    assert faults_check.left_behind(location) == []
    open_dataset(location).update({"score": "1.5"}, where="id = 99")
    after = faults_check.facts(open_dataset(location))
    assert (after.rows, after.sum_of_ids) == (100, 4950)
    assert after.sampled != before.sampled  # the last row is always sampled
    changed = {name for name, _ in faults_check.digests(open_dataset(location)).items() ^ columns.items()}
    assert changed == {"score"}
    staged = Path(location.uri) / "data" / "fill-0123456789abcdef.lance"
    staged.write_bytes(b"x")
    journal = Path(location.staging_uri) / "ingest" / "key.unit"
    journal.parent.mkdir(parents=True)
    journal.write_bytes(b"x")
    assert faults_check.left_behind(location) == ["data/fill-0123456789abcdef.lance", "staging/ingest/key.unit"]


def test_digests_do_not_see_the_layout(tmp_path: Path) -> None:
    texts = [f"text {row}" for row in range(40)]
    whole = make_table(tmp_path / "whole", texts)
    parts = make_table(tmp_path / "parts", texts[:15])
    append(parts, texts[15:])
    assert len(open_dataset(parts).get_fragments()) == 2
    assert faults_check.digests(open_dataset(parts)) == faults_check.digests(open_dataset(whole))


def test_the_scale_table_has_the_answers_that_the_benchmark_expects(tmp_path: Path) -> None:
    location = Location(database_uri=str(tmp_path))
    scale_cases.build(location, rows=2_000, fragments=2, appends=2, rows_per_append=100)
    assert scale_cases.list_all_versions(str(tmp_path))() == 7
    assert scale_cases.token_sums(str(tmp_path))() == scale_cases.expected_tokens(2_000)
    assert scale_cases.find_missing(str(tmp_path))() == [0, 0]
    assert scale_cases.fill_again(str(tmp_path))() is False
    scale_cases.append(location, 2_000, 100)
    assert scale_cases.find_missing(str(tmp_path))() == [1, 1]


def test_the_clock_starts_with_the_request_or_with_the_first_block() -> None:
    def slow_start() -> Iterator[int]:
        time.sleep(0.3)
        yield 1000
        for _ in range(10):
            time.sleep(0.01)
            yield 5

    whole = loader_cases.timed(slow_start)
    assert whole["tokens"] == 1050
    assert whole["clock_seconds"] >= 0.4
    assert 0.3 <= whole["first_block_seconds"] < whole["clock_seconds"]
    later = loader_cases.timed(slow_start, from_first_block=True)
    assert later["tokens"] == 50
    assert 0.1 <= later["clock_seconds"] < whole["clock_seconds"]
    assert later["first_block_seconds"] >= 0.3
    assert loader_cases.timed(slow_start, seconds=0.0)["tokens"] == 1005
    twice = loader_cases.timed(slow_start, twice=True)
    assert twice["tokens"] == 1050
    assert min(twice["first_block_seconds"], twice["clock_seconds"] - 0.1) >= 0.3


def test_the_bare_take_reads_every_planned_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRETRAIN_CACHE_DIR", str(tmp_path / "cache"))
    facts = loader_table.write(str(tmp_path), 600, 300, 3)
    plan = loader_cases._loader(str(tmp_path), 4, 1).plan(0)
    windows = list(loader_cases._windows(plan, 8 * loader_table.SEQ_LEN))
    assert len(windows) == -(-int(plan.tokens_per_split.max()) // (2 * loader_table.SEQ_LEN))
    rows = np.concatenate([rows for rows, _ in windows])
    assert sorted(rows.tolist()) == sorted(plan.row_ids.tolist())
    assert sum(tokens for _, tokens in windows) == plan.tokens_per_split.sum()
    answer = loader_cases.scan(str(tmp_path))()
    assert answer["tokens"] == facts["tokens"]


def test_the_s3_stub_answers_ranges_and_lists_and_counts_what_was_asked(tmp_path: Path) -> None:
    (tmp_path / "bucket" / "folder").mkdir(parents=True)
    (tmp_path / "bucket" / "folder" / "a").write_bytes(bytes(range(200)))
    latency = 0.05
    with s3_stub.served(tmp_path, latency) as endpoint:
        import boto3

        client = boto3.client(
            "s3", endpoint_url=endpoint, aws_access_key_id="x", aws_secret_access_key="x", region_name="us-east-1"
        )
        started = time.monotonic()
        part = client.get_object(Bucket="bucket", Key="folder/a", Range="bytes=10-19")
        assert part["Body"].read() == bytes(range(10, 20))
        assert time.monotonic() - started >= latency
        assert client.get_object(Bucket="bucket", Key="folder/a", Range="bytes=-3")["Body"].read() == b"\xc5\xc6\xc7"
        assert client.head_object(Bucket="bucket", Key="folder/a")["ContentLength"] == 200
        client.put_object(Bucket="bucket", Key="folder/b/c", Body=b"new")
        assert client.get_object(Bucket="bucket", Key="folder/b/c")["Body"].read() == b"new"
        found = client.list_objects_v2(Bucket="bucket", Prefix="folder/", Delimiter="/")
        assert [one["Key"] for one in found["Contents"]] == ["folder/a"]
        assert [one["Prefix"] for one in found["CommonPrefixes"]] == ["folder/b/"]
        counts = s3_stub.stats(endpoint)
    assert counts.pop("bytes") > 16
    assert counts == {"get": 3, "head": 1, "put": 1, "list": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words", "cases"),
    [
        pytest.param(
            "loader",
            ["--rows", "3000"],
            ["ours 16", "streaming tuned 128", "bare take 16", "memmap"],
            marks=pytest.mark.minutes,
        ),
        pytest.param(
            "loader_s3",
            ["--rows", "4000"],
            ["ours, clump 1", "ours local, clump 32", "streaming tuned, clump 32"],
            marks=pytest.mark.minutes,
        ),
        ("plan", ["--rows", "50000"], ["build", "second rank", "streaming dataset"]),
        pytest.param("train_cpu", ["--steps", "6"], ["ours", "bare"], marks=pytest.mark.minutes),
    ],
)
def test_a_quick_benchmark_measures_every_case(name: str, words: list[str], cases: list[str]) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", *words]
    done = subprocess.run(command, cwd=harness.ROOT, check=True, capture_output=True, text=True)
    document = json.loads(done.stdout.splitlines()[-1])
    assert list(document) == KEYS
    assert set(document["targets"]) == set(document["met"]) <= set(document["ratios"])
    assert all(document["measurements"][case]["seconds"] > 0 for case in cases)
    assert all(ratio > 0 for ratio in document["ratios"].values())


@pytest.mark.slow
def test_the_gpu_benchmark_climbs_the_ladder_and_measures_on_a_cpu_too(tmp_path: Path) -> None:
    command = [str(harness.ROOT / "benchmarks" / "gpu.sh"), "--smoke"]
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert list(document) == KEYS
    found = document["measurements"]
    rungs = [value["ok"] for value in found["ladder"].values() if isinstance(value, dict) and "ok" in value]
    assert found["skipped"] == [] and rungs == [True] * 9
    for source in ("synthetic", "packed"):
        measured = found["124m, compiled, 2 blocks"][source]
        assert measured["tokens_per_second"] > 0 and measured["mfu"] is None
    assert document["met"] == {"mfu_124m": False, "mfu_354m": False}  # not measured is not met


def test_the_gpu_benchmark_keeps_its_budget_and_what_a_broken_case_has_said(tmp_path: Path) -> None:
    run = gpu.Run(1.0, tmp_path / "gpu.json", smoke=True)
    run.take(gpu.Step(name="too long", module="gpu_speed", seconds=100.0))
    run.take(gpu.Step(name="broken", module="no_such_module", seconds=0.5))
    found = json.loads((tmp_path / "gpu.json").read_text())["measurements"]
    assert found["skipped"][0].startswith("too long: needs about 100 s")
    assert "exit code 1" in found["broken"]["failed"]


def test_ratios_are_of_the_best_speed_and_of_what_was_measured() -> None:
    def speed(tokens: float, mfu: float | None) -> dict[str, Any]:
        return {"tokens_per_second": tokens, "mfu": mfu}

    found = gpu.ratios(
        {
            "ladder": {"device": {}},
            "124m, compiled, 32 blocks": {"synthetic": speed(400, 0.4), "packed": speed(396, 0.39)},
            "124m, compiled, 64 blocks": {"synthetic": speed(500, 0.46)},
            "124m, eager, 32 blocks": {"synthetic": speed(250, 0.2)},
            "354m, compiled, 16 blocks": {"failed": "out of memory"},
            "skipped": ["one"],
        }
    )
    assert found == {"mfu_124m": 0.46, "packed_vs_synthetic_124m": 0.99, "compiled_vs_eager_124m": 2.0}
