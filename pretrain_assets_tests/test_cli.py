"""The `pretrain` command as a person types it: real processes, exit codes, messages, and the README's own commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from pretrain_assets.assets import inprocess
from pretrain_assets.cli import cli, main
from pretrain_assets.errors import FilterError, PretrainError
from pretrain_assets.table.predicate import check_predicate
from pretrain_assets.table.storage import Location, open_dataset

ROOT = Path(__file__).parent.parent
EVERY_ROW = ["--set", "data.filter=id > 9", "--set", "data.held_out_filter=id <= 9"]
BUNDLED = ROOT / "pretrain_assets" / "data" / "public_domain_docs.parquet"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project folder."""
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "dagster.yaml", tmp_path)
    return tmp_path


def pretrain(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that must fail with exit code 1 and without a traceback."""
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 1
    message = capsys.readouterr().err
    assert message.splitlines()[-1].startswith("error: ") and "Traceback" not in message
    return message


def test_stages_by_hand_tell_what_they_did(home: Path) -> None:
    pq.write_table(pq.read_table(BUNDLED).slice(0, 20), home / "docs.parquet")
    assert pretrain("ingest", "docs.parquet").stdout.startswith("ingested-v1: 20 rows, ")
    assert pretrain("ingest", "docs.parquet").stdout == "ingested-v1: nothing to do, no new version\n"
    assert json.loads(pretrain("dedup", "--json").stdout)["ledger"] == {"in": 20, "unique": 20, "duplicate": 0}
    record = json.loads(pretrain("tokenize", "--tokenizer", "byte", "--json").stdout)
    assert (record["tag"], record["changed"], record["parameters"]["vocab_size"]) == ("tokenized-v3", True, 257)
    assert "indexed-v4" in pretrain("index").stdout
    lines = pretrain("versions").stdout.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["v1", "v2", "v3", "v4"] and "by hand" in lines[-1]
    argv = shlex.split(pretrain("train", "demo", *EVERY_ROW, "--set", "train.max_steps=3", "--write-spec").stdout)
    assert argv[:3] == [sys.executable, "-m", "pretrain_assets.launch.elastic"] and argv[-3:-1] == [
        "-m",
        "pretrain_assets.train",
    ]
    spec = json.loads(Path(argv[-1]).read_text())
    assert spec["tag"] == "tokenized-v3" and spec["recipe"]["train"]["max_steps"] == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ingest", "nowhere/*.parquet"], ["nowhere", "matches no file"]),
        (["ingest", "broken.parquet"], ["broken.parquet"]),
        (["ingest", "null.parquet"], ["null.parquet", "row 2", "on_bad_row='skip'"]),
        (["tokenize", "--tokenizer", "gpt3"], ["'gpt3'", "gpt2 (bundled)"]),
        (["train", "dmo"], ["'dmo'", "Did you mean 'demo'?"]),
        (["train", "demo", "--set", "train.max_stps=3"], ["max_stps", "Did you mean 'max_steps'?"]),
        (["train", "demo", "--set", "data.filter=scroe > 3"], ["scroe", "Did you mean 'score'?"]),
        (["train", "demo", "--set", "data.filter=score >"], ["score >"]),
        (["train", "demo", *EVERY_ROW, "--nproc", "3"], ["3", "num_splits=8"]),
        (["train", "demo", "--tag", "tokenized-v9"], ["tokenized-v9", "tokenized-v3"]),
        (["train", "demo", "--set", "data.filter=NOT is_dup) OR (true"], ["unbalanced parentheses"]),
        (["train", "demo", "--set", "data.filter=random() < 0.5"], ["random()", "another answer each time"]),
        (["train", "demo", "--set", "data.filter=id < 0"], ["keeps none of the 20 rows"]),
        (["train", "demo", "--set", "name=../x"], ["'../x'", "letters"]),
        (["train", "demo", "--set", "train.learning_rate=Infinity"], ["learning_rate=inf"]),
        (["train", "demo", *EVERY_ROW, "--nproc", "0"], ["nproc=0"]),
        (["ingest", ""], ["sources", "bundled"]),
        (["ingest", "foo://x"], ["foo://x", "cannot be opened"]),
        (["ingest", "twice.parquet"], ["twice.parquet", "2 columns of this name"]),
        (["--table", "../x", "versions"], ["'../x'", "letters"]),
        (["lineage"], ["No complete checkpoint", "pretrain train RECIPE"]),
        (["search", "word"], ["No complete checkpoint"]),
        (["--database", "empty", "dedup"], ["No table at", "pretrain ingest"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_mistakes_are_told_in_one_message(
    prepared: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    before = open_dataset(Location(database_uri=str(prepared / ".pretrain/lancedb"))).version
    message = refused(capsys, *arguments)
    for word in words:
        assert word in message, message
    assert open_dataset(Location(database_uri=str(prepared / ".pretrain/lancedb"))).version == before


@pytest.fixture
def prepared(home: Path) -> Path:
    """A project with a table of 20 rows, tokenized by bytes, and some bad files."""
    table = pq.read_table(BUNDLED).slice(0, 20)
    pq.write_table(table, home / "docs.parquet")
    (home / "broken.parquet").write_bytes((home / "docs.parquet").read_bytes()[:2000])
    pq.write_table(pa.table({"text": ["one", None]}), home / "null.parquet")
    pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text", "text"]), home / "twice.parquet")
    for arguments in (["ingest", "docs.parquet"], ["dedup"], ["tokenize", "--tokenizer", "byte"]):
        assert pretrain(*arguments).exit_code == 0
    return home


def test_tokens_beside_are_trained_on_at_the_version_that_has_them(
    prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["demo", *EVERY_ROW, "--set", "data.token_column=input_ids_byte"]
    assert "Run `pretrain tokenize --beside byte --tokenizer NAME` first" in refused(capsys, "train", *asked)
    assert pretrain("tokenize", "--tokenizer", "byte", "--beside", "byte").exit_code == 0
    spec = json.loads(Path(shlex.split(pretrain("train", *asked, "--write-spec").stdout)[-1]).read_text())
    assert (spec["tag"], spec["recipe"]["data"]["token_column"]) == ("tokenized_byte-v4", "input_ids_byte")
    plain = json.loads(Path(shlex.split(pretrain("train", *asked[:-2], "--write-spec").stdout)[-1]).read_text())
    assert plain["tag"] == "tokenized-v3"
    assert "it has: tokenized_byte-v4" in refused(capsys, "train", *asked, "--tag", "tokenized-v3")
    packed = pretrain("pack-sample", *asked, "--blocks", "8", "--out", "blocks.npy").stdout
    assert packed.startswith("blocks.npy: 8 blocks of 128 tokens") and packed.endswith("from tokenized_byte-v4\n")


def test_the_engines_own_columns_are_not_named(prepared: Path) -> None:
    dataset = open_dataset(Location(database_uri=str(prepared / ".pretrain/lancedb")))
    everything = "`pretrain filter` lists all columns and named filters"
    known = (("nope_nope", ""), ("scor", "Did you mean 'score' or 'source'? "))
    for word, hint in known:
        predicate = f"{word} > 1"
        with pytest.raises(FilterError) as error:
            check_predicate(dataset, predicate, setting="--where")
        reason = f"no column is named {word!r}. {hint}{everything}"
        assert str(error.value) == f"--where={predicate!r} is not a predicate of this table: {reason}"


@pytest.mark.parametrize(
    ("result", "options", "words"),
    [
        ({"error_type": "DivergenceError"}, [], "failed: the reason is above\n"),
        ({"error_type": "DivergenceError"}, ["--json"], "failed: The loss is not finite\n"),
        ({}, [], "failed: The loss is not finite\n"),  # no rank lived to say it
    ],
)
def test_the_reason_of_a_failure_is_told_once(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, result: dict[str, Any], options: list[str], words: str
) -> None:
    failed = {"status": "failed", "error": "The loss is not finite", "is_mistake": True, **result}
    monkeypatch.setattr("pretrain_assets.launch.local.run_local", lambda *_: failed)
    done = pretrain("train", "demo", *EVERY_ROW, *options)
    assert (done.exit_code, done.stderr) == (1, words)


def test_ctrl_c_during_the_imports_is_one_word() -> None:
    code = (
        "import runpy, sys\n"
        "class Pressed:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pretrain_assets.cli.stages': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Pressed())\n"
        "runpy.run_module('pretrain_assets', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "\nAborted!\n")


@pytest.mark.parametrize("stop", [dg.DagsterExecutionInterruptedError, KeyboardInterrupt])
def test_a_stopped_demo_says_that_it_goes_on(
    home: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    @dg.op
    def model__checkpoint() -> None:
        raise stop

    @dg.job
    def stopped() -> None:
        model__checkpoint()

    monkeypatch.setattr(dg.DagsterInstance, "get", dg.DagsterInstance.ephemeral)
    monkeypatch.setattr(inprocess, "build_defs", lambda: dg.Definitions(jobs=[stopped]))
    with pytest.raises(PretrainError, match=r"model__checkpoint was stopped\..*the same command goes on from there"):
        inprocess.run_job("stopped")


@pytest.mark.slow
def test_two_ingests_at_once_never_share_an_id(home: Path) -> None:
    """Real processes: one wins, the other is refused or comes after it; started again, all documents are there."""
    assert pretrain("ingest", "synthetic:100:1").exit_code == 0
    program = str(Path(sys.executable).parent / "pretrain")
    names = ("synthetic:3000:2", "synthetic:3000:3")
    racers = [subprocess.Popen([program, "ingest", name], stderr=subprocess.PIPE, text=True) for name in names]
    for racer in racers:
        message = racer.communicate(timeout=60)[1]
        assert racer.returncode == 0 or "is in use: ingest" in message
    for name in names:
        assert pretrain("ingest", name).exit_code == 0
    ids = open_dataset(Location(database_uri=str(home / ".pretrain/lancedb"))).to_table(columns=["id"])["id"]
    assert ids.to_pylist() == list(range(6100))


def test_one_file_has_one_name(home: Path) -> None:
    pq.write_table(pq.read_table(BUNDLED).slice(0, 5), home / "docs.parquet")
    assert pretrain("ingest", "docs.parquet", f"../{home.name}/docs.parquet").stdout.startswith("ingested-v1: 5 rows")
    assert "nothing to do" in pretrain("ingest", str(home / "x" / ".." / "docs.parquet")).stdout


def test_trouble_with_storage_is_one_message(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRETRAIN_DATABASE_URI", str(home / "dagster.yaml"))  # a file, not a folder
    assert "storage: " in refused(capsys, "ingest", "synthetic:5")
    monkeypatch.setenv("PRETRAIN_NPROC_PER_NODE", "two")
    monkeypatch.setenv("PRETRAIN_DATABASE_URI", "good")
    for arguments in (["ingest", "synthetic:500"], ["dedup"], ["tokenize", "--tokenizer", "byte"]):
        assert pretrain(*arguments).exit_code == 0
    assert "PRETRAIN_NPROC_PER_NODE='two'" in refused(capsys, "train", "demo", *EVERY_ROW)


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, pretrain_assets.cli; print({'torch', 'lance', 'lancedb', 'dagster', 'pandas'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def readme_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def readme_commands() -> list[str]:
    """Every `pretrain` command in the README's shell blocks, comments removed."""
    lines = [line.split(" # ")[0].strip() for block in readme_blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith(".venv/bin/pretrain")]


@pytest.mark.slow
def test_the_readmes_commands_work_in_order(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new project, as pasted; with bytes as tokens and one rank, to save time."""
    monkeypatch.setenv("PRETRAIN_TOKENIZER", "byte")
    monkeypatch.setenv("PRETRAIN_NPROC_PER_NODE", "1")
    commands = readme_commands()
    assert len(commands) == 28
    for command in commands:
        done = pretrain(*shlex.split(command)[1:])
        assert done.exit_code == 0 and done.stdout.strip(), f"{command}\n{done.output}\n{done.exception}"
    (loader,) = (code for code in readme_blocks("python") if "BlockLoader" in code)
    names: dict[str, Any] = {}
    exec(loader, names)
    ledger = names["loader"].plan(0).ledger()
    assert names["batch"].input_ids.shape == (16, 128) and ledger["tokens_trained"] > 0


FAKE_PYTHON = """#!/bin/sh
case "$*" in
    "-m venv .venv") mkdir -p .venv/bin && cp python .venv/bin/python ;;
    *"pip install"*) test ! -e .venv/half || echo "on top of a half"
        touch .venv/half; test ! -e killed || kill -9 $PPID; test ! -e fails || exit 3; rm .venv/half ;;
esac
"""


def test_an_install_that_was_killed_is_made_afresh(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python").write_text(FAKE_PYTHON)
    (tmp_path / "python").chmod(0o755)

    def install(trouble: str | None = None) -> str:
        if trouble:
            (tmp_path / trouble).touch()
        command = ["make", ".venv/installed", f"PYTHON={tmp_path}/python"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) == (trouble is None)
        if trouble:
            (tmp_path / trouble).unlink()
        return done.stdout

    def pin_changes() -> None:
        later = (tmp_path / ".venv/installed").stat().st_mtime + 1
        os.utime(tmp_path / "constraints.txt", (later, later))
        os.utime(tmp_path / ".venv/installed", (later - 2, later - 2))

    install("killed")
    assert "starting afresh" in (again := install()) and "half" not in again
    assert "up to date" in install()
    pin_changes()
    install("fails")  # pip itself puts back what it was about to replace
    assert "starting afresh" not in install()
    pin_changes()
    install("killed")
    assert "starting afresh" in install()
    assert sorted(path.name for path in (tmp_path / ".venv").iterdir()) == ["bin", "installed"]


def test_the_readmes_make_targets_exist() -> None:
    targets = set(re.findall(r"(?:`|^)make ([a-z]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    made = subprocess.run(["make", "-pqn"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert targets >= {"demo", "test", "ui", "lint"}
    assert targets <= set(re.findall(r"^([a-z]+):", made, re.MULTILINE))
