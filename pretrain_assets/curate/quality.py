"""Quality signals of every document as columns: the numbers of Gopher's, C4's and FineWeb's rules, language, PII.

Invariant: a column is a number about one text, never a verdict; the published thresholds are predicates over them, in
`quality_rules`. Words are those of `str.split()`, which the columns' metadata names, since another splitter changes
verdicts.
Memory: about 60 bytes per word of a batch, in which a document of 50 MB is alone.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import EngineConfig, QualityConfig, to_dict
from pretrain_assets.curate.language import language_model, telling
from pretrain_assets.curate.pii import pii_numbers
from pretrain_assets.curate.quality_numbers import rule_numbers
from pretrain_assets.curate.words import text_bytes
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
        "language_model": language_model(config.language_model),
        "language_chars": config.language_chars,
    }


def _fill(config: QualityConfig) -> Fill:
    return Fill(
        stage=STAGE,
        groups=(RowColumns(outputs=outputs(config), inputs=("text",), make=partial(measuring, config)),),
        code_version=CODE_VERSION,
        parameters=parameters(config),
        batch_bytes=config.batch_bytes,
        facts={"settings": to_dict(config)},
        summarize=_summarize,
    )


def outputs(config: QualityConfig) -> pa.Schema:
    """The fields of this stage, as `table.quality_columns` lists them."""
    import pyarrow as pa

    types = {"int32": pa.int32(), "float": pa.float32(), "string": pa.string()}
    making: dict[str, Any] = {"stage": STAGE, "code_version": CODE_VERSION, "parameters": parameters(config)}
    return pa.schema([computed_field(c.name, types[c.arrow_type], **making) for c in columns_of(STAGE)])


def measuring(config: QualityConfig, worker: Worker) -> BatchFunction:
    """The function that makes the columns of this stage from `text`."""
    import pyarrow as pa

    del worker  # one thread
    fields, tell = outputs(config), telling(config.language_model, config.language_chars)

    def measure(batch: pa.RecordBatch) -> list[pa.Array]:
        texts = batch.column(0)
        data, offsets = text_bytes(texts)
        languages, probabilities = tell(texts)
        found = {
            **rule_numbers(data, offsets, config.stop_words),
            "language": languages,
            "language_probability": probabilities,
            **pii_numbers(texts, data, offsets),
        }
        return [pa.array(found[field.name], field.type) for field in fields]

    return measure


def _summarize(read: ColumnReader) -> dict[str, int]:
    import pyarrow.compute as pc

    words = read("gopher_words")
    empty = pc.sum(pc.equal(words, 0), min_count=0).as_py()
    return {"in": len(words), "measured": len(words) - empty, "wordless": empty}
