"""One run, two tables: which of them answers, by every verb; and how runs and checkpoints are found by their names."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pretrain_assets.cli import cli
from pretrain_assets.config import IndexConfig, IngestConfig, TokenizeConfig, override
from pretrain_assets.errors import CheckpointError, TableError
from pretrain_assets.forensics.checkpoints import find_checkpoint, find_run
from pretrain_assets.forensics.indexes.index import build_index
from pretrain_assets.forensics.subject import find_subject, table_of
from pretrain_assets.forensics.where import where
from pretrain_assets.ingest.append import ingest
from pretrain_assets.launch.contract import write_spec
from pretrain_assets.table.delete import Request, delete
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.schema import tokenizer_identity
from pretrain_assets.table.storage import Location
from pretrain_assets.table.versions import open_pin, release_tags
from pretrain_assets.tokenize.columns import tokenize
from pretrain_assets_tests.runs import spec_in
from pretrain_assets_tests.tables import append, make_table, newest
from pretrain_assets_tests.test_run_card import save

RUN = "tiny-v2-aaaaaaaa"
CHANGES = {
    "data.filter": "id % 10 != 0",
    "data.held_out_filter": "id % 10 = 0",
    "data.num_splits": 2,
    "train.global_batch_tokens": 2 * 2 * 32,
    "train.max_steps": 40,
}


@dataclasses.dataclass
class Home:
    """A folder with a table and the runs on it."""

    folder: Path

    @property
    def location(self) -> Location:
        return Location(database_uri=str(self.folder / "db"))

    @property
    def runs(self) -> str:
        return str(self.folder / "runs")

    @property
    def run_dir(self) -> str:
        return f"{self.runs}/{RUN}"

    @property
    def pin(self) -> Pin:
        return find_checkpoint(RUN, self.runs).pin


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A run of forty steps with a checkpoint at step 20, on sixty documents."""
    home = Home(tmp_path_factory.mktemp("table") / "home")
    location, source = home.location, home.folder / "documents.jsonl"
    home.folder.mkdir()
    source.write_text("".join(f'{{"text": "Document {i} says this, and more of it."}}\n' for i in range(60)))
    pin = ingest(location, IngestConfig(sources=(str(source),))).pin
    pin = tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=pin).pin
    build_index(location, IndexConfig(), input_pin=pin)
    spec = spec_in(location.database_uri, home.run_dir)
    tokenizer = tokenizer_identity(open_pin(location, pin))
    recipe = override(spec.recipe, CHANGES)
    spec = dataclasses.replace(spec, recipe=recipe, pin=str(pin), tag=f"tokenized-v{pin.version}", tokenizer=tokenizer)
    write_spec(spec)
    save(spec, location, 20)
    return home


@pytest.fixture
def home(made: Home, tmp_path: Path) -> Home:
    """A copy of it, whose run.json names the original's table."""
    shutil.copytree(made.folder, tmp_path / "home")
    return Home(tmp_path / "home")


def test_the_projects_own_table_answers_where_it_is_the_runs(made: Home, home: Home) -> None:
    delete(home.location, Request(ids=(7,)))
    for asked, deleted in ((made, ()), (home, ("deleted-v4",))):
        (found,) = where(RUN, [7], location=asked.location, runs_uri=asked.runs).documents
        assert found.seen and found.deleted == deleted
    assert table_of(home.run_dir, home.pin, home.location) == home.location
    assert table_of(home.run_dir, home.pin, Location(database_uri="/nowhere")) == made.location


VERBS: tuple[Any, ...] = (
    ("seen", RUN, "--step", "3"),
    ("where", RUN, "--doc", "7"),
    ("ledger", RUN),
    ("lineage", RUN),
    ("card", RUN, "--json"),
    ("search", "document", "--checkpoint", RUN),
    ("attribute", RUN, "--text", "Document 7 says this, and more of it."),
    ("replay", RUN, "--id", "7", "--dry-run"),
    ("contamination", "--checkpoint", RUN),
    ("neighbours", "--doc", "7", "--checkpoint", RUN),
)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
def test_else_every_verb_that_asks_asks_the_table_that_the_run_names(
    made: Home, tmp_path: Path, caplog: pytest.LogCaptureFixture, verb: tuple[str, ...]
) -> None:
    """It says so once. What the run or its table lacks (vectors, weights, a search for items) is said of that one."""
    location = make_table(tmp_path / "db", ["Another table."])
    append(location, ["With as many versions."])
    with caplog.at_level(logging.WARNING, "pretrain_assets"):
        answer = CliRunner().invoke(cli, ["--database", location.database_uri, "--runs", made.runs, *verb])
    said = [record.getMessage() for record in caplog.records if "is not the table of" in record.getMessage()]
    assert len(said) == 1 and location.uri in said[0] and made.location.uri in said[0]
    assert location.uri not in f"{answer.exception}"
    assert (answer.exit_code == 0) == (verb[0] not in ("contamination", "neighbours"))


def test_where_neither_is_there_the_projects_error_stands(home: Home, tmp_path: Path) -> None:
    run_json = Path(home.run_dir, "run.json")
    run_json.write_text(run_json.read_text().replace('"database_uri": "', '"database_uri": "/nowhere'))
    shutil.rmtree(home.folder / "db")
    with pytest.raises(TableError, match=f"No table at {home.location.uri}"):
        where(RUN, [7], location=home.location, runs_uri=home.runs)


def test_a_version_that_was_freed_is_said_to_be_gone(home: Home) -> None:
    append(home.location, ["One more."])
    dataset = open_pin(home.location, newest(home.location))
    release_tags(dataset, [f"tokenized-v{home.pin.version}"])
    dataset.cleanup_old_versions(versions=[home.pin.version], error_if_tagged_old_versions=False)
    with pytest.raises(TableError, match=r"has no version 2 any more: maintenance freed it.*`pretrain versions`"):
        where(RUN, [7], location=home.location, runs_uri=home.runs)


def test_places_inside_a_runs_folder_are_found_from_there(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home.run_dir)
    uri = f"{home.run_dir}/checkpoints/step_00000020"
    for which in ("checkpoints/step_00000020", "./checkpoints/step_00000020", "."):
        assert find_subject(which, home.runs, home.location).uri == uri
        assert find_checkpoint(which, home.runs).uri == uri
    monkeypatch.chdir(home.folder)
    assert find_subject(f"{RUN}/checkpoints/step_00000020", home.runs, home.location).uri == uri
    assert find_run(f"runs/{RUN}", home.runs) == home.run_dir


def test_a_run_is_found_by_its_name_without_run_json_and_no_name_is_its_own_near_miss(home: Home) -> None:
    Path(home.run_dir, "run.json").unlink()
    assert find_checkpoint(RUN, home.runs).step == 20 and find_run(RUN, home.runs) == home.run_dir
    shutil.rmtree(f"{home.run_dir}/checkpoints")
    Path(home.run_dir, "run.json").write_text("{}")
    for which in (RUN, "tiny", home.run_dir):
        with pytest.raises(CheckpointError) as error:
            find_checkpoint(which, home.runs)
        assert f"No complete checkpoint in {home.run_dir}: none was saved yet" in str(error.value)
        assert "Did you mean" not in str(error.value)
