r"""Texts of documents as they may be printed anywhere: a corpus holds what steers a terminal, a browser or a table.

Invariant: what comes out has no control characters but tab and line feed, no marks of direction and no lone surrogates;
they are shown as escapes, such as `\x1b`.
"""

from __future__ import annotations

import re

_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
NAME = 80
"""Characters of a name shown."""


def clean(text: str) -> str:
    r"""Text with control characters, marks of direction and lone surrogates as escapes, such as `\x00` or `\u202e`."""
    return _STEERING.sub(lambda match: ascii(match[0])[1:-1], text)


def named(name: str | None, most: int = NAME) -> str:
    """The name of a source or document on one line, clean, a long one without its middle; `-` where it has none."""
    line = clean(" ".join((name or "").split()))
    return (line if len(line) <= most else f"{line[: most // 2]}...{line[3 - most // 2 :]}") or "-"
