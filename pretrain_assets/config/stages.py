"""Configuration of the stages that make and keep the table."""

from __future__ import annotations

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
    """How exact duplicates are found."""

    batch_bytes: int = 32 << 20
    """Bytes of text held per batch. Does not change the result."""

    def __post_init__(self) -> None:
        require(self.batch_bytes >= 1 << 10, "batch_bytes", self.batch_bytes, "use at least 1024")


@dataclass(frozen=True, kw_only=True)
class TokenizeConfig:
    """How text becomes token ids."""

    tokenizer: str = "gpt2"
    """`gpt2` (bundled vocabulary), `byte`, or `hf:<name or local directory>`."""
    batch_bytes: int = 16 << 20
    """Bytes of text held per batch. Does not change the result."""

    def __post_init__(self) -> None:
        require(self.batch_bytes >= 1 << 10, "batch_bytes", self.batch_bytes, "use at least 1024")


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """How the forensics index is built."""

    with_position: bool = False
    """Keep word positions, needed for phrase search; four times the build time and twice the size."""
