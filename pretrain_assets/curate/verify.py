"""Invariants of the curation columns at a version. Each answers with a finding; nothing is repaired here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pretrain_assets.table import verify
from pretrain_assets.table.columns import columns_of
from pretrain_assets.table.lineage import LineageRecord
from pretrain_assets.table.query import sql_rows
from pretrain_assets.table.verify import Finding

if TYPE_CHECKING:
    import lance


def near_duplicates_name_survivors(dataset: lance.LanceDataset, record: LineageRecord) -> Finding:
    """Every near duplicate names a row that is kept and comes before it, at least as similar as the threshold."""
    threshold = record.parameters["threshold"]
    query = (
        "SELECT count(*) FILTER (WHERE d.is_near_dup) AS near_duplicates, count(*) FILTER (WHERE d.is_near_dup <> "
        "(s.id IS NOT NULL AND NOT s.is_near_dup AND NOT s.is_dup AND s.id < d.id AND NOT d.is_dup "
        f"AND d.near_dup_similarity >= CAST({threshold} AS FLOAT)) "
        "OR (d.near_dup_of IS NOT NULL) <> d.is_near_dup OR (d.near_dup_similarity IS NOT NULL) <> d.is_near_dup) "
        "AS wrong FROM dataset d LEFT JOIN dataset s ON d.near_dup_of = s.id WHERE d.is_near_dup IS NOT NULL"
    )
    row = sql_rows(dataset, query)[0]
    return Finding(
        name="near_duplicates_name_survivors",
        passed=row["wrong"] == 0,
        description=f"{row['wrong']:,} rows name a wrong row, or none; {row['near_duplicates']:,} near duplicates",
        details=row,
    )


def near_share_removed(dataset: lance.LanceDataset, record: LineageRecord) -> Finding:
    """No source loses more of its rows to near deduplication than the limit that the stage was given."""
    return verify.share_removed(dataset, record, name="near_share_removed", flag="is_near_dup")


def matches_lie_in_their_texts(dataset: lance.LanceDataset, record: LineageRecord) -> Finding:
    """A row has an item and a span in its text exactly where it has an overlap, and all items where contaminated."""
    limit = record.parameters["min_overlap"]
    query = (
        "SELECT count(*) FILTER (WHERE contaminated) AS contaminated, count(*) FILTER (WHERE "
        f"contaminated <> (contamination_overlap >= CAST({limit} AS FLOAT)) "
        "OR contaminated <> (contamination_items IS NOT NULL) "
        "OR (contamination_overlap > 0) <> (contamination_item IS NOT NULL) "
        "OR (contamination_overlap > 0) <> coalesce(contamination_start >= 0 "
        "AND contamination_stop > contamination_start AND contamination_stop <= n_chars, false)) AS wrong "
        "FROM dataset WHERE contaminated IS NOT NULL"
    )
    row = sql_rows(dataset, query)[0]
    return Finding(
        name="matches_lie_in_their_texts",
        passed=row["wrong"] == 0,
        description=f"{row['wrong']:,} rows contradict themselves; {row['contaminated']:,} are contaminated",
        details=row,
    )


def contaminated_share(dataset: lance.LanceDataset, record: LineageRecord) -> Finding:
    """No source has a larger share of contaminated rows than the limit that the stage was given."""
    return verify.share_removed(dataset, record, name="contaminated_share", flag="contaminated")


def lines_add_up(dataset: lance.LanceDataset) -> Finding:
    """Every line of a text has exactly one outcome under C4's rules."""
    first, *outcomes = [column.name for column in columns_of("quality") if column.name.startswith("c4_")][:-1]
    wrong = dataset.count_rows(f"{first} <> {' + '.join(outcomes)}")
    return Finding(name="lines_add_up", passed=wrong == 0, description=f"{wrong:,} rows have other lines than outcomes")
