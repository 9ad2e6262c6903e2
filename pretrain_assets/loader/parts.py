"""The ledger of a mixture, part by part: rows and tokens drawn, repeated, thinned, planned, trained.

Invariant: every line, summed over the parts, is the line of the same name in the epoch's ledger; each part closes like
the whole: in + repeated = planned + left out, and planned = trained + not reached + left out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from pretrain_assets.config import MixtureComponent

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]
UInt32Array = npt.NDArray[np.uint32]

MANY_REPEATS = 4.0
"""Repeats of the same data beyond which more of them are worth little (Muennighoff et al. 2023, section 5)."""
_log = logging.getLogger(__name__)

DRAWN = (
    *("rows_in", "rows_repeated", "rows_left_out_thinned"),
    *("tokens_in", "tokens_repeated", "tokens_left_out_thinned"),
)
"""Columns of what `tally` counts: rows that the filter keeps, draws of a row beyond its first, rows not drawn; and the
tokens of each, EOS included."""


def tally(num_tokens: Int32Array, parts: UInt8Array, positions: UInt32Array, *, num_parts: int) -> Int64Array:
    """What a draw of `mix` takes from each part, shape (parts, columns of `DRAWN`).

    Args:
        num_tokens: Tokens per kept row without EOS, shape (rows,).
        parts: Part of each kept row, shape (rows,).
        positions: The draw, shape (entries,).
        num_parts: Parts of the mixture.
    """
    times = np.zeros(len(parts), np.uint32)
    np.add.at(times, positions, 1)
    drawn = np.empty((num_parts, len(DRAWN)), np.int64)
    for part in range(num_parts):
        rows = parts == part
        again, lengths = times[rows], num_tokens[rows].astype(np.int64) + 1
        more, none = np.maximum(again, 1) - 1, again == 0
        drawn[part] = len(lengths), more.sum(), none.sum(), lengths.sum(), more @ lengths, lengths[none].sum()
    return drawn


def describe_mixture(parts: Mapping[str, Mapping[str, float]]) -> None:
    """Log how often an epoch repeats each part of its mixture, or what it leaves out of it; many repeats are a warning.

    Args:
        parts: Ledger of the epoch by part.
    """
    for name, part in parts.items():
        drawn = part["tokens_in"] + part["tokens_repeated"] - part["tokens_left_out_thinned"]
        times = drawn / max(1, part["tokens_in"])
        level = logging.WARNING if times > MANY_REPEATS else logging.INFO
        _log.log(
            level,
            "mixture: %.1f%% of an epoch's tokens are %s's, which is %.2f times each of its tokens",
            100 * part["weight_share"],
            name,
            times,
        )


def ledger_by_part(
    components: Sequence[MixtureComponent],
    drawn: Int64Array,
    parts: UInt8Array,
    places: UInt32Array,
    ends: Int64Array,
    reached: Sequence[int],
    hidden: Int64Array | None = None,
) -> dict[str, dict[str, float]]:
    """What became of the rows and tokens of each part, by its name.

    Args:
        components: The mixture.
        drawn: What `tally` counted, shape (parts, columns).
        parts: Part of each kept row, shape (rows,).
        places: The plan's order: places of kept rows, shape (splits, entries per split).
        ends: Position in its split's token stream just after each entry, shape (splits, entries per split).
        reached: Tokens per split that are trained on, that stand in whole steps, and that stand in whole cycles.
        hidden: Tokens of each part that are in holes instead of trained on, shape (parts,); None without holes.
    """
    num_parts = len(components)
    rows = np.zeros(num_parts, np.int64)
    tokens = np.zeros((4, num_parts), np.int64)
    for places_of_split, ends_of_split in zip(places, ends, strict=True):
        of_split, lengths = parts[places_of_split], np.diff(ends_of_split, prepend=0)
        rows += np.bincount(of_split, minlength=num_parts)
        for i, limit in enumerate((*reached, ends_of_split[-1])):
            within = np.clip(lengths - np.maximum(ends_of_split - limit, 0), 0, None)
            tokens[i] += np.bincount(of_split, weights=within, minlength=num_parts).astype(np.int64)  # exact to 2**53
    total = sum(Fraction(component.weight) for component in components)
    ledgers = {}
    for i, component in enumerate(components):
        rows_in, rows_repeated, rows_thinned, tokens_in, tokens_repeated, tokens_thinned = map(int, drawn[i])
        trained, steps, cycles, planned = map(int, tokens[:, i])
        ledgers[component.name] = {
            "weight_share": float(Fraction(component.weight) / total),
            "rows_in": rows_in,
            "rows_repeated": rows_repeated,
            "rows_planned": int(rows[i]),
            "rows_left_out_beyond_splits": rows_in + rows_repeated - rows_thinned - int(rows[i]),
            "rows_left_out_thinned": rows_thinned,
            "tokens_in": tokens_in,
            "tokens_repeated": tokens_repeated,
            "tokens_planned": planned,
            "tokens_trained": trained - (0 if hidden is None else int(hidden[i])),
            **({} if hidden is None else {"tokens_in_holes": int(hidden[i])}),
            "tokens_not_reached": steps - trained,
            "tokens_left_out_partial_step": cycles - steps,
            "tokens_left_out_end_of_split": planned - cycles,
            "tokens_left_out_beyond_splits": tokens_in + tokens_repeated - tokens_thinned - planned,
            "tokens_left_out_thinned": tokens_thinned,
        }
    return ledgers
