"""Our GPT in the layout of Hugging Face's `GPT2LMHeadModel`, and back: names and shapes of tensors, and config.json.

Invariant: both directions go through the same table of names, and back again is bitwise the same. A model that ours
cannot compute exactly is refused, never approximated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pretrain_assets.config import ModelConfig, TokenizerIdentity, from_dict
from pretrain_assets.errors import CheckpointError, ConfigError
from pretrain_assets.train.model import GPT

THEIRS = {
    "token_embedding": "wte",
    "position_embedding": "wpe",
    "norm": "ln_f",
    "norm_1": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.projection": "attn.c_proj",
    "norm_2": "ln_2",
    "expand": "mlp.c_fc",
    "projection": "mlp.c_proj",
}
"""Our modules (inside a layer, from `norm_1` on) and theirs."""
TRANSPOSED = re.compile(r"\.c_\w+\.weight$")
"""Their linear layers store (in, out), ours (out, in)."""
EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"
_BUFFER = re.compile(r"\.attn\.(bias|masked_bias)$")
"""Causal masks that older files carry beside the weights."""

FIXED: dict[str, Any] = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
"""What our model always does; also what transformers assumes where config.json does not say."""


def their_name(name: str) -> str:
    """Their name of one of our tensors, such as `transformer.h.0.attn.c_attn.weight`."""
    module, _, kind = name.rpartition(".")
    layer = re.match(r"layers\.(\d+)\.", module)
    inside = module[layer.end() :] if layer else module
    return f"transformer.{f'h.{layer[1]}.' if layer else ''}{THEIRS[inside]}.{kind}"


def to_theirs(model: GPT) -> dict[str, Tensor]:
    """The weights of our model by their names: vocabulary without padding, the tied head once, as the embedding."""
    found = {}
    for name, value in model.state_dict().items():
        theirs = their_name(name)
        found[theirs] = value.T.contiguous() if TRANSPOSED.search(theirs) else value
    return {**found, EMBEDDING: found[EMBEDDING][: model.vocab_size].contiguous()}


def load_theirs(model: GPT, tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Load weights by their names into our model; the padding of the vocabulary becomes 0.

    Args:
        model: A model of the right shape.
        tensors: Weights, with or without the prefix `transformer.`.
        where: What they were read from, for errors.

    Raises:
        CheckpointError: a tensor is missing, unknown or has another shape or type, or the head is not the embedding.
    """
    given = {
        name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": value
        for name, value in tensors.items()
        if not _BUFFER.search(name)
    }
    for name, value in given.items():
        if not value.is_floating_point():
            raise CheckpointError(
                f"{where}: {name} has the type {value.dtype}; only floating-point weights are loaded."
            )
    head = given.pop(HEAD, None)
    ours = model.state_dict()
    wanted = {their_name(name): name for name in ours}
    missing, unknown = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
    if missing or unknown:
        lists = [
            f"{word}: {', '.join(names[:5])}" for word, names in (("missing", missing), ("unknown", unknown)) if names
        ]
        raise CheckpointError(f"{where} does not hold the weights that its config.json describes; {'; '.join(lists)}.")
    if head is not None and not (head.dtype == given[EMBEDDING].dtype and head.equal(given[EMBEDDING])):
        raise CheckpointError(f"{where} has an output head of its own; only models with a tied head can be loaded.")
    for theirs, name in wanted.items():
        value = given[theirs].T if TRANSPOSED.search(theirs) and given[theirs].dim() == 2 else given[theirs]
        target = ours[name]
        if theirs == EMBEDDING and value.shape == (model.vocab_size, target.shape[1]):
            target[model.vocab_size :] = 0
            target = target[: model.vocab_size]
        if value.shape != target.shape:
            raise CheckpointError(
                f"{where}: {theirs} has the shape {tuple(given[theirs].shape)}, which is not what its config.json says."
            )
        target.copy_(value)


def to_config(model: GPT, tokenizer: TokenizerIdentity, dtype: str) -> dict[str, Any]:
    """The contents of config.json.

    `pad_token_id` is given only where the pad id is in the vocabulary: elsewhere no row of the embedding belongs to it,
    and transformers would look one up.
    """
    config, dropout = model.config, model.config.dropout
    return {
        "architectures": ["GPT2LMHeadModel"],
        **FIXED,
        "vocab_size": model.vocab_size,
        "n_positions": model.seq_len,
        "n_embd": config.n_embd,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_inner": None,
        "attn_pdrop": dropout,
        "embd_pdrop": dropout,
        "resid_pdrop": dropout,
        "initializer_range": 0.02,
        "bos_token_id": tokenizer.eos_id,
        "eos_token_id": tokenizer.eos_id,
        **({"pad_token_id": tokenizer.pad_id} if tokenizer.pad_id < tokenizer.vocab_size else {}),
        "dtype": dtype,
        "use_cache": True,
    }


def to_generation_config(tokenizer: TokenizerIdentity) -> dict[str, Any]:
    """The contents of generation_config.json. Rows of a batch that are done are filled with end-of-text."""
    return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_id)


def from_config(config: Mapping[str, Any], *, where: str) -> ModelConfig:
    """Our model's shape from a config.json.

    Raises:
        CheckpointError: a setting is missing, or describes a model that ours is not.
    """
    for name, value in FIXED.items():
        given = config.get(name, None if name == "model_type" else value)
        if given != value:
            raise CheckpointError(
                f"{where}: config.json has {name}={given!r}; only GPT-2 models with {name}={value!r} can be loaded."
            )
    sizes = {name: config.get(name) for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")}
    missing = [name for name, value in sizes.items() if value is None]
    if missing:
        raise CheckpointError(f"{where}: config.json does not say {', '.join(missing)}.")
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{where}: config.json has {name}={value!r}; it must be a whole number from 1 on.")
    if config.get("n_inner") not in (None, 4 * config["n_embd"]):
        raise CheckpointError(f"{where}: config.json has n_inner={config['n_inner']}; only 4 * n_embd can be loaded.")
    shape = {name: sizes[name] for name in ("n_layer", "n_head", "n_embd")}
    try:
        return from_dict(ModelConfig, {**shape, "dropout": config.get("resid_pdrop", 0.0)})
    except ConfigError as error:
        said = str(error).replace("dropout", "resid_pdrop")
        raise CheckpointError(f"{where}: config.json describes no model: {said}.") from error
