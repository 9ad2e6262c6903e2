"""tok/s and MFU of one model, micro-batch and way to execute it, on one or more sources of blocks.

A step is 64 blocks of 1,024 tokens, what each of 8 GPUs does of a step of the GPT-2 recipes, in micro-batches. The
first step, which compiles, and 20 more are not timed; then 50 are, between two synchronisations of the device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu_child import GPT2, HostBatch, Report, engine_of, main, pinned, recipe_of, synthetic
from pretrain_assets.loader.sample import Sample, read_sample
from pretrain_assets.train.device import attention_kernel, device_name
from pretrain_assets.train.distributed import World
from pretrain_assets.train.engine import Blocks, Engine
from pretrain_assets.train.feed import feed
from pretrain_assets.train.flops import causal_flops_per_token, flops_per_token, mfu

BLOCKS_PER_STEP, SMOKE_BLOCKS_PER_STEP = 64, 4
WARM_UP_STEPS, STEPS = 20, 50
SMOKE_WARM_UP_STEPS, SMOKE_STEPS = 1, 4
TOTAL_STEPS = 4_636
"""Of the run whose learning rates the steps have."""


def speed(
    report: Report,
    world: World,
    *,
    recipe: str,
    micro_batch: int,
    compiled: bool,
    sources: list[str],
    blocks: str | None,
    smoke: bool = False,
    cudnn: bool = True,
    document_mask: bool = False,
    chunked_loss: bool = False,
    compile_mode: str = "default",
) -> None:
    """Measure on every source in turn, with one engine.

    Args:
        report: Gets the kernel of attention, then each source's numbers; or why it `failed`.
        world: One rank.
        recipe: Name of the recipe.
        micro_batch: Blocks at once.
        compiled: Whether to compile.
        sources: Of `synthetic`, `packed` and `loader`.
        blocks: File of packed blocks, or None.
        smoke: Tiny, and few steps.
        cudnn: Whether attention may be cuDNN's.
        document_mask: As of the model.
        chunked_loss: As of the execution.
        compile_mode: As of the execution.
    """
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    changes: dict[str, Any] = {
        "execution.micro_batch_blocks": micro_batch,
        "execution.compile": compiled,
        "execution.chunked_loss": chunked_loss,
        "execution.compile_mode": compile_mode,
        "model.document_mask": document_mask,
    }
    found = recipe_of(recipe, changes, smoke=smoke)
    seq_len = found.data.seq_len
    per_step = SMOKE_BLOCKS_PER_STEP if smoke else BLOCKS_PER_STEP
    try:
        engine = engine_of(found, world)
        report("attention", "flex" if document_mask else attention_kernel(found.model, seq_len, world.device))
        for source in sources:
            with contextlib.closing(_batches(source, per_step, seq_len, blocks, document_mask)) as batches:
                if isinstance(skipped := next(batches), str):
                    report(source, {"skipped": skipped})
                    continue
                counts = (SMOKE_WARM_UP_STEPS, SMOKE_STEPS) if smoke else (WARM_UP_STEPS, STEPS)
                report(source, _measure(engine, feed(batches, world.device), per_step, seq_len, *counts))
    except torch.OutOfMemoryError as error:
        report("failed", f"out of memory: {str(error).splitlines()[0]}")
    except Exception as error:
        kind = type(error).__name__
        first = next(iter(str(error).splitlines()), "")
        report("failed", f"{kind}: {first}"[:500])


def _measure(
    engine: Engine, stream: Iterator[Blocks], blocks: int, seq_len: int, warm_up_steps: int, steps: int
) -> dict[str, Any]:
    device = engine.world.device
    first = time.perf_counter()
    loss, _ = engine.train_step(next(stream), step=1, total_steps=TOTAL_STEPS)
    first_loss = float(loss)
    first = time.perf_counter() - first
    for step in range(warm_up_steps):
        engine.train_step(next(stream), step=2 + step, total_steps=TOTAL_STEPS)
    _synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    waited, started = 0.0, time.perf_counter()
    for step in range(steps):
        asked = time.perf_counter()
        ids = next(stream)
        waited += time.perf_counter() - asked
        loss, _ = engine.train_step(ids, step=2 + warm_up_steps + step, total_steps=TOTAL_STEPS)
    _synchronize(device)
    seconds = time.perf_counter() - started
    tokens_per_second = steps * blocks * seq_len / seconds
    name = device_name(device)
    numbers = (engine.num_parameters, engine.model.config, seq_len)
    full, causal = flops_per_token(*numbers), causal_flops_per_token(*numbers)
    return {
        "tokens_per_second": round(tokens_per_second, 1),
        "mfu": _rounded(mfu(tokens_per_second, full, name, 1)),
        "mfu_causal": _rounded(mfu(tokens_per_second, causal, name, 1)),
        "flops_per_token": full,
        "parameters": engine.num_parameters,
        "steps": steps,
        "blocks_per_step": blocks,
        "step_seconds": round(seconds / steps, 5),
        "first_step_seconds": round(first, 2),
        "data_wait": round(waited / seconds, 5),
        "peak_memory_gb": round(torch.cuda.max_memory_allocated(device) / 1e9, 2) if device.type == "cuda" else None,
        "loss_first": round(first_loss, 4),
        "loss_last": round(float(loss), 4),
    }


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _batches(source: str, per_step: int, seq_len: int, path: str | None, masked: bool) -> Iterator[Any]:
    """An empty batch or the reason why there is none, then batches without end."""
    if source == "synthetic":
        yield None
        yield from synthetic(per_step, seq_len, GPT2.vocab_size)
    elif source == "loader":
        from benchmarks.gpu_loader import batches

        yield None
        yield from batches(per_step)
    elif path is None:
        yield "there is no file of packed blocks; name one with --blocks"
    else:
        yield None
        yield from _packed(read_sample(path), per_step, seq_len, masked)


def _packed(sample: Sample, per_step: int, seq_len: int, masked: bool) -> Iterator[HostBatch]:
    """Real blocks from a memory-mapped file, copied to pinned memory, over and over."""
    eos = sample.facts["tokenizer"]["eos_id"]
    while True:
        for start in range(0, len(sample.blocks) - per_step + 1, per_step):
            rows = sample.blocks[start : start + per_step, :seq_len]
            batch = HostBatch(pinned(torch.from_numpy(rows.astype("int32"))))
            yield _with_documents(batch, eos) if masked else batch


def _with_documents(batch: HostBatch, eos_id: int) -> HostBatch:
    """Document numbers and places as the loader makes them, from where documents end."""
    ids = batch.input_ids
    ends = (ids == eos_id).int()
    doc_ids = torch.cumsum(ends, 1, dtype=torch.int32) - ends
    places = torch.arange(ids.shape[1], dtype=torch.int32).expand_as(ids)
    begins = torch.where(torch.nn.functional.pad(ends[:, :-1], (1, 0)) == 1, places, 0)
    positions = places - torch.cummax(begins, 1).values
    return replace(batch, doc_ids=pinned(doc_ids), position_ids=pinned(positions))


if __name__ == "__main__":
    main(speed)
