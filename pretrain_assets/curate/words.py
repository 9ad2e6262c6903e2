"""Texts as flat arrays of bytes, and their words: what the compiled loops over text share.

Invariant: words are those of Python's `str.split()`, to the last Unicode space, and never copied: a word is a span of
bytes. No Python object is made per document or word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pretrain_assets.compiled import compiled

if TYPE_CHECKING:
    import pyarrow as pa

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]


def text_bytes(texts: pa.Array) -> tuple[Bytes, Offsets]:
    """The UTF-8 bytes of all texts, one after the other, and where each begins, shape (len + 1,); NULL is empty.

    The bytes are a view of the Arrow array where it has no NULL.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if texts.null_count:
        texts = pc.fill_null(texts, "")
    kind = np.int64 if pa.types.is_large_string(texts.type) else np.int32
    _, ends, data = texts.buffers()
    if ends is None or not len(texts):
        return _sealed(np.empty(0, np.uint8)), np.zeros(len(texts) + 1, np.int64)
    offsets = np.frombuffer(ends, kind)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    whole = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return _sealed(whole[offsets[0] : offsets[-1]]), offsets - offsets[0]


def _sealed(view: Bytes) -> Bytes:
    """The same array, never to be written: numba compiles once for those that can be and once for those that cannot."""
    view.flags.writeable = False
    return view


@compiled
def space_bytes(data: Any, at: int, stop: int) -> int:
    """Bytes of the white space character that begins at `at`, and 0 where there is none.

    The 29 characters for which `str.isspace` holds.
    """
    first = data[at]
    if first < 0x80:
        return 1 if first == 0x20 or 0x09 <= first <= 0x0D or 0x1C <= first <= 0x1F else 0
    if first == 0xC2 and at + 1 < stop:
        return 2 if data[at + 1] == 0x85 or data[at + 1] == 0xA0 else 0
    if at + 2 >= stop:
        return 0
    second, third = data[at + 1], data[at + 2]
    if first == 0xE1:
        return 3 if second == 0x9A and third == 0x80 else 0
    if first == 0xE2:
        if second == 0x80:
            return 3 if 0x80 <= third <= 0x8A or third == 0xA8 or third == 0xA9 or third == 0xAF else 0
        return 3 if second == 0x81 and third == 0x9F else 0
    if first == 0xE3:
        return 3 if second == 0x80 and third == 0x80 else 0
    return 0


@compiled
def word_spans(data: Any, offsets: Any) -> Any:
    """Where the words of all texts begin and end, and which word is the first of each text.

    Args:
        data: uint8, UTF-8 bytes of all texts.
        offsets: int64, (texts + 1,): where each text begins in it.

    Returns:
        int64 starts (words,), stops (words,), and firsts (texts + 1,): text t has the words firsts[t] to firsts[t + 1].
    """
    starts = np.empty(len(data) // 2 + len(offsets), np.int64)
    stops = np.empty_like(starts)
    firsts = np.zeros(len(offsets), np.int64)
    count = 0
    for text in range(len(offsets) - 1):
        at, stop = offsets[text], offsets[text + 1]
        begun = -1
        while at < stop:
            space = 0 if 0x20 < data[at] < 0xC2 else space_bytes(data, at, stop)  # most bytes by a glance
            if space == 0:
                if begun < 0:
                    begun = at
                at += 1
                continue
            if begun >= 0:
                starts[count], stops[count] = begun, at
                count += 1
                begun = -1
            at += space
        if begun >= 0:
            starts[count], stops[count] = begun, stop
            count += 1
        firsts[text + 1] = count
    return starts[:count].copy(), stops[:count].copy(), firsts
