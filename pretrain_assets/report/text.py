"""Text for people: tables of versions, lineage and search hits."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from tabulate import tabulate

from pretrain_assets.forensics.lineage import Lineage
from pretrain_assets.forensics.search import Hit
from pretrain_assets.table.lineage import LineageRecord
from pretrain_assets.table.versions import VersionInfo


def megabytes(num_bytes: int) -> str:
    """Bytes as MB (10^6), two decimals."""
    return f"{num_bytes / 1e6:,.2f} MB"


def stages_text(records: Sequence[LineageRecord]) -> str:
    """One line per stage: version, tag, rows, bytes added."""
    rows = [
        [r.stage, f"v{r.version}", r.tag, f"{r.rows:,}", f"{r.rows_total:,}", megabytes(r.bytes_added), _ledger(r)]
        for r in records
    ]
    headers = ["stage", "version", "tag", "rows written", "rows", "bytes added", "ledger"]
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=["left"] * 3 + ["right"] * 3 + ["left"])


def versions_text(versions: Sequence[VersionInfo]) -> str:
    """One line per version."""
    rows = [
        [
            f"v{entry.version}",
            entry.created.strftime("%Y-%m-%d %H:%M:%S"),
            f"{entry.rows:,}",
            megabytes(entry.bytes_total),
            ", ".join(record.tag for record in entry.records) or "-",
            ", ".join(name for record in entry.records for name in record.columns) or "-",
            ", ".join(record.run_id or "by hand" for record in entry.records) or "-",
        ]
        for entry in versions
    ]
    headers = ["version", "created", "rows", "bytes", "tags", "columns written", "Dagster run"]
    return tabulate(rows, headers=headers, disable_numparse=True)


def lineage_text(lineage: Lineage) -> str:
    """The chain as a tree, checkpoint first."""
    passport = lineage.checkpoint.passport
    lines = [
        f"checkpoint {lineage.checkpoint.uri}",
        f"  recipe {passport['recipe']['name']}, step {lineage.checkpoint.step}, "
        f"{passport['tokens_seen']:,} tokens seen, filter {passport['filter']}",
    ]
    for depth, record in enumerate(lineage.records):
        indent = "   " * depth
        lines.append(f"{indent}└─ {record.stage} v{record.version}  (tag {record.tag}, {record.pin})")
        lines.append(f"{indent}     {', '.join(record.columns)}; {_ledger(record)}; run {record.run_id or 'by hand'}")
    indent = "   " * len(lineage.records)
    lines += [f"{indent}└─ {r.rows:,} rows from {', '.join(r.inputs)}  (tag {r.tag})" for r in lineage.ingests]
    return "\n".join(lines)


def hits_text(hits: Sequence[Hit]) -> str:
    """Hits with their preview and what the checkpoint saw of each."""
    if not hits:
        return "no hits"
    lines = []
    for place, hit in enumerate(hits, 1):
        seen = f", {hit.seen.describe()}" if hit.seen else ""
        lines.append(f"{place}. id {hit.id} ({hit.source}), score {hit.score:.1f}{seen}")
        lines.append(textwrap.indent(textwrap.fill(hit.preview, 100), "   "))
    return "\n".join(lines)


def _ledger(record: LineageRecord) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in record.ledger.items())
