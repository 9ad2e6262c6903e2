"""From a source's columns to the table's: types, ids of documents, lengths, and what happens to a row without text.

Invariant: every row that a reader meets is either in a batch or in the tally with a reason. Text is never altered.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pretrain_assets.config import IngestConfig
from pretrain_assets.errors import InputError
from pretrain_assets.ingest.sources import SourceFile
from pretrain_assets.table.schema import ingested_schema

if TYPE_CHECKING:
    import pyarrow as pa

REASONS = {
    "missing_text": "there is no text column",
    "ambiguous_column": "which column is meant is not clear",
    "null_text": "the text is null",
    "text_not_a_string": "the text is not a string",
    "malformed_json": "the line is not JSON",
    "not_an_object": "the line is not a JSON object",
    "invalid_utf8": "the bytes are not UTF-8",
    "lone_surrogate": "the text holds half of a surrogate pair, which is not a character",
    "bad_id": "an id must be a string or a 64-bit integer",
    "bad_score": "a score must be a number",
    "bad_source": "a source must be a string",
    "bad_value": "a value does not have its column's type",
}
"""Why a row was left out; the keys appear in ledgers as `left_out:<key>`."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which columns to look for, and how the table holds them."""

    config: IngestConfig
    """Names of the columns in the files."""
    extra: tuple[pa.Field, ...] = ()
    """More columns to keep, with the table's types."""

    @property
    def schema(self) -> pa.Schema:
        """Columns written to the table."""
        return ingested_schema(list(self.extra))

    @property
    def wanted(self) -> list[str]:
        """Columns read from the files, each once."""
        config = self.config
        roles = (config.text_column, config.id_column, config.score_column, config.source_column)
        return list(dict.fromkeys((*roles, *(extra.name for extra in self.extra))))


@dataclass
class Tally:
    """What became of the rows of one file."""

    file: SourceFile
    """The file."""
    config: IngestConfig
    """Says whether a bad row stops the ingest or is left out."""
    rows_in: int = 0
    """Rows met so far."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Rows left out so far, by reason."""

    def reject(self, reason: str, *, place: str, column: str | None = None, value: Any = None, rows: int = 1) -> None:
        """Count rows that cannot be used, or stop.

        Raises:
            InputError: on_bad_row is `raise`; names the file, place, column and value.
        """
        if self.config.on_bad_row == "raise":
            where = f"{self.file.name}, {place}" + (f", column {column!r}" if column else "")
            shown = "" if value is None else f" (found {_short(value)})"
            raise InputError(
                f"{where}: {REASONS[reason]}{shown}. Nothing was committed. Mend the file, or set on_bad_row='skip' "
                f"to leave such rows out and count them as left_out:{reason}."
            )
        self.left_out[reason] += rows


@contextmanager
def readable(file: SourceFile) -> Iterator[None]:
    """Turn an error of decompression or decoding into one that names the file. Network faults pass through."""
    import pyarrow as pa

    try:
        yield
    except (ConnectionError, TimeoutError, PermissionError):
        raise
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError, EOFError) as error:
        detail = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        kind = f"{file.compression} {file.format}" if file.compression else file.format
        raise InputError(
            f"{file.name} cannot be read as {kind}: {detail}. Nothing was committed. The file may be truncated or "
            "corrupt: fetch it again, or take it out of the sources."
        ) from error


def to_documents(raw: pa.RecordBatch | pa.Table, file: SourceFile, layout: Layout) -> pa.RecordBatch:
    """The table's columns, all but `id`, from a batch of usable rows under the file's own column names."""
    import pyarrow as pa
    import pyarrow.compute as pc

    config, rows = layout.config, raw.num_rows
    text = _column(raw, config.text_column, pa.string())
    doc_id = _column(raw, config.id_column, pa.string())
    columns = {
        "doc_id": _hash_where_null(doc_id, text),
        "text": text,
        "source": pc.fill_null(_column(raw, config.source_column, pa.string()), file.source),
        "source_file": pa.repeat(file.name, rows),
        "score": _column(raw, config.score_column, pa.float32()),
        "n_chars": pc.utf8_length(text).cast(pa.int32()),
        **{extra.name: _column(raw, extra.name, extra.type) for extra in layout.extra},
    }
    return pa.RecordBatch.from_pydict(columns, schema=layout.schema.remove(0))


def _column(raw: pa.RecordBatch | pa.Table, name: str, arrow_type: pa.DataType) -> pa.Array:
    """A column by name in the type wanted; nulls when the file has none."""
    import pyarrow as pa

    if name not in raw.schema.names:
        return pa.nulls(raw.num_rows, arrow_type)
    column = raw.column(name)
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return whole if whole.type == arrow_type else whole.cast(arrow_type, safe=False)


def _hash_where_null(doc_id: pa.Array, text: pa.Array) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not doc_id.null_count:
        return doc_id
    missing = doc_id.is_null()
    hashes = [f"sha256:{_sha256(value)}" for value in text.filter(missing).cast(pa.binary())]
    return pc.replace_with_mask(doc_id, missing, pa.array(hashes, pa.string()))


def _sha256(value: pa.BinaryScalar) -> str:
    return hashlib.sha256(value.as_buffer()).hexdigest()[:32]


def _short(value: Any) -> str:
    shown = ascii(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
