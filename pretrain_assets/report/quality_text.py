"""What the published quality rules would leave out, as a table."""

from __future__ import annotations

from collections.abc import Mapping

from tabulate import tabulate

from pretrain_assets.curate.quality_rules import RULES


def rules_text(failing: Mapping[str, Mapping[str, int]], rows: int, tablefmt: str = "simple") -> str:
    """Rows that each rule leaves out, alone, and their share.

    Args:
        failing: From `quality_rules.rows_failing`.
        rows: Rows of the table.
        tablefmt: Format of `tabulate`.
    """
    meanings = {(name, rule.name): rule.meaning for name, rules in RULES.items() for rule in rules}
    lines = [
        (name, rule or "any", meanings.get((name, rule), ""), f"{count:,}", f"{count / max(1, rows):.1%}")
        for name, counts in failing.items()
        for rule, count in counts.items()
    ]
    return tabulate(lines, headers=("rules", "rule", "keeps", "left out", "share"), tablefmt=tablefmt)
