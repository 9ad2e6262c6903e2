"""What a checkpoint must hold to go on bitwise: weights, optimizer moments, and the generator's state.

Invariant: tensors are named after parameters, so a checkpoint does not depend on the order of parameter groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pretrain_assets.errors import CheckpointError
from pretrain_assets.train.checkpoint import read_tensors
from pretrain_assets.train.model import GPT

MODEL, OPTIMIZER = "model", "optimizer"
"""File names, without suffix."""

_RNG = "rng"


def capture(model: GPT, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, dict[str, Tensor]]:
    """Tensors by name, by file; the tied head is stored once, as the token embedding."""
    moments = {_RNG: torch.get_rng_state()}
    for name, weight in model.named_parameters():
        for optimizer in optimizers:
            if weight in optimizer.state:
                moments |= {f"{name}|{key}": value.detach().cpu() for key, value in optimizer.state[weight].items()}
    return {MODEL: {name: value.detach().cpu() for name, value in model.state_dict().items()}, OPTIMIZER: moments}


def restore_model(folder: Path, model: GPT) -> None:
    """Load the weights of an open checkpoint.

    Raises:
        CheckpointError: they belong to a model of another shape.
    """
    try:
        model.load_state_dict(read_tensors(folder, MODEL))
    except RuntimeError as error:
        raise CheckpointError(
            f"Checkpoint {folder} holds another model: {error}. Use the recipe it was trained with (its passport.json "
            "has it), or another run_dir."
        ) from error


def restore_optimizers(folder: Path, model: GPT, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Load the moments and the generator's state of an open checkpoint."""
    stored = read_tensors(folder, OPTIMIZER)
    torch.set_rng_state(stored.pop(_RNG))
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for name, value in stored.items():
        parameter, _, key = name.rpartition("|")
        by_parameter.setdefault(parameter, {})[key] = value
    names = {id(weight): name for name, weight in model.named_parameters()}
    for optimizer in optimizers:
        state = optimizer.state_dict()
        in_order = [weight for group in optimizer.param_groups for weight in group["params"]]
        state["state"] = {index: by_parameter[names[id(weight)]] for index, weight in enumerate(in_order)}
        optimizer.load_state_dict(state)
