"""AdamW, or Muon and AdamW, and their learning rate: decay on matrices only, linear warm-up, then a cosine.

Invariant: the learning rate is a function of the step and the run's total alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from pretrain_assets.config import TrainConfig


def make_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """The optimizers of all parameters: AdamW, and before it Muon for the matrices of the layers if asked for.

    Weight decay acts on tensors of two or more dimensions, not on biases and norms. AdamW is fused on CUDA.
    """
    named = dict(model.named_parameters())
    optimizers: list[torch.optim.Optimizer] = []
    if config.optimizer == "muon":
        inner = [name for name, weight in named.items() if weight.dim() == 2 and ".layers." in f".{name}"]
        matrices = [named.pop(name) for name in inner]
        # `match_rms_adamw` would tie it to AdamW's rate; the original scale has a rate of its own (Jordan, 2024)
        optimizers.append(
            torch.optim.Muon(matrices, lr=config.muon_learning_rate, weight_decay=config.weight_decay, momentum=0.95)
        )
    groups = [
        {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = next(iter(named.values())).is_cuda
    betas = (config.beta1, config.beta2)
    return [*optimizers, torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=fused)]


MOMENTS: dict[type[torch.optim.Optimizer], set[str]] = {
    torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"},
    torch.optim.Muon: {"momentum_buffer"},
}
"""What an optimizer keeps of every weight once it has made a step."""


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """Learning rate of a step (from 1): linear to the peak at `warmup_steps`, then a cosine to the minimum."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    share = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.min_learning_rate + (config.learning_rate - config.min_learning_rate) * share


def set_learning_rate(optimizers: Sequence[torch.optim.Optimizer], config: TrainConfig, value: float) -> None:
    """Give AdamW this learning rate, and Muon its own in the same proportion to its peak."""
    for optimizer in optimizers:
        muon = isinstance(optimizer, torch.optim.Muon)
        for group in optimizer.param_groups:
            group["lr"] = value * config.muon_learning_rate / config.learning_rate if muon else value
