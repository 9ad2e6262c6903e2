"""What documents leave behind, and looking for it: in rows, in the columns of data files, in plain bytes.

Invariant: every document is looked for by its ids and by digests of whole values, of text and of tokens; hundreds of
them also by phrases and runs of tokens that no other row has, and of how many that is true is counted. What is searched
for is never written anywhere.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from pretrain_assets.curate.normalise import HASH_BYTES, content_hashes
from pretrain_assets.forensics.receipts.documents import Documents
from pretrain_assets.forensics.receipts.needles import Needles, is_in
from pretrain_assets.loader.plan import Int64Array, UInt64Array
from pretrain_assets.loader.read import take_rows

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

PHRASED_DOCUMENTS = 500
"""Documents that are also looked for by phrases and runs of tokens, spread evenly over all."""
PER_DOCUMENT = 2
"""Phrases of each, and runs of tokens."""
CANDIDATES = 8
"""Of so many, those that no other row has are taken."""
PHRASE_CHARS = (12, 48)
"""Length of a phrase, at least and at most: short enough to lie in one page of a database file."""
RUN_TOKENS = 12
READ_ROWS = 1_024
"""Rows of text read at a time."""
TEXTS = ("text", "text_masked")


@dataclass(frozen=True, kw_only=True, eq=False)
class Traces:
    """What to look for."""

    ids: Int64Array
    """Ids of the documents, ascending."""
    row_ids: UInt64Array
    """Row ids by which indexes know them, ascending."""
    keys: dict[str, UInt64Array]
    """By column, keys of the documents' values that no other row has, ascending; see `keys`."""
    phrases: tuple[str, ...]
    """Parts of their texts that stand in no other row."""
    runs: tuple[bytes, ...]
    """Runs of their tokens, as little-endian int32, that are in no other row."""
    shared: int
    """Documents whose content another row of the newest version has too."""

    read: int
    """Documents that a version still has, so that more than their ids is known."""
    phrased: int
    """Of these, how many have a phrase to look for, and so can be told in plain bytes."""

    @cached_property
    def needles(self) -> Needles:
        """What can be found in plain bytes: phrases, also as JSON and HTML write them, and runs of tokens."""
        written = (
            way
            for text in self.phrases
            for way in (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], html.escape(text))
        )
        return Needles([*(way.encode() for way in written), *self.runs])

    @cached_property
    def in_columns(self) -> tuple[Needles, Needles]:
        """Phrases, for columns of texts, and runs, for columns of tokens."""
        return Needles(phrase.encode() for phrase in self.phrases), Needles(self.runs)

    def in_batch(self, batch: pa.RecordBatch) -> set[str]:
        """How a batch of any columns shows one of the documents; empty where it does not."""
        found = set()
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if name == "id" and is_in(column.to_numpy(), self.ids).any():
                found.add("id")
            if name == "_rowid" and is_in(column.to_numpy(), self.row_ids).any():
                found.add("row id")
            if name in self.keys and _has_keys(column.type) and is_in(keys(column), self.keys[name]).any():
                found.add(name)
            if held_in(column, *self.in_columns):
                found.add(f"{'tokens' if _is_tokens(column.type) else 'phrase'} in {name}")
        return found


def traces_of(dataset: lance.LanceDataset, documents: Documents) -> Traces:
    """What documents have left, read from the versions that still have them, and compared with all other rows.

    Args:
        dataset: The table, at its newest version.
        documents: The documents.
    """
    values: dict[str, list[UInt64Array]] = {}
    phrases: list[list[str]] = []
    runs: list[list[bytes]] = []
    chosen = set(documents.ids[:: max(1, len(documents) // PHRASED_DOCUMENTS)][:PHRASED_DOCUMENTS].tolist())
    for batch in _rows(dataset, documents):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if _has_keys(column.type):
                values.setdefault(name, []).append(keys(column))
        for at, row in enumerate(batch["id"].to_pylist()):
            if row in chosen:
                phrases.append(_phrases(batch["text"][at].as_py()) if "text" in batch.schema.names else [])
                tokens = (column for column in batch.columns if _is_tokens(column.type))
                runs.append([run for column in tokens for run in _runs(column[at].as_py())])
    own = {name: np.unique(np.concatenate(parts)) for name, parts in values.items()}
    shared, others = _of_other_rows(dataset, documents.ids, own, [*chain(*phrases)], [*chain(*runs)])
    told = [[text for text in texts if text.encode() not in others][:PER_DOCUMENT] for texts in phrases]
    left = {name: np.setdiff1d(mine, shared[name], assume_unique=True) for name, mine in own.items()}
    return Traces(
        ids=documents.ids,
        row_ids=np.sort(documents.row_ids),
        keys=left,
        phrases=tuple(chain(*told)),
        runs=tuple(run for some in runs for run in [r for r in some if r not in others][:PER_DOCUMENT]),
        shared=len(own["text"]) - len(left["text"]) if "text" in own else 0,
        read=len(documents.row_ids),
        phrased=sum(map(bool, told)),
    )


def _rows(dataset: lance.LanceDataset, documents: Documents) -> Iterator[pa.RecordBatch]:
    """The documents with the columns that identify them, each in the newest version that has it."""
    last = documents.last[documents.last > 0]
    for version in np.unique(last).tolist():
        opened = dataset.checkout_version(version)
        row_ids = np.sort(documents.row_ids[last == version])
        for start in range(0, len(row_ids), READ_ROWS):
            yield from take_rows(opened, row_ids[start : start + READ_ROWS], _telling(opened)).to_batches()


def _of_other_rows(
    dataset: lance.LanceDataset,
    ids: Int64Array,
    own: dict[str, UInt64Array],
    phrases: Sequence[str],
    runs: Sequence[bytes],
) -> tuple[dict[str, UInt64Array], set[bytes]]:
    """Which keys, phrases and runs of tokens other rows of the newest version have too."""
    import pyarrow as pa

    shared = {name: [np.empty(0, np.uint64)] for name in own}
    seen: set[bytes] = set()
    left = Needles(phrase.encode() for phrase in phrases), Needles(runs)
    for batch in dataset.scanner(columns=_telling(dataset), batch_size=READ_ROWS).to_batches():
        batch = batch.filter(pa.array(~is_in(batch["id"].to_numpy(), ids)))
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if name in own and _has_keys(column.type):
                found = keys(column)
                shared[name].append(found[is_in(found, own[name])])
            if more := held_in(column, *left):
                seen |= more
                left = left[0].without(more), left[1].without(more)
    return {name: np.unique(np.concatenate(parts)) for name, parts in shared.items()}, seen


def _telling(dataset: lance.LanceDataset) -> list[str]:
    """`id`, and the columns that identify a document: its text, tokens, vectors and content hash."""
    return ["id", *(f.name for f in dataset.schema if f.name in TEXTS or _is_value(f.type) or f.name == "content_hash")]


def keys(column: pa.Array) -> UInt64Array:
    """The first eight bytes of the digest of every value that has one, as numbers.

    Of a million documents among a thousand million rows, some other row has a key in common with one of them once in
    twenty thousand times: n * m / 2^64.
    """
    found = digests(column).drop_null()
    width = HASH_BYTES // 8
    start = found.offset * width
    return np.frombuffer(found.buffers()[1], np.uint64)[start : start + len(found) * width : width]


def digests(column: pa.Array) -> pa.Array:
    """A digest of 16 bytes for every value: of a text that of its content, of anything else of its bytes; NULL of none.

    Equal content is equal text once runs of white space are made one space (`curate.normalise`).
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    from xxhash import xxh3_128_digest

    if pa.types.is_fixed_size_binary(column.type):
        return column
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        texts = column.cast(pa.string())
        empty = pc.fill_null(pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(texts)), 0), True)
        return pc.if_else(empty, None, content_hashes(texts))
    data, ends = _bytes(column)
    found = [xxh3_128_digest(data[a:b]) if any(data[a:b]) else None for a, b in pairwise(ends)]
    return pa.array(found, pa.binary(HASH_BYTES))


def _bytes(column: pa.Array) -> tuple[memoryview, list[int]]:
    """The bytes of all values of a column of lists of numbers, and where each begins."""
    import pyarrow as pa

    values = column.flatten() if column.null_count else column.values
    width = values.type.bit_width // 8
    if pa.types.is_fixed_size_list(column.type):
        size = column.type.list_size * width
        start = 0 if column.null_count else column.offset * size
        lengths = [0 if not there else size for there in column.is_valid().to_pylist()]
        ends = [start, *(start + end for end in accumulate(lengths))]
    elif column.null_count:
        lengths = column.value_lengths().fill_null(0).to_pylist()
        ends = [0, *(width * end for end in accumulate(lengths))]
    else:
        ends = (column.offsets.to_numpy().astype(np.int64) * width).tolist()
    buffer = values.buffers()[1]
    data = memoryview(buffer)[values.offset * width :] if buffer else memoryview(b"")
    return data, ends


def _is_tokens(kind: Any) -> bool:
    import pyarrow as pa

    return bool((pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_integer(kind.value_type))


def _is_value(kind: Any) -> bool:
    """Whether a column's values, tokens or vectors, identify a document."""
    import pyarrow as pa

    return _is_tokens(kind) or bool(pa.types.is_fixed_size_list(kind) and pa.types.is_floating(kind.value_type))


def _has_keys(kind: Any) -> bool:
    import pyarrow as pa

    hashed = pa.types.is_fixed_size_binary(kind) and kind.byte_width == HASH_BYTES
    return bool(_is_value(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind) or hashed)


def held_in(column: pa.Array, phrases: Needles, runs: Needles) -> set[bytes]:
    """Which phrases stand in a column of texts, or which runs of tokens in one of tokens; nothing in any other."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        _, starts, data = column.buffers()
        width = np.dtype(np.int64 if pa.types.is_large_string(column.type) else np.int32)
        ends = np.frombuffer(starts, width, len(column) + 1, column.offset * width.itemsize) if data else [0]
        content = bytes(memoryview(data)[ends[0] : ends[-1]]) if data else b""
        near = phrases.found_in(content)  # a phrase may stand across the border of two texts
        return {phrase for phrase in near if pc.any(pc.match_substring(column, phrase.decode())).as_py()}
    if _is_tokens(column.type) and column.values.type.bit_width == 32 and len(column.values):
        content = bytes(memoryview(column.values.buffers()[1]))
        return {run for run in runs.found_in(content) if find_aligned(content, run, 4)}
    return set()


def find_aligned(content: bytes, needle: bytes, width: int) -> bool:
    """Whether a run of numbers of `width` bytes is in the content, at the place of a number."""
    at = content.find(needle)
    while at >= 0 and at % width:
        at = content.find(needle, at + 1)
    return at >= 0


def _phrases(text: str | None) -> list[str]:
    """Candidates: parts of lines, from all over the text, that stay as they are where white space is made one space."""
    least, most = PHRASE_CHARS
    lines = re.split(r"\s{2,}|[^\S ]", (text or "").strip())
    whole = [line[start : start + most] for line in lines for start in range(0, len(line), most)]
    parts = [part for part in whole if len(part) >= least]
    return parts[:: max(1, len(parts) // CANDIDATES)][:CANDIDATES]


def _runs(tokens: list[int] | None) -> list[bytes]:
    """Candidates: runs of tokens from all over a document."""
    ids = np.array(tokens or [], np.int32)
    starts = range(0, max(1, len(ids) - RUN_TOKENS + 1), RUN_TOKENS)
    parts = [ids[start : start + RUN_TOKENS].tobytes() for start in starts if len(ids) >= RUN_TOKENS]
    return parts[:: max(1, len(parts) // CANDIDATES)][:CANDIDATES]
