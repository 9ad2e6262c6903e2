"""When a run first trained on evaluation items, against its plan step by step; which scores stand; clean scores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from pretrain_assets.cli import cli
from pretrain_assets.config import ContaminationConfig, EngineConfig, TokenizeConfig, override
from pretrain_assets.curate.contamination import decontaminate
from pretrain_assets.errors import InputError, TableError
from pretrain_assets.forensics.checkpoints import Checkpoint, find_checkpoint
from pretrain_assets.forensics.contamination.contamination import (
    ContaminationInTime,
    contamination_in_time,
    scores_stand,
)
from pretrain_assets.forensics.contamination.eval_results import score_clean
from pretrain_assets.forensics.exposure import schedule_of
from pretrain_assets.launch.contract import PASSPORT_NAME, RUN_NAME
from pretrain_assets.loader.exposure import documents
from pretrain_assets.report.contamination_in_time_text import in_time_text, scores_text
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.tokenize.columns import tokenize
from pretrain_assets.train.checkpoint import commit, write_file
from pretrain_assets_tests.runs import RECIPE as TINY
from pretrain_assets_tests.runs import passport_of
from pretrain_assets_tests.tables import make_table, newest

RECIPE = override(
    TINY,
    {
        "name": "demo",
        "data.filter": "id % 10 != 0",
        "data.held_out_filter": "id % 10 = 0",
        "data.seq_len": 32,
        "data.num_splits": 4,
        "train.global_batch_tokens": 128,
    },
)
SAVED, ASKED = (1, 8, 30, 70), 30
WORDS = ("river", "mountain", "harbour", "forest", "meadow", "valley", "island", "desert", "glacier", "lagoon")
WORDS = (*WORDS, "prairie", "tundra", "canyon", "delta")


def item(number: int) -> str:
    return " ".join(f"{word}{number}" for word in WORDS)


def filler(number: int, length: int = 12) -> str:
    return " ".join(f"plain{number}x{i}" for i in range(length))


HELD = {7: ["often"], 13: ["often"], 21: ["often"], 33: ["late"], 20: ["held"], 34: ["one", "two"]}
"""Items by the document that they are put in: 20 is held out."""
NUMBERS = {name: number for number, name in enumerate(("often", "late", "held", "one", "two", "nowhere"))}


def texts() -> list[str]:
    """120 documents, the items at the end of those that hold them."""
    return [" ".join([filler(i), *(item(NUMBERS[name]) for name in HELD.get(i, ()))]) for i in range(120)]


class Project(NamedTuple):
    """A table and a run on it."""

    location: Location
    pin: Pin
    runs: Path
    exam: str
    other: str

    @property
    def found(self) -> Checkpoint:
        return find_checkpoint(f"{self.runs}/demo-v1/checkpoints/step_{ASKED:08d}", str(self.runs))

    def ask(self, **how: Any) -> ContaminationInTime:
        return contamination_in_time(self.location, self.found, **how)


def write_set(path: Path, items: dict[str, str]) -> str:
    path.write_text("".join(json.dumps({"id": name, "question": text}) + "\n" for name, text in items.items()))
    return f"{path.stem}={path}"


def write_run(runs: Path, pin: Pin, recipe: Any = RECIPE) -> None:
    """Checkpoints without a model: what is asked of them is their data alone."""
    for step in SAVED:
        passport = {**passport_of(step, recipe), "pin": str(pin), "table_id": pin.table_id, "version": pin.version}
        files = {PASSPORT_NAME: json.dumps(passport).encode(), "model.safetensors": b"never read"}
        facts = {name: write_file(f"{runs}/demo-v1", step, name, [data]) for name, data in files.items()}
        commit(f"{runs}/demo-v1", step, facts)
    (runs / "demo-v1" / RUN_NAME).write_text("{}")


def search(location: Location, *sets: str) -> Pin:
    config = ContaminationConfig(eval_sets=sets)
    return decontaminate(location, config, input_pin=newest(location), engine=EngineConfig(workers=1)).pin


def make_project(folder: Path, *, searched: bool = True) -> Project:
    location = make_table(folder / "db", texts())
    known = {name: item(number) for name, number in NUMBERS.items()}
    exam = write_set(folder / "exam.jsonl", {**known, "short": "too short a question"})
    other = write_set(folder / "other.jsonl", {"away": filler(999), "there": filler(5)})
    if searched:
        search(location, exam, other)
    engine = EngineConfig(workers=1)
    pin = tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=newest(location), engine=engine).pin
    write_run(folder / "runs", pin)
    return Project(location, pin, folder / "runs", exam, other)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return make_project(tmp_path_factory.mktemp("in_time"))


def replayed(project: Project, start: int, last_step: int) -> dict[int, list[int]]:
    """Steps that trained on each document's tokens from place `start` of its item on, from what each step emits."""
    schedule = schedule_of(project.location, project.pin, RECIPE)
    found: dict[int, list[int]] = {}
    for step in range(1, last_step + 1):
        for span in documents(schedule, step):
            words_from = len(filler(span.doc_id).encode()) + 1 if start else 0
            if span.doc_start + span.tokens > words_from:
                found.setdefault(span.doc_id, []).append(step)
    return found


def test_first_steps_are_those_of_the_plan(project: Project) -> None:
    found = project.ask()
    seen, of_words = replayed(project, 0, SAVED[-1]), replayed(project, 1, SAVED[-1])
    holders = {name: [i for i, names in HELD.items() if name in names] for name in NUMBERS}
    first = {name: min((seen[i][0] for i in ids if i in seen), default=None) for name, ids in holders.items()}
    assert {one.item: one.first_step for one in found.items if one.item.startswith("exam/")} == {
        f"exam/{name}": step for name, step in first.items() if holders[name]
    }
    assert first["held"] is None and {first["often"], first["late"]} != {None}
    often = next(one for one in found.items if one.item == "exam/often")
    by_then = [i for i in holders["often"] if i in seen and seen[i][0] <= ASKED]
    assert (often.documents, often.documents_seen) == (3, len(by_then))
    assert seen[often.document][0] == first["often"]
    exam = found.sets[0]
    steps = [step for step in first.values() if step is not None]
    assert exam.dirty == tuple(sum(step <= saved for step in steps) for saved in SAVED)
    assert (exam.searched, exam.too_short, exam.found, exam.first_step) == (6, 1, 5, min(steps))
    assert exam.newest_clean == max((saved for saved in SAVED if saved < min(steps)), default=None)
    assert exam.stands is (min(steps) > ASKED)
    for one in found.sightings:
        if one.words == "trained on" and one.item.startswith("exam/"):
            assert one.words_step == of_words[one.document][0] >= one.first_step  # type: ignore[operator]
    assert any(one.words_step != one.first_step for one in found.sightings if one.words_step), "the item ends its text"
    held = next(one for one in found.sightings if one.item == "exam/held")
    assert (held.words_step, held.first_step) == (None, None) and "held out" in held.words


def test_the_second_item_of_a_document_has_no_words_of_its_own(project: Project) -> None:
    one, two = (next(s for s in project.ask().sightings if s.item == f"exam/{name}") for name in ("one", "two"))
    assert (one.overlap, two.overlap, two.excerpt) == (1.0, None, None)
    assert one.excerpt == item(NUMBERS["one"]) and (two.words, two.words_step) == ("exam/one is noted there", None)


def test_the_check_and_the_text_name_what_does_not_stand(project: Project) -> None:
    found = project.ask(limit=2)
    finding, text = scores_stand(found), in_time_text(found)
    assert not finding.passed and "exam: " in finding.description and "does not stand" in finding.description
    assert "does NOT stand" in text and "... and 4 more items" in text
    assert f"{ASKED} *" in text
    clean = replace(found, sets=(replace(found.sets[0], stands=True),))
    assert scores_stand(clean).passed and clean.stands is True
    unknown = replace(found, sets=(replace(found.sets[0], stands=None),))
    assert not scores_stand(unknown).passed and unknown.stands is None


def test_a_filter_that_leaves_contaminated_rows_out_keeps_every_score(project: Project, tmp_path: Path) -> None:
    data = replace(RECIPE.data, filter="NOT contaminated AND id % 10 != 0")
    write_run(tmp_path, project.pin, replace(RECIPE, data=data))
    found = contamination_in_time(project.location, find_checkpoint("demo", str(tmp_path)))
    assert found.stands is True and (found.documents, found.documents_kept, found.documents_seen) == (7, 0, 0)
    assert [one.newest_clean for one in found.sets] == [SAVED[-1]] * 2
    assert "keeps none of the 7 documents that hold an item" in in_time_text(found)


def test_it_can_be_asked_after_training_and_deleted_rows_are_unknown(tmp_path: Path) -> None:
    project = make_project(tmp_path, searched=False)
    with pytest.raises(TableError, match=r"Not measured: neither version 2 .*pretrain decontaminate"):
        project.ask()
    search(project.location, project.other)
    found = project.ask()
    never = 5 not in replayed(project, 0, ASKED)
    assert (found.version, found.stands, found.unsearched) == (3, never, 0)
    search(project.location, project.exam)
    assert project.ask(tag="decontaminated-v3").newer == "decontaminated-v4"
    with pytest.raises(TableError, match=r"not searched for an eval set 'exam', but for other\. decontaminated-v4"):
        project.ask(tag="decontaminated-v3", only="exam")
    gone = next(iter(replayed(project, 0, 1)))
    open_dataset(project.location).delete(f"id = {gone} OR array_length(contamination_items) > 0")
    search(project.location, write_set(tmp_path / "late.jsonl", {"away": filler(999), "gone": filler(gone)}))
    found = project.ask()
    assert (found.sets[0].stands, found.sets[0].newest_clean, found.sets[0].found) == (None, None, 0)
    assert found.unsearched >= found.unsearched_seen > 0
    assert "were not searched" in in_time_text(found) and not scores_stand(found).passed


def write_results(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_scores_over_all_items_and_over_the_clean_ones(project: Project, tmp_path: Path) -> None:
    found = project.ask()
    seen = {name for name, step in found.first_step_of().items() if step <= ASKED}
    names = [*NUMBERS, "short"]
    rows = [{"set": "exam", "id": name, "acc": float(f"exam/{name}" in seen)} for name in names]
    file = write_results(tmp_path / "results.jsonl", *rows, {"set": "exam", "id": "unknown", "acc": 1})
    (scored,) = score_clean(project.location, found, file)
    assert (scored.name, scored.metric, scored.without_result) == ("exam", "acc", 0)
    assert (scored.all.items, scored.all.score) == (7, pytest.approx(len(seen & {f"exam/{n}" for n in names}) / 7))
    assert (scored.clean.score, scored.seen.score, scored.unsearched.items) == (0.0, 1.0, 1)
    assert scored.clean.items + scored.seen.items == 6 and scored.clean.error == 0.0
    assert (scored.num_unmatched, scored.unmatched) == (1, ("line 8: exam/unknown",))
    assert "1 result could not be matched to an item and counts nowhere" in scores_text((scored,))


def test_what_lm_evaluation_harness_writes_is_read_as_it_is(project: Project, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"doc_id": place, "doc": {"question": item(number)}, "filter": answered, "exact_match": float(place == 0)}
        for answered in ("strict-match", "flexible-extract")
        for place, number in enumerate(NUMBERS.values())
    ]
    rows += [{"doc_id": 3, "doc": {"question": "another text"}, "filter": "strict-match", "exact_match": 1.0}]
    rows += [{"doc_id": 99, "filter": "strict-match", "exact_match": 1.0}]
    file = write_results(tmp_path / "samples_exam_2024-11-02T10-11-12.345678.jsonl", *rows)
    strict, flexible = score_clean(project.location, project.ask(), file)
    assert (strict.metric, flexible.metric) == ("exact_match, strict-match", "exact_match, flexible-extract")
    assert strict.all.items == 6 and strict.all.score == pytest.approx(1 / 6) and strict.without_result == 1
    assert strict.unmatched == (
        "line 13: doc_id 3 has another text than exam/one",
        "line 14: doc_id 99 is beyond the 7 items of exam",
    )


@pytest.mark.parametrize(
    ("row", "how", "words"),
    [
        ({"set": "exam", "id": "often"}, {}, r"line 1: none of the fields score, exact_match.*--score FIELD"),
        ({"set": "exam", "id": "often", "acc": "yes"}, {}, r"the score 'acc' is 'yes', and no finite number"),
        ({"set": "exam", "id": "often", "acc": 1}, {"field": "mine"}, r"'mine' is not there \(found set, id, acc\)"),
        ({"set": "exams", "id": "often", "acc": 1}, {}, r"'exams' is no eval set.*exam, other\)\. Did you mean 'exam'"),
        ({"id": "often", "acc": 1}, {}, r"does not name its set .*--set NAME, one of exam, other"),
        ({"set": "exam", "acc": 1}, {}, r"neither `id` nor `doc_id`"),
        ({"set": "exam", "id": "often", "acc": 1}, {"set_name": "other"}, r"has no result of set 'other'"),
    ],
)
def test_results_that_cannot_be_read_say_why(
    project: Project, tmp_path: Path, row: dict[str, Any], how: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        score_clean(project.location, project.ask(), write_results(tmp_path / "r.jsonl", row), **how)


def test_a_result_given_twice_a_missing_file_and_a_set_that_was_changed_are_refused(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    found, row = project.ask(), {"set": "exam", "id": "often", "acc": 1}
    file = write_results(tmp_path / "twice.jsonl", row, row)
    with pytest.raises(InputError, match=r"line 2: item exam/often has a result of acc already"):
        score_clean(project.location, found, file)
    with pytest.raises(InputError, match="There is no file of results"):
        score_clean(project.location, found, str(tmp_path / "none.jsonl"))
    write_set(tmp_path / "exam.jsonl", {"often": "other words"})
    with pytest.raises(TableError, match=r"Eval set exam is another than was searched for at version 3"):
        score_clean(project.location, found, file)


def test_the_verb(project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--database", project.location.database_uri, "--runs", str(project.runs), "contamination"]
    file = write_results(tmp_path / "r.jsonl", {"id": "often", "score": 1})
    more = ["--checkpoint", "demo", "--set", "exam", "--results", file]
    cli.main([*base, *more, "--json"], standalone_mode=False)
    facts = json.loads(capsys.readouterr().out)
    assert facts["step"] == SAVED[-1] and facts["stands"] is False
    assert [one["name"] for one in facts["sets"]] == ["exam"] and facts["scores"][0]["all"]["score"] == 1
    cli.main([*base, "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["contaminated"] == 7
    for wrong, words in ((["--set", "exam"], "give --checkpoint"), ([*more[:2], "--score", "x"], "give --results")):
        with pytest.raises(click.UsageError, match=words):
            cli.main([*base, *wrong], standalone_mode=False)


@pytest.mark.slow
def test_the_asset_gates_the_scores(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    import dagster as dg

    from pretrain_assets.assets.contamination_in_time import contamination_in_time as asset
    from pretrain_assets.assets.resources import default_resources

    monkeypatch.setenv("PRETRAIN_DATABASE_URI", project.location.database_uri)
    monkeypatch.setenv("PRETRAIN_RUNS_URI", str(project.runs))
    done = dg.materialize([asset], partition_key="demo", resources=default_resources())
    (check,) = done.get_asset_check_evaluations()
    assert (check.check_name, check.passed, check.severity) == ("scores_stand", False, dg.AssetCheckSeverity.ERROR)
    assert not check.blocking, "the run card has to be made, and to say so"
    (event,) = done.asset_materializations_for_node("forensics__contamination")
    assert event.metadata["scores_stand"].value["exam"] == "does NOT stand"  # type: ignore[index,call-overload]
    assert event.metadata["steps"].value == SAVED[-1] and "clean" in str(event.metadata["checkpoints"].value)
