"""JSON lines, plain or compressed, as batches of documents.

Invariant: what happens to a line does not depend on its neighbours. A clean block of lines is parsed by Arrow with a
fixed schema; a block with anything odd is looked at line by line, and its good lines give the rows they give alone.

Arrow alone is not enough: 26.0 crashes on a block whose first line is `null` and lets invalid UTF-8 through.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pretrain_assets.errors import InputError
from pretrain_assets.ingest.documents import Layout, Tally, readable, to_documents
from pretrain_assets.ingest.sources import SourceFile

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK_BYTES = 1 << 20
"""Bytes of lines parsed at once; a longer line makes its block longer. 1 MiB parses fastest (250 MB/s against 150)."""

MAX_LINE_BYTES = 1 << 30
"""A longer line is taken for a file that is not JSON lines. Keeps string offsets far below 2 GiB."""

Fault = tuple[str, str | None, Any]
"""Reason, column, value."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_jsonl(file: SourceFile, layout: Layout, tally: Tally) -> Iterator[pa.RecordBatch]:
    """Documents of one file."""
    found: set[str] = set()
    for first_line, block in line_blocks(file, min(BLOCK_BYTES, layout.config.batch_bytes)):
        raw = _parse_clean(block, layout)
        if raw is None:
            raw = _parse_carefully(block, first_line, layout, tally)
        else:
            tally.rows_in += raw.num_rows
        if raw.num_rows:
            found.update(extra.name for extra in layout.extra if raw[extra.name].null_count < raw.num_rows)
            yield to_documents(raw, file, layout)
    absent = [extra.name for extra in layout.extra if extra.name not in found]
    if absent and tally.rows_in > tally.left_out.total():
        raise InputError(f"{file.name}: no row has extra column {absent[0]!r}. Take it out of extra_columns.")


def line_blocks(file: SourceFile, block_bytes: int) -> Iterator[tuple[int, bytes]]:
    """(number of the first line, counted from 1, whole lines ending in a newline) of a decompressed file."""
    line, pending = 1, [b""]
    with readable(file), file.open() as handle:
        stream = _decompressed(handle, file.compression)
        while chunk := stream.read(block_bytes):
            cut = chunk.rfind(b"\n") + 1
            if cut:
                block = b"".join([*pending, chunk[:cut]]).removeprefix(_BYTE_ORDER_MARK if line == 1 else b"")
                yield line, block
                line, pending = line + block.count(b"\n"), []
            pending.append(chunk[cut:])
            if sum(map(len, pending)) > MAX_LINE_BYTES:
                raise InputError(f"{file.name}: line {line} is longer than {MAX_LINE_BYTES:,} bytes: not JSON lines.")
    last = b"".join(pending).removeprefix(_BYTE_ORDER_MARK if line == 1 else b"")
    if last.strip():
        yield line, last + b"\n"


def infer_type(file: SourceFile, name: str) -> pa.DataType | None:
    """Type of a key's values in the first block of a file; None when they do not tell."""
    import pyarrow as pa

    _, block = next(line_blocks(file, BLOCK_BYTES), (1, b""))
    rows = [_loads(line) for line in block.splitlines()]
    values = [row[name] for row in rows if isinstance(row, dict) and row.get(name) is not None]
    try:
        return pa.array(values).type if values else None
    except (pa.ArrowInvalid, pa.ArrowTypeError):  # mixed types: the first value decides, the others are bad rows
        return pa.array(values[:1]).type


def _decompressed(handle: Any, compression: str | None) -> Any:
    import pyarrow as pa

    return pa.CompressedInputStream(pa.PythonFile(handle, "r"), compression) if compression else handle


def _parse_clean(block: bytes, layout: Layout) -> pa.Table | None:
    """All rows of a block in which every line is an object with a text, or None when any is not."""
    lines = block.count(b"\n")
    if not block.startswith(b"{") or block.count(b"\n{") + 1 != lines or not _is_utf8(block):
        return None
    table = _arrow_rows(block, layout)
    if table is None or table.num_rows != lines or table[layout.config.text_column].null_count:
        return None
    return table


def _arrow_rows(block: bytes, layout: Layout) -> pa.Table | None:
    """Rows of a block by Arrow's parser, ids made strings; None when it finds a fault."""
    import pyarrow as pa
    import pyarrow.json as pj

    read = pj.ReadOptions(use_threads=False, block_size=len(block) + 1)
    for id_type in (pa.string(), pa.int64(), pa.uint64()):
        parse = pj.ParseOptions(explicit_schema=_json_schema(layout, id_type), unexpected_field_behavior="ignore")
        try:
            return pj.read_json(pa.BufferReader(block), read, parse).cast(_json_schema(layout, pa.string()))
        except pa.ArrowInvalid:
            continue
    return None


def _json_schema(layout: Layout, id_type: pa.DataType) -> pa.Schema:
    import pyarrow as pa

    config = layout.config
    types = {
        **{extra.name: extra.type for extra in layout.extra},
        config.score_column: pa.float64(),
        config.source_column: pa.string(),
        config.id_column: id_type,
        config.text_column: pa.string(),
    }
    return pa.schema([(name, types[name]) for name in layout.wanted])


def _parse_carefully(block: bytes, first_line: int, layout: Layout, tally: Tally) -> pa.Table:
    """Rows of the good lines; the others go to the tally with their line number. Blank lines are no rows."""
    import pyarrow as pa

    good: list[tuple[int, bytes]] = []
    for number, line in enumerate(block.split(b"\n"), start=first_line):
        if line.strip():
            tally.rows_in += 1
            fault, kept = _look_at(line, layout)
            if fault is None:
                good.append((number, json.dumps(kept).encode() + b"\n"))
            else:
                reason, column, value = fault
                tally.reject(reason, place=f"line {number}", column=column, value=value)
    empty = _json_schema(layout, pa.string()).empty_table()
    together = _arrow_rows(b"".join(line for _, line in good), layout) if good else empty
    return pa.concat_tables([empty, *_one_by_one(good, layout, tally)]) if together is None else together


def _one_by_one(lines: list[tuple[int, bytes]], layout: Layout, tally: Tally) -> Iterator[pa.Table]:
    """The rows that Arrow accepts, each line alone; the others go to the tally."""
    for number, line in lines:
        row = _arrow_rows(line, layout)
        if row is None:
            tally.reject("bad_value", place=f"line {number}", value=line.decode())
        else:
            yield row


def _look_at(line: bytes, layout: Layout) -> tuple[Fault | None, dict[str, Any]]:
    """What is wrong with a line (reason, column, value) or None, and its wanted values."""
    config = layout.config
    if not _is_utf8(line):
        return ("invalid_utf8", None, line), {}
    row = _loads(line)
    if isinstance(row, ValueError):
        return ("malformed_json", None, line.decode()), {}
    if not isinstance(row, dict):
        return ("not_an_object", None, row), {}
    if config.text_column not in row:
        return ("missing_text", config.text_column, list(row)), {}
    kept = {name: row[name] for name in layout.wanted if name in row}
    return _value_fault(kept, layout), kept


def _value_fault(row: dict[str, Any], layout: Layout) -> Fault | None:
    config, text = layout.config, row[layout.config.text_column]
    if text is None:
        return "null_text", config.text_column, None
    if not isinstance(text, str):
        return "text_not_a_string", config.text_column, text
    if not _is_encodable(text):
        return "lone_surrogate", config.text_column, text
    for reason, column, accepted in (
        ("bad_id", config.id_column, (str, int)),
        ("bad_score", config.score_column, (int, float)),
        ("bad_source", config.source_column, (str,)),
    ):
        value = row.get(column)
        if value is not None and (isinstance(value, bool) or not isinstance(value, accepted)):
            return reason, column, value
    return None


def _loads(line: bytes) -> Any:
    """The value of a line, or the ValueError that says why there is none."""
    try:
        return json.loads(line)
    except RecursionError:
        return ValueError("nested too deeply")
    except ValueError as error:
        return error


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_utf8(block: bytes) -> bool:
    try:
        block.decode()
    except UnicodeDecodeError:
        return False
    return True
