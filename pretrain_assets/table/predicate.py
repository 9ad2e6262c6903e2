"""SQL predicates from users: checked before any work, and safe to put into brackets.

Invariant: a predicate that passes means the same alone and inside `(...)`, and the same whenever it is evaluated.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pretrain_assets.errors import FilterError

if TYPE_CHECKING:
    import lance

_QUOTED = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`")
_INTERNALS = re.compile(r"\.?, /.*|\. Valid fields are .*", re.DOTALL)
"""What the engine adds to its reason: places in its own source, and its list of columns, with those of its own."""
_VOLATILE = re.compile(
    r"\b(?:(random|rand|uuid|now|today)\b\s*\(|(current_date|current_time|current_timestamp)\b)", re.IGNORECASE
)


def check_predicate(dataset: lance.LanceDataset, predicate: str, *, setting: str) -> None:
    """Refuse a predicate that the table cannot evaluate, or that would not mean the same every time.

    Args:
        dataset: The table at the version that is asked.
        predicate: SQL.
        setting: Name of the setting that it comes from, for messages.

    Raises:
        FilterError: not one SQL predicate of this table, or not deterministic.
    """
    problem = _shape(predicate)
    if problem:
        raise FilterError(f"{setting}={predicate!r} {problem}; give one SQL predicate over the table's columns")
    try:
        dataset.scanner(columns=["id"], filter=f"({predicate})", limit=1).to_table()
    except (ValueError, OSError) as error:
        reason = _INTERNALS.sub("", str(error).removeprefix("Invalid user input: ").removeprefix("Schema error: "))
        raise FilterError(
            f"{setting}={predicate!r} is not a predicate of this table: {reason}{'' if reason.endswith('?') else '.'} "
            f"Columns: {', '.join(dataset.schema.names)}"
        ) from error


def _shape(predicate: str) -> str | None:
    """What is wrong with a predicate as text, quoted parts aside; None when nothing is."""
    bare = _QUOTED.sub("''", predicate)
    if ";" in bare or "--" in bare or "/*" in bare:
        return "holds a semicolon or a comment"  # Lance would ignore what follows
    depth = 0
    for character in bare:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth < 0:
            break
    if depth:
        return "has unbalanced parentheses"
    volatile = _VOLATILE.search(bare)
    name = volatile and (volatile[1] or volatile[2])
    return f"calls {name}(), which gives another answer each time" if name else None
