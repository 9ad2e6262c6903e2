"""The forensics benchmark: its clock, its scores and the naive ways beside ours; and a quick run of it all."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks import forensics, forensics_build, forensics_peers, forensics_questions, harness
from benchmarks.forensics_questions import Kind


def test_kinds_take_turns_until_their_time_is_up_and_wrong_answers_count() -> None:
    order: list[str] = []

    def kind(name: str, seconds: float, after: str | None = None) -> Kind:
        def ask(document: forensics_questions.Document) -> int:
            order.append(name)
            time.sleep(seconds)
            return int(document["id"])

        return Kind(ask=ask, is_right=lambda found, document: found == document["id"] and found != 2, after=after)

    found = forensics_questions.measured(
        {"quick": kind("quick", 0.0), "slow": kind("slow", 0.02), "then": kind("then", 0.0, "slow")},
        [{"id": i} for i in range(1, 5)],
        0.03,
    )
    assert order[:6] == ["quick", "slow", "then", "quick", "slow", "then"]
    assert (found["quick"]["queries"], found["quick"]["right"]) == (4, 0.75)
    assert found["slow"]["queries"] == found["then"]["queries"] == 3 and found["slow"]["median_ms"] >= 20


def test_a_run_of_tokens_does_not_go_on_in_the_next_document() -> None:
    text = np.arange(20, dtype=np.int32)
    words = np.arange(21)
    tokens = np.concatenate([[90], text[:6], text[6:9], [91], text[8:20]]).astype(np.int32)
    offsets = np.array([0, 7, 11, 23])  # 0-5 end one document and 6-8 begin the next: neither is 8 long
    assert forensics_peers._runs_naively(text, words, tokens, offsets) == {(8, 12): [2]}
    joined = forensics_peers._runs_naively(text, words, tokens, np.array([0, 11, 23]))
    assert joined == {(0, 9): [0], (8, 12): [1]}
    twice = np.concatenate([text[3:12], [92], text[3:12], [93], text[3:12]]).astype(np.int32)
    assert forensics_peers._runs_naively(text, words, twice, np.array([0, 20, 29])) == {(3, 9): [0, 1]}


def test_scores_name_what_is_slow_or_wrong() -> None:
    names = (*forensics.CERTAIN, "text", "attribution")
    asked = {name: {"p95_ms": 100.0, "right": 1.0} for name in names}
    asked["attribution"] = {"p95_ms": 4_000.0, "right": 0.5}
    asked["ledger"]["p95_ms"] = 2_500.0
    large = {"where": {"p95_ms": 500.0, "right": 0.9}, "seen": {"p95_ms": 1_000.0, "right": 1.0}}
    same = {"times_as_fast": 3.0, "same": 1.0, "hits_shared": 0.7, "recall_at_10": 0.99}
    peers = dict.fromkeys(("replay", "numpy", "hybrid", "vectors"), same)
    found = forensics.scores(asked, large, {"seen": 2.0, "attribute": 4.0}, peers)
    report = harness.Report(name="forensics", measurements={}, **found)
    assert report.ratios["where_of_the_large_table_under_2s"] == 4.0
    assert report.ratios["slowest_cold_start_under_5s"] == 1.25
    assert report.ratios["attribution_under_5s"] == 1.25
    missed = {name for name, met in report.met.items() if not met}
    assert missed == {"slowest_other_question_under_2s", "right_answers"}


def test_a_turned_text_is_another_of_the_same_words() -> None:
    assert forensics_build.turned("one two  three\nfour five") == "three four five one two"


@pytest.mark.slow
def test_the_model_puts_texts_of_the_same_words_together(tmp_path: Path) -> None:
    from benchmarks import forensics_model
    from pretrain_assets.config import EmbedConfig
    from pretrain_assets.curate import embedding
    from pretrain_assets.curate.document_models import find_model

    texts = [f"{word} number {i} goes {word} again" for word in ("harbour", "meadow", "desert") for i in range(10)]
    folder = forensics_model.make(texts, tmp_path / "static", dims=4)
    encode = embedding.load(find_model(str(folder)), EmbedConfig(model=str(folder), library="model2vec"), "cpu")
    vectors = encode(["a harbour", "harbour!", "the meadow", "nothing known"])
    unit = vectors[:3] / np.linalg.norm(vectors[:3], axis=1, keepdims=True)
    assert unit[0] @ unit[1] > 0.99 > 0.5 > unit[0] @ unit[2] and not vectors[3].any()


@pytest.mark.slow
def test_a_quick_run_measures_every_kind_and_prints_the_contract() -> None:
    command = [sys.executable, "-m", "benchmarks.forensics", "--quick", "--json"]
    done = subprocess.run(command, cwd=harness.ROOT, check=True, capture_output=True, text=True)
    document = json.loads(done.stdout.splitlines()[-1])
    assert list(document) == ["name", "commit", "machine", "versions", "measurements", "ratios", "targets", "met"]
    kinds = (*forensics.CERTAIN, "text", "vector", "hybrid", "attribution")
    assert all(document["measurements"][f"question: {kind}"]["median_ms"] > 0 for kind in kinds)
    for equal in ("right_answers", "where_same_as_replay", "attribution_same_as_numpy", "recall_at_10_over_0.9"):
        assert document["met"][equal], (equal, document["ratios"])
