"""Token columns: `input_ids` without end-of-text (the packer adds it once) and `n_tokens`.

Invariant: n_tokens equals the length of input_ids in every row; null or empty text gives an empty list and is counted.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import EngineConfig, TokenizeConfig, TokenizerIdentity
from pretrain_assets.errors import TokenizerError
from pretrain_assets.table.filler.fill import fill
from pretrain_assets.table.filler.spec import BatchFunction, ColumnReader, Fill, RowColumns, Worker
from pretrain_assets.table.lineage import Pin, StageResult
from pretrain_assets.table.schema import computed_field
from pretrain_assets.table.storage import Location
from pretrain_assets.tokenize.tokenizers import load_tokenizer

if TYPE_CHECKING:
    import pyarrow as pa

CODE_VERSION = "1"
"""Raised when the same tokenizer would give other columns."""


def tokenize(
    location: Location,
    config: TokenizeConfig,
    *,
    input_pin: Pin,
    run_id: str | None = None,
    engine: EngineConfig | None = None,
) -> StageResult:
    """Fill `input_ids` and `n_tokens` for the rows that lack them: one new version, or none.

    Args:
        location: The table.
        config: Tokenizer and batch size. Another tokenizer recomputes every row in one new version, or goes `beside`.
        input_pin: Version of `deduped` to work from.
        run_id: Dagster run id for the lineage record.
        engine: Where texts are encoded; None: processes on this machine.

    Raises:
        TokenizerError: unknown tokenizer, or one without an end-of-text token.
        ColumnError: a text that cannot be encoded, and `config.on_error` is `raise`.
    """
    identity = load_tokenizer(config.tokenizer).identity
    return fill(location, _fill(identity, config), input_pin=input_pin, run_id=run_id, engine=engine)


def _fill(identity: TokenizerIdentity, config: TokenizeConfig) -> Fill:
    import pyarrow as pa

    parameters = asdict(identity)
    ending = f"_{config.beside}" if config.beside else ""
    stage = f"tokenized{ending}"
    making: dict[str, Any] = {"stage": stage, "code_version": CODE_VERSION, "parameters": parameters}
    return Fill(
        stage=stage,
        groups=(
            RowColumns(
                outputs=pa.schema(
                    [
                        computed_field(f"input_ids{ending}", pa.list_(pa.int32()), **making),
                        computed_field(f"n_tokens{ending}", pa.int32(), **making),
                    ]
                ),
                inputs=("text",),
                make=partial(encoding, config.tokenizer, identity),
            ),
        ),
        code_version=CODE_VERSION,
        parameters=parameters,
        batch_bytes=config.batch_bytes,
        on_error=config.on_error,
        max_failed_share=config.max_failed_share,
        summarize=partial(_summarize, f"n_tokens{ending}"),
    )


def encoding(name: str, identity: TokenizerIdentity, worker: Worker) -> BatchFunction:
    """The function that makes `input_ids` and `n_tokens` from `text`.

    Raises:
        TokenizerError: the tokenizer of that name is another one where the worker runs.
    """
    import numpy as np
    import pyarrow as pa

    tokenizer = load_tokenizer(name)
    if tokenizer.identity != identity:
        raise TokenizerError(
            f"Tokenizer {name} is {tokenizer.identity} for this worker, and {identity} where the stage was started: "
            "install the same files and package versions on every node."
        )

    def token_columns(batch: pa.RecordBatch) -> list[pa.Array]:
        texts = [text or "" for text in batch.column(0).to_pylist()]
        values, offsets = tokenizer.encode_batch(texts, worker.num_threads)
        lengths = np.diff(offsets).astype(np.int32)
        return [pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values)), pa.array(lengths)]

    return token_columns


def _summarize(name: str, read: ColumnReader) -> dict[str, int]:
    import pyarrow.compute as pc

    lengths = read(name)
    empty = pc.sum(pc.equal(lengths, 0), min_count=0).as_py()
    return {"in": len(lengths), "tokenized": len(lengths) - lengths.null_count - empty, "empty": empty}
