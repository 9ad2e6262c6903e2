"""Configuration of a training run: model, optimization, execution, and the contract that takes them to a GPU node."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pretrain_assets.config.data import DataConfig, LoaderConfig, TokenizerIdentity, data_identity
from pretrain_assets.convert import check_name, require, to_dict
from pretrain_assets.errors import ConfigError

MOST = 10**9
"""Counts end below this: more is a slip of the hand."""
NO_HOLES = {"without": [], "without_from": [0, 0]}
"""Settings of data that are as if they were not there: runs from before they were are the same runs."""
MAX_RATE = 1e30
"""Learning rates end here: far above any that trains, and still a finite float32."""


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
    document_mask: bool = False
    """Confine attention to the document, and count positions from its start (in the block): documents packed into one
    block do not see each other."""

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_head", "n_embd"):
            require(1 <= getattr(self, name) < MOST, name, getattr(self, name), f"use 1 to {MOST - 1:,}")
        require(0.0 <= self.dropout < 1.0, "dropout", self.dropout, "use 0 or more, and less than 1")
        require(self.n_embd % self.n_head == 0, "n_embd", self.n_embd, f"must be a multiple of n_head={self.n_head}")
        masked = self.document_mask and self.dropout
        require(not masked, "dropout", self.dropout, "attention over documents has none; use 0 with document_mask")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What a run learns: batch, optimizer and length."""

    global_batch_tokens: int
    """Tokens per optimizer step over all ranks; a multiple of num_splits * seq_len, whatever the number of ranks."""
    max_steps: int | None = None
    """Optimizer steps; None means exactly `epochs` epochs."""
    epochs: int = 1
    """Passes over the filtered rows when max_steps is None."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW, or Muon for the matrices inside the layers and AdamW for all else."""
    learning_rate: float = 6e-4
    """Peak learning rate of AdamW."""
    muon_learning_rate: float = 0.02
    """Peak learning rate of Muon, which follows the same schedule."""
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
    eval_every: int = 250
    """Steps between validation passes; the first and last step are always evaluated."""
    eval_blocks: int | None = 64
    """Blocks of the held-out set per validation pass; None for all."""

    def __post_init__(self) -> None:
        for name in ("global_batch_tokens", "epochs", "eval_every"):
            require(1 <= getattr(self, name) < MOST, name, getattr(self, name), f"use 1 to {MOST - 1:,}")
        blocks = self.eval_blocks
        require(blocks is None or blocks >= 1, "eval_blocks", blocks, "use at least 1, or None for all")
        steps = self.max_steps
        require(steps is None or 1 <= steps < MOST, "max_steps", steps, f"use 1 to {MOST - 1:,}, or None")
        rate, floor, muon = self.learning_rate, self.min_learning_rate, self.muon_learning_rate
        require(0 < rate <= MAX_RATE, "learning_rate", rate, f"use a positive number, at most {MAX_RATE}")
        require(0 < muon <= MAX_RATE, "muon_learning_rate", muon, f"use a positive number, at most {MAX_RATE}")
        require(0 <= floor <= rate, "min_learning_rate", floor, f"use a number from 0 to learning_rate={rate}")
        require(0 <= self.warmup_steps < MOST, "warmup_steps", self.warmup_steps, f"use 0 to {MOST - 1:,}")
        require(0 <= self.init_seed < 2**63, "init_seed", self.init_seed, "use an integer from 0 to 2**63 - 1")
        require(self.grad_clip > 0, "grad_clip", self.grad_clip, "use a positive number; inf does not clip")
        require(0 <= self.weight_decay < math.inf, "weight_decay", self.weight_decay, "use 0 or more")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "use a number from 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """How a run is executed: speed, memory, files and reports, never what is learned (up to the order of sums).

    Any of these may change when a run is resumed.
    """

    micro_batch_blocks: int = 8
    """Blocks per forward pass and rank: changes memory and speed, never the global batch."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Whole model on every rank (DDP), or its weights and moments shared out (FSDP2) for models one GPU cannot hold."""
    compile: bool = False
    """torch.compile the model: worth it on CUDA, slow to start on CPU."""
    compile_mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """Mode of torch.compile: the second tries more kernels, for minutes at the start."""
    attention: Literal["sdpa", "fa3"] = "sdpa"
    """Attention kernels: PyTorch's choice, or FlashAttention 3, which must be installed."""
    chunked_loss: bool = False
    """Compute logits and loss in chunks: slower, but the logits of a micro-batch never stand in memory at once."""
    deterministic: bool = False
    """Use deterministic kernels only: the same machine and number of ranks give bitwise equal runs, also on CUDA."""
    log_every: int = 10
    """Steps between console lines and metrics records."""
    checkpoint_every: int = 250
    """Steps between checkpoints; the last step is always saved."""
    async_checkpoint: bool = True
    """Write checkpoints while training goes on; a step waits only until its weights are copied."""
    keep_last: int = 2
    """Checkpoints kept, newest first."""
    keep_every: int | None = None
    """Checkpoints of every so many steps are kept for good; None for none."""
    stop_after: int | None = None
    """Save and stop after this step, as if told to: the same run without it goes on from there. None: to the end."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()
    """Experiment trackers that get every record, beside metrics.jsonl; each needs its own package."""

    def __post_init__(self) -> None:
        for name in ("micro_batch_blocks", "log_every", "checkpoint_every", "keep_last"):
            require(1 <= getattr(self, name) < MOST, name, getattr(self, name), f"use 1 to {MOST - 1:,}")
        every = self.keep_every
        require(every is None or every >= 1, "keep_every", every, "use at least 1, or None")
        stop = self.stop_after
        require(stop is None or stop >= 1, "stop_after", stop, "use at least 1, or None")
        require(len(set(self.trackers)) == len(self.trackers), "trackers", self.trackers, "name each once")


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
    """Batch, optimizer and length."""
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    """How it is executed; changes no result."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How its blocks are read; changes no result."""
    sample_prompt: str = "The"
    """Text that the final sample continues; another one changes no result, and a finished run keeps its sample."""

    def __post_init__(self) -> None:
        check_name(self.name, "recipe name")
        sharded_muon = self.train.optimizer == "muon" and self.execution.parallel == "fsdp"
        require(not sharded_muon, "train.optimizer", "muon", "it needs whole matrices; use execution.parallel=ddp")
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
    def lasting(self) -> dict[str, Any]:
        """What decides the result, as plain JSON values: two recipes that agree in this are one run, to be resumed."""
        return lasting(to_dict(self))

    @property
    def blocks_per_step(self) -> int:
        """Blocks of `seq_len` tokens per optimizer step over all ranks."""
        return self.train.global_batch_tokens // self.data.seq_len

    @property
    def cycles_per_step(self) -> int:
        """Rounds over all splits (one block each) per optimizer step."""
        return self.blocks_per_step // self.data.num_splits


def lasting(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe as plain values, without what changes no result."""
    values = {name: value for name, value in recipe.items() if name not in ("execution", "loader", "sample_prompt")}
    if isinstance(data := values.get("data"), Mapping):
        values["data"] = {name: value for name, value in data.items() if NO_HOLES.get(name) != value}
    return values


@dataclass(frozen=True, kw_only=True)
class ReplayOf:
    """The run that a replay repeats without some documents, and where in it the replay begins."""

    run_dir: str
    """Folder of the original run, which is only read: local path or `s3://...`."""
    step: int
    """Step of its checkpoint that the replay was asked for."""
    checkpoint: str
    """Digest of that checkpoint."""
    start_step: int = 0
    """Step of its checkpoint that the replay goes on from; 0 to begin with new weights."""
    start: str = ""
    """Digest of the checkpoint of `start_step`; empty at 0."""
    documents_seen: int = 0
    """Documents of `data.without` that the original had trained on by `start_step`: 0 is a clean start, which gives
    what a run from step 0 gives."""
    tokens_seen: int = 0
    """Tokens of them that it had trained on by then."""


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
    replay: ReplayOf | None = None
    """What it is a replay of; None for any other run."""
    storage_env: tuple[str, ...] = ()
    """Names of the environment variables that the storage clients read on the node."""

    @property
    def identity(self) -> dict[str, Any]:
        """What makes two runs train on the same data in the same order; compared before any resume."""
        data = data_identity(self.pin, self.recipe.data, self.tokenizer)
        return data | {"global_batch_tokens": self.recipe.train.global_batch_tokens}
