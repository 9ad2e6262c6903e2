"""What documents leave behind, and looking for it: in rows, in the columns of data files, in plain bytes.

Invariant: every document is looked for by its ids and by digests of whole values, of text and of tokens; a few of them
also by phrases and runs of tokens that no other row has. What is searched for is never written anywhere.
"""

from __future__ import annotations

import html
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pretrain_assets.curate.normalise import HASH_BYTES, content_hashes
from pretrain_assets.forensics.copies import Int64Array
from pretrain_assets.forensics.documents import Documents
from pretrain_assets.table.predicate import in_list

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

PHRASED_DOCUMENTS = 8
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
PIECE_BYTES = 16 << 20
TEXTS = ("text", "text_masked")
IDS_PER_READ = 10_000


@dataclass(frozen=True, kw_only=True, eq=False)
class Traces:
    """What to look for."""

    ids: Int64Array
    """Ids of the documents, ascending."""
    row_ids: npt.NDArray[np.uint64]
    """Row ids by which indexes know them."""
    digests: dict[str, pa.Array]
    """By column, digests of the documents' values that no other row has; 16 bytes each."""
    phrases: tuple[str, ...]
    """Parts of their texts that stand in no other row."""
    runs: tuple[bytes, ...]
    """Runs of their tokens, as little-endian int32, that are in no other row."""
    shared: int
    """Documents whose content another row of the newest version has too."""

    @property
    def needles(self) -> tuple[bytes, ...]:
        """Everything that can be found in plain bytes: phrases, also as JSON and HTML write them, and runs of tokens."""
        written = [way for text in self.phrases for way in (text, json.dumps(text)[1:-1], html.escape(text))]
        return tuple(dict.fromkeys([*(way.encode() for way in written), *self.runs]))

    def in_batch(self, batch: pa.RecordBatch) -> set[str]:
        """How a batch of any columns shows one of the documents; empty where it does not."""
        found = set()
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if name == "id" and _any_in(column, self.ids):
                found.add("id")
            if name == "_rowid" and _any_in(column, self.row_ids):
                found.add("row id")
            if name in self.digests and _has_digests(column.type) and _any_in(digests(column), self.digests[name]):
                found.add(name)
            if any(holds(column, phrase) for phrase in self.phrases):
                found.add(f"phrase in {name}")
            if any(holds(column, run) for run in self.runs):
                found.add(f"tokens in {name}")
        return found


def traces_of(dataset: lance.LanceDataset, documents: Documents) -> Traces:
    """What documents have left, read from the versions that still have them, and compared with all other rows.

    Args:
        dataset: The table, at its newest version.
        documents: The documents.
    """
    import pyarrow.compute as pc

    values: dict[str, list[pa.Array]] = {}
    phrases: list[list[str]] = []
    runs: list[list[bytes]] = []
    chosen = set(documents.ids[:: max(1, len(documents) // PHRASED_DOCUMENTS)][:PHRASED_DOCUMENTS].tolist())
    for batch in _rows(dataset, documents):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if _has_digests(column.type):
                values.setdefault(name, []).append(digests(column))
        for at, row in enumerate(batch["id"].to_pylist()):
            if row in chosen:
                phrases.append(_phrases(batch["text"][at].as_py()) if "text" in batch.schema.names else [])
                tokens = (c for c in batch.columns if _is_tokens(c.type))
                runs.append([run for column in tokens for run in _runs(column[at].as_py())])
    import pyarrow as pa

    own = {name: pc.unique(pa.concat_arrays(parts)).drop_null() for name, parts in values.items()}
    every = [text for texts in phrases for text in texts], [run for some in runs for run in some]
    shared, others = _of_other_rows(dataset, documents.ids, own, every)
    left = {name: array.filter(pc.invert(pc.is_in(array, value_set=shared[name]))) for name, array in own.items()}
    return Traces(
        ids=documents.ids,
        row_ids=documents.row_ids,
        digests=left,
        phrases=tuple(text for texts in phrases for text in [t for t in texts if t not in others][:PER_DOCUMENT]),
        runs=tuple(run for some in runs for run in [r for r in some if r not in others][:PER_DOCUMENT]),
        shared=len(own["text"]) - len(left["text"]) if "text" in own else 0,
    )


def _rows(dataset: lance.LanceDataset, documents: Documents) -> Iterator[pa.RecordBatch]:
    """The documents with the columns that identify them, each in the newest version that has it."""
    for version in np.unique(documents.last[documents.last > 0]).tolist():
        opened = dataset.checkout_version(version)
        ids = documents.ids[documents.last == version].tolist()
        for start in range(0, len(ids), IDS_PER_READ):
            among = in_list("id", ids[start : start + IDS_PER_READ])
            yield from opened.scanner(columns=_telling(opened), filter=among, batch_size=READ_ROWS).to_batches()


def _of_other_rows(
    dataset: lance.LanceDataset,
    ids: Int64Array,
    own: dict[str, pa.Array],
    needles: tuple[Sequence[str], Sequence[bytes]],
) -> tuple[dict[str, pa.Array], set[str | bytes]]:
    """Which digests, phrases and runs of tokens other rows of the newest version have too."""
    import pyarrow as pa
    import pyarrow.compute as pc

    shared: dict[str, list[pa.Array]] = {name: [] for name in own}
    seen: set[str | bytes] = set()
    mine = pa.array(ids)
    for batch in dataset.scanner(columns=_telling(dataset), batch_size=READ_ROWS).to_batches():
        batch = batch.filter(pc.invert(pc.is_in(batch["id"], value_set=mine)))
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if name in own and _has_digests(column.type):
                found = digests(column)
                shared[name].append(found.filter(pc.is_in(found, value_set=own[name])))
            seen |= {n for some in needles for n in some if n not in seen and holds(column, n)}
    nothing = pa.array([], pa.binary(HASH_BYTES))
    return {name: pa.concat_arrays([nothing, *parts]) for name, parts in shared.items()}, seen


def _telling(dataset: lance.LanceDataset) -> list[str]:
    """`id`, and the columns that identify a document: its text, tokens, vectors and content hash."""
    return ["id", *(f.name for f in dataset.schema if f.name in TEXTS or _is_value(f.type) or f.name == "content_hash")]


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
    found = [xxh3_128_digest(data[a:b]) if any(data[a:b]) else None for a, b in itertools.pairwise(ends)]
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
        ends = [start, *(start + end for end in itertools.accumulate(lengths))]
    elif column.null_count:
        lengths = column.value_lengths().fill_null(0).to_pylist()
        ends = [0, *(width * end for end in itertools.accumulate(lengths))]
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


def _has_digests(kind: Any) -> bool:
    import pyarrow as pa

    hashed = pa.types.is_fixed_size_binary(kind) and kind.byte_width == HASH_BYTES
    return bool(_is_value(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind) or hashed)


def _any_in(column: Any, wanted: Any) -> bool:
    import pyarrow as pa
    import pyarrow.compute as pc

    values = wanted if isinstance(wanted, pa.Array) else pa.array(wanted)
    return bool(len(values)) and bool(pc.any(pc.is_in(column, value_set=values)).as_py())


def holds(column: pa.Array, needle: str | bytes) -> bool:
    """Whether a phrase stands in a column of texts, or a run of tokens in one of tokens."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if isinstance(needle, str):
        is_text = bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
        return is_text and bool(pc.any(pc.match_substring(column, needle)).as_py())
    if not _is_tokens(kind):
        return False
    values = column.values
    width = values.type.bit_width // 8
    buffer = values.buffers()[1]
    return width == 4 and buffer is not None and find_aligned(memoryview(buffer), needle, width)


def find_aligned(data: memoryview, needle: bytes, width: int) -> bool:
    """Whether a run of numbers of `width` bytes is in `data`, at the place of a number."""
    content, at = bytes(data), -1
    while (at := content.find(needle, at + 1)) >= 0:
        if at % width == 0:
            return True
    return False


def _phrases(text: str | None) -> list[str]:
    """Candidates: parts of lines, from all over the text."""
    least, most = PHRASE_CHARS
    lines = [line for line in (text or "").splitlines() if len(line.strip()) >= least]
    whole = [line.strip()[start : start + most] for line in lines for start in range(0, len(line.strip()), most)]
    parts = [part for part in whole if len(part) >= least]
    return parts[:: max(1, len(parts) // CANDIDATES)][:CANDIDATES]


def _runs(tokens: list[int] | None) -> list[bytes]:
    """Candidates: runs of tokens from all over a document."""
    ids = np.array(tokens or [], np.int32)
    starts = range(0, max(1, len(ids) - RUN_TOKENS + 1), RUN_TOKENS)
    parts = [ids[start : start + RUN_TOKENS].tobytes() for start in starts if len(ids) >= RUN_TOKENS]
    return parts[:: max(1, len(parts) // CANDIDATES)][:CANDIDATES]


def find_in_bytes(file: Any, needles: Sequence[bytes]) -> set[bytes]:
    """Which of the needles a binary file holds, read in pieces that overlap."""
    found: set[bytes] = set()
    overlap = max((len(needle) for needle in needles), default=1) - 1
    before = b""
    while piece := file.read(PIECE_BYTES):
        content = before + piece
        found |= {needle for needle in needles if needle not in found and needle in content}
        before = content[-overlap:] if overlap else b""
    return found
