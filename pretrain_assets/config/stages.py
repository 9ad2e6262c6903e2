"""Configuration of the stages that make and keep the table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from pretrain_assets.convert import require


@dataclass(frozen=True, kw_only=True)
class IngestConfig:
    """What to read into the table."""

    sources: tuple[str, ...] = ("bundled",)
    """Paths, globs, `s3://...`, `hf://datasets/...`, `bundled`, or `synthetic[:rows[:seed]]`; read in this order."""
    text_column: str = "text"
    """Column or JSON key that holds the document."""
    id_column: str = "id"
    """Column that holds the source's own id; documents without it get the hash of their text."""
    score_column: str = "score"
    """Column with a quality score; absent means null scores."""
    source_column: str = "source"
    """Column that names a document's origin; absent means the name of the source it was listed under."""
    extra_columns: tuple[str, ...] = ()
    """More columns to keep, by name."""
    on_bad_row: Literal["raise", "skip"] = "raise"
    """A row without usable text stops the ingest (`raise`), or is left out and counted by reason (`skip`)."""
    batch_bytes: int = 32 << 20
    """Bytes of Arrow data held per batch: bounds memory whatever the size of the table. 32 MiB keeps writes large."""
    files_in_flight: int = 4
    """Files read at the same time. Four hides the latency of object stores without many open batches."""

    def __post_init__(self) -> None:
        named = bool(self.sources) and all(source.strip() for source in self.sources)
        require(named, "sources", list(self.sources), "name at least one source, and none empty, for example bundled")
        require(self.batch_bytes >= 1 << 10, "batch_bytes", self.batch_bytes, "use at least 1024")
        require(self.files_in_flight >= 1, "files_in_flight", self.files_in_flight, "use at least 1")


@dataclass(frozen=True, kw_only=True)
class DedupConfig:
    """How exact duplicates are found. Nothing here changes a value."""

    batch_bytes: int = 32 << 20
    """Bytes of text held per batch and worker, and once more for its content."""
    memory_bytes: int = 2 << 30
    """Bytes held to compare rows with earlier ones, 24 for each; more goes to temporary files (TMPDIR). 2 GiB: 89
    million rows."""
    max_share_removed: float = 0.5
    """Share of a source's rows above which the check `share_removed` alarms: usually templates, not copies."""

    def __post_init__(self) -> None:
        require(self.batch_bytes >= 1 << 10, "batch_bytes", self.batch_bytes, "use at least 1024")
        require(self.memory_bytes >= 0, "memory_bytes", self.memory_bytes, "use 0 or more")
        share = self.max_share_removed
        require(0 <= share <= 1, "max_share_removed", share, "use a number from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class TokenizeConfig:
    """How text becomes token ids."""

    tokenizer: str = "gpt2"
    """`gpt2` (bundled vocabulary), `byte`, or `hf:<name or local directory>`."""
    beside: str = ""
    """Empty: the columns `input_ids` and `n_tokens`, made anew when the tokenizer changes. A word, such as `byte`:
    columns beside them, `input_ids_byte` and `n_tokens_byte`, of a stage `tokenized_byte`."""
    text_column: str = "text"
    """Column that is encoded: `text`, or `text_masked`, in which e-mail and IP addresses are replaced."""
    engine: Literal["auto", "fastokens", "tiktoken", "transformers"] = "auto"
    """What runs a byte-level BPE; gives the same ids, which are compared before every run. `auto`: the fastest that is
    installed (fastokens comes with the extra `fast`). Other tokenizers are run by transformers."""
    batch_bytes: int = 4 << 20
    """Bytes of text held per batch and worker. Does not change the result. 4 MiB: as fast as more, in less memory."""
    on_error: Literal["raise", "null"] = "raise"
    """A text that the tokenizer cannot encode stops the stage (`raise`), or gets NULL and is counted by reason
    (`null`); run with `raise` again to try the failed rows anew."""
    max_failed_share: float = 0.001
    """Share of failed rows above which the check `failed_share` alarms."""

    def __post_init__(self) -> None:
        require(self.batch_bytes >= 1 << 10, "batch_bytes", self.batch_bytes, "use at least 1024")
        word = not self.beside or (self.beside != "error" and re.fullmatch("[a-z][a-z0-9]*", self.beside) is not None)
        require(word, "beside", self.beside, "use lower-case letters and digits, beginning with a letter; not `error`")
        require(bool(self.text_column.strip()), "text_column", self.text_column, "name a column, such as text")
        engines = ("auto", "fastokens", "tiktoken", "transformers")
        require(self.engine in engines, "engine", self.engine, f"use one of {', '.join(engines)}")
        require(self.on_error in ("raise", "null"), "on_error", self.on_error, "use raise or null")
        require(0 <= self.max_failed_share <= 1, "max_failed_share", self.max_failed_share, "use a number from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """How the forensics index is built."""

    with_position: bool = True
    """Keep word positions, which phrases need; the text index is nearly three times as large with them."""
    exact_below: int = 50_000
    """Vectors in no index are compared exactly, by reading them; only from this many on are they indexed. 50 thousand
    are read in 20 ms (256 dimensions of float16), which an index does not undercut by much."""

    def __post_init__(self) -> None:
        remedy = "use at least 1000: an index of fewer has nothing to learn its partitions from"
        require(self.exact_below >= 1_000, "exact_below", self.exact_below, remedy)


@dataclass(frozen=True, kw_only=True)
class DocumentLossConfig:
    """How the loss of every document under a checkpoint is measured."""

    name: str
    """A word: the columns are `loss_<name>`, `loss_max_<name>` and `loss_tokens_<name>`, of a stage
    `loss_measured_<name>`."""
    max_tokens: int | None = None
    """Tokens of a document that are predicted, from its beginning; None: all of them, and its end of text."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the model's arithmetic. bfloat16 is that of training on a GPU, and several times as fast there."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: a GPU for each worker where there is one."""
    batch_bytes: int = 256 << 10
    """Bytes of token ids per batch and worker: 64 thousand tokens, half a minute of GPT-2 on a core. Work is saved
    between batches. Changes a value by rounding only."""

    def __post_init__(self) -> None:
        word = re.fullmatch("[a-z][a-z0-9]*", self.name) is not None and self.name != "error"
        require(word, "name", self.name, "use lower-case letters and digits, beginning with a letter; not `error`")
        most = self.max_tokens
        require(most is None or most >= 1, "max_tokens", most, "use at least 1, or None for all")
        require(self.batch_bytes >= 1 << 10, "batch_bytes", self.batch_bytes, "use at least 1024")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Where columns are computed. Nothing here changes a value: all engines give identical columns."""

    engine: Literal["local", "ray", "geneva"] = "local"
    """`local`: processes on this machine. `ray`: a Ray cluster (extra `ray`). `geneva`: LanceDB's Geneva, which is
    proprietary and installed apart (extra `geneva`)."""
    workers: int | None = None
    """Worker processes: None is one per core here, or as many as the Ray cluster has CPUs for. 1 computes in the
    calling process."""
    cpus_per_worker: float = 1.0
    """Cores that each worker is given: threads of the function locally, a resource request on Ray."""
    ray_address: str | None = None
    """Ray cluster: `auto`, `ray://host:10001`, or None to start one on this machine."""

    def __post_init__(self) -> None:
        known = ("local", "ray", "geneva")
        require(self.engine in known, "engine", self.engine, f"use one of {', '.join(known)}")
        require(self.workers is None or self.workers >= 1, "workers", self.workers, "use at least 1, or None")
        require(self.cpus_per_worker > 0, "cpus_per_worker", self.cpus_per_worker, "use a positive number")


DAY_SECONDS = 86_400


@dataclass(frozen=True, kw_only=True)
class MaintainConfig:
    """What maintenance keeps, and what it rewrites."""

    keep_last: int = 3
    """Versions of every stage that stay, the newest first. The newest is what downstream stages read; two more let an
    unlucky night be undone."""
    older_than_seconds: int = 7 * DAY_SECONDS
    """Younger versions stay, whoever made them."""
    keep_unfinished_seconds: int = 7 * DAY_SECONDS
    """Younger files that no version refers to stay: a killed fill or ingest goes on from them. 0 removes all of them,
    which is safe for the work of this project, since maintenance runs while nobody works."""
    target_bytes: int = 512 << 20
    """Size towards which small fragments are merged; one of half that size is left alone. Large enough for long
    sequential reads, small enough that a fill, which works fragment by fragment, spreads over many workers."""
    merge_factor: int = 4
    """Adjacent fragments are merged when together they are at least this many times the largest of them. So a byte is
    rewritten only into something this many times larger: n nightly appends rewrite n log n bytes, never n squared."""
    max_deleted_share: float = 0.1
    """A fragment with a larger share of deleted rows is rewritten without them. 0 rewrites every fragment that has one:
    only then are the bytes of deleted rows gone, and the index is built anew without their words."""

    def __post_init__(self) -> None:
        require(self.keep_last >= 1, "keep_last", self.keep_last, "use at least 1: downstream stages read the newest")
        require(self.older_than_seconds >= 0, "older_than_seconds", self.older_than_seconds, "use 0 or more")
        unfinished = self.keep_unfinished_seconds
        require(unfinished >= 0, "keep_unfinished_seconds", unfinished, "use 0 or more")
        require(self.target_bytes >= 1, "target_bytes", self.target_bytes, "use at least 1")
        require(self.merge_factor >= 2, "merge_factor", self.merge_factor, "use at least 2")
        share = self.max_deleted_share
        require(0 <= share <= 1, "max_deleted_share", share, "use a number from 0 to 1")
