"""Text for people: tables of versions and what changed between them, lineage and search hits.

Invariant: prints what it is given and looks up nothing; what is not known is printed as unknown.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from pretrain_assets.plural import counted

if TYPE_CHECKING:  # forensics needs torch, which takes seconds to import
    from pretrain_assets.forensics.lineage import Lineage
    from pretrain_assets.table.delete import Deletion
    from pretrain_assets.table.diff import Diff
    from pretrain_assets.table.history import VersionInfo
    from pretrain_assets.table.lineage import LineageRecord
    from pretrain_assets.table.upkeep.maintain import MaintainReport
    from pretrain_assets.table.upkeep.retention import Kept

MIXTURE_LINES = {
    "tokens_trained": "tokens trained so far",
    "tokens_repeated": "repeated in whole epochs",
    "tokens_left_out_thinned": "left out of whole epochs",
}
"""Lines of a part's ledger that a table of the mixture shows, added up over the epochs entered, and their headers."""


def megabytes(num_bytes: int) -> str:
    """Bytes as MB (10^6), two decimals."""
    return f"{num_bytes / 1e6:,.2f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:,.1f} kB"


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
    if mixture := mixture_text(passport):
        lines.append(textwrap.indent(mixture, "  "))
    for depth, record in enumerate(lineage.records):
        indent = "   " * depth
        lines.append(f"{indent}└─ {record.stage} v{record.version}  (tag {record.tag}, {record.pin})")
        lines.append(f"{indent}     {', '.join(record.columns)}; {_ledger(record)}; run {record.run_id or 'by hand'}")
    indent = "   " * len(lineage.records)
    lines += [f"{indent}└─ {counted(r.rows, 'row')} from {', '.join(r.inputs)}  (tag {r.tag})" for r in lineage.ingests]
    return "\n".join(lines)


def mixture_text(passport: Mapping[str, Any], *, tablefmt: str = "simple") -> str:
    """What a checkpoint saw of each part of its mixture, over all epochs; empty without a mixture."""
    ledgers = [ledger["parts"] for ledger in passport.get("ledger", {}).values() if "parts" in ledger]
    rows = [
        [
            name,
            f"{part['weight_share']:.2%}",
            f"{sum(parts[name]['tokens_trained'] for parts in ledgers) / max(1, passport['tokens_seen']):.2%}",
            *(f"{sum(parts[name][line] for parts in ledgers):,}" for line in MIXTURE_LINES),
        ]
        for name, part in (ledgers[-1].items() if ledgers else ())
    ]
    headers = ["part", "due", "share so far", *MIXTURE_LINES.values()]
    return tabulate(rows, headers=headers, tablefmt=tablefmt, disable_numparse=True) if rows else ""


def data_wait_text(result: Mapping[str, Any]) -> str:
    """The share of a run's training time in which it waited for data."""
    share = result.get("data_wait")
    return "data-wait unknown" if share is None else f"data-wait {share:.2%} of training time"


def maintain_text(report: MaintainReport) -> str:
    """What maintenance did, or would do; then every version kept, with the reasons."""
    after = "known once it runs" if report.bytes_after is None else megabytes(report.bytes_after)
    freed = f" ({_ranges(report.versions_freed)})" if report.versions_freed else ""
    facts = [
        ["bytes on storage", f"{megabytes(report.bytes_before)} -> {after}"],
        ["fragments", f"{report.fragments_before:,} -> {report.fragments_after:,}"],
        ["bytes rewritten", megabytes(report.bytes_rewritten)],
        ["rows indexed", f"{report.rows_indexed:,}"],
        ["index segments merged", f"{report.segments_merged:,}"],
        ["versions freed", f"{len(report.versions_freed):,}{freed}"],
        ["leftovers removed", f"{counted(report.leftovers_removed, 'file')}, {megabytes(report.leftover_bytes)}"],
        *(["waiting", reason] for reason in report.waiting),
    ]
    did = "plan, nothing was changed" if report.dry_run else f"newest version v{report.version}"
    parts = [tabulate(facts, headers=["", did], disable_numparse=True), kept_text(report.versions_kept)]
    if not report.changed:
        parts.append("nothing to do")
    return "\n\n".join(parts)


def kept_text(kept: Sequence[Kept], tablefmt: str = "simple") -> str:
    """One line per version that stays, with the reasons."""
    rows = [[f"v{entry.version}", "; ".join(entry.reasons)] for entry in kept]
    return tabulate(rows, headers=["kept", "because"], disable_numparse=True, tablefmt=tablefmt)


def deletion_text(deletion: Deletion) -> str:
    """What was deleted or would be, where the rows still are, and what to run next."""
    record, request = deletion.record, deletion.request
    lines = [
        f"{record.tag}: {counted(deletion.rows, 'row')} deleted, {record.rows_total:,} stay"
        if record
        else f"{deletion.rows:,} rows match{'' if deletion.rows else '; nothing to do, no new version'}"
    ]
    if deletion.missing_ids:
        lines.append(f"not in the table: id {', '.join(map(str, deletion.missing_ids))}")
    if deletion.copies:
        lines.append(
            f"{deletion.copies:,} of them are copies of the rows asked for"
            if request.with_duplicates
            else f"{deletion.copies:,} other rows have the same text and stay; --with-duplicates deletes them too"
        )
    if deletion.rows and deletion.unhashed:
        lines.append(f"{deletion.unhashed:,} rows were not compared with others yet, so there may be more copies")
    if record and deletion.copies and not request.with_duplicates:
        lines.append("they may all be marked as duplicates until the next `pretrain dedup` promotes one of them")
    if deletion.still_in:
        lines += ["", "older versions keep the rows until they are freed:", kept_text(deletion.still_in), ""]
        tags = [r[4:] for kept in deletion.still_in for r in kept.reasons if r.startswith("tag ")]
        lines += [f"  pretrain release {tag}" for tag in tags]
        lines += [
            "  pretrain maintain --purge    # rewrites fragments without the deleted rows",
            "  pretrain ingest SOURCE && pretrain dedup && pretrain tokenize && pretrain index    # move on to it",
            "  pretrain maintain --purge    # frees what nobody names any more",
            "or all of that at once, and a search of everything for what is left: pretrain receipt --delete --purge",
        ]
    return "\n".join(lines)


def _ranges(versions: Sequence[int]) -> str:
    """Version numbers with runs of them folded: v1-v12, v14."""
    runs: list[list[int]] = []
    for version in versions:
        if runs and version == runs[-1][-1] + 1:
            runs[-1].append(version)
        else:
            runs.append([version])
    return ", ".join(f"v{run[0]}-v{run[-1]}" if len(run) > 1 else f"v{run[0]}" for run in runs)


def _ledger(record: LineageRecord) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in record.ledger.items())


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "-"


def _value(value: object) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
