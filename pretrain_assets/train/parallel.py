"""One model on many ranks: replicated (DDP) or shared out (FSDP2), and compiled.

Invariant: parameters keep their names and values in every form, so a checkpoint of one form resumes in any other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pretrain_assets.config import ExecutionConfig
from pretrain_assets.train.distributed import World
from pretrain_assets.train.model import GPT


def shard(model: GPT, world: World, execution: ExecutionConfig) -> None:
    """Share out the weights of a model in place if asked for; call it before the optimizer is made."""
    if execution.parallel != "fsdp" or world.size == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    cuda = world.device.type == "cuda"
    # Weights are gathered as bfloat16, half of the traffic; gradients are summed as float32.
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if cuda else MixedPrecisionPolicy()
    )
    for layer in model.layers:
        if execution.compile:
            layer.compile(dynamic=False, mode=_mode(execution))
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def replicate(model: GPT, world: World, execution: ExecutionConfig) -> nn.Module:
    """What a training step calls: the model, compiled if asked for, with gradients averaged over all ranks.

    DDP is wrapped before compiling, so that the compiler can cut its graph where gradients are sent (PyTorch's notes
    on DistributedDataParallel).
    """
    sharded = execution.parallel == "fsdp" and world.size > 1
    network: nn.Module = model
    if world.size > 1 and not sharded:
        cuda = world.device.type == "cuda"
        network = DistributedDataParallel(
            model, device_ids=[world.device] if cuda else None, gradient_as_bucket_view=True
        )
    if execution.compile and not sharded:
        network = cast(nn.Module, torch.compile(network, dynamic=False, mode=_mode(execution)))
    return network


@contextlib.contextmanager
def gradients_sent(network: nn.Module, sent: bool) -> Iterator[None]:
    """Exchange gradients in the backward pass inside, or leave them on this rank (all micro-batches but the last)."""
    plain = getattr(network, "_orig_mod", network)
    if isinstance(plain, DistributedDataParallel) and not sent:
        with plain.no_sync():
            yield
        return
    if hasattr(plain, "set_requires_gradient_sync"):  # FSDP2
        cast(Any, plain).set_requires_gradient_sync(sent)
    yield


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be shared out, as a plain one on every rank."""
    return cast(Tensor, cast(Any, tensor).full_tensor()) if hasattr(tensor, "full_tensor") else tensor


def _mode(execution: ExecutionConfig) -> str | None:
    return None if execution.compile_mode == "default" else execution.compile_mode
