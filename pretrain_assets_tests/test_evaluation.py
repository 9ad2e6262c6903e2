"""Evaluation: the numbers against brute force, on any number of ranks, and `pretrain evaluate`."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from pretrain_assets.cli import cli, main
from pretrain_assets.config import RunSpec, TokenizerIdentity, override
from pretrain_assets.errors import FilterError
from pretrain_assets.launch.local import run_local
from pretrain_assets.table.schema import computed_field
from pretrain_assets.table.storage import Location
from pretrain_assets.table.versions import identified
from pretrain_assets.tokenize import load_tokenizer
from pretrain_assets.train import distributed, evaluation
from pretrain_assets.train.assessment import Loaded
from pretrain_assets.train.distributed import World
from pretrain_assets.train.engine import Blocks
from pretrain_assets.train.evaluation import HeldOut
from pretrain_assets.train.metrics import read_metrics
from pretrain_assets.train.model import GPT
from pretrain_assets.train.run import run
from pretrain_assets.train.scores import Evaluation, Tally
from pretrain_assets_tests.runs import RECIPE

BYTE = load_tokenizer("byte").identity
OTHER = replace(BYTE, name="other", fingerprint="other")
SEQ, EOS, PAD = RECIPE.data.seq_len, BYTE.eos_id, BYTE.pad_id
SOURCES = ["web", "books", None]
CPU = torch.device("cpu")


def made_by(tokenizer: TokenizerIdentity) -> pa.Field:
    making: dict[str, Any] = {"stage": "tokenized", "code_version": "1", "parameters": asdict(tokenizer)}
    return computed_field("input_ids", pa.list_(pa.int32()), **making)


@pytest.fixture(scope="module")
def tokens() -> list[list[int]]:
    """250 documents, some of them empty, one as long as three blocks."""
    rng = np.random.default_rng(0)
    lengths = [int(n) for n in rng.integers(0, 30, 250)]
    lengths[0], lengths[10], lengths[20] = 0, 3 * SEQ, 0
    return [(rng.zipf(1.5, n) % 256).tolist() for n in lengths]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory, tokens: list[list[int]]) -> str:
    """Version 1: 250 rows; version 2: a copy of 50 more; version 3: the same rows by another tokenizer."""
    folder = tmp_path_factory.mktemp("evaluation")
    table = pa.table(
        {
            "id": pa.array(range(250), pa.int64()),
            "source": pa.array([SOURCES[i // 10 % 3] for i in range(250)]),
            "input_ids": pa.array(tokens, pa.list_(pa.int32())),
            "n_tokens": pa.array(map(len, tokens), pa.int32()),
        }
    )
    table = table.cast(identified(table.schema, "table"))
    uri, stable = f"{folder}/corpus.lance", {"enable_stable_row_ids": True, "data_storage_version": "2.2"}
    lance.write_dataset(table.cast(table.schema.set(2, made_by(BYTE))), uri, **stable)
    more = table.slice(0, 50).set_column(0, table.schema.field(0), pa.array(range(250, 300), pa.int64()))
    lance.write_dataset(more.cast(more.schema.set(2, made_by(BYTE))), uri, mode="append")
    lance.write_dataset(table.cast(table.schema.set(2, made_by(OTHER))), uri, mode="overwrite", **stable)
    lance.dataset(uri).tags.create("grown", 2)
    return str(folder)


def spec_of(database: str, run_dir: str = "none", **changes: Any) -> RunSpec:
    recipe = override(RECIPE, {name.replace("__", "."): value for name, value in changes.items()})
    return RunSpec(
        recipe=recipe,
        database_uri=database,
        table_name="corpus",
        pin="table@1",
        tag="tokenized-v1",
        tokenizer=BYTE,
        run_dir=run_dir,
    )


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sums inside a matrix product depend on the number of threads."""
    monkeypatch.setattr(distributed, "_num_cores", lambda: 1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def alone() -> World:
    return World(rank=0, size=1, local_size=1, device=CPU, control=None)


def model_of(spec: RunSpec) -> GPT:
    """A model that is far from uniform."""
    model = GPT(spec.recipe.model, BYTE, SEQ)
    model.init_weights(0)
    with torch.no_grad():
        model.token_embedding.weight *= 20
    return model


def held_out(spec: RunSpec, world: World | None = None) -> HeldOut:
    return HeldOut.of_run(Location(database_uri=spec.database_uri), spec, world or alone())


def evaluate(spec: RunSpec) -> Evaluation:
    world = alone()
    return held_out(spec, world).evaluate(Loaded(model_of(spec), world))


def stream_of(spec: RunSpec, tokens: list[list[int]]) -> list[tuple[int, int]]:
    """Every held-out token and the document it belongs to, in order: the documents joined by ends of text."""
    plan = held_out(spec).plan
    return [(token, int(i)) for i in plan.doc_ids for token in [*tokens[int(i)], EOS]]


# --- the numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("masked", "eval_blocks"), [(False, None), (True, 5)], ids=["plain", "document mask"])
@torch.no_grad()
def test_every_number_is_that_of_brute_force(
    database: str, tokens: list[list[int]], masked: bool, eval_blocks: int | None
) -> None:
    """Each prefix is given to the model by itself, the next token's loss noted for the next token's document."""
    spec = spec_of(database, train__eval_blocks=eval_blocks, model__document_mask=masked)
    model, stream = model_of(spec), stream_of(spec, tokens)
    blocks = min(eval_blocks or 10**9, len(stream) // SEQ)
    losses: list[tuple[int, str, float]] = []  # token, source, nats
    for start in range(0, blocks * SEQ, SEQ):
        block = stream[start : start + SEQ]
        for at in range(1, SEQ):
            before = block[at - 1][1]
            seen = [token for token, document in block[:at] if not masked or document == before]
            logits = model.logits(torch.tensor([seen]))[0, -1]
            token, document = block[at]
            nats = float(F.cross_entropy(logits.double(), torch.tensor(token)))
            losses.append((token, SOURCES[document // 10 % 3] or "unknown", nats))
    found = evaluate(spec)
    assert (found.blocks, found.tokens) == (blocks, blocks * (SEQ - 1)) == (blocks, len(losses))
    assert list(found.by_source) == ["books", "unknown", "web"]
    for name, part in [("all", found), *found.by_source.items()]:
        mine = [(token, nats) for token, source, nats in losses if name in ("all", source)]
        text = [nats for token, nats in mine if token != EOS]
        assert part.tokens == len(mine) and len(text) < len(mine)
        assert part.loss == pytest.approx(sum(nats for _, nats in mine) / len(mine), abs=1e-5)
        assert part.perplexity == pytest.approx(math.exp(part.loss))
        assert part.bits_per_byte == pytest.approx(sum(text) / math.log(2) / len(text), abs=1e-5)
    assert len({round(part.loss, 3) for part in found.by_source.values()}) == 3


def test_a_block_of_padding_counts_nothing_and_unknown_bytes_are_none() -> None:
    ids = torch.tensor([[7, 8, EOS, 9, PAD], [PAD] * 5])
    losses = torch.tensor([[1.0, 2.0, 4.0, 0.0, 9.0], [0.0] * 5])
    sources = torch.tensor([[0, 0, 0, 1, 0], [0] * 5])
    widths = np.arange(BYTE.vocab_size)
    widths[EOS] = 0
    tally = Tally(3, PAD, widths, CPU)
    tally.add(ids, losses, sources)
    found = tally.evaluation(2, ["a", "b", "c"])
    assert (found.tokens, found.loss) == (3, 7 / 3)
    assert found.bits_per_byte == pytest.approx((1 + 4) / math.log(2) / (8 + 9))
    assert {name: (part.tokens, part.loss) for name, part in found.by_source.items()} == {"a": (2, 1.5), "b": (1, 4.0)}
    ignorant = Tally(3, PAD, None, CPU)
    ignorant.add(ids, losses, sources)
    assert (tally.sums + ignorant.sums)[:2].tolist() == (2 * tally.sums[:2]).tolist()
    tally.sums += ignorant.sums  # a rank without the tokenizer makes it unknown, not wrong
    assert tally.evaluation(2, []).bits_per_byte is None and tally.evaluation(2, []).loss == 7 / 3
    assert "val_bits_per_byte" not in tally.evaluation(2, []).metrics()


def test_without_a_column_of_sources_there_is_no_breakdown(database: str, tmp_path: Path) -> None:
    lance.write_dataset(
        lance.dataset(f"{database}/corpus.lance", version=1).to_table(["id", "input_ids", "n_tokens"]),
        f"{tmp_path}/corpus.lance",
        enable_stable_row_ids=True,
        data_storage_version="2.2",
    )
    spec = spec_of(database)
    found, without = evaluate(spec), evaluate(replace(spec, database_uri=str(tmp_path)))
    assert (without.loss, without.by_source) == (found.loss, {}) and len(found.by_source) == 3
    assert "val_loss_by_source" not in without.metrics()


def test_nothing_to_predict_is_an_error(database: str) -> None:
    with pytest.raises(FilterError, match=r"The 1 rows of 'id = 20' hold no token to predict"):
        evaluate(spec_of(database, data__held_out_filter="id = 20"))


# --- ranks and memory -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Thread(World):
    """A rank in a thread of this process, whose collectives wait for all of them."""

    barrier: threading.Barrier
    shared: dict[int, torch.Tensor]

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        self.shared[self.rank] = value.clone()
        self.barrier.wait(20)
        value.copy_(torch.stack([self.shared[rank] for rank in range(self.size)]).sum(0))
        self.barrier.wait(20)
        return value


class Collective(Loaded):
    """A model whose forward pass all ranks make together, as under FSDP2."""

    def loss(self, blocks: Blocks, *, per_token: bool = False) -> torch.Tensor:
        assert isinstance(self.world, Thread)
        self.world.barrier.wait(20)
        return super().loss(blocks, per_token=per_token)


@pytest.mark.parametrize(("rows", "masked"), [("id % 10 = 0", False), ("id % 10 = 0", True), ("id = 10", False)])
def test_the_number_is_bitwise_the_same_on_any_number_of_ranks(database: str, rows: str, masked: bool) -> None:
    spec = spec_of(database, train__eval_blocks=None, data__held_out_filter=rows, model__document_mask=masked)
    model, found = model_of(spec), {}
    for size in (1, 2, 4):
        barrier, shared = threading.Barrier(size), {}

        def of_rank(rank: int, size: int = size, barrier: Any = barrier, shared: Any = shared) -> Evaluation:
            world = Thread(
                rank=rank, size=size, local_size=size, device=CPU, control=None, barrier=barrier, shared=shared
            )
            torch.set_num_threads(1)
            return held_out(spec, world).evaluate(Collective(model, world))

        with ThreadPoolExecutor(size) as pool:
            found[size] = list(pool.map(of_rank, range(size)))
    assert {repr(result) for results in found.values() for result in results} == {repr(found[1][0])}
    assert found[1][0] == evaluate(spec)


@pytest.mark.parametrize(("rows", "blocks"), [("id = 12", 1), ("id % 10 = 0", 5)])
def test_small_held_out_sets_work(database: str, rows: str, blocks: int) -> None:
    """Every block is one rank's, and ranks without a block have padding."""
    spec = spec_of(database, data__held_out_filter=rows)
    worlds = [World(rank=r, size=n, local_size=n, device=CPU, control=None) for n in (1, 3) for r in range(n)]
    parts = [torch.cat([part.input_ids for part in held_out(spec, world)._micro_batches()]) for world in worlds]
    assert held_out(spec).num_blocks == blocks
    assert torch.equal(torch.cat(parts[1:])[:blocks], parts[0][:blocks])
    assert (torch.cat(parts[1:])[blocks:] == PAD).all() and (parts[0][:blocks] != PAD).any(1).all()
    assert len({len(part) for part in parts[1:]}) == 1


def test_few_blocks_are_kept_and_many_are_read_again(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, world = spec_of(database, train__eval_blocks=None), alone()
    model, reads, read = Loaded(model_of(spec), world), [], HeldOut._read
    monkeypatch.setattr(HeldOut, "_read", lambda self: reads.append(self) or read(self))
    few = held_out(spec, world)
    assert few.evaluate(model) == few.evaluate(model) and reads == [few]
    monkeypatch.setattr(evaluation, "KEPT_BYTES", few.num_blocks * SEQ * 4 - 1)
    many = held_out(spec, world)
    assert many.evaluate(model) == few.evaluate(model) == many.evaluate(model) and reads == [few, many, many]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_real_ranks_give_the_bits_of_one(database: str, tmp_path: Path, parallel: str) -> None:
    def first(name: str, **changes: Any) -> dict[str, Any]:
        spec = spec_of(database, str(tmp_path / name), train__max_steps=1, train__eval_blocks=None, **changes)
        run(spec) if name == "one" else run_local(spec, 2)
        return next(record for record in read_metrics(spec.run_dir) if "val_loss" in record)

    assert first("two", execution__parallel=parallel) == first("one")


# --- the verb -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(database: str, tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """The tiny run, start to end."""
    spec = spec_of(database, str(tmp_path_factory.mktemp("runs") / "tiny"), train__max_steps=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "_num_cores", lambda: 1)
        assert run(spec) == 0
    return spec


def asked(spec: RunSpec, *arguments: str) -> Any:
    """What `pretrain evaluate` answers."""
    argv = ["--database", spec.database_uri, "evaluate", spec.run_dir, *arguments]
    result = CliRunner().invoke(cli, argv, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout) if "--json" in arguments else result.stdout


def test_the_verb_gives_what_the_trainer_recorded(trained: RunSpec) -> None:
    last = [record for record in read_metrics(trained.run_dir) if "val_loss" in record][-1]
    found = asked(trained, "--json")
    assert found["pin"] == found["trained_pin"] == "table@1" and found["documents_trained"] == 0
    numbers = found["evaluation"]
    assert (numbers["tokens"], numbers["blocks"]) == (last["val_tokens"], 5) == (5 * (SEQ - 1), 5)
    for name in ("loss", "perplexity", "bits_per_byte"):
        assert numbers[name] == pytest.approx(last[f"val_{name}"], abs=1e-6)
    assert {s: part["loss"] for s, part in numbers["by_source"].items()} == pytest.approx(last["val_loss_by_source"])
    earlier = f"{trained.run_dir}/checkpoints/step_00000004"
    assert asked(replace(trained, run_dir=earlier), "--json")["evaluation"]["loss"] > numbers["loss"]
    assert asked(trained, "--json", "--micro-batch", "1")["evaluation"]["loss"] == pytest.approx(numbers["loss"])


def test_the_text_names_version_rows_and_sources(trained: RunSpec) -> None:
    text = asked(trained, "--all")
    assert "1, the one it was trained on (table@1)" in text and "25 of id % 10 = 0" in text
    assert "read     all of 14 blocks of 32 tokens: 24 rows" in text  # the rest fills no block
    rows = [line.split()[0] for line in text.split("---\n")[1].splitlines() if line]
    assert rows == ["all", "books", "unknown", "web"] and "Warning" not in text


def test_rows_trained_on_are_counted_and_another_version_is_named(trained: RunSpec) -> None:
    text = asked(trained, "--version", "grown", "--filter", "id >= 240", "--blocks", "1000")
    assert "2, NOT the one it was trained on, which is 1 (table@2)" in text
    assert "60 of id >= 240" in text
    assert "Warning: the run's training filter keeps 9 of these 57 rows" in text  # 241 to 249; the rest fills no block
    assert asked(trained, "--version", "table@2", "--filter", "id >= 250", "--json")["documents_trained"] == 0


@pytest.mark.slow
def test_an_exported_model_is_judged_as_its_checkpoint(trained: RunSpec, tmp_path: Path) -> None:
    out = str(tmp_path / "exported")
    argv = ["--database", trained.database_uri, "export", trained.run_dir, "--out", out]
    assert CliRunner().invoke(cli, argv, catch_exceptions=False).exit_code == 0
    ours, theirs = asked(trained, "--json"), asked(replace(trained, run_dir=out), "--json")
    assert theirs["evaluation"]["loss"] == pytest.approx(ours["evaluation"]["loss"], abs=1e-6)
    assert {**theirs, "subject": None, "evaluation": None} == {**ours, "subject": None, "evaluation": None}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--filter", "scroe > 1"], ["--filter='scroe > 1'", "`pretrain filter` lists all columns"]),
        (["--filter", "id < 0"], ["--filter='id < 0' keeps none of the 250 rows"]),
        (["--version", "9"], ["version 9", "`pretrain versions`"]),
        (["--version", "nothing"], ["tag 'nothing'"]),
        (["--version", "table@x"], ["'table@x' is not a pin"]),
        (["--version", "chair@1"], ["is not the table of pin chair@1"]),
        (["--version", "3"], ["cannot be evaluated on version 3", "model:     'byte'", "version 3: 'other'"]),
        (["--blocks", "2", "--all"], ["--blocks 2 and --all"]),
    ],
    ids=" ".join,
)
def test_mistakes_are_told(
    trained: RunSpec, capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    message = refusal(capsys, "--database", trained.database_uri, "evaluate", trained.run_dir, *arguments)
    for word in words:
        assert word in message, message


def test_no_checkpoint_and_no_blocks_are_told(
    trained: RunSpec, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nothing = refusal(capsys, "--database", trained.database_uri, "--runs", str(tmp_path), "evaluate")
    assert f"No complete checkpoint under {tmp_path}" in nothing
    zero = CliRunner().invoke(cli, ["evaluate", trained.run_dir, "--blocks", "0"])
    assert zero.exit_code == 2 and "0 is not in the range" in zero.output


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 1
    return capsys.readouterr().err
