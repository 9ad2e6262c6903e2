"""Where runs of one text's tokens stand in others: a suffix automaton of the text, and loops over other tokens.

Invariant: every answer is exact, and takes time in proportion to the tokens that are read, whatever repeats in them.
The automaton has a state for every set of runs that end at the same places of the text (Blumer et al. 1985); reading
other tokens, it stands at the longest run that ends there and is in the text as well.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pretrain_assets.compiled import compiled

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""Multiplier of Fibonacci hashing: 2^64 over the golden ratio."""
BREAK = -1
"""A token that no text has, to put between tokens that do not follow each other."""


class Automaton(NamedTuple):
    """The suffix automaton of a text; state 0 is the empty run."""

    symbols: Int32s
    """Number of each token id among the different ones of the text, -1 for the others; shape (largest id + 1,)."""
    num_symbols: int
    """Different tokens of the text."""
    lengths: Int32s
    """Longest run of each state, in tokens."""
    links: Int32s
    """The state of the longest run that ends with it and ends at more places; -1 for state 0."""
    ends: Int32s
    """A place of the text at which its runs end, the first: the index of their last token."""
    prefixes: Int32s
    """State of each beginning of the text, by the index of its last token; shape (tokens,)."""
    order: Int64s
    """All states, those with longer runs first."""
    starts: Int32s
    """The state of each symbol alone; shape (num_symbols,)."""
    keys: Int64s
    """Hash table of the transitions: state * num_symbols + symbol, or -1."""
    targets: Int32s
    """The state that each leads to."""


def automaton(ids: npt.ArrayLike) -> Automaton:
    """The automaton of a text's token ids, at least one, none of them negative. Up to 300 bytes per token."""
    tokens = np.asarray(ids, np.int64)
    distinct, text = np.unique(tokens, return_inverse=True)
    symbols = np.full(int(distinct[-1]) + 1, -1, np.int32)
    symbols[distinct] = np.arange(len(distinct), dtype=np.int32)
    num_states, slots = 2 * len(text), 1 << (8 * len(text) - 1).bit_length()  # at most 3 transitions per token
    found = Automaton(
        symbols,
        len(distinct),
        np.zeros(num_states, np.int32),
        np.full(num_states, -1, np.int32),
        np.full(num_states, -1, np.int32),
        np.zeros(len(text), np.int32),
        np.zeros(num_states, np.int64),
        np.zeros(len(distinct), np.int32),
        np.full(slots, -1, np.int64),
        np.zeros(slots, np.int32),
    )
    count = _build(found, text.astype(np.int32), np.full(num_states, -1, np.int32), np.full(slots, -1, np.int32))
    return found._replace(
        lengths=found.lengths[:count],
        links=found.links[:count],
        ends=found.ends[:count],
        order=np.argsort(-found.lengths[:count], kind="stable"),
    )


@compiled
def _build(made: Any, text: Any, first_slots: Any, next_slots: Any) -> int:
    """Fill an automaton by a text of symbols (Crochemore, Hancart and Lecroq 2007, section 5.4); its states."""
    lengths, links, ends = made.lengths, made.links, made.ends
    last, count = 0, 1
    for at in range(len(text)):
        symbol = text[at]
        new = count
        count += 1
        lengths[new], ends[new] = lengths[last] + 1, at
        state = last
        while state >= 0 and _target(made, state, symbol) < 0:
            _set(made, state, symbol, new, first_slots, next_slots)
            state = links[state]
        if state < 0:
            links[new] = 0
        else:
            old = _target(made, state, symbol)
            if lengths[old] == lengths[state] + 1:
                links[new] = old
            else:
                clone = count
                count += 1
                lengths[clone], links[clone], ends[clone] = lengths[state] + 1, links[old], ends[old]
                slot = first_slots[old]
                while slot >= 0:
                    _set(made, clone, made.keys[slot] % made.num_symbols, made.targets[slot], first_slots, next_slots)
                    slot = next_slots[slot]
                while state >= 0 and _target(made, state, symbol) == old:
                    made.targets[_slot(made, state, symbol)] = clone
                    state = links[state]
                links[old], links[new] = clone, clone
        made.prefixes[at] = new
        last = new
    for symbol in range(made.num_symbols):
        made.starts[symbol] = _target(made, 0, symbol)
    return count


@compiled
def _slot(made: Any, state: int, symbol: int) -> Any:
    """Where a transition stands in the hash table, or would."""
    key, mask = state * made.num_symbols + symbol, len(made.keys) - 1
    slot = np.int64((np.uint64(key) * SPREAD) >> np.uint64(32)) & mask
    while made.keys[slot] != key and made.keys[slot] >= 0:
        slot = (slot + 1) & mask
    return slot


@compiled
def _target(made: Any, state: int, symbol: int) -> int:
    slot = _slot(made, state, symbol)
    return made.targets[slot] if made.keys[slot] >= 0 else -1


@compiled
def _set(made: Any, state: int, symbol: int, target: int, first_slots: Any, next_slots: Any) -> None:
    """Add a transition, and chain it to the others of its state."""
    slot = _slot(made, state, symbol)
    made.keys[slot], made.targets[slot] = state * made.num_symbols + symbol, target
    next_slots[slot], first_slots[state] = first_slots[state], slot


@compiled
def _advance(made: Any, state: int, length: int, token: int) -> Any:
    """State and length of the longest run that ends with one more token, and the token's symbol."""
    symbol = made.symbols[token] if 0 <= token < len(made.symbols) else -1
    if symbol < 0:
        return 0, 0, symbol
    while state > 0:
        target = _target(made, state, symbol)
        if target > 0:
            return target, length + 1, symbol
        state = made.links[state]
        length = made.lengths[state]
    return made.starts[symbol], 1, symbol


@compiled
def read(made: Any, counts: Any, tokens: Any, offsets: Any, least: int) -> Any:
    """The runs of at least `least` tokens that documents share with the text, none inside a longer one.

    Args:
        made: `Automaton`.
        counts: int64, (num_symbols,): how often each of the text's tokens stands in the documents is added to it.
        tokens: int32, ids of all documents.
        offsets: int64, (documents + 1,): where each begins in them.
        least: Tokens, at least 1.

    Returns:
        int64 (runs, 3): document, index of the run's last token at its first place in the text, tokens.
    """
    runs, num_runs = np.empty((64, 3), np.int64), 0
    for document in range(len(offsets) - 1):
        state, length = 0, 0
        for at in range(offsets[document], offsets[document + 1]):
            before, last = length, state
            state, length, symbol = _advance(made, state, length, tokens[at])
            if symbol >= 0:
                counts[symbol] += 1
            if before >= least and length <= before:
                runs, num_runs = _note(runs, num_runs, document, made.ends[last], before)
        if length >= least:
            runs, num_runs = _note(runs, num_runs, document, made.ends[state], length)
    return runs[:num_runs]


@compiled
def _note(runs: Any, num_runs: int, document: int, end: int, length: int) -> Any:
    if num_runs == len(runs):
        more = np.empty((2 * num_runs, 3), np.int64)
        for row in range(num_runs):  # a slice would take the compiler seven seconds
            for column in range(3):
                more[row, column] = runs[row, column]
        runs = more
    runs[num_runs, 0], runs[num_runs, 1], runs[num_runs, 2] = document, end, length
    return runs, num_runs + 1


@compiled
def longest_runs(made: Any, tokens: Any, least: int) -> Any:
    """The runs of the text of at least `least` tokens that stand in some tokens, none inside a longer one.

    Unlike `read`, it finds every place of the text: also the second one of a run that stands twice in it.

    Args:
        made: `Automaton`.
        tokens: int32, ids; `BREAK` between those that do not follow each other.
        least: Tokens, at least 1.

    Returns:
        int64 (runs, 3): index of the first token in the text, tokens, index of the first one in `tokens`; in the
        text's order.
    """
    reach, places = np.zeros(len(made.lengths), np.int64), np.zeros(len(made.lengths), np.int64)
    state, length = 0, 0
    for at in range(len(tokens)):
        state, length, _ = _advance(made, state, length, tokens[at])
        if length >= least and length > reach[state]:
            reach[state], places[state] = length, at
    for state in made.order:  # whatever ends with a run stands wherever that stands
        link = made.links[state]
        if reach[state] and made.lengths[link] >= least and made.lengths[link] > reach[link]:
            reach[link], places[link] = made.lengths[link], places[state]
    runs, num_runs = np.empty((len(made.prefixes), 3), np.int64), 0
    before = 0
    for at in range(len(made.prefixes)):
        state = made.prefixes[at]
        while state > 0 and not reach[state]:
            state = made.links[state]
        length = reach[state]
        if length:
            if before and length == before + 1:  # the one before goes on
                num_runs -= 1
            runs[num_runs, 0], runs[num_runs, 1], runs[num_runs, 2] = (
                at + 1 - length,
                length,
                places[state] + 1 - length,
            )
            num_runs += 1
        before = length
    return runs[:num_runs]


@compiled
def places_of(tokens: Any, run: Any) -> Any:
    """Every place at which a run stands in some tokens, overlapping ones too (Knuth, Morris and Pratt 1977).

    Args:
        tokens: int32, ids.
        run: int32, ids, at least one.

    Returns:
        int64 (places,): index of the run's first token in `tokens`, ascending.
    """
    borders, length = np.zeros(len(run), np.int64), 0
    for at in range(1, len(run)):
        while length and run[at] != run[length]:
            length = borders[length - 1]
        length += run[at] == run[length]
        borders[at] = length
    places, num_places = np.empty(max(0, len(tokens) + 1 - len(run)), np.int64), 0
    length = 0
    for at in range(len(tokens)):
        while length and (length == len(run) or tokens[at] != run[length]):
            length = borders[length - 1]
        length += tokens[at] == run[length]
        if length == len(run):
            places[num_places] = at + 1 - length
            num_places += 1
    return places[:num_places]
