"""Configuration of a run's data: which rows, in which order, in which tokens, and how they are read."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pretrain_assets.convert import check_name, require, to_dict

MAX_HOLES = 1_000_000
"""Documents that a run may leave out one by one: all their ids stand in `run.json` and in every passport."""


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
    """SQL predicate of the training rows, over columns and named filters (`pretrain filter` lists them)."""
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
    without: tuple[int, ...] = ()
    """Ids of documents to leave out as holes, ascending: in their places stand masked padding tokens that nothing is
    learned from, and every other token stays where it is. `pretrain replay` sets it."""
    without_from: tuple[int, ...] = (0, 0)
    """Epoch and cycle (one block of every split) from which on `without` holds: for replays that go on from a
    checkpoint which had seen some of the documents. The default is the whole run."""
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
        self._check_without()

    def _check_without(self) -> None:
        ids = self.without
        require(len(ids) <= MAX_HOLES, "without", f"{len(ids):,} ids", f"use at most {MAX_HOLES:,}, or a filter")
        wrong = next((i for i in ids if type(i) is not int or not 0 <= i < 2**63), None)
        require(wrong is None, "without", wrong, "use ids of documents: whole numbers from 0")
        pair = next((pair for pair in itertools.pairwise(ids) if pair[0] >= pair[1]), None)
        require(pair is None, "without", pair, "give the ids in ascending order, each once")
        start = self.without_from
        fits = len(start) == 2 and min(start) >= 0 and (bool(ids) or not any(start))
        require(fits, "without_from", start, "use an epoch and a cycle, from 0, together with data.without")

    @cached_property
    def holes(self) -> str | None:
        """What `without` and `without_from` come to, in a line with a digest; None without any."""
        if not self.without:
            return None
        digest = hashlib.sha256(repr((self.without, self.without_from)).encode()).hexdigest()[:16]
        epoch, cycle = self.without_from
        since = f" from epoch {epoch}, cycle {cycle} on" if epoch or cycle else ""
        many = "" if len(self.without) == 1 else "s"
        return f"{len(self.without):,} document{many}{since}, digest {digest}"

    @property
    def count_column(self) -> str:
        """Column with the length of `token_column`, in tokens."""
        return self.token_column.replace("input_ids", "n_tokens", 1)

    @property
    def token_stage(self) -> str:
        """Stage that fills `token_column`: `tokenized`, or `tokenized_<word>`."""
        return self.token_column.replace("input_ids", "tokenized", 1)


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


def data_identity(pin: str, data: DataConfig, tokenizer: TokenizerIdentity) -> dict[str, Any]:
    """What makes two streams of blocks equal, as plain JSON values; `pin` is `table-id@version`."""
    return {
        "table_version": pin,
        "filter": data.filter,
        "mixture": [to_dict(part) for part in data.mixture],
        "token_column": data.token_column,
        "shuffle_clump_size": data.shuffle_clump_size,
        "tokenizer": tokenizer.fingerprint,
        "seed": data.seed,
        "num_splits": data.num_splits,
        "seq_len": data.seq_len,
        "eos_id": tokenizer.eos_id,
        "pad_id": tokenizer.pad_id,
        **({"without": data.holes} if data.holes else {}),
    }
