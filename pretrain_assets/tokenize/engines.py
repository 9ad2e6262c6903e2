"""What runs a byte-level BPE: fastokens (extra `fast`), tiktoken, or transformers, which says what the ids are.

Invariant: an engine changes speed and nothing else, so it is no parameter of the column. Before a run, ids are compared
with those of transformers on texts of the run and on hard ones (`choose`); an engine that gives others is not used, and
says so aloud.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pretrain_assets.errors import TokenizerError
from pretrain_assets.tokenize.bytelevel import GPT2_PATTERN, ByteLevel, cut_pattern, pieces

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pretrain_assets.tokenize.tokenizers import Tokenizer

    Encoded = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]
    Encode = Callable[[Sequence[str], int], Encoded]

_log = logging.getLogger(__name__)

FAST = ("fastokens", "tiktoken")
"""Fastest first."""
REFERENCE = "transformers"
LONG_TEXT = 100_000
"""Characters from which a text is searched for runs of white space as long: near 1,000,000 they overflow the regex."""
LONG_RUN = re.compile(rf"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]{{{LONG_TEXT},}}")
PART_CHARS = 1 << 20
"""Characters that transformers is given at once: 400 MB in its hands."""
NO_WORD = "\U0010fffe"
"""The one special token that tiktoken is given, for speed (it halves without any), and never told to look for: it is
ordinary text like all others."""
SHOWN_CHARS = 60


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The engine of a run, and why it is that one."""

    engine: str
    """`fastokens`, `tiktoken`, or `transformers`, which stands for the one way to run a tokenizer as well."""
    checked_texts: int = 0
    """Texts whose ids were compared with those of transformers."""
    refused: tuple[str, ...] = ()
    """Why faster engines are not used."""


@cache
def hard_texts() -> tuple[str, ...]:
    """Texts that tokenizers are known to disagree on, the shortest first; every kind of character is in them."""
    stored = (files("pretrain_assets") / "data" / "hard_texts.json").read_text(encoding="utf-8")
    runs = [one * times for one in ("a", "=", "-", "ab", "é", "\n", " ", " \n", "7") for times in (33, 300)]
    return (*sorted([*json.loads(stored), *runs], key=len), "x" * 3000)


def choose(tokenizer: Tokenizer, wanted: str, texts: Sequence[str]) -> Choice:
    """The fastest engine that gives the ids that transformers gives.

    Args:
        tokenizer: What defines the ids.
        wanted: `auto`, or the engine to begin with.
        texts: Texts of the run to compare on, beside `hard_texts()`.

    Raises:
        TokenizerError: the wanted engine is not installed.
    """
    if not tokenizer.has_engines or wanted == REFERENCE:
        return Choice(engine=REFERENCE)
    everything = [*hard_texts(), *texts]
    refused: list[str] = []
    expected = tokenizer.engine(REFERENCE)(everything, 1)
    for name in FAST if wanted == "auto" else FAST[FAST.index(wanted) :]:
        if find_spec(name) is None:
            if name == wanted:
                raise TokenizerError(
                    f"engine {name} is not installed: pip install 'pretrain-assets[fast]', or use auto."
                )
            continue
        try:
            difference = first_difference(everything, tokenizer.engine(name)(everything, 1), expected)
        except TokenizerError as error:
            difference = str(error)
        except BaseException as error:  # of a Rust library, about a file that another one can read
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            difference = f"{type(error).__name__}: {error}".splitlines()[0]
        if difference is None:
            return Choice(engine=name, checked_texts=len(everything), refused=tuple(refused))
        refused.append(f"{name}: {difference}")
        _log.warning("tokenizer %s is not run by %s: %s", tokenizer.identity.name, name, difference)
    return Choice(engine=REFERENCE, refused=tuple(refused))


def first_difference(texts: Sequence[str], found: Encoded, expected: Encoded) -> str | None:
    """Where the ids of two engines part: the text, the position and both ids; None when they are equal."""
    import numpy as np

    for at, text in enumerate(texts):
        ours, theirs = (ids[offsets[at] : offsets[at + 1]] for ids, offsets in (found, expected))
        if np.array_equal(ours, theirs):
            continue
        both = min(len(ours), len(theirs))
        position = int(np.argmin(np.append(ours[:both] == theirs[:both], False)))
        one, other = (str(ids[position]) if position < len(ids) else "the end" for ids in (ours, theirs))
        shown = text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."
        return f"other ids for {shown!r}: at position {position} {one} instead of {other}"
    return None


class TiktokenEngine:
    """A byte-level BPE run by tiktoken, which releases the interpreter lock."""

    def __init__(self, level: ByteLevel, reference: Encode | None = None):
        import tiktoken

        self._level, self._reference, self._words = level, reference, set(level.words)
        special = {NO_WORD: max([*level.ranks.values(), *level.words.values()]) + 1, **level.words}
        self.encoding = tiktoken.Encoding(
            "byte-level", pat_str=level.pattern, mergeable_ranks=level.ranks, special_tokens=special
        )

    def __call__(self, texts: Sequence[str], num_threads: int = 1) -> Encoded:
        """Ids of all texts and offsets of each text's first."""
        if num_threads == 1 or len(texts) == 1:
            return concatenate([self._encode(text) for text in texts])
        with ThreadPoolExecutor(num_threads) as pool:
            return concatenate(list(pool.map(self._encode, texts)))

    def _encode(self, text: str) -> npt.NDArray[Any]:
        level, changed = self._level, text
        if level.normalizer is not None and not text.isascii():
            changed = level.normalizer.normalize_str(text)
        long_runs = len(text) > LONG_TEXT and LONG_RUN.search(text) is not None
        words_first = changed != text and any(word in text or word in changed for word in level.words)
        if words_first or (long_runs and level.pattern != GPT2_PATTERN):  # that pattern alone is cut below
            assert self._reference is not None
            return self._reference([text], 1)[0]
        ids = self._long_runs(changed) if long_runs else self._plain(changed)
        return ids if level.ids is None else level.ids[ids]

    def _plain(self, text: str) -> npt.NDArray[Any]:
        # an array, not a list: 10 instead of 7 to 9 MB/s on one core (measured on the bundled documents)
        found: npt.NDArray[Any] = self.encoding.encode_to_numpy(
            text, allowed_special=self._words, disallowed_special=()
        )
        return found

    def _long_runs(self, text: str) -> npt.NDArray[Any]:
        """Cuts long runs of white space where GPT2_PATTERN does, before their last one."""
        import numpy as np

        parts: list[Any] = []
        start = 0
        for run in LONG_RUN.finditer(text):
            stop = run.end() if run.end() == len(text) else run.end() - 1
            parts.append(self._plain(text[start : run.start()]))
            parts.append(np.array(self.encoding._encode_single_piece(text[run.start() : stop]), np.int32))
            start = stop
        return np.concatenate([*parts, self._plain(text[start:])])


class FastokensEngine:
    """A byte-level BPE run by fastokens, on as many threads as RAYON_NUM_THREADS says."""

    def __init__(self, tokenizer_json: str):
        import fastokens

        self._tokenizer = fastokens.Tokenizer.from_json_str(tokenizer_json)

    def __call__(self, texts: Sequence[str], num_threads: int = 1) -> Encoded:
        """Ids of all texts and offsets of each text's first; special tokens are ordinary text."""
        import numpy as np

        ids, offsets = self._tokenizer.encode_batch_flat(list(texts), split_special_tokens=True)
        return np.frombuffer(ids, np.int32), np.frombuffer(offsets, np.int64)


class ReferenceEngine:
    """Any tokenizer run by the `tokenizers` package, as transformers does: what it gives is right."""

    def __init__(self, backend: Any):
        self._backend = backend
        self._pattern = cut_pattern(json.loads(backend.to_str()))

    def __call__(self, texts: Sequence[str], num_threads: int = 1) -> Encoded:
        """Ids of all texts and offsets of each text's first."""
        ids: list[Any] = []
        for _, some in itertools.groupby(texts, key=lambda text: len(text) > 2 * PART_CHARS):
            ids += self._encode(list(some))
        return concatenate(ids)

    def _encode(self, texts: list[str]) -> list[Any]:
        """Long texts one after the other and in parts: a token takes 100 bytes and more here."""
        import numpy as np

        if len(texts[0]) <= 2 * PART_CHARS:
            return [found.ids for found in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        return [np.concatenate([self._ids(part) for part in pieces(text, self._pattern, PART_CHARS)]) for text in texts]

    def _ids(self, text: str) -> Any:
        import numpy as np

        (found,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return np.array(found.ids, np.int32)


def concatenate(encoded: Sequence[Any]) -> Encoded:
    """Ids of each text as ids of all and offsets."""
    import numpy as np

    offsets = np.zeros(len(encoded) + 1, dtype=np.int64)
    np.cumsum([len(ids) for ids in encoded], out=offsets[1:])
    values = np.empty(offsets[-1], dtype=np.int32)
    for ids, start, stop in zip(encoded, offsets[:-1], offsets[1:], strict=True):
        values[start:stop] = ids
    return values, offsets
