"""Numbers with their nouns: `1 row`, `2,000 rows`. Invariant: imports nothing, so that every room may use it."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """The number with thousands separated, and the noun in the plural unless it is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
