"""The table that the loader's benchmarks read: random documents with token ids, and the settings to read them with.

Invariant: a table is a pure function of (rows, mean tokens, seed). Its tokens are those of language in what matters to
a reader: lengths spread like documents', and a few ids are most of the text (Zipf), so that files compress as usual.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from pretrain_assets.config import DataConfig, TokenizerIdentity
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location

if TYPE_CHECKING:
    import pyarrow as pa

SEQ_LEN = 1024
EOS, PAD = 50_256, 50_257
TOKENIZER = TokenizerIdentity(name="gpt2", fingerprint="benchmark", vocab_size=PAD, eos_id=EOS, pad_id=PAD)
PIN = Pin("00000000-0000-0000-0000-00000000be4c", 1)
FILTER = "NOT is_dup"
SEED = 5
DUPLICATE_EVERY = 20
"""One row in so many is left out by the filter, as in a deduplicated corpus."""
LENGTH_SIGMA = 0.8
"""Spread of the logarithm of the length; web documents have 0.8 to 1.1."""
ZIPF_EXPONENT = 1.3
CHUNK_ROWS = 5_000


def data(num_splits: int, clump: int = 1) -> DataConfig:
    """What to read of the table, and in which order."""
    return DataConfig(filter=FILTER, seq_len=SEQ_LEN, num_splits=num_splits, seed=SEED, shuffle_clump_size=clump)


def write(database: str, rows: int, mean_tokens: int, fragments: int) -> dict[str, Any]:
    """Make the table.

    Returns:
        Rows, tokens, bytes on disk and fragments.
    """
    import lance
    import pyarrow as pa

    location = Location(database_uri=database)
    reader = pa.RecordBatchReader.from_batches(schema(), _batches(rows, mean_tokens))
    dataset = lance.write_dataset(
        reader,
        location.uri,
        data_storage_version="2.2",
        enable_stable_row_ids=True,
        max_rows_per_file=-(-rows // fragments),
        max_bytes_per_file=1 << 40,
    )
    files = [file for fragment in dataset.get_fragments() for file in fragment.metadata.files]
    assert len(dataset.get_fragments()) == fragments
    return {
        "rows": rows,
        "tokens": dataset.sql("SELECT sum(n_tokens) AS n FROM dataset").build().to_batch_records()[0]["n"][0].as_py(),
        "bytes": sum(int(file.file_size_bytes) for file in files),
        "fragments": fragments,
    }


def schema() -> pa.Schema:
    """Columns of the table, with its identity."""
    import pyarrow as pa

    from pretrain_assets.table.versions import identified

    fields = [("id", pa.int64()), ("is_dup", pa.bool_()), ("input_ids", pa.list_(pa.int32())), ("n_tokens", pa.int32())]
    return identified(pa.schema(fields), PIN.table_id)


def _batches(rows: int, mean_tokens: int) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    rng = np.random.default_rng(0)
    middle = np.log(mean_tokens) - LENGTH_SIGMA**2 / 2
    for first in range(0, rows, CHUNK_ROWS):
        ids = np.arange(first, min(rows, first + CHUNK_ROWS), dtype=np.int64)
        lengths = np.maximum(1, rng.lognormal(middle, LENGTH_SIGMA, len(ids))).astype(np.int32)
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tokens = (rng.zipf(ZIPF_EXPONENT, int(ends[-1])) % EOS).astype(np.int32)
        lists = pa.ListArray.from_arrays(pa.array(ends), pa.array(tokens))
        columns = [pa.array(ids), pa.array(ids % DUPLICATE_EVERY == 0), lists, pa.array(lengths)]
        yield pa.record_batch(columns, schema=schema())
