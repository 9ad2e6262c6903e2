"""A run as lines for people: what begins, one line per record, what it came to.

Invariant: pure text of what it is given; lines of one kind have their columns at the same places; unknown is `n/a`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import RunSpec
from pretrain_assets.plural import counted
from pretrain_assets.train.flops import describe

if TYPE_CHECKING:
    from pretrain_assets.train.spikes import Spike


def opening(
    spec: RunSpec, *, num_parameters: int, ranks: int, device_name: str, step: int, total_steps: int, epoch_steps: int
) -> str:
    """What is about to be trained, on what, with what, and where it goes; and a warning where little can come of it."""
    recipe = spec.recipe
    model, data, train, execution = recipe.model, recipe.data, recipe.train, recipe.execution
    blocks = counted(recipe.blocks_per_step // ranks, "block")
    steps, epochs = counted(total_steps, "step"), counted(total_steps / epoch_steps, "epoch", ".3g")
    kept = f"the last {execution.keep_last} kept" + (
        f", and every {counted(execution.keep_every, 'step')} one for good" if execution.keep_every else ""
    )
    rows = {
        "recipe": f"{recipe.name}: {num_parameters:,} parameters, {model.n_layer} layers x {model.n_embd}, "
        f"{train.optimizer}",
        "device": f"{device_name}, {counted(ranks, 'rank')}" + (f" ({execution.parallel})" if ranks > 1 else ""),
        "step": f"{train.global_batch_tokens:,} tokens = {counted(ranks, 'rank')} x {blocks} (at most "
        f"{execution.micro_batch_blocks:,} at once) x {data.seq_len:,} tokens",
        "run": f"{steps}, {epochs} of {epoch_steps:,}, {total_steps * train.global_batch_tokens:,} tokens"
        + (f"; {counted(step, 'step')} done" if step else ""),
        "data": f"{spec.tag} ({spec.pin}), {data.filter}",
        "saved": f"every {counted(execution.checkpoint_every, 'step')}, {kept}, in {spec.run_dir}",
        "MFU": describe(num_parameters, model, data.seq_len, device_name, ranks),
    }
    lines = [f"{name:<6} {text}" for name, text in rows.items()]
    if train.warmup_steps > total_steps:
        lines.append(
            f"warning: train.warmup_steps={train.warmup_steps:,}, and the run has {steps}: the learning rate gets no "
            f"further than {total_steps / train.warmup_steps:.2g} of its peak; lower train.warmup_steps"
        )
    return "\n".join(lines)


def progress_line(record: Mapping[str, Any]) -> str:
    """A record of metrics.jsonl."""
    total = f"{record['total_steps']}"
    at = f"step {record['step']:>{len(total)}}/{total}"
    if "val_loss" in record:
        parts = [at, f"val loss {record['val_loss']:.4f}"]
        if "val_perplexity" in record:
            parts.append(f"perplexity {record['val_perplexity']:,.2f}")
        if record.get("val_bits_per_byte") is not None:
            parts.append(f"{record['val_bits_per_byte']:.4f} bits/byte")
        return " | ".join([*parts, f"on {record['val_tokens']:,} tokens"])
    share = record["mfu"]
    return " | ".join(
        [
            at,
            f"loss {record['loss']:7.4f}" if "loss" in record else "all holes   ",
            f"lr {record['lr']:.2e}",
            f"grad {record.get('grad_norm', 0.0):6.2f}",
            f"{record['tok_per_s'] / 1e3:8.1f}k tok/s",
            "MFU   n/a" if share is None else f"MFU {share:5.1%}",
            f"data-wait {record['data_wait']:5.1%}",
            f"queue {record['queue_rows']:7,} rows",
            f"mem {record['memory_bytes'] / 1e9:6.2f} GB",
            f"eta {duration(record['eta_seconds']):>6}",
        ]
    )


def closing(result: Mapping[str, Any]) -> str:
    """How a run ended, what it took, and where the time went."""
    if result["status"] == "failed":
        return f"failed after {duration(result['seconds'])}"
    losses = f"{_loss(result, 'loss', 'train_loss')} | {_loss(result, 'val loss', 'val_loss')}"
    line = f"{result['status']} at step {result['step']} | {losses} | {duration(result['seconds'])}"
    parts = result.get("seconds_by_part")
    if not parts:
        return line
    shares = ", ".join(f"{name.replace('_', '-')} {seconds / result['seconds']:.1%}" for name, seconds in parts.items())
    return f"{line}\ngoodput {_rate(result['goodput_tok_per_s'])} tok/s of all wall time: {shares}"


def spike_line(spike: Spike, command: str) -> str:
    """A warning of a loss that jumped."""
    return (
        f"the loss jumped to {spike.loss:.4f} at step {spike.step}, where {spike.expected:.4f} was to be expected; "
        f"what the model saw there: {command}"
    )


def duration(seconds: float) -> str:
    """Seconds as `42s`, `3m07s`, `1h23m` or `2d04h`."""
    whole = round(seconds)
    for unit, length, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= length:
            return f"{whole // length}{unit}{whole % length // part:02d}{smaller}"
    return f"{whole}s"


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second / 1e3:,.1f}k" if tokens_per_second >= 1e3 else f"{tokens_per_second:.0f}"


def _loss(result: Mapping[str, Any], name: str, key: str) -> str:
    """A loss, and its step where that is not the last one."""
    if result.get(key) is None:
        return f"{name} n/a"
    at = result.get(f"{key}_step", result["step"])
    return f"{name} {result[key]:.4f}" + (f" (at step {at})" if at != result["step"] else "")
