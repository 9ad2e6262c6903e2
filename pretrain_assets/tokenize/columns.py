"""Token columns: `input_ids` without end-of-text (the packer adds it once) and `n_tokens`.

Invariant: n_tokens equals the length of input_ids in every row; null or empty text gives an empty list and is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import EngineConfig, TokenizeConfig, TokenizerIdentity
from pretrain_assets.errors import TableError, TokenizerError
from pretrain_assets.table.filler.fill import fill
from pretrain_assets.table.filler.plan import make_plan
from pretrain_assets.table.filler.spec import BatchFunction, ColumnReader, Fill, RowColumns, Worker
from pretrain_assets.table.lineage import Pin, StageResult
from pretrain_assets.table.schema import computed_field, text_parameters
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.tokenize.engines import REFERENCE, Choice, choose
from pretrain_assets.tokenize.tokenizers import load_tokenizer

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

CODE_VERSION = "1"
"""Raised when the same tokenizer would give other columns."""
DEFAULT = Choice(engine="tiktoken")
SAMPLE_CLUMPS, SAMPLE_CLUMP_ROWS, SAMPLE_CHARS = 32, 8, 1_000
"""Texts compared before a run: as many places of the table, rows at each, and characters of each: 0.2 seconds."""


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
        input_pin: Version of the stage before to work from.
        run_id: Dagster run id for the lineage record.
        engine: Where texts are encoded; None: processes on this machine.

    Raises:
        TokenizerError: unknown tokenizer, or one without an end-of-text token.
        TableError: the table has no column of that name to encode.
        ColumnError: a text that cannot be encoded, and `config.on_error` is `raise`.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    dataset = open_dataset(location)
    if config.text_column not in dataset.schema.names:
        raise TableError(
            f"{location.uri} has no column {config.text_column}: run the stage that makes it first (`pretrain mask` "
            "for text_masked), or encode `text`."
        )
    text = text_parameters(dataset.schema, config.text_column)
    plan = make_plan(location, _fill(tokenizer.identity, config, text), input_pin)
    fragments, choice = plan.work[0].fragments, Choice(engine=REFERENCE)
    if tokenizer.has_engines and fragments:
        choice = choose(tokenizer, config.engine, sample(fragments, config.text_column))
    spec = _fill(tokenizer.identity, config, text, choice)
    return fill(location, spec, input_pin=input_pin, run_id=run_id, engine=engine)


def _fill(identity: TokenizerIdentity, config: TokenizeConfig, text: dict[str, Any], choice: Choice = DEFAULT) -> Fill:
    import pyarrow as pa

    parameters = asdict(identity) | text
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
                inputs=(config.text_column,),
                make=partial(encoding, config.tokenizer, choice.engine, identity),
            ),
        ),
        code_version=CODE_VERSION,
        parameters=parameters,
        batch_bytes=config.batch_bytes,
        on_error=config.on_error,
        max_failed_share=config.max_failed_share,
        summarize=partial(_summarize, f"n_tokens{ending}"),
        facts={"tokenizer_engine": {**asdict(choice), "refused": list(choice.refused)}},
    )


def sample(fragments: Sequence[lance.LanceFragment], column: str) -> list[str]:
    """Beginnings and middles of some texts, spread over all fragments; one text is held at a time."""
    import numpy as np

    ends = np.cumsum([fragment.count_rows() for fragment in fragments])
    rows = int(ends[-1])
    parts: list[str] = []
    for row in range(0, rows, max(SAMPLE_CLUMP_ROWS, rows // SAMPLE_CLUMPS)):
        which = int(np.searchsorted(ends, row, side="right"))
        begin = row - (int(ends[which - 1]) if which else 0)
        scanner = fragments[which].scanner(
            columns=[column], offset=begin, limit=SAMPLE_CLUMP_ROWS, batch_size=1, batch_readahead=1
        )
        for at, batch in enumerate(scanner.to_batches()):
            text = batch.column(0)[0].as_py() or ""
            start = len(text) // 2 if at % 2 and len(text) > 2 * SAMPLE_CHARS else 0
            parts.append(text[start : start + SAMPLE_CHARS])
    return parts


def encoding(name: str, engine: str, identity: TokenizerIdentity, worker: Worker) -> BatchFunction:
    """The function that makes `input_ids` and `n_tokens` from a text column, by the engine that was checked.

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
    encode = tokenizer.engine(engine) if tokenizer.has_engines else tokenizer.encode_batch

    def token_columns(batch: pa.RecordBatch) -> list[pa.Array]:
        texts = [text or "" for text in batch.column(0).to_pylist()]
        values, offsets = encode(texts, worker.num_threads)
        lengths = np.diff(offsets).astype(np.int32)
        return [pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values)), pa.array(lengths)]

    return token_columns


def _summarize(name: str, read: ColumnReader) -> dict[str, int]:
    import pyarrow.compute as pc

    lengths = read(name)
    empty = pc.sum(pc.equal(lengths, 0), min_count=0).as_py()
    return {"in": len(lengths), "tokenized": len(lengths) - lengths.null_count - empty, "empty": empty}
