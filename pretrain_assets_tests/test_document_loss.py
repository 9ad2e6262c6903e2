"""The loss of every document as columns: against a loop over documents, incremental, and refused where it must be."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F

from pretrain_assets.cli import cli
from pretrain_assets.config import DocumentLossConfig, EngineConfig, IndexConfig, RunSpec, TokenizeConfig
from pretrain_assets.errors import ColumnError, ConfigError, DataIdentityError, FilterError, TableError
from pretrain_assets.forensics.checkpoints import Checkpoint, find_checkpoint
from pretrain_assets.forensics.indexes.index import build_index
from pretrain_assets.forensics.losses.document_loss import joined, measure_loss, measuring, windows
from pretrain_assets.forensics.losses.loss_report import GROUPS, loss_report, losses_complete, losses_plausible
from pretrain_assets.forensics.retrieval.search import search
from pretrain_assets.launch.contract import write_spec
from pretrain_assets.report.loss_text import loss_text
from pretrain_assets.table.filler import tasks
from pretrain_assets.table.filler.spec import Worker
from pretrain_assets.table.lineage import Pin, StageResult
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.tokenize import load_tokenizer
from pretrain_assets.tokenize.columns import tokenize
from pretrain_assets.train import state
from pretrain_assets.train.attention import document_mask
from pretrain_assets.train.checkpoint import digest, open_checkpoint
from pretrain_assets.train.model import GPT
from pretrain_assets.train.run import run
from pretrain_assets.train.state import load_model
from pretrain_assets_tests.runs import SEQ, spec_in
from pretrain_assets_tests.tables import append, make_table, newest, values

BYTE = load_tokenizer("byte").identity
EOS = BYTE.eos_id
TEXTS = [f"The {word} {i} stands {'alone ' * (i % 9)}here." for i, word in enumerate(["river", "mast", "à"] * 30)]
TEXTS[3], TEXTS[10], TEXTS[11] = "", "x" * 200, "Q" * 40
"""An empty one, a held-out one of several windows, and one of a letter that is rare."""
HERE = EngineConfig(workers=1)
CPU = Worker(num_threads=1, device="cpu")


class Trained(NamedTuple):
    """A table and the folder of a run on it."""

    location: Location
    pin: Pin
    run_dir: str

    def checkpoint(self, step: int = 14) -> Checkpoint:
        return find_checkpoint(f"{self.run_dir}/checkpoints/step_{step:08d}", str(Path(self.run_dir).parent))

    def measure(self, name: str = "tiny", step: int = 14, pin: Pin | None = None, **settings: Any) -> StageResult:
        config = DocumentLossConfig(name=name, **settings)
        return measure_loss(self.location, self.checkpoint(step), config, input_pin=pin or self.pin, engine=HERE)

    def model(self, step: int = 14) -> GPT:
        with open_checkpoint(self.run_dir, step) as folder:
            return load_model(folder)


def train(folder: Path, name: str, texts: list[str], **changes: Any) -> Trained:
    location = make_table(folder / "db", texts)
    pin = tokenize(location, TokenizeConfig(tokenizer="byte"), input_pin=newest(location), engine=HERE).pin
    more = {"pin": str(pin), "tag": f"tokenized-v{pin.version}", "tokenizer": BYTE}
    spec: RunSpec = spec_in(f"{folder}/db", f"{folder}/runs/{name}", **more, **changes)
    write_spec(spec)
    assert run(spec) == 0
    return Trained(location, pin, spec.run_dir)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """90 documents in bytes; 14 steps."""
    changes = {"train__max_steps": 14, "train__eval_every": 7, "train__eval_blocks": 50}
    changes |= {"execution__checkpoint_every": 7, "execution__keep_last": 2}
    return train(tmp_path_factory.mktemp("loss"), "tiny-v2-a", TEXTS, **changes)


def alone(model: GPT, text: str) -> list[float]:
    """Loss of every token of a document and its end, by a loop over windows of one document."""
    ids, losses = [EOS, *text.encode(), EOS], list[float]()
    for start in range(0, len(ids) - 1, SEQ - 1):
        part = torch.tensor([ids[start : start + SEQ]])
        with torch.no_grad():
            losses += F.cross_entropy(model.logits(part)[0, :-1], part[0, 1:], reduction="none").tolist()
    return losses


def test_the_columns_are_those_of_a_loop_over_documents(trained: Trained) -> None:
    result = trained.measure()
    expected = [alone(trained.model(), text) for text in TEXTS]
    np.testing.assert_allclose(values(trained.location, "loss_tiny"), [np.mean(one) for one in expected], atol=1e-4)
    np.testing.assert_allclose(values(trained.location, "loss_max_tiny"), [max(one) for one in expected], atol=1e-4)
    assert values(trained.location, "loss_tokens_tiny") == [len(text.encode()) + 1 for text in TEXTS]
    record = result.record
    assert (record.stage, record.version) == ("loss_measured_tiny", trained.pin.version + 1)
    assert record.ledger == {"in": 90, "measured": 90, "without_tokens": 0}
    said = {"checkpoint": digest(trained.checkpoint().uri), "run": "tiny-v2-a", "step": 14, "seq_len": SEQ}
    assert said.items() <= record.parameters.items() and record.parameters["tokenizer"] == "byte"


@pytest.mark.slow
def test_under_a_document_mask_it_is_what_the_trainer_sees(tmp_path: Path) -> None:
    texts = [text[: SEQ - 2] for text in TEXTS]
    masked = train(tmp_path, "masked", texts, train__max_steps=4, train__eval_every=4, model__document_mask=True)
    masked.measure(step=4)
    model, expected = masked.model(4), []
    for text in texts:
        ids = torch.tensor([[EOS, *text.encode(), EOS]])
        documents = torch.ones_like(ids)
        documents[0, 0] = 0
        places = (torch.arange(ids.shape[1]) - 1).clamp(min=0)[None]
        with torch.no_grad():
            expected.append(model(ids, document_mask(documents), places, reduction="none")[0, :-1].mean().item())
    np.testing.assert_allclose(values(masked.location, "loss_tiny"), expected, atol=1e-4)


def test_every_token_is_a_target_once_behind_what_stands_before_it() -> None:
    rng = np.random.default_rng(0)
    lengths = np.array([0, 1, 5, 6, 7, 50, 0, 13])
    tokens = rng.integers(0, 90, lengths.sum()).astype(np.int32)
    firsts = np.concatenate(([0], lengths.cumsum()))
    for lead in (0, 1):
        stream, starts = joined(tokens, firsts, 99, lead)
        found: dict[int, list[tuple[int, int]]] = {}
        for documents, ids in windows(stream, starts[:-1], np.diff(starts), seq_len=7, pad_id=-1, num_tokens=21):
            assert ids.size <= 21 and ids.shape[1] <= 7
            for document, row in zip(documents.tolist(), ids.tolist(), strict=True):
                pairs = itertools.pairwise(row)
                found.setdefault(document, []).extend(pair for pair in pairs if pair[1] != -1)
        for at in range(len(lengths)):
            whole = [99] * lead + tokens[firsts[at] : firsts[at + 1]].tolist() + [99]
            assert sorted(found.get(at, [])) == sorted(itertools.pairwise(whole))


@pytest.mark.slow
def test_new_rows_alone_are_measured_and_another_checkpoint_measures_all_anew(tmp_path: Path) -> None:
    changes = {"train__max_steps": 2, "train__eval_every": 2, "execution__checkpoint_every": 1}
    mine = train(tmp_path, "tiny-v2-b", TEXTS[:40], **changes, execution__keep_last=2)
    first = mine.measure(step=2)
    assert (first.changed, mine.measure(step=2).changed) == (True, False)
    append(mine.location, ["Something new.", ""])
    pin = tokenize(mine.location, TokenizeConfig(tokenizer="byte"), input_pin=newest(mine.location), engine=HERE).pin
    before = values(mine.location, "loss_tiny")[:40]
    again = mine.measure(step=2, pin=pin)
    assert (again.changed, again.record.rows) == (True, 2)
    assert values(mine.location, "loss_tiny")[:40] == before
    assert values(mine.location, "loss_tiny")[40] == pytest.approx(
        np.mean(alone(mine.model(2), "Something new.")), abs=1e-4
    )
    other = mine.measure(step=1, pin=pin)
    assert (other.record.rows, other.record.parameters["step"]) == (42, 1)
    assert values(mine.location, "loss_tiny")[:40] != before
    with pytest.raises(TableError, match=r"measured under step 1 of tiny-v2-b .*pretrain measure-loss .*--name tiny"):
        loss_report(mine.location, mine.checkpoint(2), "tiny")
    mine.measure("cut", step=1, pin=pin, max_tokens=5)
    losses = [alone(mine.model(1), text)[:5] for text in TEXTS[:40]]
    np.testing.assert_allclose(values(mine.location, "loss_cut")[:40], [np.mean(one) for one in losses], atol=1e-4)


def test_a_row_without_tokens_has_no_loss_and_an_empty_text_that_of_its_end(trained: Trained) -> None:
    found = trained.checkpoint()
    for lead in (0, 1):
        function = measuring(trained.run_dir, 14, digest(found.uri), EOS, lead, None, "float32", CPU)
        rows = pa.array([None, [], [65, 66]], pa.list_(pa.int32()))
        loss, most, count = function(pa.record_batch([rows], names=["input_ids"]))
        assert (loss.null_count, most.null_count, count.to_pylist()) == (1, 1, [0, 1, 3])
        assert loss[1].as_py() == pytest.approx(alone(trained.model(), "")[0], abs=1e-4) and loss[0].as_py() is None


def test_the_report_tells_trained_from_held_out_and_names_what_stands_out(trained: Trained) -> None:
    trained.measure()
    report, found = loss_report(trained.location, trained.checkpoint(), "tiny", limit=3), trained.checkpoint()
    loss, tokens = (np.array(values(trained.location, f"loss_{part}tiny")) for part in ("", "tokens_"))
    held_out = np.arange(90) % 10 == 0
    assert [group.name for group in report.groups] == list(GROUPS) and sum(g.documents for g in report.groups) == 90
    assert report.groups[1].loss == pytest.approx((loss * tokens)[held_out].sum() / tokens[held_out].sum(), abs=1e-5)
    assert report.groups[1].quantiles[1] == pytest.approx(np.median(loss[held_out]), abs=1e-5)
    long = tokens >= 16
    assert report.highest[0].id == int(np.argmax(np.where(long, loss, -1)))
    lowest = report.lowest[0]
    trained_on = long & ~held_out
    assert lowest.loss == pytest.approx(loss[trained_on].min(), abs=1e-5) and lowest.seen.times > 0
    assert lowest.held_out_below == pytest.approx((loss[held_out] < lowest.loss).mean())
    assert [one.loss for one in report.lowest] == sorted(one.loss for one in report.lowest)
    assert report.val_loss == found.passport["val_loss"]
    assert losses_plausible(report).passed, losses_plausible(report).description
    assert not losses_plausible(replace(report, val_loss=2 * report.groups[1].loss)).passed
    assert "not compared" in losses_plausible(replace(report, max_tokens=5)).description
    assert losses_complete(open_dataset(trained.location), "tiny").passed
    text = loss_text(report)
    assert "Lowest of those trained on" in text and "seen" in text and f"{report.val_loss:.4f}" in text


def test_a_search_of_the_pinned_rows_may_ask_for_the_loss_measured_since(trained: Trained) -> None:
    trained.measure()
    losses = values(trained.location, "loss_tiny")
    limit = sorted(losses)[45]
    wanted = {i for i, loss in enumerate(losses) if loss > limit}
    found = search(trained.location, "", pin=trained.pin, where=f"loss_tiny > {limit!r}", limit=90)
    assert {hit.id for hit in found} == wanted
    build_index(trained.location, IndexConfig(), input_pin=trained.pin)
    found = search(trained.location, "river", pin=trained.pin, where=f"loss_tiny > {limit!r}", limit=90)
    assert {hit.id for hit in found} == {i for i in wanted if "river" in TEXTS[i]}
    with pytest.raises(FilterError, match="'loss_tini', which is neither a column nor a named filter"):
        search(trained.location, "", pin=trained.pin, where="loss_tini > 1")


def test_losses_that_are_wrong_are_found(tmp_path: Path) -> None:
    rows = {"loss_x": [1.0, None, 5.0, None, 3.0], "loss_max_x": [2.0, None, 4.0, 1.0, float("nan")]}
    table = pa.table({**rows, "loss_tokens_x": pa.array([3, 0, 2, 4, 1], pa.int32())})
    import lance

    finding = losses_complete(lance.write_dataset(table, tmp_path / "t.lance"), "x")
    assert (finding.passed, finding.details["wrong"]) == (False, 3)


def test_what_cannot_be_meant_is_refused(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="name='a_b' cannot work"):
        DocumentLossConfig(name="a_b")
    with pytest.raises(TableError, match=r"has no column loss_none\. Run `pretrain measure-loss"):
        loss_report(trained.location, trained.checkpoint(), "none")
    found = trained.checkpoint()
    other = {**found.passport, "tokenizer": {**found.passport["tokenizer"], "name": "else", "fingerprint": "else"}}
    with pytest.raises(DataIdentityError, match=r"cannot measure the documents .*\n?.*"):
        measure_loss(
            trained.location,
            replace(found, passport=other),
            DocumentLossConfig(name="other"),
            input_pin=trained.pin,
            engine=HERE,
        )
    model = trained.model()
    torch.nn.init.constant_(model.norm.weight, float("nan"))
    monkeypatch.setattr(state, "load_model", lambda folder, device: model)
    with pytest.raises(ColumnError, match="the model has diverged"):
        trained.measure("diverged")


@pytest.mark.slow
def test_worker_processes_give_the_same_columns(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    trained.measure()
    monkeypatch.setattr(tasks, "RANGE_BYTES", 1 << 10)
    config = DocumentLossConfig(name="two", batch_bytes=1 << 10)
    engine = EngineConfig(workers=2)
    measure_loss(trained.location, trained.checkpoint(), config, input_pin=trained.pin, engine=engine)
    expected = values(trained.location, "loss_tiny")
    np.testing.assert_allclose(values(trained.location, "loss_two"), expected, atol=1e-5)


def test_the_verb(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--database", trained.location.database_uri, "--runs", str(Path(trained.run_dir).parent), "measure-loss"]
    cli.main([*base, trained.run_dir, "--workers", "1", "--json"], standalone_mode=False)
    facts = json.loads(capsys.readouterr().out)
    assert facts["stage"] == "loss_measured_tiny" and facts["report"]["groups"][1]["documents"] == 9
    cli.main([*base, "--limit", "1"], standalone_mode=False)
    assert "nothing to do, no new version" in capsys.readouterr().out


@pytest.mark.slow
def test_the_asset(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    import dagster as dg

    from pretrain_assets.assets.document_loss import document_loss
    from pretrain_assets.assets.resources import default_resources

    monkeypatch.setenv("PRETRAIN_DATABASE_URI", trained.location.database_uri)
    monkeypatch.setenv("PRETRAIN_RUNS_URI", str(Path(trained.run_dir).parent))
    Path(trained.run_dir).rename(Path(trained.run_dir).with_name("demo-v2-a"))
    config = {"ops": {"corpus__document_loss": {"config": {"name": "asset"}}}}
    done = dg.materialize([document_loss], partition_key="demo", resources=default_resources(), run_config=config)
    checks = {check.check_name: check.passed for check in done.get_asset_check_evaluations()}
    assert checks == {"losses_complete": True, "losses_plausible": True}
    (event,) = done.asset_materializations_for_node("corpus__document_loss")
    assert event.metadata["ledger"].value == {"in": 90, "measured": 90, "without_tokens": 0}
    assert "held out" in event.metadata["losses"].value  # type: ignore[operator]
