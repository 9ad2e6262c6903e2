"""Named, complete training recipes: each a function that returns a `Recipe`; change one with `config.override`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from pretrain_assets.config import DataConfig, ExecutionConfig, ModelConfig, Recipe, TrainConfig
from pretrain_assets.errors import ConfigError


def demo() -> Recipe:
    """A small GPT, one epoch of the bundled Devil's Dictionary: about a minute on two CPU cores.

    One twentieth is held out instead of the usual hundredth: the dictionary has only 730 entries.
    """
    return Recipe(
        name="demo",
        model=ModelConfig(n_layer=2, n_head=4, n_embd=64),
        data=DataConfig(
            filter="NOT is_dup AND source = 'apt:dict-devil' AND (id % 20 != 0)",
            held_out_filter="NOT is_dup AND source = 'apt:dict-devil' AND (id % 20 = 0)",
            seq_len=128,
            num_splits=8,
        ),
        train=TrainConfig(
            global_batch_tokens=8 * 128,
            learning_rate=5e-3,
            min_learning_rate=5e-4,
            warmup_steps=10,
            eval_every=50,
            eval_blocks=32,
        ),
        execution=ExecutionConfig(micro_batch_blocks=4, checkpoint_every=50),
        sample_prompt="MARRIAGE, n.",
    )


FINEWEB_FILTER = "NOT is_dup AND score >= 1.0 AND (id % 100 != 0)"
FINEWEB_HELD_OUT = "NOT is_dup AND score >= 1.0 AND (id % 100 = 0)"


def gpt2_124m() -> Recipe:
    """GPT-2 124M, one epoch of 2.4 M FineWeb-Edu documents: 4,636 steps of 512 x 1,024 tokens (2.43 B tokens)."""
    return Recipe(
        name="gpt2_124m",
        model=ModelConfig(n_layer=12, n_head=12, n_embd=768),
        data=DataConfig(filter=FINEWEB_FILTER, held_out_filter=FINEWEB_HELD_OUT),
        train=TrainConfig(global_batch_tokens=512 * 1024, warmup_steps=200, eval_blocks=2048),
        execution=ExecutionConfig(micro_batch_blocks=32, compile=True),
    )


def gpt2_354m() -> Recipe:
    """GPT-2 354M on 7 B FineWeb-Edu tokens: 13,351 steps of 512 x 1,024 tokens."""
    return Recipe(
        name="gpt2_354m",
        model=ModelConfig(n_layer=24, n_head=16, n_embd=1024),
        data=DataConfig(filter=FINEWEB_FILTER, held_out_filter=FINEWEB_HELD_OUT),
        train=TrainConfig(
            global_batch_tokens=512 * 1024,
            max_steps=13_351,
            learning_rate=3e-4,
            min_learning_rate=3e-5,
            warmup_steps=200,
            eval_blocks=2048,
        ),
        execution=ExecutionConfig(micro_batch_blocks=16, checkpoint_every=500, compile=True),
    )


RECIPES: dict[str, Callable[[], Recipe]] = {"demo": demo, "gpt2_124m": gpt2_124m, "gpt2_354m": gpt2_354m}
"""Every recipe by name; the keys are the checkpoint's Dagster partitions."""


def get(name: str) -> Recipe:
    """A recipe by name.

    Raises:
        ConfigError: no such recipe.
    """
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"Unknown recipe {name!r}.{hint} Known: {', '.join(RECIPES)}.")
    return RECIPES[name]()


VOCABULARY_MULTIPLE = 128
"""A model's embedding has a multiple of so many rows: 50,304 for GPT-2."""


def num_parameters(recipe: Recipe, vocab_size: int = 50_257) -> int:
    """Weights of a recipe's model: the tied embedding with its padding, positions and layers.

    Each layer has 12 d^2 weights in its four matrices and 13 d in their biases and the two norms.
    """
    model, width = recipe.model, recipe.model.n_embd
    rows = vocab_size + -vocab_size % VOCABULARY_MULTIPLE + recipe.data.seq_len
    return rows * width + model.n_layer * (12 * width + 13) * width + 2 * width


def summary(name: str) -> dict[str, Any]:
    """A recipe in a few numbers, with GPT-2's vocabulary."""
    recipe, (first_line, *_) = get(name), (RECIPES[name].__doc__ or "").splitlines()
    return {
        "name": name,
        "description": first_line,
        "num_parameters": num_parameters(recipe),
        "tokens_per_step": recipe.train.global_batch_tokens,
        "max_steps": recipe.train.max_steps,
        "epochs": recipe.train.epochs,
    }
