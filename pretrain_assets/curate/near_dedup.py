"""Near duplicates: a MinHash signature per row, and for each near duplicate the kept row it repeats and how similar.

Invariant: the columns are a function of the live rows (their texts, ids, `is_dup`) and the settings alone: ingesting in
one batch or twenty gives the same, appending flips no earlier row, and every near duplicate names a kept row.
Signatures are made once per row, and anew when settings of theirs change; which rows repeat which is decided from them
in each run, since that takes seconds per million rows.
Rows with `is_dup` take no part (NULL, NULL, false), nor do rows without words. When the row that others repeat is
deleted, the next run decides as if it had never been there: the first of them is kept, and a later row may now repeat
that one. Words, shingles and hash functions: minhash.py; what wins: lsh.py.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pretrain_assets.config import EngineConfig, NearDedupConfig, to_dict
from pretrain_assets.curate import lsh, minhash
from pretrain_assets.curate.partitions import temporary_files
from pretrain_assets.errors import TableError
from pretrain_assets.progress import Progress
from pretrain_assets.table.filler.fill import fill
from pretrain_assets.table.filler.spec import BatchFunction, ColumnReader, Fill, RowColumns, TableColumns, Worker
from pretrain_assets.table.lineage import Pin, StageResult
from pretrain_assets.table.schema import computed_field, made_by
from pretrain_assets.table.storage import Location
from pretrain_assets.table.versions import open_pin

if TYPE_CHECKING:
    import pyarrow as pa

CODE_VERSION = "1"
"""Raised when the values of a column change."""
STAGE = "near_deduped"
WRITTEN = "what near duplicates are found by (8 bytes per row and band, and signatures or shingles of candidates)"


def near_dedup(
    location: Location,
    config: NearDedupConfig,
    *,
    input_pin: Pin,
    run_id: str | None = None,
    engine: EngineConfig | None = None,
) -> StageResult:
    """Fill `minhash`, `near_dup_of`, `near_dup_similarity`, `is_near_dup` for the rows that lack them.

    Args:
        location: The table.
        config: What counts as near.
        input_pin: Version of `deduped` to work from.
        run_id: Dagster run id for the lineage record.
        engine: Where signatures are made; None: processes on this machine.

    Raises:
        TableError: the input has no `is_dup`.
    """
    schema = open_pin(location, input_pin).schema
    if "is_dup" not in schema.names:
        raise TableError(f"{input_pin} has no is_dup: run `pretrain dedup` first, near duplicates come after it.")
    spec = _fill(config, made_by(schema.field("is_dup")))
    return fill(location, spec, input_pin=input_pin, run_id=run_id, engine=engine)


def signing(config: NearDedupConfig, worker: Worker) -> BatchFunction:
    """The function that makes `minhash` from `text`."""
    import pyarrow as pa

    del worker  # one thread

    def sign(batch: pa.RecordBatch) -> list[pa.Array]:
        found = minhash.signatures(
            batch.column(0),
            ngram_words=config.ngram_words,
            min_words=config.min_words,
            num_values=config.bands * config.rows_per_band,
            seed=config.seed,
        )
        return [pa.FixedSizeBinaryArray.from_buffers(_signature_type(config), len(found), [None, pa.py_buffer(found)])]

    return sign


def _fill(config: NearDedupConfig, is_dup: list[str]) -> Fill:
    import pyarrow as pa

    signature: dict[str, Any] = {
        "signature": minhash.CODE_VERSION,
        "ngram_words": config.ngram_words,
        "min_words": config.min_words,
        "values": config.bands * config.rows_per_band,
        "seed": config.seed,
    }
    parameters: dict[str, Any] = {
        **signature,
        "bands": config.bands,
        "threshold": config.threshold,
        "verify": config.verify,
        "max_compared": config.max_compared,
        "skip_sources": sorted(set(config.skip_sources)),
        "is_dup": is_dup,
    }
    making: dict[str, Any] = {"stage": STAGE, "code_version": CODE_VERSION, "parameters": parameters}
    return Fill(
        stage=STAGE,
        groups=(
            RowColumns(
                outputs=pa.schema(
                    [computed_field("minhash", _signature_type(config), **{**making, "parameters": signature})]
                ),
                inputs=("text",),
                make=functools.partial(signing, config),
                worker_bytes=256 << 20,  # some 110 MB/s on one core
            ),
            TableColumns(
                outputs=pa.schema(
                    [
                        computed_field("near_dup_of", pa.int64(), **making),
                        computed_field("near_dup_similarity", pa.float32(), **making),
                        computed_field("is_near_dup", pa.bool_(), **making),
                    ]
                ),
                inputs=("id", "is_dup"),
                nullable=("near_dup_of", "near_dup_similarity"),
                make=functools.partial(judging, config),
            ),
        ),
        code_version=CODE_VERSION,
        parameters=parameters,
        batch_bytes=config.batch_bytes,
        facts={"settings": to_dict(config)},
        limits={"near_share_removed": config.max_share_removed},
        summarize=_summarize,
    )


def _signature_type(config: NearDedupConfig) -> pa.DataType:
    import pyarrow as pa

    return pa.binary(4 * config.bands * config.rows_per_band)


def judging(config: NearDedupConfig, read: ColumnReader) -> BatchFunction:
    """Decides all rows of the table; the function looks up those of a batch.

    Raises:
        TableError: the temporary folder is full.
    """
    import pyarrow as pa

    ids = read("id").to_numpy()
    takes_part = _takes_part(config, read)
    with temporary_files(WRITTEN), tempfile.TemporaryDirectory(prefix="near-duplicates-") as folder:
        scratch = Path(folder)
        buckets = lsh.find_buckets(_signatures(config, read), takes_part, ids, bands=config.bands, scratch=scratch)
        found = lsh.first_wins(
            buckets,
            _evidence(config, read, np.sort(buckets.rows)),
            threshold=config.threshold,
            max_compared=config.max_compared,
            scratch=scratch,
        )
    order = np.argsort(ids[found.rows])
    near, partners, similarities = ids[found.rows][order], ids[found.partners][order], found.similarities[order]

    def judge(batch: pa.RecordBatch) -> list[pa.Array]:
        rows = batch.column(0).to_numpy()
        at = np.searchsorted(near, rows)
        is_near = at < len(near)
        is_near[is_near] = near[at[is_near]] == rows[is_near]
        where = pa.array(at, mask=~is_near)
        return [pa.array(partners).take(where), pa.array(similarities).take(where), pa.array(is_near)]

    return judge


def _signatures(config: NearDedupConfig, read: ColumnReader) -> Iterator[npt.NDArray[np.uint32]]:
    """All signatures, piece by piece."""
    with Progress(f"{STAGE}: signatures compared") as progress:
        for piece in read.batches("minhash"):
            yield _matrix(piece, config)
            progress.update(len(piece), piece.nbytes)


def _takes_part(config: NearDedupConfig, read: ColumnReader) -> npt.NDArray[np.bool_]:
    """Rows that are compared: neither exact duplicates nor of a source left out."""
    import pyarrow as pa
    import pyarrow.compute as pc

    takes_part: npt.NDArray[np.bool_] = ~read("is_dup").fill_null(False).to_numpy()
    if config.skip_sources:
        skipped = pa.array(config.skip_sources)
        skip = [pc.is_in(sources, skipped).to_numpy(zero_copy_only=False) for sources in read.batches("source")]
        takes_part &= ~np.concatenate([np.empty(0, bool), *skip])
    return takes_part


def _evidence(config: NearDedupConfig, read: ColumnReader, rows: npt.NDArray[np.int64]) -> Iterator[Any]:
    """What the candidates are verified by: their signatures, or their shingles."""
    if config.verify == "exact":
        shingles = functools.partial(minhash.shingle_sets, ngram_words=config.ngram_words, min_words=config.min_words)
        return lsh.chosen(read.batches("text"), rows, shingles)

    def values(signatures: pa.Array) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        matrix = _matrix(signatures, config)
        return matrix.ravel(), np.full(len(matrix), matrix.shape[1], np.int64)

    return lsh.chosen(read.batches("minhash"), rows, values)


def _matrix(signatures: pa.Array, config: NearDedupConfig) -> npt.NDArray[np.uint32]:
    """Signatures as numbers, shape (rows, values); of a row that has none yet, that of a text without words."""
    num_values = config.bands * config.rows_per_band
    buffer = signatures.buffers()[1]
    if buffer is None:
        return np.full((len(signatures), num_values), minhash.EMPTY)
    values = np.frombuffer(buffer, np.uint32).reshape(-1, num_values)
    values = values[signatures.offset : signatures.offset + len(signatures)]
    if signatures.null_count:
        values = values.copy()
        values[signatures.is_null().to_numpy(zero_copy_only=False)] = minhash.EMPTY
    return values


def _summarize(read: ColumnReader) -> dict[str, int]:
    import pyarrow.compute as pc

    near, exact = read("is_near_dup"), read("is_dup")
    duplicates = pc.sum(exact, min_count=0).as_py()
    near_duplicates = pc.sum(near, min_count=0).as_py()
    kept = len(near) - duplicates - near_duplicates
    return {"in": len(near), "kept": kept, "near_duplicate": near_duplicates, "duplicate": duplicates}
