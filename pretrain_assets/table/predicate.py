"""SQL predicates from users: checked before any work, and safe to put into brackets.

Invariant: a predicate that passes means the same alone and inside `(...)`, and the same whenever it is evaluated.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from pretrain_assets.errors import FilterError

if TYPE_CHECKING:
    import lance

_QUOTED = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`")
_INTERNALS = re.compile(
    r".*(?:Invalid user input|Schema error|Arrow error|sql parser error|Error during planning): |\.?,? /\S+\.rs:.*",
    re.DOTALL,
)
"""What the engine puts around its reason: how it came to it, with the SQL that it was given, and its own source."""
_UNKNOWN = re.compile(r"No field named \"?(?P<word>.*?)\"?\. ", re.DOTALL)
_CLOCK = "current_date|current_time|current_timestamp"
_VOLATILE = re.compile(rf"\b(random|rand|uuid|now|today|{_CLOCK})\b`?\s*\(|(?<!`)\b({_CLOCK})\b(?!`)", re.IGNORECASE)
"""Functions whose answers change: also in backticks where they are called, but not a column of such a name."""
SHOWN_CHARACTERS, MOST_NEAR = 200, 3
"""Of a predicate in a message, and names that are near to a wrong one."""


def check_predicate(dataset: lance.LanceDataset, predicate: str, *, setting: str, written: str | None = None) -> None:
    """Refuse a predicate that the table cannot evaluate, or that would not mean the same every time.

    Args:
        dataset: The table at the version that is asked.
        predicate: SQL.
        setting: Name of the setting that it comes from, for messages.
        written: What the user wrote, for messages; None: the predicate itself.

    Raises:
        FilterError: not one SQL predicate of this table, or not deterministic.
    """
    said = f"{setting}={excerpt(predicate if written is None else written)!r}"
    if problem := _shape(predicate):
        raise FilterError(f"{said} {problem}; give one SQL predicate over the table's columns")
    try:
        dataset.scanner(columns=["id"], filter=f"({predicate})", limit=1).to_table()
    except (ValueError, OSError) as error:
        raise FilterError(f"{said} is not a predicate of this table: {_reason(error, dataset)}") from error


def excerpt(text: str) -> str:
    """A predicate as a message shows it: its beginning, where it is long."""
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def near(word: str, known: Collection[str]) -> str:
    """What to say of a word that nothing is named: the names nearest to it, and where all of them are listed."""
    found = difflib.get_close_matches(word.lower(), known, n=MOST_NEAR)
    hint = f"Did you mean {' or '.join(map(repr, found))}? " if found else ""
    return f"{hint}`pretrain filter` lists all columns and named filters"


def _reason(error: Exception, dataset: lance.LanceDataset) -> str:
    """Why the engine cannot evaluate a predicate, in its words but for those about itself."""
    if unknown := _UNKNOWN.search(str(error)):
        return f"no column is named {unknown['word']!r}. {near(unknown['word'], dataset.schema.names)}"
    reason = " ".join(_INTERNALS.sub("", str(error)).split())
    if "sql parser error" in str(error):
        reason = reason.removesuffix(")").replace("found: )", "found: its end, or a closing bracket")
    return excerpt(reason)


def _shape(predicate: str) -> str | None:
    """What is wrong with a predicate as text, quoted parts aside; None when nothing is."""
    if not predicate.strip():
        return "is empty"
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
    volatile = _VOLATILE.search(_QUOTED.sub(lambda quoted: quoted[0] if quoted[0][0] == "`" else "''", predicate))
    name = volatile and (volatile[1] or volatile[2])
    return f"calls {name}(), which gives another answer each time" if name else None


def in_list(column: str, values: Iterable[int | str]) -> str:
    """`column IN (...)`; `false` for no values."""
    quoted = ["'" + v.replace("'", "''") + "'" if isinstance(v, str) else str(v) for v in values]
    return f"{column} IN ({', '.join(quoted)})" if quoted else "false"


def redacted(predicate: str) -> str:
    """A predicate without what stands in quotes, which may be the very words of a document that is to go."""
    return re.sub(r"'(?:[^']|'')*'", "'...'", predicate)
