"""Which passages stand in documents: one pass over the documents' words, looked up in an index of n-grams.

Invariant: a hit counts only once its words were compared one by one, by their 64-bit hashes, and the memory beside the
documents' own is that of the index, however long a document is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pretrain_assets.compiled import compiled
from pretrain_assets.curate.ngrams import BASE, Index, Int64s
from pretrain_assets.curate.plain_words import Place, read_words

CHUNK_WORDS = 2048
"""Words of a document held at once: their arrays stay in a core's cache."""


class Scratch(NamedTuple):
    """What `find` remembers of a document while it reads it; made once, since it is as large as the index.

    A passage's entries count only where `document` says that they are of this document.
    """

    number: Int64s
    """(1,): number of the document being read, over all calls."""
    ngram_document: Int64s
    """(n-grams,): the last document that each was found in."""
    document: Int64s
    """(passages,): the last document that an n-gram of each was found in."""
    found: Int64s
    """(passages,): different n-grams found."""
    last: Int64s
    """(passages,): the word of the document at which the last one ended."""
    run: Int64s
    """(passages, 2): words at which n-grams in a row ended, and the first character of the first of them."""
    longest: Int64s
    """(passages, 3): the longest such run: its words, first character, and the one after its last."""
    item_document: Int64s
    """(items,): the last document that each was found in."""
    touched: Int64s
    """(passages,): those that something was found of; as many as `find` has counted."""


def scratch(index: Index) -> Scratch:
    """Fresh scratch memory for an index."""
    num_ngrams, num_passages = len(index.hashes), len(index.totals)
    return Scratch(
        number=np.zeros(1, np.int64),
        ngram_document=np.zeros(num_ngrams, np.int64),
        document=np.zeros(num_passages, np.int64),
        found=np.zeros(num_passages, np.int64),
        last=np.zeros(num_passages, np.int64),
        run=np.zeros((num_passages, 2), np.int64),
        longest=np.zeros((num_passages, 3), np.int64),
        item_document=np.zeros(index.items[-1] + 1 if num_passages else 0, np.int64),
        touched=np.zeros(num_passages, np.int64),
    )


class Found(NamedTuple):
    """What was found in some documents."""

    best: Any
    """int64 (documents,): item of the passage of which the largest share was found, then the most; -1 where none."""
    overlap: Any
    """float32 (documents,): share of that passage's n-grams found in the document; 0 where none."""
    start: Any
    """int32 (documents,): first character of the longest run of them."""
    stop: Any
    """int32 (documents,): the character after its last."""
    item_firsts: Any
    """int64 (documents + 1,): document d has found_items[item_firsts[d]:item_firsts[d + 1]]."""
    found_items: Any
    """int64: items with a passage of which at least `min_overlap` was found, in the order in which each begins in the
    document."""


@compiled
def find(data: Any, offsets: Any, table: Any, index: Any, memory: Any, min_overlap: float) -> Any:
    """The passages that stand in documents, wholly or in part.

    Args:
        data: uint8, UTF-8 bytes of all documents.
        offsets: int64, (documents + 1,): where each begins in them.
        table: `plain_words.letters()`.
        index: `Index`.
        memory: `scratch(index)`, at every call the same.
        min_overlap: Share of a passage's n-grams from which its item is found.

    Returns:
        `Found`.
    """
    num_documents = len(offsets) - 1
    best = np.full(num_documents, -1, np.int64)
    overlap = np.zeros(num_documents, np.float32)
    start, stop = np.zeros(num_documents, np.int32), np.zeros(num_documents, np.int32)
    item_firsts = np.zeros(num_documents + 1, np.int64)
    items, num_items = np.empty(64, np.int64), 0
    held = CHUNK_WORDS + (index.lengths[-1] if len(index.lengths) else 0)
    words, sums, spans = np.zeros(held, np.uint64), np.zeros(held + 1, np.uint64), np.zeros((2, held), np.int64)
    for document in range(num_documents):
        num_touched = _read(data, offsets[document], offsets[document + 1], table, index, memory, words, sums, spans)
        leader, most = -1, 0.0
        for at in range(num_touched):
            passage = memory.touched[at]
            item, share = index.items[passage], memory.found[passage] / index.totals[passage]
            if leader < 0 or share > most or (share == most and _is_before(memory, passage, leader)):
                leader, most = passage, share
            if share >= min_overlap and memory.item_document[item] != memory.number[0]:
                memory.item_document[item] = memory.number[0]
                if num_items == len(items):
                    more = np.empty(2 * num_items, np.int64)
                    more[:num_items] = items
                    items = more
                items[num_items] = item
                num_items += 1
        if leader >= 0:
            best[document], overlap[document] = index.items[leader], most
            start[document], stop[document] = memory.longest[leader, 1], memory.longest[leader, 2]
        item_firsts[document + 1] = num_items
    return Found(best, overlap, start, stop, item_firsts, items[:num_items])


@compiled
def _is_before(memory: Any, passage: int, other: int) -> bool:
    """Whether a passage with the same share comes first: by its longest run, then by its place in the sets."""
    run, other_run = memory.longest[passage, 0], memory.longest[other, 0]
    return run > other_run or (run == other_run and passage < other)


@compiled
def _read(
    data: Any, begin: int, end: int, table: Any, index: Any, memory: Any, words: Any, sums: Any, spans: Any
) -> Any:
    """Note all n-grams of one document in the scratch memory; the number of passages that any was found of.

    The arrays hold the last words of the chunk before, as many as an n-gram may have, and then a chunk.
    """
    memory.number[0] += 1
    longest = len(words) - CHUNK_WORDS
    firsts, lasts = spans[0], spans[1]
    num_touched, before, kept, count = 0, 0, 0, CHUNK_WORDS
    place = Place(begin, 0, 0)
    sums[0] = np.uint64(0)
    while count == CHUNK_WORDS:
        stop = kept + CHUNK_WORDS
        count, place = read_words(data, end, place, table, words[kept:stop], firsts[kept:stop], lasts[kept:stop])
        stop = kept + count
        for at in range(kept, stop):
            sums[at + 1] = sums[at] * BASE + words[at]
            for which in range(len(index.lengths)):
                start = at + 1 - index.lengths[which]
                if start < 0:
                    break
                hashed = sums[at + 1] - sums[start] * index.powers[which]
                bit = hashed >> index.shift
                if index.sieve[bit >> np.uint64(3)] >> (bit & np.uint64(7)) & np.uint64(1):
                    ngram = _look_up(index, hashed, words[start : at + 1])
                    if ngram >= 0:
                        num_touched = _note(index, memory, ngram, before + at, firsts[start], lasts[at], num_touched)
        kept, start = min(longest, stop), stop - min(longest, stop)
        before += start
        sums[0] = sums[start]
        for at in range(kept):
            words[at], sums[at + 1], firsts[at] = words[start + at], sums[start + at + 1], firsts[start + at]
    return num_touched


@compiled
def _look_up(index: Any, hashed: Any, words: Any) -> Any:
    """The n-gram with this hash and exactly these words, or -1."""
    ngram, stop = 0, len(index.hashes)
    while ngram < stop:
        middle = (ngram + stop) // 2
        if index.hashes[middle] < hashed:
            ngram = middle + 1
        else:
            stop = middle
    if ngram == len(index.hashes) or index.hashes[ngram] != hashed or index.sizes[ngram] != len(words):
        return -1
    start = index.starts[ngram]
    for at in range(len(words)):
        if index.words[start + at] != words[at]:
            return -1
    return ngram


@compiled
def _note(index: Any, memory: Any, ngram: int, number: int, first: int, last: int, num_touched: int) -> Any:
    """Count an n-gram that ends at the document's word `number` for all passages that have it."""
    document = memory.number[0]
    is_new = memory.ngram_document[ngram] != document
    memory.ngram_document[ngram] = document
    for holder in range(index.holder_firsts[ngram], index.holder_firsts[ngram + 1]):
        passage = index.holders[holder]
        run, longest = memory.run[passage], memory.longest[passage]
        if memory.document[passage] != document:
            memory.document[passage] = document
            memory.touched[num_touched] = passage
            num_touched += 1
            memory.found[passage], memory.last[passage], longest[0] = 0, -2, 0
        memory.found[passage] += is_new
        if memory.last[passage] == number - 1:
            run[0] += 1
        else:
            run[0], run[1] = 1, first
        memory.last[passage] = number
        if run[0] > longest[0]:
            longest[0], longest[1], longest[2] = run[0], run[1], last
    return num_touched
