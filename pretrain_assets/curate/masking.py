"""`text_masked`: the text with e-mail and public IP addresses replaced, for those who must not train on them.

Invariant: `text` stays as it is; a run chooses between the two by the column that it tokenizes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import EngineConfig, MaskConfig, to_dict
from pretrain_assets.curate.pii import mask_text, may_have_pii
from pretrain_assets.curate.words import text_bytes
from pretrain_assets.table.filler.fill import fill
from pretrain_assets.table.filler.spec import BatchFunction, ColumnReader, Fill, RowColumns, Worker
from pretrain_assets.table.lineage import Pin, StageResult
from pretrain_assets.table.schema import computed_field
from pretrain_assets.table.storage import Location

if TYPE_CHECKING:
    import pyarrow as pa

CODE_VERSION = "1"
"""Raised when the same text and replacements would give other values."""

STAGE = "masked"


def mask(
    location: Location,
    config: MaskConfig,
    *,
    input_pin: Pin,
    run_id: str | None = None,
    engine: EngineConfig | None = None,
) -> StageResult:
    """Fill `text_masked` and `n_masked` for the rows that lack them: one new version, or none.

    Args:
        location: The table.
        config: What stands in place of addresses. Other words make every row anew.
        input_pin: Version to work from; the stage needs `text` alone.
        run_id: Dagster run id for the lineage record.
        engine: Where texts are masked; None: processes on this machine.
    """
    return fill(location, _fill(config), input_pin=input_pin, run_id=run_id, engine=engine)


def _fill(config: MaskConfig) -> Fill:
    import pyarrow as pa

    parameters = {"emails": list(config.emails), "ips": list(config.ips)}
    making: dict[str, Any] = {"stage": STAGE, "code_version": CODE_VERSION, "parameters": parameters}
    return Fill(
        stage=STAGE,
        groups=(
            RowColumns(
                outputs=pa.schema(
                    [
                        computed_field("text_masked", pa.string(), **making),
                        computed_field("n_masked", pa.int32(), **making),
                    ]
                ),
                inputs=("text",),
                nullable=("text_masked",),
                make=partial(masking, config),
                worker_bytes=128 << 20,  # most texts are copied
            ),
        ),
        code_version=CODE_VERSION,
        parameters=parameters,
        batch_bytes=config.batch_bytes,
        facts={"settings": to_dict(config)},
        summarize=_summarize,
    )


def masking(config: MaskConfig, worker: Worker) -> BatchFunction:
    """The function that makes `text_masked` and `n_masked` from `text`."""
    import numpy as np
    import pyarrow as pa

    del worker  # one thread, nothing to load

    def mask_batch(batch: pa.RecordBatch) -> list[pa.Array]:
        texts, counts = batch.column(0).to_pylist(), np.zeros(batch.num_rows, np.int32)
        for row in np.flatnonzero(may_have_pii(*text_bytes(batch.column(0)))):
            texts[row], counts[row] = mask_text(texts[row], config.emails, config.ips)
        return [pa.array(texts, pa.string()), pa.array(counts)]

    return mask_batch


def _summarize(read: ColumnReader) -> dict[str, int]:
    import pyarrow.compute as pc

    counts = read("n_masked")
    masked = pc.sum(pc.greater(counts, 0), min_count=0).as_py()
    return {"in": len(counts), "masked": masked, "unchanged": len(counts) - masked}
