"""`pretrain runs`: runs side by side, read from what they wrote."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pretrain_assets.cli import cli
from pretrain_assets.launch.contract import METRICS_NAME, write_file, write_result, write_spec
from pretrain_assets.report.runs_text import runs_text
from pretrain_assets.train.lock import LOCK_NAME
from pretrain_assets.train.runs import list_runs
from pretrain_assets_tests.runs import spec_in

RECORDS: list[dict[str, Any]] = [
    {"step": 0, "val_loss": 9.0, "total_steps": 1200},
    {"step": 10, "loss": 8.0, "tok_per_s": 100.0, "total_steps": 1200},
    {"step": 20, "loss": 7.0, "tok_per_s": 300.0, "total_steps": 1200},
    {"step": 20, "val_loss": 7.5, "total_steps": 1200},
    {"step": 30, "loss": 6.5, "tok_per_s": 290.0, "total_steps": 1200},
]


def write_run(runs_uri: str, name: str, records: list[dict[str, Any]]) -> str:
    run_dir = f"{runs_uri}/{name}"
    write_spec(spec_in("/nowhere", run_dir))
    write_file(f"{run_dir}/{METRICS_NAME}", "".join(json.dumps(record) + "\n" for record in records).encode())
    return run_dir


def test_runs_are_compared_newest_first(tmp_path: Path) -> None:
    runs = str(tmp_path)
    done, training, new = (write_run(runs, n, r) for n, r in (("a", RECORDS), ("b", RECORDS[:2]), ("c", [])))
    write_result(done, {"status": "done"})
    for age, run_dir in ((10, done), (300, training), (90_000, new)):
        os.utime(f"{run_dir}/{METRICS_NAME}", (1e9 - age, 1e9 - age))
    (tmp_path / "notes").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{}")
    with (Path(training) / LOCK_NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = list_runs(runs)
    assert [(r.name, r.status, r.step, r.total_steps) for r in found] == [
        ("a", "done", 30, 1200),
        ("b", "training", 10, 1200),
        ("c", "unfinished", 0, None),
    ]
    first = found[0]
    assert (first.recipe, first.pin, first.tag, first.run_dir) == ("tiny", "table@1", "tokenized-v1", done)
    assert (first.train_loss, first.val_loss, first.tok_per_s) == (6.5, 7.5, 290.0)
    lines = [line.split() for line in runs_text(found, now=1e9).splitlines()]
    assert lines[2] == [
        "a",
        "tokenized-v1",
        "done",
        "30/1,200",
        "6.5000",
        "7.5000",
        "(step",
        "20)",
        "290",
        "10",
        "s",
        "ago",
    ]
    assert lines[3][-3:] == ["5", "min", "ago"] and lines[4][-3:] == ["1", "d", "ago"]
    assert lines[4][3:7] == ["0/n/a", "n/a", "n/a", "n/a"]
    assert list_runs(runs)[1].status == "unfinished"


def test_the_verb_prints_a_table_or_json(tmp_path: Path) -> None:
    def said(*arguments: str) -> str:
        return CliRunner().invoke(cli, ["--runs", str(tmp_path / "runs"), "runs", *arguments]).stdout

    assert said().startswith("No runs in ") and json.loads(said("--json")) == []
    write_run(str(tmp_path / "runs"), "one", RECORDS)
    assert said().splitlines()[2].split()[:4] == ["one", "tokenized-v1", "unfinished", "30/1,200"]
    assert [(run["name"], run["val_loss"]) for run in json.loads(said("--json"))] == [("one", 7.5)]


def test_damaged_files_of_one_run_do_not_hide_the_others(tmp_path: Path) -> None:
    runs = str(tmp_path)
    write_run(runs, "good", RECORDS)
    damaged = Path(write_run(runs, "damaged", RECORDS[:3]))
    with (damaged / METRICS_NAME).open("ab") as handle:
        handle.write(b'\0\0\n\n[1]\n{"step": 25}\n{"step": 30, "lo')
    (damaged / "result.json").write_text('{"status": ["done"]}')
    Path(write_run(runs, "binary", []), "run.json").write_bytes(b"\xff\0")
    found = {run.name: run for run in list_runs(runs)}
    assert found.keys() == {"good", "damaged"}
    run = found["damaged"]
    assert (run.status, run.step, run.train_loss, run.val_loss, run.tok_per_s) == ("unfinished", 25, 7.0, 9.0, 200.0)


def test_recipes_are_listed_with_their_size() -> None:
    lines = CliRunner().invoke(cli, ["recipes"]).stdout.splitlines()
    assert "124.5 M" in lines[3] and "524,288" in lines[3] and "13,351 steps" in lines[4]
    listed = {recipe["name"]: recipe for recipe in json.loads(CliRunner().invoke(cli, ["recipes", "--json"]).stdout)}
    assert (listed["gpt2_124m"]["max_steps"], listed["gpt2_124m"]["epochs"]) == (None, 1)
    assert listed["gpt2_354m"]["max_steps"] == 13_351


@pytest.mark.slow
def test_runs_on_s3(s3: Any) -> None:
    runs = f"{s3.bucket('runs')}/all"
    assert list_runs(runs) == []
    write_result(write_run(runs, "one", RECORDS), {"status": "stopped"})
    assert [(run.name, run.status, run.val_loss) for run in list_runs(runs)] == [("one", "stopped", 7.5)]


def test_the_size_of_a_recipe_is_that_of_its_model() -> None:
    import torch

    from pretrain_assets import recipes
    from pretrain_assets.config import TokenizerIdentity
    from pretrain_assets.train.model import GPT

    tokenizer = TokenizerIdentity(name="gpt2", fingerprint="f", vocab_size=50_257, eos_id=50_256, pad_id=50_257)
    for name in recipes.RECIPES:
        recipe = recipes.get(name)
        with torch.device("meta"):
            model = GPT(recipe.model, tokenizer, recipe.data.seq_len)
        assert model.num_parameters == recipes.num_parameters(recipe)
