"""Text of a checkpoint's ledger.

Invariant: every line of every account is printed but those of nothing, and each section says whether it closes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tabulate import tabulate

if TYPE_CHECKING:
    from pretrain_assets.forensics.ledger import RunLedger, Section

WIDTH = 60
"""Characters of a line's name."""
UNITS = {"tokens": "tokens, with ends of text"}
"""Units that say more of themselves in print."""


def ledger_text(ledger: RunLedger) -> str:
    """The checkpoint in two lines, its sections, and whether all of them close."""
    head = f"{ledger.run}\nstep {ledger.step:,}, {ledger.tokens_seen:,} tokens seen, {ledger.pin}"
    end = "Every section closes." if not ledger.gaps else "\n".join(["The ledger does not close:", *ledger.gaps])
    return "\n\n".join([head, *map(_section, ledger.sections), end])


def _section(section: Section) -> str:
    """What came in above what became of it, one column for each unit."""
    accounts = section.accounts
    lines = [
        *dict.fromkeys(("in", name) for account in accounts for name in account.came),
        *dict.fromkeys(("out", name) for account in accounts for name in account.went),
    ]
    rows = []
    for way, name in lines:
        counts = [(account.came if way == "in" else account.went).get(name) for account in accounts]
        if any(counts):
            rows.append([f"{way:<3}  {_plain(name)}", *("" if count is None else f"{count:,}" for count in counts)])
    closes = "closes" if not section.gaps else "DOES NOT CLOSE: " + "; ".join(section.gaps)
    headers = [
        f"{section.name} ({_cut(section.detail)})",
        *(UNITS.get(account.unit, account.unit) for account in accounts),
    ]
    align = ["left", *("right" for _ in accounts)]
    table = tabulate(rows, headers=headers, disable_numparse=True, colalign=align if rows else None)
    return f"{table}\n{closes}"


def _plain(name: str) -> str:
    """A line's name in words: `left_out_end_of_split` as `left out: end of split`. SQL stays as it is."""
    if " " not in name:
        name = name.replace("left_out_", "left out: ").replace("left_out:", "left out: ").replace("_", " ")
    return _cut(name)


def _cut(text: str) -> str:
    return text if len(text) <= WIDTH else f"{text[:WIDTH]}..."
