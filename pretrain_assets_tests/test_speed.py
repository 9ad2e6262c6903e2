"""What the trainer's speed rests on: FLOPs and peaks, the feed, garbage, kernels, chunks, compiling, packed samples."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pretrain_assets import recipes
from pretrain_assets.config import ExecutionConfig, ModelConfig, TokenizerIdentity, override
from pretrain_assets.errors import ConfigError, InputError
from pretrain_assets.loader.sample import read_sample, write_sample
from pretrain_assets.loader.stream import Batch, BlockLoader
from pretrain_assets.plural import counted
from pretrain_assets.train import model as model_module
from pretrain_assets.train import pauses
from pretrain_assets.train.attention import document_mask
from pretrain_assets.train.device import attention_kernel, cudnn_advice, describe, prepare
from pretrain_assets.train.engine import Blocks, Engine
from pretrain_assets.train.feed import feed
from pretrain_assets.train.flops import causal_flops_per_token, flops_per_token, mfu, peak_tflops
from pretrain_assets.train.flops import describe as describe_mfu
from pretrain_assets.train.model import GPT
from pretrain_assets_tests.loader_tables import Case
from pretrain_assets_tests.ranks import ONE
from pretrain_assets_tests.runs import MODEL, PAD, RECIPE, SEQ, TOKENIZER, VOCAB

CPU = torch.device("cpu")


# --- FLOPs and peaks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters", "flops", "causal"),
    [
        ("gpt2_124m", 124_475_904, 860_101_632, 803_478_528),
        ("gpt2_354m", 354_871_296, 2_431_217_664, 2_280_222_720),
    ],
)
def test_flops_of_the_recipes(name: str, parameters: int, flops: int, causal: int) -> None:
    config = recipes.get(name).model
    assert count_parameters(config, 50_304, 1024) == parameters
    numbers = (parameters, config, 1024)
    assert (flops_per_token(*numbers), causal_flops_per_token(*numbers)) == (flops, causal)
    assert count_parameters(MODEL, 384, SEQ) == GPT(MODEL, TOKENIZER, SEQ).num_parameters


def count_parameters(config: ModelConfig, rows: int, seq_len: int) -> int:
    """Of GPT-2 with tied embeddings: tokens, positions, layers, the last norm."""
    width = config.n_embd
    return (rows + seq_len) * width + config.n_layer * (12 * width**2 + 13 * width) + 2 * width


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165),
        *(
            (other, None)
            for other in (
                "CPU",
                "NVIDIA RTX A1000",
                "NVIDIA GB200",
                "NVIDIA L40",
                "NVIDIA GeForce RTX 4090 Laptop GPU",
                "NVIDIA GeForce RTX 4090 D",
                "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
            )
        ),
    ],
)
def test_a_peak_is_that_of_the_very_device_or_unknown(device: str, peak: float | None) -> None:
    assert peak_tflops(device) == peak
    share = mfu(1e12, 1, device, 2)
    assert share is None if peak is None else share == pytest.approx(1 / (2 * peak))


def test_mfu_is_described_with_everything_that_it_depends_on() -> None:
    config = recipes.get("gpt2_124m").model
    text = describe_mfu(124_475_904, config, 1024, "NVIDIA H200", 8)
    for part in (
        "860,101,632",
        "6N + 12LdT",
        "N = 124,475,904",
        "L = 12",
        "d = 768",
        "T = 1,024",
        "8 x 989 TFLOP/s",
        "93.4%",
    ):
        assert part in text
    assert "n/a: the peak of this device is not known" in describe_mfu(1, config, 1024, "CPU", 1)


# --- feed, garbage, device ---------------------------------------------------------------------------------------


def test_the_feed_widens_every_tensor_and_ends_with_its_source() -> None:
    ids = torch.arange(6, dtype=torch.int32).view(2, 3)
    batches = [Batch(input_ids=ids + n, doc_ids=ids if n else None, position_ids=None, cu_seqlens=None) for n in (0, 1)]
    first, second = feed(batches, CPU)
    assert first.input_ids.dtype == torch.int64 and torch.equal(first.input_ids, ids.long())
    assert first.doc_ids is None and second.doc_ids is not None and torch.equal(second.input_ids, ids.long() + 1)


def test_the_feed_asks_for_no_batch_before_it_is_wanted() -> None:
    asked = []

    def batches() -> Iterator[Batch]:
        for number in range(3):
            asked.append(number)
            yield Batch(input_ids=torch.zeros(1, 2), doc_ids=None, position_ids=None, cu_seqlens=None)

    stream = feed(batches(), CPU)
    next(stream)
    assert asked == [0]


class Knot:
    """Something that only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_only_where_it_is_asked_for() -> None:
    assert gc.isenabled()
    with pytest.raises(KeyError), pauses.deferred():
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        knot = weakref.ref(Knot())
        assert knot() is not None
        pauses.collect()
        assert knot() is None
        raise KeyError
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_the_device_is_described_by_what_will_compute() -> None:
    assert attention_kernel(MODEL, SEQ, CPU) == "flash"
    assert attention_kernel(ModelConfig(n_layer=1, n_head=2, n_embd=32, dropout=0.1), SEQ, CPU) == "math"
    assert describe(MODEL, SEQ, CPU) == f"CPU, {counted(torch.get_num_threads(), 'thread')}, attention: flash"


@pytest.mark.parametrize("cudnn", [None, 90100, 91400])
def test_an_old_cudnn_is_told_of_on_hopper_alone(cudnn: int | None) -> None:
    advice = cudnn_advice((9, 0), cudnn)
    assert advice is not None and "older than 9.15" in advice
    assert ("none" if cudnn is None else f"9.{cudnn // 100 % 100}.0") in advice
    assert cudnn_advice((8, 0), cudnn) is None
    assert cudnn_advice((9, 0), 91501) is None


def test_flash_attention_3_that_is_not_there_is_a_readable_error() -> None:
    with pytest.raises(ConfigError, match=r"execution.attention='fa3' cannot work: .*use execution.attention=sdpa"):
        prepare(ExecutionConfig(attention="fa3"), CPU)
    assert torch.nn.attention.current_flash_attention_impl() is None


# --- model and compiler ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True])
def test_a_loss_in_chunks_is_the_loss(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in bfloat16, where a sum would lose its digits."""
    monkeypatch.setattr(model_module, "CHUNK_TOKENS", 50)  # of 4 x 32 positions: uneven chunks
    ids = torch.randint(0, VOCAB, (4, SEQ), generator=torch.Generator().manual_seed(0))
    ids[0, 20:] = PAD
    found = []
    for chunked in (False, True):
        model = GPT(MODEL, TOKENIZER, SEQ, chunked_loss=chunked)
        model.init_weights(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss, each = model(ids), model(ids, reduction="none")
        loss.backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        found.append((loss, each, gradients))
    (plain, plain_each, plain_gradients), (loss, each, gradients) = found
    assert loss.dtype == each.dtype == torch.float32 and each.shape == (4, SEQ)
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-6)
    assert torch.equal(each, plain_each)
    for one, two in zip(gradients, plain_gradients, strict=True):
        assert float((one - two).norm() / two.norm()) < (1e-2 if autocast else 1e-6)


def test_the_logits_of_padding_are_computed_but_never_seen() -> None:
    model = GPT(MODEL, TOKENIZER, SEQ)
    model.init_weights(0)
    logits = model.logits(torch.zeros(1, 5, dtype=torch.int64))
    assert logits.shape == (1, 5, VOCAB) and logits.stride(1) == 384


@pytest.mark.slow
def test_training_and_evaluation_compile_once_for_each_shape_of_work() -> None:
    """Two sizes of micro-batch, training and two kinds of evaluation in turn: six programs, of at most eight."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    engine = Engine(override(RECIPE, {"model.n_layer": 2}), TOKENIZER, ONE)
    engine.network = torch.compile(engine.model, dynamic=False, backend=counter)
    ids = torch.randint(0, VOCAB, (8, SEQ), generator=torch.Generator().manual_seed(0))  # micro-batches 3, 3 and 2
    for step in range(1, 5):
        engine.train_step(Blocks(ids), step=step, total_steps=10)
        with engine.evaluating():
            for part in Blocks(ids).split(3):
                engine.loss(part)
                engine.loss(part, per_token=True)
    assert counter.frame_count == 6
    torch._dynamo.reset()


@pytest.mark.slow
def test_flex_attention_makes_the_boolean_mask() -> None:
    """What CUDA is given, on the CPU: the same pairs of positions, and the same attention."""
    from torch.nn.attention.flex_attention import create_block_mask, create_mask

    from pretrain_assets.train.attention import may_see

    doc_ids = torch.tensor([[0] * 10 + [1] * 22, [0] * 32])
    made = create_mask(may_see(doc_ids), 2, None, 32, 32, device="cpu")
    assert torch.equal(made, document_mask(doc_ids))
    block_mask = create_block_mask(may_see(doc_ids), 2, None, 32, 32, device="cpu", BLOCK_SIZE=16)
    assert block_mask.kv_num_blocks.tolist() == [[[1, 2]], [[1, 1]]]


# --- packed samples ----------------------------------------------------------------------------------------------


def loader_of(folder: Path, eos_id: int, vocab_size: int) -> BlockLoader:
    case = Case(lengths=(20, 3, 40, 0, 33) * 20, num_splits=4, seed=3)
    location, pin = case.build(folder)
    tokenizer = TokenizerIdentity(name="none", fingerprint="f", vocab_size=vocab_size, eos_id=eos_id, pad_id=eos_id + 1)
    return BlockLoader(location, pin, case.data, tokenizer)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(301, "uint16"), (70_000, "int32")])
def test_a_sample_holds_the_first_blocks_and_what_they_are_of(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    loader = loader_of(tmp_path, 300, vocab_size)
    sample = write_sample(loader, tmp_path / "some" / "blocks.npy", 10)
    expected = torch.cat([batch.input_ids for batch in loader.batches(0, max_batches=3)])[:10]
    assert isinstance(sample.blocks, np.memmap) and sample.blocks.dtype == dtype
    assert torch.equal(torch.from_numpy(sample.blocks.astype(np.int64)), expected)
    facts = json.loads((tmp_path / "some" / "blocks.npy.json").read_text())
    assert facts == sample.facts and facts["plan_digest"] == loader.plan(0).digest and facts["pin"] == str(loader.pin)
    assert (facts["blocks"], facts["seq_len"], facts["tokenizer"]["eos_id"]) == (10, 16, 300)
    assert sorted(path.name for path in (tmp_path / "some").iterdir()) == ["blocks.npy", "blocks.npy.json"]


def test_a_sample_is_never_longer_than_the_epoch(tmp_path: Path) -> None:
    loader = loader_of(tmp_path, 300, 301)
    assert len(write_sample(loader, tmp_path / "all.npy", 10**6).blocks) == loader.plan(0).blocks_per_epoch


def test_what_is_no_sample_is_refused(tmp_path: Path) -> None:
    loader = loader_of(tmp_path, 300, 301)
    with pytest.raises(ConfigError, match=r"ends in \.npy"):
        write_sample(loader, tmp_path / "blocks.bin", 1)
    write_sample(loader, tmp_path / "blocks.npy", 4)
    np.save(tmp_path / "blocks.npy", np.zeros((3, 16), np.uint16))
    with pytest.raises(InputError, match=r"shape \(3, 16\), and 4 x 16 is expected"):
        read_sample(tmp_path / "blocks.npy")
    np.save(tmp_path / "blocks.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(InputError, match="cannot be read as packed blocks"):
        read_sample(tmp_path / "blocks.npy")
    with pytest.raises(InputError, match="pretrain pack-sample RECIPE --out"):
        read_sample(tmp_path / "missing.npy")
