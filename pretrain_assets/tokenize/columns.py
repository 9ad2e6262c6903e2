"""Token columns: `input_ids` without end-of-text (the packer adds it once) and `n_tokens`.

Invariant: n_tokens equals the length of input_ids in every row; null or empty text gives an empty list and is counted.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import TokenizeConfig
from pretrain_assets.table.fill import BatchFunction, ColumnGroup, ColumnReader, Fill, fill
from pretrain_assets.table.lineage import Pin, StageResult
from pretrain_assets.table.schema import computed_field
from pretrain_assets.table.storage import Location
from pretrain_assets.tokenize.tokenizers import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import pyarrow as pa

CODE_VERSION = "1"
"""Raised when the same tokenizer would give other columns."""


def tokenize(location: Location, config: TokenizeConfig, *, input_pin: Pin, run_id: str | None = None) -> StageResult:
    """Fill `input_ids` and `n_tokens` for the rows that lack them: one new version, or none.

    Args:
        location: The table.
        config: Tokenizer and batch size. Another tokenizer recomputes every row in one new version.
        input_pin: Version of `deduped` to work from.
        run_id: Dagster run id for the lineage record.

    Raises:
        TokenizerError: unknown tokenizer, or one without an end-of-text token.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    return fill(location, _fill(tokenizer, config), input_pin=input_pin, run_id=run_id)


def _fill(tokenizer: Tokenizer, config: TokenizeConfig) -> Fill:
    import pyarrow as pa

    parameters = asdict(tokenizer.identity)
    making: dict[str, Any] = {"stage": "tokenized", "code_version": CODE_VERSION, "parameters": parameters}
    return Fill(
        stage="tokenized",
        groups=(
            ColumnGroup(
                outputs=pa.schema(
                    [
                        computed_field("input_ids", pa.list_(pa.int32()), **making),
                        computed_field("n_tokens", pa.int32(), **making),
                    ]
                ),
                inputs=("text",),
                prepare=lambda reader: _batch_function(tokenizer, reader),
            ),
        ),
        code_version=CODE_VERSION,
        parameters=parameters,
        batch_bytes=config.batch_bytes,
        summarize=_summarize,
    )


def _batch_function(tokenizer: Tokenizer, _: ColumnReader) -> BatchFunction:
    import numpy as np
    import pyarrow as pa

    def token_columns(batch: pa.RecordBatch) -> list[pa.Array]:
        values, offsets = tokenizer.encode_batch([text or "" for text in batch.column(0).to_pylist()])
        lengths = np.diff(offsets).astype(np.int32)
        return [pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values)), pa.array(lengths)]

    return token_columns


def _summarize(read: ColumnReader) -> dict[str, int]:
    import pyarrow.compute as pc

    lengths = read("n_tokens")
    empty = pc.sum(pc.equal(lengths, 0), min_count=0).as_py()
    return {"in": len(lengths), "tokenized": len(lengths) - empty, "empty": empty}
