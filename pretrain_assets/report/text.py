"""Text for people: tables of versions and what changed between them, lineage and search hits.

Invariant: prints what it is given and looks up nothing; what is not known is printed as unknown.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tabulate import tabulate

if TYPE_CHECKING:  # forensics needs torch, which takes seconds to import
    from pretrain_assets.forensics.lineage import Lineage
    from pretrain_assets.forensics.search import Hit
    from pretrain_assets.table.diff import Diff
    from pretrain_assets.table.history import VersionInfo
    from pretrain_assets.table.lineage import LineageRecord


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
            _listed(record.stage for record in entry.records),
            _listed(entry.tags),
            f"{entry.rows:,}",
            "unknown" if entry.columns_added is None else _listed(entry.columns_added),
            "unknown" if entry.bytes_added is None else megabytes(entry.bytes_added),
            _listed(record.run_id or "by hand" for record in entry.records),
            _listed([*(["tag"] if entry.tags else []), *entry.runs, *(["full-text index"] if entry.indexed else [])]),
        ]
        for entry in versions
    ]
    headers = ["version", "created", "stage", "tag", "rows", "columns added", "bytes added", "Dagster run", "pinned by"]
    align = ["left"] * 4 + ["right", "left", "right"] + ["left"] * 2
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=align if rows else None)


def diff_text(diff: Diff) -> str:
    """What changed, then which parameters, then the stages that ran."""
    grown = diff.rows_newer - diff.rows_older
    facts = [
        ["rows", f"{diff.rows_older:,} -> {diff.rows_newer:,} ({grown:+,})"],
        ["rows added", f"{diff.rows_added:,}"],
        ["rows deleted", f"{diff.rows_deleted:,}"],
        ["columns added", _listed(diff.columns_added)],
        ["columns removed", _listed(diff.columns_removed)],
        ["columns remade", _listed(diff.columns_remade)],
        ["bytes added", megabytes(diff.bytes_added)],
    ]
    parts = [tabulate(facts, headers=["", f"v{diff.older} -> v{diff.newer}"], disable_numparse=True)]
    if diff.parameters_changed:
        changes = [[c.stage, f"{c.name}: {_value(c.old)} -> {_value(c.new)}"] for c in diff.parameters_changed]
        parts.append(tabulate(changes, headers=["stage", "parameters changed"], disable_numparse=True))
    parts.append(stages_text(diff.stages) if diff.stages else "no stage ran in between")
    return "\n\n".join(parts)


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


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "-"


def _value(value: object) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
