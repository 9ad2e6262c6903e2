"""The table's columns: one owner stage each, with type, meaning and unit.

Invariant: a column is written by its owner alone, and what is not listed here is an extra column of `ingested`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of the table."""

    name: str
    """Column name."""
    arrow_type: str
    """Arrow type, as `str(pa.DataType)` prints it."""
    owner: str
    """The one stage that writes it."""
    meaning: str
    """What a value is, with its unit."""
    optional: bool = False
    """Whether the table has it only once there was something to write."""
    nullable: bool = False
    """Whether NULL is a value of a computed row, and not only the lack of one."""


COLUMNS = (
    Column(name="id", arrow_type="int64", owner="ingested", meaning="dense row number, given once, never used again"),
    Column(name="doc_id", arrow_type="string", owner="ingested", meaning="the source's own id, or the text's hash"),
    Column(name="text", arrow_type="string", owner="ingested", meaning="the document, unchanged"),
    Column(name="source", arrow_type="string", owner="ingested", meaning="where the document comes from"),
    Column(name="source_file", arrow_type="string", owner="ingested", meaning="the file it was read from"),
    Column(name="score", arrow_type="float", owner="ingested", meaning="the source's quality score, or null"),
    Column(name="n_chars", arrow_type="int32", owner="ingested", meaning="length of `text` in Unicode code points"),
    Column(
        name="content_hash",
        arrow_type="fixed_size_binary[16]",
        owner="deduped",
        meaning="xxh3-128 of the text with runs of white space made one space",
    ),
    Column(name="is_dup", arrow_type="bool", owner="deduped", meaning="an earlier row has the same content_hash"),
    Column(name="input_ids", arrow_type="list<item: int32>", owner="tokenized", meaning="token ids, no end-of-text"),
    Column(name="n_tokens", arrow_type="int32", owner="tokenized", meaning="length of input_ids, in tokens"),
    Column(
        name="input_ids_error",
        arrow_type="string",
        owner="tokenized",
        meaning="why the text could not be encoded (`on_error` null), else NULL",
        optional=True,
    ),
)
"""All columns that the stages of this project own. Extra ingested columns belong to `ingested` as well."""


def columns_of(stage: str) -> list[Column]:
    """The columns that a stage owns."""
    return [column for column in COLUMNS if column.owner == stage]
