"""Configuration of a training run: model, data, optimization, and the job contract that carries them to a GPU node."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from pretrain_assets.convert import check_name, require, to_dict
from pretrain_assets.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A GPT-2 model. The vocabulary comes from the tokenizer."""

    n_layer: int
    """Transformer blocks."""
    n_head: int
    """Attention heads per block."""
    n_embd: int
    """Width of the residual stream."""
    dropout: float = 0.0
    """Dropout probability; pretraining for one epoch needs none."""

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_head", "n_embd"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "use at least 1")
        require(0.0 <= self.dropout < 1.0, "dropout", self.dropout, "use 0 or more, and less than 1")
        require(self.n_embd % self.n_head == 0, "n_embd", self.n_embd, f"must be a multiple of n_head={self.n_head}")


@dataclass(frozen=True, kw_only=True)
class MixtureComponent:
    """A part of the training rows that is to make up a given share of the tokens."""

    name: str
    """Name in the ledger, such as the source's."""
    predicate: str
    """SQL predicate of its rows, such as `source = 'wiki'`; every row that the filter keeps is in exactly one part."""
    weight: float
    """Share of the epoch's tokens, in proportion to the weights of the other parts."""

    def __post_init__(self) -> None:
        check_name(self.name, "mixture name")
        require(0 < self.weight < math.inf, f"weight of {self.name}", self.weight, "use a positive number")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which rows a run trains on, and in which order."""

    filter: str = "NOT is_dup AND (id % 100 != 0)"
    """SQL predicate of the training rows."""
    held_out_filter: str = "NOT is_dup AND (id % 100 = 0)"
    """SQL predicate of the validation rows; must share no row with `filter`."""
    seq_len: int = 1024
    """Tokens per block."""
    num_splits: int = 128
    """Independent document streams; a multiple of every world size the run may use."""
    seed: int = 0
    """Shuffle seed; epoch e uses seed + 100003 * e, as LanceDB's StreamingDataset does."""
    shuffle_clump_size: int = 1
    """Rows that stay together, in table order, when the order is shuffled: more than 1 makes fewer and longer reads on
    object stores, and batches less random."""
    mixture: tuple[MixtureComponent, ...] = ()
    """Shares of the training tokens by part: documents are repeated or thinned to reach them. Empty: every row once."""
    token_column: str = "input_ids"
    """Column of token ids: `input_ids`, or `input_ids_<word>` where a second tokenizer went beside the first."""

    def __post_init__(self) -> None:
        require(self.seq_len >= 2, "seq_len", self.seq_len, "use at least 2")
        require(self.num_splits >= 1, "num_splits", self.num_splits, "use at least 1")
        require(0 <= self.seed < 2**63, "seed", self.seed, "use an integer from 0 to 2**63 - 1")
        require(self.shuffle_clump_size >= 1, "shuffle_clump_size", self.shuffle_clump_size, "use at least 1")
        known = re.fullmatch("input_ids(_[a-z][a-z0-9]*)?", self.token_column) is not None
        require(known, "token_column", self.token_column, "use `input_ids`, or `input_ids_<word>`")
        plain = [part for part in self.mixture if not isinstance(part, MixtureComponent)]
        require(not plain, "mixture", plain, "make each part a MixtureComponent(name=..., predicate=..., weight=...)")
        names = [component.name for component in self.mixture]
        require(len(set(names)) == len(names), "mixture", names, "give every part a name of its own")
        require(len(names) <= 255, "mixture", f"{len(names)} parts", "use at most 255")

    @property
    def count_column(self) -> str:
        """Column with the length of `token_column`, in tokens."""
        return self.token_column.replace("input_ids", "n_tokens", 1)


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """How blocks are read: speed and memory only, never which blocks come in which order."""

    window_tokens: int = 1 << 20
    """Tokens that a rank reads in one request and packs at once."""
    read_ahead_bytes: int = 256 << 20
    """Bytes of windows that a rank may have in flight or ready before the trainer asks for them."""
    io_threads: int = 2
    """Windows read at once; on object stores more are added, up to `read_ahead_bytes`, while the trainer waits."""
    prefetch: bool = False
    """Copy the token column of the pinned version to local disk (PRETRAIN_CACHE_DIR) first: for tables on object
    stores whose tokens fit there."""

    def __post_init__(self) -> None:
        for name in ("window_tokens", "read_ahead_bytes", "io_threads"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "use at least 1")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a run trains."""

    global_batch_tokens: int
    """Tokens per optimizer step over all ranks; a multiple of num_splits * seq_len, whatever the number of ranks."""
    micro_batch_blocks: int = 8
    """Blocks per forward pass and rank: changes memory and speed, never the global batch."""
    max_steps: int | None = None
    """Optimizer steps; None means exactly `epochs` epochs."""
    epochs: int = 1
    """Passes over the filtered rows when max_steps is None."""
    learning_rate: float = 6e-4
    """Peak learning rate."""
    min_learning_rate: float = 6e-5
    """Learning rate at the end of the cosine."""
    warmup_steps: int = 100
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """Decay of tensors with two or more dimensions."""
    beta1: float = 0.9
    """AdamW beta1."""
    beta2: float = 0.95
    """AdamW beta2."""
    grad_clip: float = 1.0
    """Global gradient norm above which gradients are scaled down."""
    init_seed: int = 1337
    """Seed of the model's initial weights."""
    log_every: int = 10
    """Steps between console lines and metrics records."""
    eval_every: int = 250
    """Steps between validation passes; the first and last step are always evaluated."""
    eval_blocks: int = 64
    """Blocks of the held-out set per validation pass."""
    checkpoint_every: int = 250
    """Steps between checkpoints; the last step is always saved."""
    keep_last: int = 2
    """Checkpoints kept, newest first."""
    compile: bool = False
    """torch.compile the model: worth it on CUDA, slow to start on CPU."""

    def __post_init__(self) -> None:
        for name in ("global_batch_tokens", "micro_batch_blocks", "epochs", "log_every", "eval_every", "eval_blocks"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "use at least 1")
        for name in ("checkpoint_every", "keep_last"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "use at least 1")
        require(self.max_steps is None or self.max_steps >= 1, "max_steps", self.max_steps, "use at least 1, or None")
        require(self.max_steps is None or self.max_steps < 10**9, "max_steps", self.max_steps, "use less than 10**9")
        rate, floor = self.learning_rate, self.min_learning_rate
        require(0 < rate < math.inf, "learning_rate", rate, "use a positive number")
        require(0 <= floor <= rate, "min_learning_rate", floor, f"use a number from 0 to learning_rate={rate}")
        require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "use 0 or more")
        require(self.grad_clip > 0, "grad_clip", self.grad_clip, "use a positive number; inf does not clip")
        require(0 <= self.weight_decay < math.inf, "weight_decay", self.weight_decay, "use 0 or more")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "use a number from 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A complete training run, short of the table version it is given."""

    name: str
    """Recipe name; also the checkpoint's Dagster partition."""
    model: ModelConfig
    """Architecture."""
    data: DataConfig
    """Rows and order."""
    train: TrainConfig
    """Optimization."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How its blocks are read."""
    sample_prompt: str = "The"
    """Text that the final sample continues."""

    def __post_init__(self) -> None:
        check_name(self.name, "recipe name")
        cycle = self.data.num_splits * self.data.seq_len
        tokens = self.train.global_batch_tokens
        if tokens % cycle:
            near = max(1, round(tokens / cycle)) * cycle
            raise ConfigError(
                f"recipe {self.name}: train.global_batch_tokens={tokens} must be a multiple of num_splits * seq_len = "
                f"{self.data.num_splits} * {self.data.seq_len} = {cycle}, so that a step is the same set of blocks on "
                f"any number of ranks. The nearest is {near}."
            )

    @property
    def blocks_per_step(self) -> int:
        """Blocks of `seq_len` tokens per optimizer step over all ranks."""
        return self.train.global_batch_tokens // self.data.seq_len

    @property
    def cycles_per_step(self) -> int:
        """Rounds over all splits (one block each) per optimizer step."""
        return self.blocks_per_step // self.data.num_splits


@dataclass(frozen=True, kw_only=True)
class TokenizerIdentity:
    """What a model needs to know of the tokenizer that made its tokens."""

    name: str
    """Name as configured, such as `gpt2`."""
    fingerprint: str
    """Digest of the vocabulary, merges and special tokens."""
    vocab_size: int
    """Number of token ids, end-of-text included."""
    eos_id: int
    """End-of-text id that the packer puts after every document."""
    pad_id: int
    """Padding id; never equal to eos_id, never produced by the tokenizer."""

    def __post_init__(self) -> None:
        remedy = "it equals eos_id, and padding could not be told from ends of text; use an id of its own"
        require(self.pad_id != self.eos_id, "pad_id", self.pad_id, remedy)
        for name in ("eos_id", "pad_id"):
            require(0 <= getattr(self, name) < 2**31, name, getattr(self, name), "use an id from 0 to 2**31 - 1")


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """The job contract between Dagster and the GPU node: everything in `run.json`, and never a secret."""

    recipe: Recipe
    """Complete resolved recipe."""
    database_uri: str
    """LanceDB database, local path or `s3://...`."""
    table_name: str
    """Table in that database."""
    pin: str
    """`table-id@version` to train on."""
    tag: str
    """Tag that names the pinned version."""
    tokenizer: TokenizerIdentity
    """Tokenizer of `input_ids` at the pinned version."""
    run_dir: str
    """Where metrics, checkpoints and the result go: local path or `s3://...`."""
    resume: Literal["auto", "never"] = "auto"
    """`auto` goes on from the newest complete checkpoint in run_dir; `never` refuses a run_dir that has one."""
    storage_env: tuple[str, ...] = ()
    """Names of the environment variables that the storage clients read on the node."""

    @property
    def identity(self) -> dict[str, Any]:
        """What makes two runs train on the same data in the same order; compared before any resume."""
        data = data_identity(self.pin, self.recipe.data, self.tokenizer)
        return data | {"global_batch_tokens": self.recipe.train.global_batch_tokens}


def data_identity(pin: str, data: DataConfig, tokenizer: TokenizerIdentity) -> dict[str, Any]:
    """What makes two streams of blocks equal, as plain JSON values; `pin` is `table-id@version`."""
    return {
        "table_version": pin,
        "filter": data.filter,
        "mixture": to_dict(data)["mixture"],
        "token_column": data.token_column,
        "shuffle_clump_size": data.shuffle_clump_size,
        "tokenizer": tokenizer.fingerprint,
        "seed": data.seed,
        "num_splits": data.num_splits,
        "seq_len": data.seq_len,
        "eos_id": tokenizer.eos_id,
        "pad_id": tokenizer.pad_id,
    }
