"""The correctness ladder (TRAINER.md): what has to hold of the model, its loss, its optimizer and the order of blocks.

Its last rungs are elsewhere: exported logits in test_export.py, whole runs on changing numbers of ranks in
test_train.py and test_checkpoint.py.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from pretrain_assets import recipes
from pretrain_assets.config import ModelConfig, TokenizerIdentity, TrainConfig
from pretrain_assets.launch.local import torchrun_argv
from pretrain_assets.train import distributed, loop
from pretrain_assets.train.attention import document_mask
from pretrain_assets.train.distributed import World
from pretrain_assets.train.engine import Blocks, Engine
from pretrain_assets.train.flops import flops_per_token, mfu, peak_tflops
from pretrain_assets.train.loop import Trainer
from pretrain_assets.train.model import GPT
from pretrain_assets.train.optim import learning_rate, make_optimizers, set_learning_rate
from pretrain_assets.train.run import run
from pretrain_assets_tests import golden
from pretrain_assets_tests.ranks import CONFIGURATIONS, STEPS, blocks_of, engine_of, exact, learned
from pretrain_assets_tests.runs import EOS, MODEL, PAD, RECIPE, SEQ, TOKENIZER, VOCAB, after, make_database, spec_in

PADDED_ROWS = 384


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun: threads would only wait for each other in models this small."""
    monkeypatch.setattr(distributed, "_num_cores", lambda: 1)


def tiny_model() -> GPT:
    model = GPT(MODEL, TOKENIZER, SEQ)
    model.init_weights(0)
    return model


@torch.no_grad()
def loss_of(model: GPT, ids: Tensor) -> float:
    return float(model(ids))


def random_blocks(blocks: int = 4) -> Tensor:
    return torch.randint(0, VOCAB, (blocks, SEQ), generator=torch.Generator().manual_seed(0))


def gradients_of_step(engine: Engine, blocks: Blocks) -> tuple[float, dict[str, Tensor]]:
    """Loss of one optimizer step, and the gradients that it takes."""
    names = {weight: name for name, weight in engine.model.named_parameters()}
    found: dict[str, Tensor] = {}

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found.update({names[w]: w.grad.clone() for group in optimizer.param_groups for w in group["params"]})

    for optimizer in engine.optimizers:
        optimizer.register_step_pre_hook(keep)
    loss, _ = engine.train_step(blocks, step=1, total_steps=10)
    return float(loss), found


# --- the loss ------------------------------------------------------------------------------------------------------


def test_initial_loss_is_near_ln_v() -> None:
    assert loss_of(tiny_model(), random_blocks()) / (4 * (SEQ - 1)) == pytest.approx(math.log(VOCAB), abs=0.05)


def test_padded_vocabulary_equals_unpadded() -> None:
    """Against cross entropy over the real rows alone: it would be ln(384/300) = 0.25 more if the others leaked."""
    model, ids = tiny_model(), random_blocks()
    assert model.token_embedding.weight.shape == (PADDED_ROWS, 32)
    loss = loss_of(model, ids)
    model(ids).backward()
    assert torch.equal(model.token_embedding.weight.grad[VOCAB:], torch.zeros(PADDED_ROWS - VOCAB, 32))
    with torch.no_grad():
        model.token_embedding.weight[VOCAB:] = 50.0
    assert loss_of(model, ids) == loss
    logits = model.logits(ids).detach()
    assert logits.shape == (4, SEQ, VOCAB)
    plain = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    assert float(plain) == pytest.approx(loss, rel=1e-6)


def test_a_padded_tail_changes_the_loss_by_exactly_nothing_and_eos_counts() -> None:
    model, ids = tiny_model(), random_blocks()
    ids[:, 20] = EOS
    ids[:, 21:] = PAD
    before = loss_of(model, ids)
    with torch.no_grad():
        model.token_embedding.weight[PAD] += 7.0  # what the pads look like to the model
    assert loss_of(model, ids) == before
    ids[:, 20] = PAD
    assert loss_of(model, ids) != before


def test_field_18_ends_of_text_carry_loss_and_pads_none() -> None:
    """A pad id that equals the EOS id cannot be configured, as then one of both would be wrong."""
    with pytest.raises(ValueError, match=r"pad_id=299.*ends of text"):
        TokenizerIdentity(name="none", fingerprint="f", vocab_size=VOCAB, eos_id=EOS, pad_id=EOS)
    ids = random_blocks(1)
    ids[0, 9:11], ids[0, 12:] = EOS, PAD
    with torch.no_grad():
        each = tiny_model()(ids, reduction="none")[0]
    assert (each > 0).tolist() == [place + 1 < 12 for place in range(SEQ)]


def test_all_padding_adds_nothing_to_loss_and_gradients() -> None:
    blocks = blocks_of(1)
    padding = torch.full_like(blocks.input_ids, PAD)
    loss, gradients = gradients_of_step(engine_of({}), blocks)
    with_padding = Blocks(torch.cat([padding, blocks.input_ids, padding]))
    again, same = gradients_of_step(engine_of({"execution.micro_batch_blocks": 8}), with_padding)
    assert again == pytest.approx(loss, abs=1e-6)
    assert all(torch.allclose(same[name], gradient, rtol=0, atol=1e-7) for name, gradient in gradients.items())
    nothing, none = gradients_of_step(engine_of({}), Blocks(padding))
    assert nothing == 0.0 and not any(gradient.any() for gradient in none.values())


def test_field_20_micro_batches_of_10_and_1000_tokens_equal_one_large_batch() -> None:
    """And the mean of the two means, which is what a common mistake computes, is far from it."""
    ids = torch.randint(0, VOCAB, (2, 1024), generator=torch.Generator().manual_seed(0))
    ids[0, 11:], ids[1, 1001:] = PAD, PAD
    changes = {"data.seq_len": 1024, "train.global_batch_tokens": 4 * 1024, "train.grad_clip": math.inf}
    engines = [engine_of({**changes, "execution.micro_batch_blocks": blocks}) for blocks in (1, 2)]
    plain = engine_of(changes).model
    logits = plain.logits(ids)[:, :-1]
    means = [F.cross_entropy(*pair, ignore_index=PAD) for pair in zip(logits, ids[:, 1:], strict=True)]
    mean = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=PAD)
    mean.backward()
    wanted, of_means = float(mean.detach()), float(torch.stack(means).mean().detach())
    for engine in engines:
        loss, gradients = gradients_of_step(engine, Blocks(ids))
        assert loss == pytest.approx(wanted, abs=1e-6)
        for name, weight in plain.named_parameters():
            assert torch.allclose(gradients[name], weight.grad, rtol=1e-4, atol=1e-7), name
    assert abs(of_means - wanted) > 1e-3


def test_one_batch_can_be_learned_by_heart() -> None:
    engine = engine_of({"train.warmup_steps": 5})
    blocks = Blocks(random_blocks())
    curve = [float(engine.train_step(blocks, step=step, total_steps=150)[0]) for step in range(1, 151)]
    assert curve[0] == pytest.approx(math.log(VOCAB), abs=0.1)
    assert curve[-1] < 0.05


# --- documents -----------------------------------------------------------------------------------------------------


def logits_of(engine: Engine, blocks: Blocks) -> Tensor:
    """Logits as a training step computes them."""
    found: list[Tensor] = []
    with engine.model.norm.register_forward_hook(lambda *seen: found.append(seen[2])), engine.evaluating():
        engine.loss(blocks)
    return F.linear(found[0], engine.model.token_embedding.weight[:VOCAB]).detach()


def two_documents(first: int) -> Blocks:
    """A block of a document of `first` tokens and another one."""
    lengths = (first, SEQ - first)
    docs = torch.cat([torch.full((n,), number) for number, n in enumerate(lengths)])
    return Blocks(random_blocks(1), docs[None], torch.cat([torch.arange(n) for n in lengths])[None])


@pytest.mark.parametrize("masked", [True, False])
def test_field_19_altering_one_document_leaves_the_next_bit_identical_with_the_mask_only(masked: bool) -> None:
    engine, blocks = engine_of({"model.document_mask": masked}), two_documents(12)
    altered = blocks.input_ids.clone()
    altered[:, :12] = (altered[:, :12] + 1) % VOCAB
    before, now = (logits_of(engine, blocks._replace(input_ids=ids)) for ids in (blocks.input_ids, altered))
    assert not torch.equal(now[:, :12], before[:, :12])
    assert torch.equal(now[:, 12:], before[:, 12:]) == masked
    with engine.evaluating():
        each = [engine.loss(blocks._replace(input_ids=ids), per_token=True) for ids in (blocks.input_ids, altered)]
    assert torch.equal(each[0][:, 12:], each[1][:, 12:]) == masked


def test_a_document_counts_positions_from_its_own_start() -> None:
    """Alone in a block it has the logits that it has behind another."""
    engine, blocks = engine_of({"model.document_mask": True}), two_documents(12)
    alone = Blocks(blocks.input_ids.roll(-12, 1), blocks.doc_ids.roll(-12, 1), blocks.position_ids.roll(-12, 1))
    there, here = logits_of(engine, blocks)[:, 12:], logits_of(engine, alone)[:, :-12]
    assert torch.allclose(there, here, rtol=0, atol=1e-6)
    unreset = blocks._replace(position_ids=torch.arange(SEQ)[None])
    assert not torch.allclose(logits_of(engine, unreset)[:, 12:], here, rtol=0, atol=1e-3)


def test_a_mask_lets_a_position_see_the_earlier_ones_of_its_document() -> None:
    mask = document_mask(torch.tensor([[0, 0, 1, 1, 1]]))
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]


# --- the optimizer -------------------------------------------------------------------------------------------------


def test_residual_projections_start_smaller() -> None:
    deep = GPT(ModelConfig(n_layer=8, n_head=2, n_embd=64), TOKENIZER, SEQ)
    deep.init_weights(0)
    assert float(deep.layers[0].expand.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    for layer in deep.layers:
        for projection in (layer.projection, layer.attention.projection):
            assert float(projection.weight.detach().std()) == pytest.approx(0.02 / 4, rel=0.05)


def test_only_matrices_decay() -> None:
    model = tiny_model()
    (optimizer,) = make_optimizers(model, RECIPE.train)
    decayed, spared = optimizer.param_groups
    assert {p.dim() for p in decayed["params"]} == {2} and decayed["weight_decay"] == 0.1
    assert {p.dim() for p in spared["params"]} == {1} and spared["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(spared["params"]) == len(list(model.parameters()))
    assert decayed["betas"] == spared["betas"] == (0.9, 0.95)


def test_muon_has_the_matrices_of_the_layers_and_its_rate_follows_the_schedule() -> None:
    engine = engine_of({"train.optimizer": "muon", "train.muon_learning_rate": 0.04})
    names = {id(weight): name for name, weight in engine.model.named_parameters()}
    muon, adamw = ([names[id(w)] for g in o.param_groups for w in g["params"]] for o in engine.optimizers)
    assert isinstance(engine.optimizers[0], torch.optim.Muon) and isinstance(engine.optimizers[1], torch.optim.AdamW)
    inside = ("attention.qkv", "attention.projection", "expand", "projection")
    assert set(muon) == {f"layers.{layer}.{name}.weight" for layer in (0, 1) for name in inside}
    assert set(adamw) == set(names.values()) - set(muon) and len(adamw) + len(muon) == len(names)
    for step, share in ((1, 0.25), (4, 1.0)):  # four steps of warm-up
        engine.train_step(blocks_of(step), step=step, total_steps=10)
        rates = [{group["lr"] for group in optimizer.param_groups} for optimizer in engine.optimizers]
        assert [rate for each in rates for rate in each] == pytest.approx([0.04 * share, 1e-2 * share])


@pytest.mark.parametrize(
    ("warmup", "total", "rates"),
    [
        (10, 110, {1: 0.1, 10: 1.0, 60: 0.55, 110: 0.1}),
        (0, 100, {1: 0.99978, 50: 0.55, 100: 0.1}),  # begins at the peak
        (10, 10, {1: 0.1, 10: 1.0}),  # ends at the peak
        (20, 10, {1: 0.05, 10: 0.5}),  # never gets there
        (0, 1, {1: 0.1}),
        (2, 4, {4: 0.1, 5: 0.1, 1000: 0.1}),  # past the end it stays at the minimum
    ],
)
def test_learning_rate_warms_up_then_follows_the_cosine(warmup: int, total: int, rates: dict[int, float]) -> None:
    config = TrainConfig(global_batch_tokens=1, learning_rate=1.0, min_learning_rate=0.1, warmup_steps=warmup)
    assert {step: learning_rate(config, step, total) for step in rates} == pytest.approx(rates, abs=1e-5)
    optimizers = make_optimizers(tiny_model(), config)
    set_learning_rate(optimizers, config, 0.3)
    assert {group["lr"] for optimizer in optimizers for group in optimizer.param_groups} == {0.3}


# --- how it is executed changes nothing ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plainly() -> dict[str, Tensor]:
    return learned({})


@pytest.mark.parametrize("blocks", [1, 3, 8, 100])
def test_micro_batches_change_neither_loss_nor_weights_nor_the_order(plainly: dict[str, Tensor], blocks: int) -> None:
    found = learned({"execution.micro_batch_blocks": blocks})
    assert_equal(found, plainly)
    engine, seen = engine_of({"execution.micro_batch_blocks": blocks}), []
    engine.model.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    whole = blocks_of(1)
    engine.train_step(whole, step=1, total_steps=STEPS)
    assert torch.equal(torch.cat(seen), whole.input_ids)
    assert [len(part) for part in seen] == [len(part.input_ids) for part in whole.split(blocks)]
    assert max(map(len, seen)) == min(blocks, 8)


def test_the_chunked_loss_is_the_same(plainly: dict[str, Tensor]) -> None:
    assert_equal(learned({"execution.chunked_loss": True}), plainly)


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Losses, norms and weights, of float64 arithmetic."""
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-10), name


@pytest.fixture(scope="module", params=[2, 4])
def on_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What so many ranks learn in every configuration."""
    path = tmp_path_factory.mktemp("ranks") / "learned.safetensors"
    argv = [*torchrun_argv("", request.param)[:-3], "-m", "pretrain_assets_tests.ranks", str(path)]
    subprocess.run(argv, check=True, cwd=Path(__file__).parent.parent)
    return load_file(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_many_ranks_learn_what_one_does(on_ranks: dict[str, Tensor], name: str) -> None:
    """Though one of the four has nothing but padding, and another all the targets."""
    found = {key.split("|")[1]: value for key, value in on_ranks.items() if key.startswith(f"{name}|")}
    assert_equal(found, learned(CONFIGURATIONS[name]))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("changes", [{}, {"model.document_mask": True}])
def test_deterministic_runs_are_bitwise_equal_with_threads(two_threads: None, changes: dict[str, Any]) -> None:
    runs = []
    for _ in range(2):
        engine = engine_of({**changes, "execution.deterministic": True})
        assert torch.are_deterministic_algorithms_enabled()
        for step in (1, 2):
            engine.train_step(blocks_of(step), step=step, total_steps=2)
        runs.append(engine.model.state_dict())
    assert all(torch.equal(runs[1][name], weight) for name, weight in runs[0].items())


def test_float64_is_left_behind() -> None:
    with exact():
        assert torch.ones(1).dtype == torch.float64
    assert engine_of({}).model.norm.weight.dtype == torch.float32


# --- the order of blocks -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_database(tmp_path_factory.mktemp("ladder"))


@pytest.mark.parametrize("begin", [0, 7])
def test_the_batch_of_a_step_is_the_same_for_1_2_and_4_ranks(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: int
) -> None:
    """By value, in the trainer's own order, over the end of an epoch, from the start and after a resume."""
    monkeypatch.setattr(loop, "Engine", lambda *_: None)
    monkeypatch.setattr(World, "new_host_group", lambda _: None)
    spec = spec_in(database, str(tmp_path), model__document_mask=True)
    cycles, splits = spec.recipe.cycles_per_step, spec.recipe.data.num_splits

    def batches(rank: int, size: int) -> list[Tensor]:
        world = World(rank=rank, size=size, local_size=size, device=torch.device("cpu"), control=None)
        trainer = Trainer(spec, world, [])
        trainer.step = begin
        assert trainer.schedule.locate(18)[0] == 1, "the steps should cross into the second epoch"
        taken = list(itertools.islice(trainer._batches(), 18 - begin))
        stacked = [torch.stack([b.input_ids, b.doc_ids, b.position_ids]) for b in taken]
        return [part.view(3, cycles, splits // size, SEQ) for part in stacked]

    alone = batches(0, 1)
    assert len({tuple(batch.flatten().tolist()) for batch in alone}) == 18 - begin
    for size in (2, 4):
        ranks = [batches(rank, size) for rank in range(size)]
        for step, whole in enumerate(alone):
            assert torch.equal(torch.cat([rank[step] for rank in ranks], 2), whole)


# --- the golden curve ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    spec = golden.golden_spec(tmp_path_factory.mktemp("golden"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "_num_cores", lambda: 1)
        assert run(spec, after(23)) == 75
        assert run(spec) == 0
    return spec


def test_a_run_of_50_steps_is_the_golden_one(golden_run: Any) -> None:
    """Stopped after step 23 and resumed, over the end of an epoch: the file's run was not."""
    wanted, found = json.loads(golden.FILE.read_text()), golden.curve(golden_run)
    assert list(found["loss"]) == [str(step) for step in range(1, 51)]
    assert list(found["val_loss"]) == [str(step) for step in range(0, 51, 10)]
    for name, values in found.items():
        assert values == pytest.approx(wanted[name], abs=1e-4), name
    assert found["val_loss"]["50"] < found["val_loss"]["0"] - 1.5


# --- floating-point operations -------------------------------------------------------------------------------------

GPT2 = TokenizerIdentity(name="gpt2", fingerprint="f", vocab_size=50257, eos_id=50256, pad_id=50257)


@pytest.mark.parametrize(
    ("recipe", "parameters", "flops"),
    [("gpt2_124m", 124_475_904, 860_101_632), ("gpt2_354m", 354_871_296, 2_431_217_664)],
)
def test_parameters_and_flops_of_the_recipes(recipe: str, parameters: int, flops: int) -> None:
    """6 N + 12 L d T, the vocabulary padded to 50,304 and the tied head counted once."""
    resolved = recipes.get(recipe)
    with torch.device("meta"):
        model = GPT(resolved.model, GPT2, resolved.data.seq_len)
    assert model.token_embedding.weight.shape[0] == 50_304
    assert model.num_parameters == parameters
    assert flops_per_token(parameters, resolved.model, 1024) == flops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA L40", None),
        ("CPU", None),
    ],
)
def test_peaks_by_the_most_specific_name(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak
    if peak is None:
        assert mfu(1.0, 1, name, 1) is None
    else:
        assert mfu(490_000, 860_101_632, name, 2) == pytest.approx(490_000 * 860_101_632 / (2 * peak * 1e12))


def test_mfu_of_the_seeds_run() -> None:
    """34.5% of 8 H100 at 398k tokens/s each, and 42.3% of one H200 at 490k (TRAINER.md counts N a little less)."""
    assert mfu(8 * 398_000, 860_101_632, "NVIDIA H100 80GB HBM3", 8) == pytest.approx(0.345, abs=2e-3)
    assert mfu(490_000, 860_101_632, "NVIDIA H200", 1) == pytest.approx(0.426, abs=1e-3)
