"""Quality signals of every document as columns: the numbers of Gopher's, C4's and FineWeb's rules, language, PII.

Invariant: a column is a number about one text, never a verdict; the published thresholds are predicates over them, in
`quality_rules`. Words are those of `str.split()`, which the columns' metadata names, since another splitter changes
verdicts.
Memory: about 60 bytes per word of a batch, in which a document of 50 MB is alone.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pretrain_assets.config import EngineConfig, QualityConfig
from pretrain_assets.curate import quality_c4, quality_lines, quality_words
from pretrain_assets.curate.characters import kinds
from pretrain_assets.curate.language import language_model, telling
from pretrain_assets.curate.pii import count_pii, may_have_pii
from pretrain_assets.curate.quality_c4 import count_c4
from pretrain_assets.curate.quality_lines import count_lines
from pretrain_assets.curate.quality_ngrams import ngram_characters
from pretrain_assets.curate.quality_words import count_words
from pretrain_assets.curate.words import Bytes, Offsets, text_bytes, word_spans
from pretrain_assets.table.columns import columns_of
from pretrain_assets.table.filler.fill import fill
from pretrain_assets.table.filler.spec import BatchFunction, ColumnReader, Fill, RowColumns, Worker
from pretrain_assets.table.lineage import Pin, StageResult
from pretrain_assets.table.schema import computed_field
from pretrain_assets.table.storage import Location

if TYPE_CHECKING:
    import pyarrow as pa

CODE_VERSION = "1"
"""Raised when the same text and parameters would give other numbers."""

STAGE = "quality"

Numbers = dict[str, npt.NDArray[Any]]


def quality(
    location: Location,
    config: QualityConfig,
    *,
    input_pin: Pin,
    run_id: str | None = None,
    engine: EngineConfig | None = None,
) -> StageResult:
    """Measure the documents that were not measured yet: one new version, or none.

    Args:
        location: The table.
        config: Stop words, how much of a text tells its language, batch size.
        input_pin: Version of the stage before to work from.
        run_id: Dagster run id for the lineage record.
        engine: Where texts are measured; None: processes on this machine.
    """
    return fill(location, _fill(config), input_pin=input_pin, run_id=run_id, engine=engine)


def parameters(config: QualityConfig) -> dict[str, Any]:
    """What the values depend on beside the code, as the columns' metadata names it."""
    return {
        "splitter": "str.split",
        "stop_words": list(config.stop_words),
        "language_model": language_model(),
        "language_chars": config.language_chars,
    }


def _fill(config: QualityConfig) -> Fill:
    import pyarrow as pa

    made_by = parameters(config)
    making: dict[str, Any] = {"stage": STAGE, "code_version": CODE_VERSION, "parameters": made_by}
    types = {"int32": pa.int32(), "float": pa.float32(), "string": pa.string()}
    return Fill(
        stage=STAGE,
        groups=(
            RowColumns(
                outputs=pa.schema([computed_field(c.name, types[c.arrow_type], **making) for c in columns_of(STAGE)]),
                inputs=("text",),
                make=partial(measuring, config),
            ),
        ),
        code_version=CODE_VERSION,
        parameters=made_by,
        batch_bytes=config.batch_bytes,
        summarize=_summarize,
    )


def measuring(config: QualityConfig, worker: Worker) -> BatchFunction:
    """The function that makes the columns of this stage from `text`, in the order of `columns_of`."""
    import pyarrow as pa

    del worker  # one thread
    tell = telling(config.language_chars)
    outputs = columns_of(STAGE)

    def measure(batch: pa.RecordBatch) -> list[pa.Array]:
        texts = batch.column(0)
        numbers = rule_numbers(*text_bytes(texts), config.stop_words)
        numbers |= pii_numbers(texts)
        languages, probabilities = tell(texts)
        numbers |= {"language": languages, "language_probability": probabilities}
        return [
            pa.array(numbers[c.name]).cast({"int32": pa.int32(), "float": pa.float32()}.get(c.arrow_type, pa.string()))
            for c in outputs
        ]

    return measure
