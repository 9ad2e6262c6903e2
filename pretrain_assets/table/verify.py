"""Invariants of the table at a version, stage by stage. Each answers with findings; nothing is repaired here.

Memory: ids are checked in one pass (they only ever grow); distinct hashes take about 32 bytes per row in the engine,
and so do the rows that duplicates are joined with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pretrain_assets.table.columns import COLUMNS, columns_of
from pretrain_assets.table.filler.spec import ERROR_SUFFIX
from pretrain_assets.table.lineage import LineageRecord, Pin
from pretrain_assets.table.query import sql_rows

if TYPE_CHECKING:
    import lance

SCAN_ROWS = 65_536
MAX_SHARE_REMOVED = 0.5
"""Limit of `share_removed` for records that were written before limits could be set."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One answered question about a version."""

    name: str
    """What was checked; also the name of the Dagster asset check."""
    passed: bool
    """Whether the invariant holds."""
    description: str
    """The evidence, with numbers."""
    details: dict[str, Any] = field(default_factory=dict)
    """Numbers for programs."""


def ledger_closes(record: LineageRecord) -> Finding:
    """Rows in equal the sum of everything that became of them."""
    out = sum(count for name, count in record.ledger.items() if name != "in")
    return Finding(
        name="ledger_closes",
        passed=record.ledger.get("in") == out,
        description=f"in {record.ledger.get('in', 0):,} = {out:,} accounted for",
        details=record.ledger,
    )


def schema_matches(dataset: lance.LanceDataset, stage: str) -> Finding:
    """Every column the stage owns is there with its type."""
    have = {f.name: str(f.type) for f in dataset.schema}
    columns = [c for c in columns_of(stage) if not c.optional or c.name in have]
    kinds = {name: {kind, kind.partition("[")[0]} for name, kind in have.items()}
    wrong = {c.name: have.get(c.name) for c in columns if c.arrow_type not in kinds.get(c.name, ())}
    return Finding(
        name="schema_matches",
        passed=not wrong,
        description=f"wrong or missing: {wrong}" if wrong else f"{len(columns)} columns as declared",
    )


def ids_unique(dataset: lance.LanceDataset) -> Finding:
    """Ids strictly increase in row order, hence are unique."""
    import numpy as np

    last, rows, bad = -1, 0, None
    for batch in dataset.scanner(columns=["id"], batch_size=SCAN_ROWS, scan_in_order=True).to_batches():
        ids = np.concatenate(([last], batch.column(0).to_numpy()))
        breaks = np.flatnonzero(np.diff(ids) <= 0)
        if len(breaks) and bad is None:
            bad = int(ids[breaks[0] + 1])
        last, rows = int(ids[-1]), rows + batch.num_rows
    return Finding(
        name="ids_unique",
        passed=bad is None,
        description=f"{rows:,} ids strictly increase" if bad is None else f"id {bad} repeats or goes back",
    )


def no_nulls(dataset: lance.LanceDataset, record: LineageRecord) -> Finding:
    """No row of the stage's input lacks a value of its columns, but for rows with a reason; lists by their lengths."""
    import pyarrow as pa

    upto = Pin.parse(record.inputs[0]).version
    reasons = [name for name in record.columns if name.endswith(ERROR_SUFFIX)]
    values = [name for name in record.columns if name not in reasons]
    may_be_null = {column.name for column in COLUMNS if column.nullable}
    narrow = [
        name for name in values if name not in may_be_null and not pa.types.is_nested(dataset.schema.field(name).type)
    ]
    missing = " OR ".join(f"{name} IS NULL" for name in narrow)
    failed = "".join(f" AND {name} IS NULL" for name in reasons)
    nulls = dataset.count_rows(f"_row_created_at_version <= {upto} AND ({missing}){failed}")
    return Finding(name="no_nulls", passed=nulls == 0, description=f"{nulls:,} rows lack {', '.join(narrow)}")


def one_kept_per_class(dataset: lance.LanceDataset) -> Finding:
    """Of all rows with the same content hash, exactly one is kept."""
    query = (
        "SELECT count(*) AS classes, count(*) FILTER (WHERE kept = 1) AS with_one FROM "
        "(SELECT sum(CASE WHEN is_dup THEN 0 ELSE 1 END) AS kept FROM dataset WHERE content_hash IS NOT NULL "
        "GROUP BY content_hash)"
    )
    row = sql_rows(dataset, query)[0]
    return Finding(
        name="one_kept_per_class",
        passed=row["classes"] == row["with_one"],
        description=f"{row['with_one']:,} of {row['classes']:,} classes have one kept row",
        details=row,
    )


def duplicates_name_survivors(dataset: lance.LanceDataset) -> Finding:
    """Every duplicate names a kept row before it that has the same content hash; no other row names one."""
    query = (
        "SELECT count(*) FILTER (WHERE d.is_dup) AS duplicates, count(*) FILTER (WHERE d.is_dup <> "
        "(s.id IS NOT NULL AND NOT s.is_dup AND s.id < d.id AND s.content_hash = d.content_hash) "
        "OR (d.dup_of IS NOT NULL) <> d.is_dup) AS wrong "
        "FROM dataset d LEFT JOIN dataset s ON d.dup_of = s.id WHERE d.is_dup IS NOT NULL"
    )
    row = sql_rows(dataset, query)[0]
    return Finding(
        name="duplicates_name_survivors",
        passed=row["wrong"] == 0,
        description=f"{row['wrong']:,} rows name a wrong first row, or none; {row['duplicates']:,} duplicates",
        details=row,
    )


def share_removed(
    dataset: lance.LanceDataset, record: LineageRecord, *, name: str = "share_removed", flag: str = "is_dup"
) -> Finding:
    """No source loses more of its rows than the limit that the stage was given.

    Args:
        dataset: The version.
        record: The stage's record, with the limit.
        name: Name of the check, under which the record has the limit.
        flag: The column that is true for removed rows.
    """
    query = (
        f"SELECT source, avg(CASE WHEN {flag} THEN 1.0 ELSE 0.0 END) AS share FROM dataset "
        f"WHERE {flag} IS NOT NULL GROUP BY source ORDER BY share DESC, source"
    )
    rows = sql_rows(dataset, query)
    limit = record.details.get("limits", {}).get(name, MAX_SHARE_REMOVED)
    over = [row for row in rows if row["share"] > limit]
    worst = rows[0] if rows else {"source": "none", "share": 0.0}
    return Finding(
        name=name,
        passed=not over,
        description=f"largest share removed: {worst['share']:.1%} of {worst['source']} (limit {limit:.0%})",
        details={"sources_over_limit": [row["source"] for row in over], "limit": limit},
    )


def failed_share(record: LineageRecord) -> Finding:
    """No more rows failed than the share that the stage was given."""
    failed = sum(count for name, count in record.ledger.items() if name.startswith("failed:"))
    share, limit = failed / max(1, record.ledger.get("in", 0)), record.details.get("max_failed_share", 0.0)
    return Finding(
        name="failed_share",
        passed=not failed or share <= limit,
        description=f"{failed:,} of {record.ledger.get('in', 0):,} rows failed: {share:.2%} (limit {limit:.2%})",
        details={"first_failed": record.details.get("failed", [])},
    )


def token_counts_match(dataset: lance.LanceDataset, since_version: int) -> Finding:
    """`n_tokens` is the length of `input_ids` in every row created after `since_version`."""
    import pyarrow.compute as pc

    rows, wrong = 0, 0
    scanner = dataset.scanner(
        columns=["input_ids", "n_tokens"],
        filter=f"_row_created_at_version > {since_version} AND n_tokens IS NOT NULL",
        batch_size=SCAN_ROWS // 16,
    )
    for batch in scanner.to_batches():
        differs = pc.not_equal(pc.list_value_length(batch.column("input_ids")), batch.column("n_tokens"))
        rows, wrong = rows + batch.num_rows, wrong + (pc.sum(differs).as_py() or 0)
    return Finding(
        name="token_counts_match",
        passed=wrong == 0,
        description=f"{wrong:,} of {rows:,} new rows have n_tokens other than the length of input_ids",
    )


def filters_disjoint(dataset: lance.LanceDataset, train: str, held_out: str) -> Finding:
    """No row is in both the training and the held-out filter."""
    both = dataset.count_rows(f"({train}) AND ({held_out})")
    return Finding(
        name="filters_disjoint", passed=both == 0, description=f"{both:,} rows are in both the train and held-out set"
    )
