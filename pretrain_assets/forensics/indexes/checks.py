"""What is asked of the indexes after they were built.

Invariant: a finding is made from the record alone, in which the counts of the table and of the index stand apart.
"""

from __future__ import annotations

from pretrain_assets.table.lineage import LineageRecord
from pretrain_assets.table.verify import Finding

LEAST_RECALL = 0.9


def vectors_add_up(record: LineageRecord) -> Finding:
    """Every row's vector is indexed, or read by every search, or points nowhere; the index holds those it should."""
    facts = record.details.get("vectors", {"rows": 0, "indexed": 0, "read": 0, "without": 0})
    entries = facts.get("entries", 0)
    parts = facts["indexed"] + facts["read"] + facts["without"]
    return Finding(
        name="vectors_add_up",
        passed=parts == facts["rows"] and entries >= facts["indexed"],
        description=f"{facts['rows']:,} rows: {facts['indexed']:,} have a vector in the index, of {entries:,} in it; "
        f"those of {facts['read']:,} are read; {facts['without']:,} have none",
        details=facts,
    )


def recall_is_high(record: LineageRecord) -> Finding:
    """The vector index finds nine of ten neighbours that reading every vector finds."""
    facts = record.details.get("vectors", {})
    found = facts.get("recall_at_10")
    said = "every vector is read" if found is None else f"{found:.3f} of {facts['queries']:,} rows asked"
    return Finding(
        name="recall_is_high",
        passed=found is None or found >= LEAST_RECALL,
        description=f"recall@10: {said}",
        details={"recall_at_10": 1.0 if found is None else found},
    )
