"""Batch functions guarded row by row: which row failed, and what becomes of it.

Invariant: what a guarded function returns has the declared types and lengths, and a NULL only beside a reason or where
the column group says that NULL is a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from pretrain_assets.errors import ColumnError
from pretrain_assets.table.filler.spec import BatchFunction

if TYPE_CHECKING:
    import pyarrow as pa

NOT_OF_A_ROW = (MemoryError, OSError, ImportError, ColumnError)
"""Errors of the machine or of the function itself; no row is to blame, so they always stop the fill."""
REASON_CHARS = 200

Describe = Callable[[int], str]
"""From the position of a row in the batch to words that a person finds it by."""


def call(
    function: BatchFunction,
    batch: pa.RecordBatch,
    outputs: pa.Schema,
    *,
    error_name: str | None,
    nullable: Sequence[str] = (),
    on_error: Literal["raise", "null"],
    describe: Describe,
) -> list[pa.Array]:
    """One array per output column; failing rows are found by halving the batch.

    Args:
        function: Computes all output columns but `error_name`.
        batch: Its input.
        outputs: Columns wanted.
        error_name: The output column that takes the reasons of failed rows; the function does not compute it.
        nullable: Output columns in which NULL is a value.
        on_error: Whether a failing row raises, or its values become NULL.
        describe: Words for a row of the batch.

    Raises:
        ColumnError: a row failed with `on_error` raise, or the function returned other types or lengths.
    """
    import pyarrow as pa

    wanted = [f for f in outputs if f.name != error_name]

    pieces: list[list[pa.Array]] = []
    ranges = [(0, batch.num_rows)]
    while ranges:
        start, length = ranges.pop()
        found = _attempt(function, batch.slice(start, length), wanted, nullable)
        if not isinstance(found, BaseException):
            pieces.append([*found, pa.nulls(length, pa.string())])  # no reasons
            continue
        if length > 1:
            half = length // 2
            ranges += [(start + half, length - half), (start, half)]
            continue
        words = f"{type(found).__name__}: {found}".splitlines()[0][:REASON_CHARS]
        reason = words.encode("utf-8", "replace").decode()  # a lone surrogate is no text for Arrow
        if on_error == "raise":
            raise ColumnError(
                f"{', '.join(f.name for f in wanted)} cannot be computed for {describe(start)}: {reason}. "
                "Mend or delete that row, or count such rows instead with on_error=null (--on-error null)."
            ) from found
        pieces.append([*(pa.nulls(1, f.type) for f in wanted), pa.array([reason])])
    columns = [pa.concat_arrays(column) if len(column) > 1 else column[0] for column in zip(*pieces, strict=True)]
    by_name = dict(zip([f.name for f in wanted] + [error_name], columns, strict=True))
    return [by_name[f.name] for f in outputs]


def _attempt(
    function: BatchFunction, batch: pa.RecordBatch, wanted: Sequence[pa.Field], nullable: Sequence[str]
) -> Sequence[pa.Array] | BaseException:
    """What the function returns, or what it raises: handed over, so that no error holds on to the one before it."""
    try:
        return _checked(function(batch), wanted, batch.num_rows, nullable)
    except NOT_OF_A_ROW:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":  # of a Rust library
            return error
        raise


def _checked(
    arrays: Sequence[pa.Array], wanted: Sequence[pa.Field], num_rows: int, nullable: Sequence[str]
) -> Sequence[pa.Array]:
    import pyarrow as pa

    if not isinstance(arrays, (list, tuple)) or not all(isinstance(array, pa.Array) for array in arrays):
        raise ColumnError(f"the batch function must return a list of Arrow arrays, not {type(arrays).__name__}")
    if len(arrays) != len(wanted):
        raise ColumnError(f"the batch function returned {len(arrays)} arrays for {len(wanted)} columns")
    for array, expected in zip(arrays, wanted, strict=True):
        if array.type != expected.type or len(array) != num_rows:
            raise ColumnError(
                f"the batch function returned {len(array)} values of {array.type} for column {expected.name}; expected "
                f"{num_rows} of {expected.type}"
            )
        if array.null_count and expected.name not in nullable:
            raise ValueError(f"the batch function returned NULL for column {expected.name}")
    return arrays
