"""E-mail and public IP addresses in texts: counted, and replaced.

Invariant: what is found is what datatrove's PIIFormatter finds, its two patterns in the same order, in time linear in
the text: its pattern for e-mail addresses takes quadratic time on long runs such as `a-a-a-...`, so the search here
begins at each `@`. Values depend on one text alone: replacements are taken in turn from the first one in every text.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import string
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pretrain_assets.compiled import compiled
from pretrain_assets.curate.words import Bytes, Offsets

if TYPE_CHECKING:
    import pyarrow as pa

LOCAL = frozenset(string.ascii_letters + string.digits + "!#$%&'*+/=?^_`{|}~-")
"""Characters of the part before the `@`, which single full stops may divide."""
OCTET = "(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)"
LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
DOMAIN = re.compile(rf"@(?:(?:{LABEL}\.)+{LABEL}|\[(?:{OCTET}\.){{3}}(?:{OCTET}|[A-Za-z0-9-]*[A-Za-z0-9]:)])")
IP = re.compile(rf"(?:{OCTET}\.){{3}}{OCTET}")

Span = tuple[int, int]


def emails(text: str) -> Iterator[Span]:
    """Where e-mail addresses begin and end, in characters, from left to right."""
    free = 0
    at = text.find("@")
    while at >= 0:
        domain = DOMAIN.match(text, at)
        start = _local_start(text, free, at) if domain else at
        if domain and start < at:
            free = domain.end()
            yield start, free
        at = text.find("@", max(free, at + 1))


def _local_start(text: str, free: int, at: int) -> int:
    """Where the part before the `@` begins: the first word boundary of its longest run; `at` where there is none."""
    start, begin = at, at
    while begin > free:
        character = text[begin - 1]
        if character == ".":
            if begin == at or text[begin] == ".":
                break
        elif character not in LOCAL:
            break
        elif _is_word(character) != (begin > 1 and _is_word(text[begin - 2])):
            start = begin - 1
        begin -= 1
    return start


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


@functools.lru_cache(1 << 12)
def _is_public(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:  # leading zeros
        return False


def ips(text: str) -> Iterator[Span]:
    """Where public IP addresses (version 4) begin and end, in characters."""
    return (match.span() for match in IP.finditer(text) if _is_public(match[0]))


def count_pii(text: str) -> tuple[int, int]:
    """E-mail addresses, and public IP addresses outside of them."""
    rest, num_emails = replaced(text, emails, ("@",))
    return num_emails, sum(1 for _ in ips(rest))


def mask_text(text: str, email_replacements: Sequence[str], ip_replacements: Sequence[str]) -> tuple[str, int]:
    """The text with its addresses replaced, and how many there were.

    Args:
        text: Any text.
        email_replacements: Words for e-mail addresses, taken in turn.
        ip_replacements: Words for public IP addresses, taken in turn.
    """
    text, num_emails = replaced(text, emails, email_replacements)
    text, num_ips = replaced(text, ips, ip_replacements)
    return text, num_emails + num_ips


def replaced(text: str, find: Callable[[str], Iterator[Span]], replacements: Sequence[str]) -> tuple[str, int]:
    """The text with what `find` finds replaced in turn, and how often."""
    pieces, behind, count = [], 0, 0
    for (start, stop), replacement in zip(find(text), cycle(replacements), strict=False):
        pieces += [text[behind:start], replacement]
        behind, count = stop, count + 1
    return ("".join([*pieces, text[behind:]]) if count else text), count


def pii_numbers(texts: pa.Array, data: Bytes, offsets: Offsets) -> dict[str, npt.NDArray[np.int32]]:
    """The columns `pii_emails` and `pii_ips` of texts, given with their bytes (`words.text_bytes`)."""
    counts = np.zeros((2, len(texts)), np.int32)
    for row in np.flatnonzero(may_have_pii(data, offsets)):
        counts[:, row] = count_pii(texts[row].as_py())
    return {"pii_emails": counts[0], "pii_ips": counts[1]}


@compiled
def may_have_pii(data: Any, offsets: Any) -> Any:
    """Which texts have an `@`, or four numbers with full stops between them: no other text has an address.

    Args:
        data: uint8, UTF-8 bytes of all texts.
        offsets: (texts + 1,): where each text begins.

    Returns:
        bool (texts,).
    """
    found = np.zeros(len(offsets) - 1, np.bool_)
    for text in range(len(offsets) - 1):
        stops, last, at, stop = 0, False, offsets[text], offsets[text + 1]
        while at < stop and not found[text]:
            byte = data[at]
            is_digit = 0x30 <= byte <= 0x39
            if byte == 0x2E and last:
                stops += 1
            elif not is_digit:
                stops = 0
            found[text] = byte == 0x40 or (stops >= 3 and is_digit)
            last = is_digit
            at += 1
    return found
