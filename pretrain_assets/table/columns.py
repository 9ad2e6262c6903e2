"""The table's columns: one owner stage each, with type, meaning and unit.

Invariant: a column is written by its owner alone, and what is not listed here is an extra column of `ingested`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pretrain_assets.table.quality_columns import QUALITY


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of the table."""

    name: str
    """Column name."""
    arrow_type: str
    """Arrow type, as `str(pa.DataType)` prints it; without its length where a setting gives that."""
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
    Column(
        name="dup_of",
        arrow_type="int64",
        owner="deduped",
        meaning="id of the first row with the same content_hash, or NULL: there is no earlier one",
        nullable=True,
    ),
    Column(name="is_dup", arrow_type="bool", owner="deduped", meaning="an earlier row has the same content_hash"),
    Column(
        name="minhash",
        arrow_type="fixed_size_binary",
        owner="near_deduped",
        meaning="MinHash signature of the text's word shingles: uint32 values, as many as bands x rows_per_band",
    ),
    Column(
        name="near_dup_of",
        arrow_type="int64",
        owner="near_deduped",
        meaning="id of the most similar kept earlier row that is at least `threshold` similar, or NULL: there is none",
        nullable=True,
    ),
    Column(
        name="near_dup_similarity",
        arrow_type="float",
        owner="near_deduped",
        meaning="Jaccard index of the word shingles of the row and near_dup_of, 0 to 1, or NULL: estimated from the "
        "signatures, or exact where the stage's parameter `verify` says so",
        nullable=True,
    ),
    Column(
        name="is_near_dup",
        arrow_type="bool",
        owner="near_deduped",
        meaning="the row repeats near_dup_of; false for rows with is_dup, which are not compared",
    ),
    *(Column(name=name, arrow_type=kind, owner="quality", meaning=meaning) for name, kind, meaning in QUALITY),
    Column(
        name="text_masked",
        arrow_type="string",
        owner="masked",
        meaning="`text` with e-mail and public IP addresses replaced; NULL as `text`",
        nullable=True,
    ),
    Column(name="n_masked", arrow_type="int32", owner="masked", meaning="addresses replaced in text_masked"),
    Column(
        name="contamination_item",
        arrow_type="string",
        owner="decontaminated",
        meaning="evaluation item (`set/id`) of which the largest share stands in the text, or NULL: none of any",
        nullable=True,
    ),
    Column(
        name="contamination_items",
        arrow_type="list<item: string>",
        owner="decontaminated",
        meaning="all evaluation items that stand in the text (`min_overlap`), or NULL: none",
        nullable=True,
    ),
    Column(
        name="contamination_overlap",
        arrow_type="float",
        owner="decontaminated",
        meaning="share of the n-grams of one text of contamination_item that the document has, 0 to 1",
    ),
    Column(
        name="contamination_start",
        arrow_type="int32",
        owner="decontaminated",
        meaning="where the longest run of those n-grams begins in `text`, in Unicode code points, or NULL",
        nullable=True,
    ),
    Column(
        name="contamination_stop",
        arrow_type="int32",
        owner="decontaminated",
        meaning="where that run ends in `text`, in Unicode code points (one past its last), or NULL",
        nullable=True,
    ),
    Column(
        name="contaminated",
        arrow_type="bool",
        owner="decontaminated",
        meaning="contamination_overlap reaches `min_overlap`: an evaluation item stands in the text",
    ),
    Column(name="input_ids", arrow_type="list<item: int32>", owner="tokenized", meaning="token ids, no end-of-text"),
    Column(name="n_tokens", arrow_type="int32", owner="tokenized", meaning="length of input_ids, in tokens"),
    Column(
        name="input_ids_error",
        arrow_type="string",
        owner="tokenized",
        meaning="why the text could not be encoded (`on_error` null), else NULL",
        optional=True,
    ),
    Column(
        name="embedding",
        arrow_type="fixed_size_list<item: halffloat>",
        owner="embedded",
        meaning="vector of length 1 by the model that the metadata names; zeros where the text says nothing to it",
        optional=True,
    ),
)
"""All columns that the stages of this project own. Extra ingested columns belong to `ingested` as well."""


def columns_of(stage: str) -> list[Column]:
    """The columns that a stage owns."""
    return [column for column in COLUMNS if column.owner == stage]
