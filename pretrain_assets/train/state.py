"""What a checkpoint must hold to go on bitwise: weights, optimizer moments, and the generator's state.

Invariant: tensors are named after parameters and whole, so a checkpoint depends neither on the order of parameter
groups nor on how many ranks shared the model out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from pretrain_assets.config import Recipe, TokenizerIdentity, from_dict
from pretrain_assets.errors import CheckpointError, ConfigError
from pretrain_assets.train.checkpoint import MODEL, OPTIMIZER, read_passport
from pretrain_assets.train.distributed import World
from pretrain_assets.train.engine import Engine
from pretrain_assets.train.model import GPT
from pretrain_assets.train.optim import MOMENTS
from pretrain_assets.train.preflight import check_memory
from pretrain_assets.train.shards import Piece, read_into, stored

_CPU, _GENERATOR = torch.device("cpu"), "generator"


def capture(engine: Engine) -> dict[str, dict[str, Piece]]:
    """What this rank writes, by name, for the files of weights and of the optimizer; nothing is copied yet.

    A moment is named `<parameter>|<moment>`, the state of the device's generator `generator|<device type>`. The tied
    head is stored once, as the token embedding.
    """
    weights = engine.model.state_dict()  # asked first: it also shares out again what a forward pass put together
    moments: dict[str, Tensor] = {}
    for name, weight in engine.model.named_parameters():
        for optimizer in engine.optimizers:
            if weight in optimizer.state:
                moments |= {f"{name}|{key}": value for key, value in optimizer.state[weight].items()}
    device = engine.world.device
    moments[f"{_GENERATOR}|{device.type}"] = (
        torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    )
    return {MODEL: _mine(weights, engine.world), OPTIMIZER: _mine(moments, engine.world)}


def restore(folder: Path, engine: Engine) -> None:
    """Load weights, moments and the generator's state of an open checkpoint into an engine of any number of ranks.

    Raises:
        CheckpointError: they belong to a model of another shape or to another optimizer, or are damaged.
    """
    _restore_weights(folder, engine.model)
    parameters = dict(engine.model.named_parameters())
    moments: dict[str, dict[str, Tensor]] = {}
    for name, (shape, dtype) in stored(folder).items():
        owner, _, moment = name.rpartition("|")
        if owner:
            weight = parameters.get(owner)  # whose moments are shared out over the ranks as it is
            like = torch.empty(shape) if weight is None or weight.shape != shape else weight
            moments.setdefault(owner, {})[moment] = torch.zeros_like(like, dtype=dtype)
    of_weights = {owner: some for owner, some in moments.items() if owner != _GENERATOR}
    untouched = not of_weights and not read_passport(folder)["tokens_seen"]  # by the optimizer: all was holes so far
    if not untouched:
        _check_moments(folder, of_weights, engine)
    read_into(folder, {f"{owner}|{name}": value for owner, some in moments.items() for name, value in some.items()})
    _restore_generator(folder, moments.pop(_GENERATOR, {}), engine.world.device)
    names = {id(weight): name for name, weight in parameters.items()}
    for optimizer in () if untouched else engine.optimizers:
        state = optimizer.state_dict()
        in_order = [weight for group in optimizer.param_groups for weight in group["params"]]
        state["state"] = {index: moments[names[id(weight)]] for index, weight in enumerate(in_order)}
        optimizer.load_state_dict(state)


def load_model(folder: Path, *, device: torch.device = _CPU) -> GPT:
    """The model of an open checkpoint in evaluation mode, in this process alone.

    Raises:
        CheckpointError: its weights do not fit the recipe in its passport.
    """
    passport = read_passport(folder)
    try:
        recipe, tokenizer = from_dict(Recipe, passport["recipe"]), from_dict(TokenizerIdentity, passport["tokenizer"])
        check_memory(recipe, tokenizer)
    except ConfigError as error:
        raise CheckpointError(f"Checkpoint {folder} cannot be used, by its passport.json: {error}") from error
    with torch.device("meta"):
        model = GPT(recipe.model, tokenizer, recipe.data.seq_len)
    model.to_empty(device=device)
    _restore_weights(folder, model)
    return model.eval()


def _restore_weights(folder: Path, model: GPT) -> None:
    weights = model.state_dict()
    there = {name: dtype for name, (_, dtype) in stored(folder).items() if "|" not in name}
    strange = sorted(there.keys() - weights.keys())
    if strange:
        raise CheckpointError(
            f"Checkpoint {folder} holds another model: it also has {', '.join(strange[:3])}. Use the recipe it was "
            "trained with (its passport.json has it), or another run_dir."
        )
    for name, dtype in there.items():
        _check_type(folder, name, dtype)
    read_into(folder, weights)


def _check_moments(folder: Path, moments: Mapping[str, Mapping[str, Tensor]], engine: Engine) -> None:
    """Refuse what is not the whole state of the engine's optimizers."""
    if not moments:
        raise CheckpointError(f"Checkpoint {folder} holds no state of an optimizer: a file is missing")
    parameters = dict(engine.model.named_parameters())
    if moments.keys() != parameters.keys():
        few = ", ".join(sorted(moments.keys() ^ parameters.keys())[:3])
        raise CheckpointError(f"Checkpoint {folder} holds the optimizer of another model; they differ in {few}")
    names = {id(weight): name for name, weight in parameters.items()}
    for optimizer in engine.optimizers:
        wanted = MOMENTS[type(optimizer)]
        for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
            name = names[id(weight)]
            if moments[name].keys() != wanted:
                few = ", ".join(sorted(moments[name].keys() ^ wanted))
                raise CheckpointError(f"Checkpoint {folder} holds another optimizer's state of {name}, by its {few}")
            for moment, value in moments[name].items():
                _check_type(folder, f"{name}|{moment}", value.dtype)
                if value.shape != (() if moment == "step" else weight.shape):
                    raise CheckpointError(f"Checkpoint {folder} holds {name}|{moment} of shape {tuple(value.shape)}")


def _check_type(folder: Path, name: str, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise CheckpointError(f"Checkpoint {folder} is damaged: it holds {name} as {dtype}, not in floating point")


def _restore_generator(folder: Path, states: Mapping[str, Tensor], device: torch.device) -> None:
    """Set the device's generator; one saved on another kind of device says nothing about this one's."""
    if device.type not in states:
        return
    try:
        if device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], device)
        else:
            torch.set_rng_state(states["cpu"])
    except (RuntimeError, TypeError) as error:
        name = f"{_GENERATOR}|{device.type}"
        raise CheckpointError(f"Checkpoint {folder} is damaged: {name} is no state of a generator: {error}") from error


def _mine(tensors: Mapping[str, Tensor], world: World) -> dict[str, Piece]:
    """The parts that only this rank has, and its fair share of the tensors that every rank has whole."""
    pieces, loads = {}, [0] * world.size
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
        if hasattr(tensor, "__create_chunk_list__"):  # a DTensor, whose part may be empty
            part: Tensor = cast(Any, tensor).to_local().detach()
            if part.numel():
                pieces[name] = Piece(part, tuple(cast(Any, tensor).__create_chunk_list__()[0].offsets))
            continue
        rank = loads.index(min(loads))
        loads[rank] += tensor.nbytes
        if rank == world.rank:
            pieces[name] = Piece(tensor.detach(), (0,) * tensor.dim())
    return pieces
