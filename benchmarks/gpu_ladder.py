"""The correctness ladder on this device: one check a rung, seconds each, with the values it was decided by.

Invariant: a rung that breaks is reported like one that is not passed, and the next one is still tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_child import HostBatch, Report, engine_of, main, pinned, recipe_of
from pretrain_assets.config import Recipe, TokenizerIdentity
from pretrain_assets.train.device import attention_kernel, device_name
from pretrain_assets.train.distributed import World
from pretrain_assets.train.engine import Blocks, Engine
from pretrain_assets.train.feed import feed
from pretrain_assets.train.flops import peak_tflops

BLOCKS, SEQ_LEN, CUT = 4, 256, 100
"""Of the batch that all rungs use; where documents matter, the second begins at `CUT`."""
VOCAB = 1_000
TOKENIZER = TokenizerIdentity(name="none", fingerprint="none", vocab_size=VOCAB, eos_id=VOCAB - 1, pad_id=VOCAB)
SMALL = {
    "model.n_layer": 2,
    "model.n_head": 2,
    "model.n_embd": 128,
    "data.seq_len": SEQ_LEN,
    "execution.compile": False,
    "execution.micro_batch_blocks": BLOCKS,
    "train.global_batch_tokens": SEQ_LEN,
    "train.learning_rate": 3e-3,
    "train.warmup_steps": 5,
}
BFLOAT16 = 4e-3
"""Relative rounding of bfloat16, 2 ** -8: how far two ways to compute the same loss may lie apart on CUDA."""


class Ladder:
    """The rungs, on one device."""

    def __init__(self, world: World, *, smoke: bool = False):
        self.world, self.device = world, world.device
        self.small = SMALL | ({"model.n_embd": 64} if smoke else {})
        self.tolerance = BFLOAT16 if self.device.type == "cuda" else 1e-5
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, VOCAB - 1, (BLOCKS, SEQ_LEN), generator=generator).to(self.device)

    def initial_loss_is_near_ln_v(self) -> dict[str, Any]:
        """Nothing is known yet: every token is as likely as any other."""
        loss = self._mean_loss(self._engine())
        return {"ok": abs(loss - math.log(VOCAB)) < 0.15, "loss": loss, "ln_v": math.log(VOCAB)}

    def overfits_one_batch(self) -> dict[str, Any]:
        """The whole step learns."""
        engine = self._engine()
        losses = [self._step(engine, step)[0] for step in range(1, 61)]
        return {"ok": losses[-1] < 0.1 * losses[0], "first": losses[0], "last": losses[-1]}

    def padded_vocabulary_equals_unpadded(self) -> dict[str, Any]:
        """What stands in the rows of padding changes no bit of the loss, and they get no gradient."""
        engine = self._engine()
        loss = engine.loss(Blocks(self.ids))
        loss.backward()
        before = loss.detach()
        weight = engine.model.token_embedding.weight
        gradient = float(weight.grad[VOCAB:].abs().max())
        with torch.no_grad(), engine.autocast():
            logits = engine.model.logits(self.ids)[:, :-1].flatten(0, 1)
            plain = float(F.cross_entropy(logits.float(), self.ids[:, 1:].flatten(), reduction="sum"))
            weight[VOCAB:] = 50.0
            after = engine.loss(Blocks(self.ids))
        close = abs(plain / float(before) - 1) < self.tolerance
        ok = bool(before == after) and gradient == 0 and logits.shape[-1] == VOCAB and close
        return {
            "ok": ok,
            "loss": float(before),
            "with_other_padding": float(after),
            "plain": plain,
            "gradient": gradient,
        }

    def documents_are_isolated(self) -> dict[str, Any]:
        """Another first document changes no bit of the second's loss (and does without the mask); the CPU agrees."""
        doc_ids, positions = self._two_documents()
        other = self.ids.clone()
        other[:, : CUT - 1] = (other[:, : CUT - 1] + 7) % (VOCAB - 1)
        found: dict[str, Tensor] = {}
        for masked in (True, False):
            engine = self._engine(**{"model.document_mask": masked})
            with engine.evaluating():
                for name, ids in (("one", self.ids), ("other", other)):
                    loss = engine.loss(Blocks(ids, doc_ids, positions), per_token=True)
                    found[f"{name}, {masked}"] = loss[:, CUT:]
        leak = (found["one, True"] - found["other, True"]).abs().max()
        unmasked = (found["one, False"] - found["other, False"]).abs().max()
        recipe = self._recipe(**{"model.document_mask": True})
        engine = Engine(recipe, TOKENIZER, replace(self.world, device=torch.device("cpu")))
        with engine.evaluating():
            on_cpu = engine.loss(Blocks(*(t.cpu() for t in (self.ids, doc_ids, positions))), per_token=True)
        apart = float((found["one, True"].cpu() - on_cpu[:, CUT:]).abs().max())
        ok = bool(leak == 0) and bool(unmasked > 0) and apart < 20 * self.tolerance
        return {"ok": ok, "leak": float(leak), "without_mask": float(unmasked), "apart_from_cpu": apart}

    def masked_gradients_are_those_of_the_cpu(self) -> dict[str, Any]:
        """The backward pass of the document mask."""
        doc_ids, positions = self._two_documents()
        norms = []
        for device in (self.device, torch.device("cpu")):
            recipe = self._recipe(**{"model.document_mask": True})
            engine = Engine(recipe, TOKENIZER, replace(self.world, device=device))
            blocks = Blocks(*(tensor.to(device) for tensor in (self.ids, doc_ids, positions)))
            norms.append(float(engine.train_step(blocks, step=1, total_steps=100)[1]))
        return {"ok": abs(norms[0] / norms[1] - 1) < 5 * self.tolerance, "norm": norms[0], "on_cpu": norms[1]}

    def compiled_equals_eager(self) -> dict[str, Any]:
        """Losses and gradient norms of five steps."""
        return self._compare({}, {"execution.compile": True})

    def chunked_loss_equals_plain(self) -> dict[str, Any]:
        """The same, with chunks smaller than the micro-batch."""
        from pretrain_assets.train import model

        whole, model.CHUNK_TOKENS = model.CHUNK_TOKENS, 300
        try:
            return self._compare({}, {"execution.chunked_loss": True})
        finally:
            model.CHUNK_TOKENS = whole

    def micro_batches_change_nothing(self) -> dict[str, Any]:
        """The same, one block at a time."""
        return self._compare({}, {"execution.micro_batch_blocks": 1})

    def feed_delivers_the_same_blocks(self) -> dict[str, Any]:
        """One pinned buffer, written over as soon as the next batch is asked for, while the device is busy."""
        buffer = pinned(torch.zeros(64, 16_384, dtype=torch.int32))

        def batches() -> Iterator[HostBatch]:
            for number in range(8):
                buffer.copy_(torch.arange(number, number + buffer.numel()).view_as(buffer))
                yield HostBatch(buffer)
                buffer.fill_(-1)

        busy = torch.randn(2048 if self.device.type == "cuda" else 64, 64, device=self.device)
        sums = []
        for blocks in feed(batches(), self.device):
            for _ in range(200):
                busy = torch.tanh(busy @ (busy.mT @ busy) / 1e3)
            sums.append(blocks.input_ids.sum())
        size = buffer.numel()
        expected = [size * (size - 1) // 2 + number * size for number in range(8)]
        return {"ok": [int(one) for one in sums] == expected, "batches": len(sums)}

    def _two_documents(self) -> tuple[Tensor, Tensor]:
        places = torch.arange(SEQ_LEN, device=self.device).expand(BLOCKS, SEQ_LEN)
        return (places >= CUT).long(), torch.where(places >= CUT, places - CUT, places)

    def _compare(self, *changes: dict[str, Any]) -> dict[str, Any]:
        one, two = (self._history(self._engine(**change)) for change in changes)
        apart = max(abs(a / b - 1) for a, b in zip(one, two, strict=True))
        return {"ok": apart < 5 * self.tolerance, "largest_relative_difference": apart, "losses_and_norms": two}

    def _history(self, engine: Engine) -> list[float]:
        return [value for step in range(1, 6) for value in self._step(engine, step)]

    def _step(self, engine: Engine, step: int) -> tuple[float, float]:
        loss, norm = engine.train_step(Blocks(self.ids), step=step, total_steps=1000)
        return float(loss), float(norm)

    def _mean_loss(self, engine: Engine) -> float:
        with engine.evaluating():
            return float(engine.loss(Blocks(self.ids))) / (BLOCKS * (SEQ_LEN - 1))

    def _recipe(self, **changes: Any) -> Recipe:
        return recipe_of("gpt2_124m", self.small | changes, smoke=False)

    def _engine(self, **changes: Any) -> Engine:
        return engine_of(self._recipe(**changes), self.world, TOKENIZER)


RUNGS: tuple[Callable[[Ladder], dict[str, Any]], ...] = (
    Ladder.initial_loss_is_near_ln_v,
    Ladder.padded_vocabulary_equals_unpadded,
    Ladder.overfits_one_batch,
    Ladder.micro_batches_change_nothing,
    Ladder.chunked_loss_equals_plain,
    Ladder.feed_delivers_the_same_blocks,
    Ladder.compiled_equals_eager,
    Ladder.documents_are_isolated,
    Ladder.masked_gradients_are_those_of_the_cpu,
)


def climb(report: Report, world: World, *, smoke: bool = False) -> None:
    """Report the device, then every rung."""
    device = world.device
    model = recipe_of("gpt2_124m", {}, smoke=smoke).model
    facts: dict[str, Any] = {"name": device_name(device), "peak_tflops": peak_tflops(device_name(device))}
    facts |= {"attention": attention_kernel(model, 1024, device), "cudnn": torch.backends.cudnn.version()}
    if device.type == "cuda":
        facts["capability"] = list(torch.cuda.get_device_capability(device))
        facts["memory_gb"] = round(torch.cuda.get_device_properties(device).total_memory / 1e9, 1)
        facts["cuda"] = torch.version.cuda
    report("device", facts | {"torch": torch.__version__})
    ladder = Ladder(world, smoke=smoke)
    for rung in RUNGS:
        try:
            found = rung(ladder)
        except Exception as error:
            found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
        report(rung.__name__, found)


if __name__ == "__main__":
    main(climb)
