"""Numbers with their nouns: `1 row`, `2,000 rows`. Invariant: imports nothing, so that every room may use it."""

from __future__ import annotations


def counted(number: float, noun: str, spec: str = ",") -> str:
    """The number as `format` writes it, and the noun in the plural unless that is 1."""
    text = format(number, spec)
    return f"{text} {noun}{'' if text == '1' else 's'}"
