"""Byte-level BPE as fast engines need it, read from the file that defines it: `vocab.json` or `tokenizer.json`.

Invariant: what is accepted here gives every text the ids that the `tokenizers` package gives it; whatever would not, or
is not understood, is refused with the reason. (The ids are compared before every run all the same: see engines.py.)
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pretrain_assets.errors import TokenizerError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
"""Pre-tokenizer of GPT-2, as published with the model (openai/gpt-2, encoder.py)."""
DIGITS_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"""  # a digit ends a piece
)
"""The same after every digit was made a piece of its own (StarCoder, SmolLM), as one pattern."""
_CASES = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
CUTTABLE = frozenset(
    {
        GPT2_PATTERN,
        DIGITS_PATTERN,
        *(  # GPT-4 and Llama 3; Qwen 2 and 3
            _ENDINGS
            + rf"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            for digits in (r"\p{N}{1,3}", r"\p{N}")
        ),
        f"{_CASES}*{_LOWER}+{_ENDINGS}?|{_CASES}+{_LOWER}*{_ENDINGS}?"  # GPT-4o
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
"""Patterns that begin a new piece at every space between two other characters, whatever comes before and after."""
CUT = re.compile(r"(?<=\S) (?=\S)")


@dataclass(frozen=True, kw_only=True)
class ByteLevel:
    """A byte-level BPE: how text is cut into pieces, and in which order the bytes of a piece are merged."""

    ranks: dict[bytes, int]
    """Bytes of every token to its rank: of all neighbours that make a token, those of the lowest rank merge first."""
    pattern: str
    """Regular expression whose matches are the pieces."""
    ids: npt.NDArray[np.int32] | None = None
    """Id of each rank; None where they are equal."""
    words: Mapping[str, int] = field(default_factory=dict)
    """Added tokens that are no special tokens, and their ranks: each is one token wherever a text has it."""
    normalizer: Any = None
    """What changes texts beyond ASCII first (`tokenizers.normalizers.NFC`), or None."""


def pieces(text: str, pattern: str | None, size: int) -> Iterator[str]:
    """A text in parts of about `size` characters that give the ids of the whole, where its pattern allows cuts."""
    start = 0
    while pattern in CUTTABLE and len(text) - start > 2 * size:
        found = CUT.search(text, start + size)
        if found is None:
            break
        yield text[start : found.start()]
        start = found.start()
    yield text[start:] if start else text


def pattern_of(stored: Mapping[str, Any]) -> str:
    """The pattern that cuts texts into pieces, of a parsed `tokenizer.json`.

    Raises:
        TokenizerError: the file cuts in a way that one pattern cannot express.
    """
    stages = stored.get("pre_tokenizer") or {}
    *before, last = (stages.get("pretokenizers") if stages.get("type") == "Sequence" else None) or [stages]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise TokenizerError("its pre-tokenizer does not end with ByteLevel, or puts a space before texts")
    own = last.get("use_regex", True)
    match before:
        case [] if own:
            return GPT2_PATTERN
        case [{"type": "Digits", "individual_digits": True}] if own:
            return DIGITS_PATTERN
        case [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}] if not own:
            if (behavior, invert) in (("Isolated", False), ("Removed", True)):
                return str(pattern)
    raise TokenizerError("its pre-tokenizer is neither GPT-2's nor one regular expression before ByteLevel")


def cut_pattern(stored: Mapping[str, Any]) -> str | None:
    """The pattern, where it alone says how a text may be cut."""
    spaced = any(" " in entry["content"] for entry in stored.get("added_tokens", []))
    normalizer = (stored.get("normalizer") or {"type": "NFC"})["type"]
    try:
        return pattern_of(stored) if normalizer == "NFC" and not spaced else None
    except TokenizerError:
        return None


def byte_level(stored: Mapping[str, Any]) -> ByteLevel:
    """A parsed `tokenizer.json` as ranks and pattern.

    Raises:
        TokenizerError: it is no byte-level BPE, or has a part that ranks and a pattern cannot express.
    """
    import numpy as np

    _check_parts(stored)
    model, pattern = stored["model"], pattern_of(stored)
    to_byte, vocabulary = byte_of_character(), model["vocab"]
    merges = merges_of(model)
    tokens = [*to_byte, *(left + right for left, right in merges)]
    order = [token for token, _ in itertools.groupby(tokens)]  # one token of several pairs: they follow each other
    if len(set(order)) != len(order) or not vocabulary.keys() >= set(order):
        raise TokenizerError("its merges make a token at several ranks, or one that has no id")
    others = vocabulary.keys() - set(order) - {entry["content"] for entry in stored.get("added_tokens", [])}
    if model.get("ignore_merges") and others:
        raise TokenizerError(f"{len(others)} of its tokens are made by no merge, such as {min(others)!r}")
    spelled = [bytes(to_byte[character] for character in token) for token in order]
    ids = np.array([vocabulary[token] for token in order], np.int32)
    ordered = bool((np.diff(ids[len(to_byte) :]) > 0).all())  # single bytes are no merges, and need no order
    words = {entry["content"]: int(entry["id"]) for entry in stored.get("added_tokens", []) if not entry["special"]}
    if not ordered:
        ids = np.append(ids, np.array(list(words.values()), np.int32))
        words = {word: len(order) + at for at, word in enumerate(words)}
    return ByteLevel(
        ranks=dict(zip(spelled, ids.tolist() if ordered else range(len(order)), strict=True)),
        pattern=pattern,
        ids=None if ordered else ids,
        words=words,
        normalizer=_normalizer(stored),
    )


def check_merges(stored: Mapping[str, Any]) -> None:
    """See that every token is what its own bytes are merged to.

    Then ranks and merges agree on every text: two neighbours that spell a token have gone the way that the token alone
    goes, since nothing before its rank reached over its ends, and so they are the pair of its merge.

    Raises:
        TokenizerError: one is not.
    """
    import tokenizers

    _check_parts(stored)
    model = stored["model"]
    merges = merges_of(model)
    bpe = tokenizers.models.BPE(vocab=model["vocab"], merges=merges)
    for left, right in merges:
        if len(bpe.tokenize(left + right)) != 1:
            raise TokenizerError(f"its token {left + right!r} is not what its bytes are merged to")


def merges_of(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The pairs that are merged, first first, in whichever way they are written."""
    written = (merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges", []))
    return [(left, right) for left, right in written]


def byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte (openai/gpt-2, encoder.py, bytes_to_unicode), inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _check_parts(stored: Mapping[str, Any]) -> None:
    model = stored["model"]
    if model.get("type", "BPE") != "BPE" or not model["vocab"].keys() >= byte_of_character().keys():
        raise TokenizerError("it is no BPE with a token for every byte")
    odd = [key for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
    if odd or model.get("byte_fallback"):
        raise TokenizerError(f"its model has {', '.join(odd) or 'byte_fallback'}")
    added = stored.get("added_tokens", [])
    texts: Sequence[str] = [entry["content"] for entry in added]
    if any(entry[key] for entry in added if not entry["special"] for key in ("lstrip", "rstrip", "single_word")):
        raise TokenizerError("an added token takes white space along, or stands for whole words only")
    words = [entry["content"] for entry in added if not entry["special"]]
    if any(word in text and word != text for word in words for text in texts):
        raise TokenizerError("an added token is part of another one")


def _normalizer(stored: Mapping[str, Any]) -> Any:
    """The NFC normaliser of the `tokenizers` package itself: Python's knows another version of Unicode."""
    import tokenizers

    kind = (stored.get("normalizer") or {"type": None})["type"]
    if kind not in (None, "NFC"):
        raise TokenizerError(f"it normalises texts with {kind}")
    return tokenizers.normalizers.NFC() if kind else None
