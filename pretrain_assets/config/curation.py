"""Configuration of the curation stages: what counts as a duplicate, and what is measured about a document."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from pretrain_assets.convert import require


@dataclass(frozen=True, kw_only=True)
class NearDedupConfig:
    """How near duplicates are found: MinHash signatures, candidates by LSH bands, and a similarity that each must have.

    Similarity is the Jaccard index of two texts' sets of shingles (runs of `ngram_words` words).
    """

    ngram_words: int = 5
    """Words per shingle. 5 as in FineWeb (Penedo et al. 2024, section 3.4)."""
    bands: int = 14
    """Bands; two texts are candidates when all values of one band agree: a pair of similarity s is one with probability
    1 - (1 - s^rows_per_band)^bands. 14 x 8 as in FineWeb: 0.77 at s = 0.75, 0.92 at 0.8, 0.9996 at 0.9."""
    rows_per_band: int = 8
    """Values per band; the signature has bands x rows_per_band values of 4 bytes."""
    threshold: float = 0.75
    """Similarity from which a candidate counts. FineWeb aims at texts that are at least 75% similar."""
    verify: Literal["estimate", "exact"] = "estimate"
    """Similarity of candidates by their signatures (`estimate`, standard error 0.04 at 0.75 and 112 values), or from
    their texts (`exact`: reads the texts once more, and needs 8 bytes of disk per word of the candidates)."""
    min_words: int = 5
    """A text of fewer words is compared whole: it is a near duplicate only of a text with the same normalised words."""
    seed: int = 1
    """Seed of the hash functions."""
    skip_sources: tuple[str, ...] = ()
    """Sources that take no part: none of their rows is a near duplicate or makes another one."""
    max_compared: int = 1000
    """Kept rows of a bucket (one value of one band) that a row is compared with at most, the earliest. Bounds the work
    on templates, of which a million share a band without being similar."""
    max_share_removed: float = 0.5
    """Share of a source's rows above which the check `near_share_removed` alarms; changes no value."""
    batch_bytes: int = 8 << 20
    """Bytes of text held per batch and worker. Does not change the result."""

    def __post_init__(self) -> None:
        require(1 <= self.ngram_words <= 64, "ngram_words", self.ngram_words, "use 1 to 64")
        require(self.bands >= 1, "bands", self.bands, "use at least 1")
        require(self.rows_per_band >= 1, "rows_per_band", self.rows_per_band, "use at least 1")
        values = self.bands * self.rows_per_band
        require(values <= 1024, "bands x rows_per_band", values, "use at most 1024: the signature is a column")
        require(0 < self.threshold <= 1, "threshold", self.threshold, "use a number above 0, and at most 1")
        require(self.verify in ("estimate", "exact"), "verify", self.verify, "use estimate or exact")
        remedy = f"use at least ngram_words ({self.ngram_words}): a text of fewer words has no shingle"
        require(self.min_words >= self.ngram_words, "min_words", self.min_words, remedy)
        require(0 <= self.seed < 1 << 63, "seed", self.seed, "use 0 to 2^63 - 1")
        named = all(source for source in self.skip_sources)
        require(named, "skip_sources", list(self.skip_sources), "name no empty source")
        require(self.max_compared >= 1, "max_compared", self.max_compared, "use at least 1")
        share = self.max_share_removed
        require(0 <= share <= 1, "max_share_removed", share, "use a number from 0 to 1")
        require(self.batch_bytes >= 1 << 10, "batch_bytes", self.batch_bytes, "use at least 1024")


STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
"""Gopher's stop words (Rae et al. 2021, appendix A.1.1)."""


@dataclass(frozen=True, kw_only=True)
class QualityConfig:
    """What is measured about a document: numbers, never verdicts; thresholds are filters (`quality_rules`)."""

    stop_words: tuple[str, ...] = STOP_WORDS
    """Words of which `gopher_stop_words` counts those that occur, as they are written here; at most 64."""
    language_model: Literal["eldc", "lid.176"] = "eldc"
    """What tells the language: `eldc`, fast, with a score; or fastText's `lid.176` (extra `lid176`), some twenty times
    slower, with the probability that FineWeb's threshold of 0.65 speaks of."""
    language_chars: int = 1_000
    """Characters from the beginning of a text by which its language is told. Bounds the time for long documents;
    `eldc` reads 1,000 bytes at most."""
    batch_bytes: int = 4 << 20
    """Bytes of text held per batch and worker. Does not change the result."""

    def __post_init__(self) -> None:
        words = all(word and word.split() == [word] for word in self.stop_words)
        require(words, "stop_words", list(self.stop_words), "give words without white space")
        count = len(self.stop_words)
        require(len(set(self.stop_words)) == count <= 64, "stop_words", count, "give at most 64 different words")
        known = ("eldc", "lid.176")
        require(self.language_model in known, "language_model", self.language_model, f"use one of {', '.join(known)}")
        require(self.language_chars >= 1, "language_chars", self.language_chars, "use at least 1")
        require(self.batch_bytes >= 1 << 10, "batch_bytes", self.batch_bytes, "use at least 1024")


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """What stands for e-mail and IP addresses in `text_masked`."""

    emails: tuple[str, ...] = ("email@example.com", "firstname.lastname@example.org")
    """Replacements, in turn within a document. These, as FineWeb's, look like addresses and belong to nobody."""
    ips: tuple[str, ...] = ("192.0.2.1", "198.51.100.1", "203.0.113.1")
    """Replacements of public IP addresses, in turn within a document: from the blocks kept for documentation
    (RFC 5737), which nobody has."""
    batch_bytes: int = 4 << 20
    """Bytes of text held per batch and worker. Does not change the result."""

    def __post_init__(self) -> None:
        require(bool(self.emails), "emails", list(self.emails), "give at least one replacement, which may be empty")
        require(bool(self.ips), "ips", list(self.ips), "give at least one replacement, which may be empty")
        require(self.batch_bytes >= 1 << 10, "batch_bytes", self.batch_bytes, "use at least 1024")


@dataclass(frozen=True, kw_only=True)
class ContaminationConfig:
    """What evaluation items are searched for in the documents, and from when on a document counts as contaminated."""

    eval_sets: tuple[str, ...] = ("bundled",)
    """Sets, each written `[NAME=]FILES[#FIELD+FIELD...]`: `bundled` (300 items of GSM8K), or JSON lines or parquet at a
    path, glob, `s3://...` or `hf://datasets/...`. Without fields: the usual names of questions and answers
    (`curate/eval_sets.py`)."""
    ngram: int = 13
    """Words that must follow each other as in the item. 13 as in GPT-3 (Brown et al. 2020, appendix C)."""
    min_words: int = 8
    """A text of fewer than `ngram` words is searched for as a whole from this length on, and not at all below, since a
    short line is no evidence; items without any longer text are counted as too short. 8 as the least of GPT-3."""
    max_items: int = 10
    """An n-gram that more items than this have is boilerplate, such as the instruction of a test, and no evidence.
    Raise it for sets in which many items quote one passage, and that passage is searched for."""
    min_overlap: float = 0.5
    """A document is contaminated when this share of the n-grams of one searched text is found in it. One changed word
    breaks up to `ngram` of them; other limits are queries over `contamination_overlap`."""
    max_share_contaminated: float = 0.01
    """Share of a source's rows above which the check `contaminated_share` alarms; changes no value."""
    batch_bytes: int = 8 << 20
    """Bytes of text held per batch and worker. Does not change the result."""

    def __post_init__(self) -> None:
        named = bool(self.eval_sets) and all(one.strip() for one in self.eval_sets)
        require(named, "eval_sets", list(self.eval_sets), "name at least one eval set, and none empty, such as bundled")
        require(1 <= self.ngram <= 1024, "ngram", self.ngram, "use 1 to 1024")
        remedy = f"use 1 to ngram ({self.ngram})"
        require(1 <= self.min_words <= self.ngram, "min_words", self.min_words, remedy)
        require(self.max_items >= 1, "max_items", self.max_items, "use at least 1")
        require(0 < self.min_overlap <= 1, "min_overlap", self.min_overlap, "use a number above 0, and at most 1")
        share = self.max_share_contaminated
        require(0 <= share <= 1, "max_share_contaminated", share, "use a number from 0 to 1")
        require(self.batch_bytes >= 1 << 10, "batch_bytes", self.batch_bytes, "use at least 1024")


@dataclass(frozen=True, kw_only=True)
class DocumentModelConfig:
    """A model that reads documents."""

    model: str
    """A local directory, or the name of a model on the Hugging Face hub. No default: none comes with the package."""
    text_column: str = "text"
    """Column that is read: `text` or `text_masked`."""
    max_tokens: int = 512
    """Tokens of a text that are read, from its beginning; fewer where the model takes fewer."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of a transformer's arithmetic. bfloat16 is twice as fast and more, and keeps 99% of the nearest neighbours."""
    batch_size: int = 64
    """Texts per forward pass, of similar length. Changes a value by rounding only."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: a GPU for each worker where there is one."""
    batch_bytes: int = 4 << 20
    """Bytes of text held per batch and worker."""

    def __post_init__(self) -> None:
        require(bool(self.model.strip()), "model", self.model, "give a directory, or the name of a model on the hub")
        require(bool(self.text_column.strip()), "text_column", self.text_column, "name a column, such as text")
        require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "use at least 1")
        require(self.batch_size >= 1, "batch_size", self.batch_size, "use at least 1")
        require(self.batch_bytes >= 1 << 10, "batch_bytes", self.batch_bytes, "use at least 1024")


@dataclass(frozen=True, kw_only=True)
class EmbedConfig(DocumentModelConfig):
    """How texts become vectors."""

    library: Literal["sentence-transformers", "model2vec"] = "sentence-transformers"
    """What runs the model: a transformer (extra `embed`), or the mean of static vectors of its tokens (extra
    `embed-static`): hundreds of times faster, on the CPU, and blind to the order of words."""
    dtype: Literal["float16", "float32"] = "float16"
    """Type of the vectors' elements. float16 is half the bytes; its rounding moves a cosine by less than 0.001."""


@dataclass(frozen=True, kw_only=True)
class ModelScoreConfig(DocumentModelConfig):
    """How a text-classification model scores texts."""

    name: str
    """A word: the column is `model_score_<name>`, of a stage `model_scored_<name>`."""
    label: str = ""
    """The label whose probability is the score. Empty: the model's only output, such as FineWeb-Edu's."""
    activation: Literal["auto", "none", "sigmoid", "softmax"] = "auto"
    """From outputs to scores. `auto`: none for a model of one output; sigmoid where its labels do not exclude each
    other; else softmax over them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        word = re.fullmatch("[a-z][a-z0-9]*", self.name) is not None and self.name != "error"
        require(word, "name", self.name, "use lower-case letters and digits, beginning with a letter; not `error`")
