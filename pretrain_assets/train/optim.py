"""AdamW and its learning rate: decay on matrices only, linear warm-up, then a cosine.

Invariant: the learning rate is a function of the step and the run's total alone.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from pretrain_assets.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on tensors of two or more dimensions, none on biases and norms; fused on CUDA."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=parameters[0].is_cuda,
    )


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """Learning rate of a step (from 1): linear to the peak at `warmup_steps`, then a cosine to the minimum."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    share = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.min_learning_rate + (config.learning_rate - config.min_learning_rate) * share


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Give every parameter group the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = value
