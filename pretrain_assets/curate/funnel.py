"""What a filter keeps, and what each of its terms removes: alone, as the only one, and in order.

Invariant: the numbers add up to the row count exactly. Rows kept and rows that each term removes in order are all rows,
and so are kept, rejected and unknown ones. NULL is not kept, as in training, and counted apart as unknown.
The truth of every term is evaluated as the loader's filters are, in one pass over narrow columns; what is held is one
entry per source and pattern of truths, never one per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pretrain_assets.curate.filters import Term, checked, terms_of
from pretrain_assets.errors import FilterError

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

SCAN_ROWS = 262_144
"""Rows per scan batch: 20-80 times faster than the default of 1,024 (TABLE.md); a few MB of narrow columns."""
MERGE_EVERY = 64
"""Batches whose patterns are held before they are merged."""
MEASURES = ("amount", "measured", "rows")
"""What is added up per pattern: tokens or characters, rows for which they are known, rows."""
FALSE, UNKNOWN, TRUE = 0, 1, 2
"""Truth values of SQL's three-valued logic, ordered so that AND is the least of them."""

States = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Count:
    """Rows and how much text they hold."""

    rows: int
    """Documents."""
    amount: int
    """Their tokens, or characters where there are no tokens yet."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One term of a filter."""

    number: str
    """Place in the filter, such as `2` or `2.1`."""
    text: str
    """As it is written."""
    sql: str
    """In plain SQL."""
    removes: Count
    """Rows for which it is not true, whatever the other terms say."""
    unknown: Count
    """Of these, rows for which it is NULL."""
    only: Count
    """Rows that it alone removes: without it they were kept."""
    in_order: Count
    """Rows that it removes of those that the terms before it leave; these add up over the terms."""
    left: Count
    """Rows that it and all terms before it leave."""
    children: tuple[Step, ...] = ()
    """Terms of its meaning, where it is a name; in the order of all terms, as if they stood in its place."""


@dataclass(frozen=True, kw_only=True)
class SourceCount:
    """What a filter keeps of one source."""

    source: str
    """Value of the `source` column."""
    total: Count
    """All of it."""
    kept: Count
    """What the filter keeps."""
    removed: tuple[int, ...]
    """Rows that each term removes in order."""


@dataclass(frozen=True, kw_only=True)
class Funnel:
    """What a filter keeps of a version."""

    filter: str
    """As it was asked for."""
    sql: str
    """In plain SQL."""
    version: int
    """Version of the table."""
    unit: str
    """What amounts are: `tokens` or `characters`."""
    total: Count
    """All rows."""
    kept: Count
    """Rows for which the filter is true."""
    rejected: Count
    """Rows for which it is false."""
    unknown: Count
    """Rows for which it is NULL; not kept."""
    unmeasured: int
    """Rows whose tokens (or characters) are not known and count 0."""
    steps: tuple[Step, ...]
    """Terms, in order."""
    by_source: tuple[SourceCount, ...]
    """Largest source first."""


def funnel(dataset: lance.LanceDataset, text: str, *, count_column: str = "n_tokens") -> Funnel:
    """Count what a filter keeps and what its terms remove.

    Args:
        dataset: The table at the version that is asked.
        text: SQL over columns and names.
        count_column: Column with the number of tokens; characters are counted where the version lacks it.

    Raises:
        FilterError: the table cannot evaluate it.
    """
    sql = checked(dataset, text)
    terms = terms_of(text, dataset.schema.names)
    leaves = [leaf for term in terms for leaf in term.leaves]
    measure = count_column if count_column in dataset.schema.names else "n_chars"
    patterns = _patterns(dataset, leaves, measure)
    table = _Truths(patterns, len(leaves))
    whole = table.states.min(axis=0)
    return Funnel(
        filter=text,
        sql=sql,
        version=dataset.version,
        unit="characters" if measure == "n_chars" else "tokens",
        total=table.count(whole >= FALSE),
        kept=table.count(whole == TRUE),
        rejected=table.count(whole == FALSE),
        unknown=table.count(whole == UNKNOWN),
        unmeasured=int((table.rows - patterns["measured"].to_numpy()).sum()),
        steps=table.steps(terms),
        by_source=table.by_source(terms, patterns["source"].to_pylist()),
    )


class _Truths:
    """Patterns of truths as arrays: rows and amounts per pattern, and the state of every leaf in it."""

    def __init__(self, patterns: pa.Table, num_leaves: int):
        self.rows = patterns["rows"].to_numpy().astype(np.int64)
        self.amounts = patterns["amount"].to_numpy().astype(np.int64)
        columns = [patterns[f"t{place}"].combine_chunks() for place in range(num_leaves)]
        self.states = np.stack([_states(column) for column in columns])

    def count(self, mask: Mask) -> Count:
        return Count(rows=int(self.rows[mask].sum()), amount=int(self.amounts[mask].sum()))

    def steps(self, terms: Sequence[Term], first: int = 0) -> tuple[Step, ...]:
        """The terms' steps; the first leaf of the first term is the leaf `first`."""
        found = []
        for term in terms:
            stop = first + len(term.leaves)
            own = self.states[first:stop].min(axis=0)
            others = np.delete(self.states, np.s_[first:stop], axis=0) == TRUE
            before, gone = (self.states[:first] == TRUE).all(axis=0), own != TRUE
            found.append(
                Step(
                    number=term.number,
                    text=term.text,
                    sql=term.sql,
                    removes=self.count(gone),
                    unknown=self.count(own == UNKNOWN),
                    only=self.count(gone & others.all(axis=0)),
                    in_order=self.count(gone & before),
                    left=self.count(~gone & before),
                    children=self.steps(term.children, first),
                )
            )
            first = stop
        return tuple(found)

    def by_source(self, terms: Sequence[Term], sources: list[str | None]) -> tuple[SourceCount, ...]:
        names, places = np.unique([source or "" for source in sources], return_inverse=True)

        def sums(values: Int64Array, mask: Mask) -> Int64Array:
            found = np.zeros(len(names), np.int64)
            np.add.at(found, places[mask], values[mask])  # exact; numpy.bincount would add floats
            return found

        stops = np.cumsum([len(term.leaves) for term in terms])
        left = [np.ones(len(places), bool), *((self.states[:stop] == TRUE).all(axis=0) for stop in stops)]
        removed = [sums(self.rows, before & ~after) for before, after in pairwise(left)]
        total, kept = ((sums(self.rows, mask), sums(self.amounts, mask)) for mask in (left[0], left[-1]))
        found = [
            SourceCount(
                source=str(name) or "(none)",
                total=Count(rows=int(total[0][place]), amount=int(total[1][place])),
                kept=Count(rows=int(kept[0][place]), amount=int(kept[1][place])),
                removed=tuple(int(counts[place]) for counts in removed),
            )
            for place, name in enumerate(names)
        ]
        return tuple(sorted(found, key=lambda count: (-count.total.rows, count.source)))


def _states(column: pa.Array) -> States:
    """Truth values of a boolean column."""
    known = column.is_valid().to_numpy(zero_copy_only=False)
    holds = column.fill_null(False).to_numpy(zero_copy_only=False)
    return np.where(known, np.where(holds, TRUE, FALSE), UNKNOWN).astype(np.uint8)


def _patterns(dataset: lance.LanceDataset, leaves: Sequence[Term], measure: str) -> pa.Table:
    """Rows, amount and measured rows of every source and pattern of truths."""
    import pyarrow as pa

    # not `dataset.sql`: there 3.3 stays a double, and `score >= 3.3` is false of a float column's 3.3; in filters, and
    # in the scanner's expressions, it takes the column's type
    truths = {f"t{place}": f"({leaf.sql})" for place, leaf in enumerate(leaves)}
    columns = {"source": "source", "amount": measure, **truths}
    try:
        scanner = dataset.scanner(columns=columns, batch_size=SCAN_ROWS)
        kinds = [scanner.projected_schema.field(name).type for name in truths]
    except (ValueError, OSError) as error:  # a column of Lance itself
        reason = str(error).split(", /")[0]
        raise FilterError(f"The terms {[leaf.text for leaf in leaves]} cannot be counted: {reason}") from error
    for leaf, kind in zip(leaves, kinds, strict=True):
        if kind != pa.bool_():
            raise FilterError(f"{leaf.text!r} is not boolean; where it calls regexp_match, call regexp_like")
    keys = ["source", *truths]
    parts: list[pa.Table] = []
    for batch in scanner.to_batches():
        part = pa.Table.from_batches([batch])
        counts = part.group_by(keys).aggregate([("amount", "sum"), ("amount", "count"), ([], "count_all")])
        parts.append(counts.rename_columns({"amount_sum": "amount", "amount_count": "measured", "count_all": "rows"}))
        if len(parts) == MERGE_EVERY:
            parts = [_merged(parts, keys)]
    return _merged(parts, keys)


def _merged(parts: list[pa.Table], keys: list[str]) -> pa.Table:
    """Patterns of several batches as one table; of none, an empty one."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not parts:
        kinds = {name: pa.string() if name == "source" else pa.bool_() for name in keys}
        return pa.schema([*kinds.items(), *((name, pa.int64()) for name in MEASURES)]).empty_table()
    sums = pa.concat_tables(parts).group_by(keys).aggregate([(name, "sum") for name in MEASURES])
    merged = sums.rename_columns({f"{name}_sum": name for name in MEASURES})
    place = merged.schema.get_field_index("amount")
    return merged.set_column(place, "amount", pc.fill_null(merged["amount"], 0))
