"""Mixtures: which rows enter an epoch, and how often, so that every part gets its share of the tokens.

Invariant: the draw is a pure function of (rows, parts, weights, seed, epoch). No state of a random generator is kept,
and neither ranks nor threads have a say.

The rule. An epoch is as long as the kept rows: T tokens, one EOS per document included. Of these, part i is due
t_i = T * w_i / sum(w), computed as an exact fraction. The documents of a part are laid end to end around a ring, in the
order of a hash of row id and seed (the upper half of splitmix64; where it is equal, in table order), which is the same
in every epoch. Epoch e takes the arc from e * t_i to (e + 1) * t_i, both ends moved to the nearest border between two
documents (of two equally near, the earlier). An arc longer than the ring, of T_i tokens, goes around it: every document
floor(t_i / T_i) times, and a run of documents once more. An arc shorter than the ring thins the part. Hence
- an epoch's tokens of a part differ from t_i by at most half of one document at either end, and those of all epochs
  together by at most half of one document, however many epochs there are;
- an epoch begins where the one before ended: after any number of epochs, no document of a part was drawn more than once
  more often than another;
- a part that is due less than half a document is left out of most epochs.

Memory: 4 bytes per kept row and 4 per entry drawn, and while it is computed about 25 per row of the largest part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pretrain_assets.config import MixtureComponent
from pretrain_assets.errors import FilterError
from pretrain_assets.table.predicate import check_predicate

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]
UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]

SCAN_BATCH_ROWS = 262_144
"""Rows per scan batch: 20-80 times faster than the default of 1,024 (TABLE.md), and 5 MB."""


def assign(
    dataset: lance.LanceDataset,
    filter: str,
    components: Sequence[MixtureComponent],
    *,
    count_column: str = "n_tokens",
    setting: str = "data.mixture",
) -> UInt8Array:
    """Number of the component that each kept row belongs to, shape (kept rows,), in storage order; one scan.

    Args:
        dataset: The table at its pinned version.
        filter: SQL predicate of the kept rows, already checked.
        components: At most 255. A predicate that is NULL for a row counts as false.
        count_column: Column with the number of tokens.
        setting: Name of the setting that the components come from, for messages.

    Raises:
        FilterError: a predicate cannot be used, a row is in no component or in two, or a component has no token.
    """
    for component in components:
        _check_component(dataset, component, setting)
    scanner = dataset.scanner(  # not a CASE expression, which Lance does not take
        columns={"n": count_column} | {f"p{i}": f"({part.predicate})" for i, part in enumerate(components)},
        filter=filter,
        with_row_id=True,
        scan_in_order=True,
        batch_size=SCAN_BATCH_ROWS,
    )
    chunks, tokens = [np.empty(0, np.uint8)], np.zeros(len(components), np.int64)
    none, several = _Misfits(), _Misfits()
    for batch in scanner.to_batches():
        hits, part = np.zeros(batch.num_rows, np.uint8), np.zeros(batch.num_rows, np.uint8)
        counts = batch["n"].fill_null(0).to_numpy(zero_copy_only=False)
        for i in range(len(components)):
            inside = _is_true(batch[f"p{i}"])
            hits += inside
            part[inside] = i
            tokens[i] += counts[inside].sum(dtype=np.int64)
        none.note(batch, hits == 0, components)
        several.note(batch, hits > 1, components)
        chunks.append(part)
    if none.rows or several.rows:
        raise FilterError(_no_partition(components, none, several, setting))
    for component, num_tokens in zip(components, tokens.tolist(), strict=True):
        if num_tokens == 0:
            raise FilterError(
                f"{setting}: no token of the rows that {filter!r} keeps is in part {component.name!r}, "
                f"{component.predicate!r}. Correct its predicate, widen the filter, or take the part out."
            )
    return np.concatenate(chunks)


def mix(
    num_tokens: Int32Array,
    parts: UInt8Array,
    weights: Sequence[float],
    row_ids: UInt64Array,
    *,
    seed: int,
    epoch: int,
) -> UInt32Array:
    """Which kept rows enter an epoch, and how often: positions among the kept rows, shape (entries,).

    Ascending, once through all rows drawn, then through those drawn again, and so on: rows that a clumped shuffle keeps
    together are neighbours in storage, never copies of one row.

    Args:
        num_tokens: Tokens per kept row without EOS, shape (rows,).
        parts: Component of each row, as `assign` gives it, shape (rows,).
        weights: Weight of each component.
        row_ids: Stable row ids, shape (rows,).
        seed: The run's shuffle seed, the same for all epochs.
        epoch: Epoch, from 0.
    """
    due = (int(num_tokens.sum(dtype=np.int64)) + len(num_tokens)) / sum(map(Fraction, weights), Fraction())
    times = np.zeros(len(num_tokens), np.uint32)
    for part, weight in enumerate(weights):
        ring = _ring(np.flatnonzero(parts == part), row_ids, seed)
        ends = np.cumsum(num_tokens[ring], dtype=np.int64)
        ends += np.arange(1, len(ring) + 1)  # one EOS each
        begin, end = (_nearest_border(ends, due * Fraction(weight) * e) for e in (epoch, epoch + 1))
        rounds, rest = divmod(end - begin, len(ring))
        first = begin % len(ring)
        times[ring] = rounds
        times[ring[first : first + rest]] += 1
        times[ring[: max(0, first + rest - len(ring))]] += 1
    again, passes = np.flatnonzero(times).astype(np.uint32), []
    while len(again):
        passes.append(again)
        again = again[times[again] > len(passes)]
    return np.concatenate(passes)


@dataclass(kw_only=True)
class _Misfits:
    """Rows that are not in exactly one part."""

    rows: int = 0
    row_id: int = 0
    names: list[str] = field(default_factory=list)

    def note(
        self, batch: pa.RecordBatch, misfit: npt.NDArray[np.bool_], components: Sequence[MixtureComponent]
    ) -> None:
        """Count the rows marked; keep row id and parts of the very first."""
        if not self.rows and misfit.any():
            first = int(misfit.argmax())
            self.row_id = batch["_rowid"][first].as_py()
            self.names = [part.name for i, part in enumerate(components) if _is_true(batch[f"p{i}"])[first]]
        self.rows += int(misfit.sum())


def _no_partition(components: Sequence[MixtureComponent], none: _Misfits, several: _Misfits, setting: str) -> str:
    """What to say when some rows are in none of the parts, or in several."""
    text = f"{setting}: every row that the filter keeps must be in exactly one part of the mixture."
    if none.rows:
        union = " OR ".join(f"({component.predicate})" for component in components)
        text += (
            f" {none.rows:,} rows are in none of {', '.join(component.name for component in components)}, first row id "
            f'{none.row_id}: add a part with predicate "({union}) IS NOT TRUE", or add AND ({union}) to the filter.'
        )
    if several.rows:
        text += (
            f" {several.rows:,} rows are in several, first row id {several.row_id} in {' and '.join(several.names)}: "
            "add AND (...) IS NOT TRUE, with the predicate of the one, to the predicate of the other."
        )
    return text


def _check_component(dataset: lance.LanceDataset, component: MixtureComponent, setting: str) -> None:
    import pyarrow as pa

    setting = f"{setting}[{component.name}].predicate"
    check_predicate(dataset, component.predicate, setting=setting)
    try:
        kind = dataset.scanner(columns={"id": "id", "p": f"({component.predicate})"}).projected_schema.field("p").type
    except (ValueError, OSError):
        kind = None
    if kind != pa.bool_():  # filters take the list that regexp_match returns for a boolean; projections do not
        raise FilterError(
            f"{setting}={component.predicate!r} is not boolean in every part; where it calls regexp_match, call "
            "regexp_like"
        )


def _is_true(column: pa.Array) -> npt.NDArray[np.bool_]:
    mask: npt.NDArray[np.bool_] = column.fill_null(False).to_numpy(zero_copy_only=False)
    return mask


def _ring(rows: Int64Array, row_ids: UInt64Array, seed: int) -> UInt32Array:
    """Places of rows, shuffled: sorted by a hash of row id and seed in the upper half, their place in the lower."""
    keys = _splitmix64(row_ids[rows] ^ _splitmix64(np.array([seed], np.uint64)))
    keys &= np.uint64(0xFFFFFFFF << 32)
    keys |= rows.astype(np.uint64)
    keys.sort()  # ten times faster than argsort
    return keys.astype(np.uint32)


def _splitmix64(values: UInt64Array) -> UInt64Array:
    """Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    return z


def _nearest_border(ends: Int64Array, place: Fraction) -> int:
    """Number of documents before the border nearest to a place on the ring, whole rounds included."""
    rounds, rest = divmod(place, int(ends[-1]))
    document = int(np.searchsorted(ends, int(rest), side="right"))  # the one that covers the place
    begin = int(ends[document - 1]) if document else 0
    later = rest - begin > int(ends[document]) - rest
    return rounds * len(ends) + document + later
