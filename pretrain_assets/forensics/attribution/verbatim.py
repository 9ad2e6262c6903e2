"""Which rows hold runs of a text's tokens, word for word: one pass over the token column, in bounded memory.

Invariant: a run counts only where all its token ids are equal, in a row of the version that is asked. How rare a run
is goes by its unigram probability over the tokens that were read (as in OLMoTrace, Liu et al. 2025): long runs of rare
tokens come first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from pretrain_assets.forensics.attribution.automaton import BREAK, Automaton, automaton, longest_runs, places_of, read
from pretrain_assets.forensics.attribution.passage import Passage
from pretrain_assets.forensics.attribution.trainings import Trainings

if TYPE_CHECKING:
    import lance

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

READ_BYTES = 8 << 20
"""Of token ids in a batch; Lance reads some sixteen of them ahead."""
ROWS_PER_RUN = 64
"""Rows that are kept of each run, the first ones, and as many that it was trained on in; of more, only the number."""


class Run(NamedTuple):
    """Consecutive tokens of the text."""

    start: int
    """Index of the first."""
    tokens: int
    """How many."""

    @property
    def stop(self) -> int:
        """Index after the last."""
        return self.start + self.tokens


@dataclass(kw_only=True)
class Rows:
    """The rows that hold a run."""

    ids: list[int] = field(default_factory=list)
    """The first of them, `ROWS_PER_RUN` at most."""
    seen: list[int] = field(default_factory=list)
    """The first of those that it was trained on in, as many at most."""
    count: int = 0
    """All of them."""
    at_least: bool = False
    """Whether there may be more than `count`."""


@dataclass(kw_only=True, eq=False)
class Reading:
    """A text's automaton, and what was read with it so far."""

    passage: Passage
    """The text."""
    least: int
    """Tokens of the shortest run that counts, white space not counted."""
    automaton: Automaton
    """Of its tokens."""
    counts: Int64s
    """How often each different token of the text was read."""
    runs: dict[Run, Rows] = field(default_factory=dict)
    """The runs that rows hold, and that stand in what was trained on of rows, none inside a longer one of the same row;
    each at its first place in the text."""
    num_rows: int = 0
    """Rows read."""
    num_tokens: int = 0
    """Tokens read."""
    without_tokens: int = 0
    """Rows among them that have no tokens: NULL."""

    @property
    def bits(self) -> npt.NDArray[np.float64]:
        """-log2 of the unigram probability of each of the text's tokens, shape (tokens,)."""
        seen = np.maximum(self.counts[self.automaton.symbols[self.passage.ids]], 1)
        return np.log2(max(1, self.num_tokens) / seen)

    def counts_as_run(self, run: Run) -> bool:
        """Whether it is long enough: white space alone, as between columns or verses, says nothing."""
        return bool(self.passage.words[run.stop] - self.passage.words[run.start] >= self.least)

    def add(self, ids: Int64s, tokens: Int32s, offsets: Int64s, trained: Int32s | None = None) -> None:
        """Look into more rows, of which so many tokens each, from the first on, were trained on: none if not given."""
        self.num_rows += len(ids)
        self.num_tokens += len(tokens)
        found = read(self.automaton, self.counts, tokens, offsets, self.least)
        for rows, places in self._noted(found, len(ids)):
            rows.count += len(places)
            rows.ids += ids[places[: ROWS_PER_RUN - len(rows.ids)]].tolist()
        if trained is None:
            return
        whole = trained >= np.diff(offsets)
        seen = [found[whole[found[:, 0]]]]
        for place in np.flatnonzero((trained > 0) & ~whole).tolist():  # the last one or two of a split and epoch
            part = tokens[offsets[place] :][: trained[place]]
            begun = read(self.automaton, np.zeros_like(self.counts), part, np.array([0, len(part)]), self.least)
            seen.append(begun + np.array([place, 0, 0]))
        for rows, places in self._noted(np.concatenate(seen), len(ids)):
            rows.seen += ids[places[: ROWS_PER_RUN - len(rows.seen)]].tolist()

    def _noted(self, found: Int64s, num_rows: int) -> Iterator[tuple[Rows, Int64s]]:
        """The runs that `read` found and that count, and at which places of the rows read, each once."""
        documents, ends, lengths = found.T
        words, size = self.passage.words, len(self.passage.ids) + 1
        long = words[ends + 1] - words[ends + 1 - lengths] >= self.least
        entries = np.unique(((ends * size + lengths) * num_rows + documents)[long])
        runs, firsts = np.unique(entries // max(1, num_rows), return_index=True)
        for run, places in zip(runs.tolist(), np.split(entries % max(1, num_rows), firsts)[1:], strict=True):
            end, length = divmod(run, size)
            yield self.runs.setdefault(Run(end + 1 - length, length), Rows()), places


def reading(passage: Passage, *, least: int) -> Reading:
    """Nothing read yet. The text needs a token."""
    made = automaton(passage.ids)
    return Reading(passage=passage, least=least, automaton=made, counts=np.zeros(made.num_symbols, np.int64))


def read_rows(
    dataset: lance.LanceDataset,
    column: str,
    readings: Sequence[Reading],
    trained: Trainings,
    ids: Iterable[int] | None = None,
) -> None:
    """Look into the tokens of all rows of a version, or of those with some ids."""
    for row_ids, tokens, offsets, without in token_batches(dataset, column, ids):
        for one in readings:
            one.add(row_ids, tokens, offsets, trained.of(row_ids))
            one.without_tokens += without


def token_batches(
    dataset: lance.LanceDataset, column: str, ids: Iterable[int] | None = None
) -> Iterator[tuple[Int64s, Int32s, Int64s, int]]:
    """The `id` of rows, their tokens one after another, where each row's begin (rows + 1), and how many have none."""
    import pyarrow.compute as pc

    where = None if ids is None else f"id IN ({', '.join(map(str, sorted(ids))) or 'NULL'})"
    scanner = dataset.scanner(columns=["id", column], filter=where, batch_size_bytes=READ_BYTES)
    for batch in scanner.to_batches():
        lists = batch.column(1)
        lengths = np.asarray(pc.list_value_length(lists).fill_null(0))
        tokens = np.asarray(lists.flatten())
        yield np.asarray(batch.column(0)), tokens, np.concatenate([[0], np.cumsum(lengths)]), lists.null_count


def runs_in(one: Reading, tokens: Int32s) -> list[Run]:
    """The runs of the text that stand in some tokens, none inside a longer one: at every place of the text."""
    found = (Run(start, count) for start, count, _ in longest_runs(one.automaton, tokens, one.least).tolist())
    return [run for run in found if one.counts_as_run(run)]


def union(one: Reading, found: Iterable[Run]) -> list[Run]:
    """The runs of the text that stand in any of some runs, none inside a longer one."""
    ids, gap = one.passage.ids, np.array([BREAK], np.int32)
    pieces = [piece for run in found for piece in (ids[run.start : run.stop], gap)]
    return runs_in(one, np.concatenate(pieces)) if pieces else []


def covered(one: Reading, runs: Iterable[Run]) -> npt.NDArray[np.bool_]:
    """Which of the text's tokens are in some of the runs."""
    inside = np.zeros(len(one.passage.ids), np.bool_)
    for run in runs:
        inside[run.start : run.stop] = True
    return inside


def resolved(one: Reading, runs: Iterable[Run]) -> list[Run]:
    """The runs with no token in two of them, the rarest first: of a rarer one's neighbour stays what is long enough."""
    bits = np.concatenate([[0.0], np.cumsum(one.bits)])
    free = np.ones(len(one.passage.ids), np.bool_)

    def rarest_first(run: Run) -> tuple[float, int]:
        return bits[run.start] - bits[run.stop], run.start

    kept = []
    for run in sorted(runs, key=rarest_first):
        part = _longest_free(free, run)
        if one.counts_as_run(part):
            kept.append(part)
            free[part.start : part.stop] = False
    return sorted(kept, key=rarest_first)


def _longest_free(free: npt.NDArray[np.bool_], run: Run) -> Run:
    """The longest part of a run that is free."""
    taken = np.flatnonzero(~free[run.start : run.stop])
    gaps = np.diff(taken, prepend=-1, append=run.tokens) - 1
    longest = int(gaps.argmax())
    return Run(run.start + (int(taken[longest - 1]) + 1 if longest else 0), int(gaps[longest]))


def rows_with(one: Reading, run: Run) -> Rows:
    """The rows that hold a run of the text, by all that was read: those first that it was trained on in."""
    wanted = one.passage.ids[run.start : run.stop]
    holders = [
        rows for there, rows in one.runs.items() if len(places_of(one.passage.ids[there.start : there.stop], wanted))
    ]
    seen = {i for rows in holders for i in rows.seen}
    ids = [*sorted(seen), *sorted({i for rows in holders for i in rows.ids} - seen)]
    cut = [rows.count for rows in holders if rows.count > len(rows.ids)]  # the same rows may be in several of them
    return Rows(
        ids=ids,
        seen=sorted(seen),
        count=max([len(ids), *cut]),
        at_least=bool(cut) and sum(rows.count > 0 for rows in holders) > 1,
    )
