"""The run card: its facts on a real table with a run made by hand, hostile text, what a run lacks, and a browser."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pretrain_assets.cli import cli, main
from pretrain_assets.config import (
    DedupConfig,
    EngineConfig,
    IngestConfig,
    MaskConfig,
    Recipe,
    RunSpec,
    TokenizeConfig,
    override,
)
from pretrain_assets.curate.dedup import dedup
from pretrain_assets.curate.masking import mask
from pretrain_assets.forensics.card.history import MAX_POINTS, history_of
from pretrain_assets.forensics.card.lineage import public
from pretrain_assets.forensics.card.run_card import RunCard, make_run_card
from pretrain_assets.forensics.card.sample import sample_of
from pretrain_assets.forensics.checkpoints import find_checkpoint
from pretrain_assets.forensics.exposure import schedule_of
from pretrain_assets.ingest.append import ingest
from pretrain_assets.launch.contract import write_file, write_spec
from pretrain_assets.loader.exposure import documents
from pretrain_assets.report.card import words
from pretrain_assets.report.card.curve import ticks
from pretrain_assets.report.card.graph import graph_svg
from pretrain_assets.report.card.html import run_card_html
from pretrain_assets.report.card.markdown import run_card_markdown
from pretrain_assets.report.clean import clean
from pretrain_assets.table.schema import tokenizer_identity
from pretrain_assets.table.storage import Location
from pretrain_assets.table.versions import open_pin
from pretrain_assets.tokenize.columns import tokenize
from pretrain_assets.train import checkpoint
from pretrain_assets.train.passport import make_passport
from pretrain_assets_tests.runs import RECIPE, make_database, spec_in
from pretrain_assets_tests.ui import CHROMIUM, FLAGS, needs_chromium

HOSTILE = "<script>alert('x')</script> \u202egnirts\x00\x1b[31m | `a` **b** [c](d) &amp; " + "w" * 300
WORDS = ("river", "mountain", "harbour", "forest", "meadow", "valley", "island", "desert")
TEXTS = [f"{HOSTILE if i % 7 == 0 else ''} A {WORDS[i % 8]} number {i} stands here alone." for i in range(60)]
SOURCES = ("<img src=x onerror=alert(1)>", "wiki|pedia", "\u202elive", "/home/somebody/secret")
RUN = "tiny-v5-test"
CARD_RECIPE = override(
    RECIPE,
    {
        "data.filter": "NOT is_dup AND n_masked = 0 AND id % 10 != 0",
        "data.held_out_filter": "NOT is_dup AND id % 10 = 0",
        "data.num_splits": 2,
        "train.global_batch_tokens": 2 * 2 * 32,
        "train.max_steps": 40,
        "execution.log_every": 2,
    },
)


@dataclasses.dataclass
class Project:
    """A table and a run whose files were written by hand, so that no model is trained."""

    location: Location
    runs: Path
    run_dir: Path
    recipe: Recipe

    def card(self) -> RunCard:
        return make_run_card(self.location, find_checkpoint(None, str(self.runs)))


def save(spec: RunSpec, location: Location, step: int, **losses: float | None) -> None:
    """A complete checkpoint with its real passport, and no weights."""
    from pretrain_assets.table.lineage import Pin

    schedule = schedule_of(location, Pin.parse(spec.pin), spec.recipe)
    passport = make_passport(spec, schedule, step=step, total_steps=40, losses=losses)
    checkpoint.begin(spec.run_dir, step)
    files = {
        name: checkpoint.write_file(spec.run_dir, step, name, [data])
        for name, data in (("passport.json", json.dumps(passport).encode()), ("model.safetensors", b"weights"))
    }
    checkpoint.commit(spec.run_dir, step, files)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """60 documents, hostile ones among them, of which the filter keeps 54; 40 steps go over them twice."""
    home = tmp_path_factory.mktemp("card")
    lines = [
        {"id": f"d{i}", "text": text, "source": SOURCES[i % 4], "license": f"L{i % 2}"} for i, text in enumerate(TEXTS)
    ]
    location = Location(database_uri=str(home / "db"))
    for name, part in (("first.jsonl", lines[:40]), ("second.jsonl", lines[40:])):
        (home / name).write_text("".join(json.dumps(line) + "\n" for line in part))
        made = ingest(location, IngestConfig(sources=(str(home / name),), extra_columns=("license",)))
    made = dedup(location, DedupConfig(), input_pin=made.pin)
    mask(location, MaskConfig(), input_pin=made.pin, engine=EngineConfig(workers=1))
    pin = tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=made.pin).pin
    run_dir = home / "runs" / RUN
    spec = dataclasses.replace(
        spec_in(location.database_uri, str(run_dir)),
        recipe=dataclasses.replace(CARD_RECIPE, sample_prompt="Once "),
        pin=str(pin),
        tag=f"tokenized-v{pin.version}",
        tokenizer=tokenizer_identity(open_pin(location, pin)),
    )
    write_spec(spec)
    for step in (20, 40):
        save(spec, location, step, train_loss=3.0, train_loss_step=step, val_loss=3.5, val_loss_step=step)
    records: list[dict[str, Any]] = [{"step": 0, "val_loss": 5.5, "val_loss_by_source": {SOURCES[0]: 5.5}}]
    for step in (1, *range(2, 41, 2)):
        records.append({"step": step, "epoch": step // 30, "loss": 5 - step / 20, "lr": 1e-3, "ranks": 1 + step // 20})
    records += [{"step": 40, "val_loss": 3.5, "val_loss_by_source": {SOURCES[0]: 3.5}}]
    write_file(f"{run_dir}/metrics.jsonl", "".join(json.dumps(record) + "\n" for record in records).encode())
    result = {"status": "done", "step": 40, "sample": f"Once {TEXTS[7]}", "seconds": 9.0}
    write_file(f"{run_dir}/result.json", json.dumps(result).encode())
    return Project(location, home / "runs", run_dir, spec.recipe)


@pytest.fixture(scope="module")
def card(project: Project) -> RunCard:
    return project.card()


def test_the_facts_agree_with_each_other_and_with_the_plan(project: Project, card: RunCard) -> None:
    assert (card.run, card.step, card.total_steps, card.status) == (RUN, 40, 40, "done")
    assert card.funnel and card.ledger and card.lineage and card.sample
    kept = card.funnel.kept.rows
    assert kept == sum(seen.documents for seen in card.exposures) == sum(source.rows for source in card.sources)
    assert "secret" in {source.name for source in card.sources}  # of which the table knows the folder
    schedule = schedule_of(project.location, find_checkpoint(None, str(project.runs)).pin, project.recipe)
    spans = [span for step in range(1, 41) for span in documents(schedule, step)]
    assert card.tokens_seen == sum(span.tokens for span in spans)
    draws = {(span.doc_id, span.epoch) for span in spans}
    often = [sum(doc == i for doc, _ in draws) for i in {doc for doc, _ in draws}]
    found = {seen.low: seen.documents for seen in card.exposures if seen.high}
    assert found == {times: often.count(times) for times in set(often)}
    assert card.ledger.gaps == () and {source.license for source in card.sources} == {"L0", "L1"}
    assert card.missing.keys() == {"contamination"} and "pretrain decontaminate" in card.missing["contamination"]


def test_no_reason_of_the_sample_names_a_private_place(project: Project) -> None:
    found = find_checkpoint(None, str(project.runs))
    recipe = {
        **found.passport["recipe"],
        "data": {**found.passport["recipe"]["data"], "filter": "source = 'wiki|pedia'"},
    }
    nothing = dataclasses.replace(found, passport={**found.passport, "recipe": recipe})
    result = {"step": 40, "sample": f"Once {TEXTS[7]}"}
    sample = sample_of(project.location, nothing, result, public)
    reasons = [source.seen.reason for source in sample.attribution.sources]
    assert any("(source is secret)" in reason for reason in reasons), reasons
    assert "/home" not in json.dumps(dataclasses.asdict(sample)) + sample.attribution.verdict


def test_the_lineage_is_a_graph_from_the_files_to_the_checkpoint(card: RunCard) -> None:
    assert card.lineage
    assert {(edge.start, edge.end, edge.label) for edge in card.lineage.edges} == {
        ("files-ingested-v1", "ingested-v1", ""),
        ("files-ingested-v2", "ingested-v2", ""),
        ("ingested-v1", "ingested-v2", ""),
        ("ingested-v2", "deduped-v3", ""),
        ("deduped-v3", "tokenized-v5", ""),
        ("tokenized-v5", "checkpoint", ""),
        ("deduped-v3", "masked-v4", ""),
        ("masked-v4", "checkpoint", "n_masked"),
    }
    rows = {node.key: node.rows for node in card.lineage.nodes}
    assert (rows["ingested-v1"], rows["ingested-v2"], rows["checkpoint"]) == (40, 60, 54)
    assert card.lineage.nodes[0].title == "first.jsonl"  # and no folder
    used = {column.name: column.used for column in card.columns if column.used}
    assert used == {
        "id": ("filter", "held-out filter"),
        "is_dup": ("filter", "held-out filter"),
        "n_masked": ("filter",),
        "input_ids": ("tokens",),
        "n_tokens": ("tokens",),
    }


@pytest.mark.parametrize("tall", [False, True])
def test_no_node_of_the_graph_covers_another(card: RunCard, tall: bool) -> None:
    assert card.lineage
    svg = graph_svg(card.lineage, tall=tall)
    boxes = [
        tuple(map(float, box)) for box in re.findall(r"<rect x='(.+?)' y='(.+?)' width='(.+?)' height='(.+?)'", svg)
    ]
    assert len(boxes) == len(card.lineage.nodes) == 8
    for (x, y, width, height), (other_x, other_y, _, _) in itertools.combinations(boxes, 2):
        assert abs(other_x - x) >= width or abs(other_y - y) >= height
    _, _, whole_width, whole_height = map(float, re.findall(r"viewBox='(.+?)'", svg)[0].split())
    assert all(x + width <= whole_width and y + height <= whole_height for x, y, width, height in boxes)


def test_the_sample_is_attributed_without_its_prompt(card: RunCard) -> None:
    assert card.sample and (card.sample.prompt, card.sample.text) == ("Once ", TEXTS[7])
    best = card.sample.attribution.sources[0]
    assert (best.id, best.covered_tokens) == (7, len(TEXTS[7].encode())) and best.seen.times
    assert "document 7" in card.sample.attribution.verdict and "document 7</b>" in run_card_html(card)


class Page(HTMLParser):
    """Tags, what is loaded, and every attribute that could run something."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "srcset", "data")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.ids += [value or "" for name, value in attrs if name == "id"]


def test_no_text_of_a_document_is_ever_markup(project: Project, card: RunCard) -> None:
    html, markdown = run_card_html(card), run_card_markdown(card)
    page = Page(html)
    assert not page.tags & {"script", "img", "iframe", "object", "link", "form"} and page.handlers == []
    assert page.links and all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert len(set(page.ids)) == len(page.ids)
    assert "&lt;script&gt;alert" in html and "\\x1b[31m" in html and "\\u202egnirts" in html
    outside = re.sub(r"(`{3,})text\n.*?\n\1", "", markdown, flags=re.DOTALL)
    assert "<script" not in outside and "<img" not in outside and "wiki\\|pedia" in outside
    for text in (html, markdown):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
        assert str(project.runs.parent) not in text and "somebody" not in text and "url(" not in text


def test_the_same_inputs_give_the_same_bytes(project: Project, card: RunCard) -> None:
    again = project.card()
    assert run_card_html(again) == run_card_html(card) and run_card_markdown(again) == run_card_markdown(card)
    facts = json.dumps(card.to_dict(), allow_nan=False)
    assert json.dumps(again.to_dict()) == facts and str(project.runs.parent) not in facts


def test_what_a_run_lacks_is_said_in_a_sentence(tmp_path: Path) -> None:
    database, run_dir = make_database(tmp_path), tmp_path / "runs" / "bare-v1-x"  # no text, sources or records
    spec = spec_in(database, str(run_dir), train__max_steps=40)
    write_spec(spec)
    location = Location(database_uri=database)
    save(spec, location, 3, train_loss=None, train_loss_step=None, val_loss=None, val_loss_step=None)
    card = make_run_card(location, find_checkpoint(None, str(tmp_path / "runs")))
    parts = ("lineage", "ledger", "funnel", "sources", "metrics", "evaluation", "contamination", "sample")
    assert card.missing.keys() == {*parts}
    html, markdown = run_card_html(card), run_card_markdown(card)
    assert "The run kept no sample" in html and "No evaluation was recorded" in html and "unknown" in html
    assert "no training records" in markdown and str(tmp_path) not in html + markdown + json.dumps(card.to_dict())


def test_a_replay_says_of_what(card: RunCard) -> None:
    assert words.replay_of(card) == ""
    recipe = override(card.recipe, {"data.without": (3, 4)})
    original = {
        "step": 40,
        "checkpoint": "abcd",
        "start_step": 20,
        "start": "ef01",
        "documents_seen": 0,
        "tokens_seen": 0,
    }
    replayed = dataclasses.replace(card, recipe=recipe, replay_of=original)
    said = (
        "A counterfactual replay of checkpoint abcd (step 40): the same order, the places of 2 documents left as masked"
    )
    assert words.replay_of(replayed).startswith(said) and "ef01 of step 20" in run_card_html(replayed)
    assert said in run_card_markdown(replayed)


def records_of(*steps: int, **facts: Any) -> list[dict[str, Any]]:
    return [{"step": step, "loss": 2.0, "lr": 0.1, "ranks": 2, **facts} for step in steps]


def test_the_history_shows_resumes_spikes_and_nothing_that_is_no_number() -> None:
    records = records_of(1, 10, 20, 26) + records_of(27, 30) + records_of(31, 40, 50, ranks=4)
    records[2]["spikes"] = [{"step": 17, "loss": 9.0, "expected": 2.0}, {"step": 18, "loss": math.nan, "expected": 2.0}]
    records += [{"step": 50, "val_loss": math.inf}, {"step": 60, "loss": 1.0, "ranks": 4}]
    found = history_of(records, {"step": 60, "seconds": 5.0}, step=50, log_every=10, total_steps=100)
    assert found.interruptions == (26,)  # stopped at 26, on again at 27; at 31 the ranks changed
    assert found.ranks == ((1, 2), (31, 4)) and [spike.step for spike in found.spikes] == [17]
    assert found.evaluations == () and found.points[-1].step == 50 and found.speed.seconds is None
    regular = history_of(records_of(*range(1, 30), 30, 40, 47), None, step=47, log_every=10, total_steps=47)
    assert regular.interruptions == ()  # reported every step at first, and at the last one


def test_a_long_curve_keeps_its_extremes() -> None:
    records = records_of(*range(1, 20_001))
    records[777]["loss"], records[12_345]["loss"] = 99.0, 0.5
    found = history_of(records, None, step=20_000, log_every=1, total_steps=20_000)
    assert len(found.points) <= MAX_POINTS and found.num_points == 20_000
    assert {99.0, 0.5} <= {point.loss for point in found.points}
    assert [point.step for point in found.points] == sorted({point.step for point in found.points})


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("no index of /home/me/runs/db/corpus.lance. Run it", "no index of corpus.lance. Run it"),
        ("s3://bucket/key/part-0.jsonl, ~/x/y, hf:/models/mine", "part-0.jsonl, y, hf:mine"),
        ("hf://datasets/org/name and org/name", "hf://datasets/org/name and org/name"),
        ("https://user:token@host/a/b?sig=1 1/2 and/or", "b?sig=1 1/2 and/or"),
        ({"sources": ["/data/a.parquet"], "n": 3}, {"sources": ["a.parquet"], "n": 3}),
    ],
)
def test_places_are_only_their_last_name(told: Any, shown: Any) -> None:
    assert public(told) == shown


def test_words_and_ticks() -> None:
    assert [words.compact(n) for n in (0, 999, 1234, 100_778, 17_500_000, 9.96e9)] == [
        *("0", "999", "1.234 k", "100.8 k", "17.5 M", "9.96 B")
    ]
    assert clean("a\nb\tc\x07\ud800") == "a\nb\tc\\x07\\ud800"
    assert ticks(2.9, 11.1, 5) == [2, 4, 6, 8, 10, 12] and ticks(1.0, 1.0, 5)[0] <= 1.0 <= ticks(1.0, 1.0, 5)[-1]


def test_the_verb_writes_the_card(project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--database", project.location.database_uri, "--runs", str(project.runs), "card"]
    done = CliRunner().invoke(cli, [*base, RUN], catch_exceptions=False)
    assert done.exit_code == 0 and str(project.run_dir / "card.html") in done.output
    assert (project.run_dir / "card.html").read_text().startswith("<!doctype html>")
    assert "not in it: contamination" in done.output
    alone = CliRunner().invoke(cli, [*base, "-o", str(tmp_path / "x.md"), "--json"], catch_exceptions=False)
    assert alone.exit_code == 0 and [file.name for file in tmp_path.iterdir()] == ["x.md"]
    assert json.loads(alone.stdout)["files"] == [str(tmp_path / "x.md")]
    with pytest.raises(SystemExit):
        main([*base, "-o", "card.pdf"])
    assert "ends in .html or .md" in capsys.readouterr().err


@pytest.mark.slow
def test_the_card_as_an_asset(project: Project) -> None:
    import dagster as dg

    from pretrain_assets.assets.report import report
    from pretrain_assets.assets.resources import CorpusResource, LauncherResource

    renamed = project.runs / "demo-v5-of-the-partition"
    project.run_dir.rename(renamed)
    resources = {
        "corpus": CorpusResource(database_uri=project.location.database_uri),
        "launcher": LauncherResource(runs_uri=str(project.runs)),
    }
    try:
        with dg.DagsterInstance.ephemeral() as instance:
            result = dg.materialize([report], instance=instance, resources=resources, partition_key="demo")
        (event,) = result.asset_materializations_for_node("forensics__report")
        assert Path(str(event.metadata["html"].value)).parent == renamed
        assert str(event.metadata["card"].value).startswith("# tiny, 40 steps")
        assert len(str(event.metadata["card"].value)) < 30_000
    finally:
        renamed.rename(project.run_dir)


@pytest.mark.slow
@pytest.mark.browser
@needs_chromium
@pytest.mark.parametrize("width", [1280, 400])
def test_the_card_in_a_browser(card: RunCard, tmp_path: Path, width: int) -> None:
    from playwright.sync_api import sync_playwright

    place = tmp_path / "card.html"
    place.write_text(run_card_html(card))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        try:
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="dark")
            asked: list[str] = []
            problems: list[str] = []
            page.on("request", lambda request: asked.append(request.url))
            page.on("console", lambda message: problems.append(message.text))
            page.on("dialog", lambda dialog: problems.append(dialog.message))
            page.goto(place.as_uri())
            assert asked == [place.as_uri()] and problems == []
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            assert [page.locator(f".graph.{kind}").is_visible() for kind in ("wide", "tall")] == [
                width > 760,
                width <= 760,
            ]
            assert page.locator("mark").first.is_visible()
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 19, 24)"
        finally:
            browser.close()
