"""What a stage computes: its columns, the functions that make them, and what its values depend on.

Invariant: a declaration is plain data and importable functions, so that it can be handed to another process or machine;
whatever changes a value is in `code_version` or `parameters`, and nothing else is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import pyarrow as pa

BatchFunction = Callable[["pa.RecordBatch"], Sequence["pa.Array"]]
"""Input columns of some rows in, one array per output column out: same length, same order, no NULL.

The values of a row depend on that row alone, so that the division into batches never shows.
"""


ERROR_SUFFIX = "_error"
"""Ending of the column that says why a row could not be computed."""


@dataclass(frozen=True, kw_only=True)
class Worker:
    """What the process that computes offers to the function it builds."""

    num_threads: int
    """Cores that are this worker's share."""
    device: str
    """Torch device: `cpu`, or `cuda:0` when the columns ask for a GPU (each worker then sees only its own)."""


class ColumnReader(Protocol):
    """Reads any column of the rows being worked on, files staged by an earlier group included.

    Values are those of live rows, in row order; NULL where a computed column has no value yet.
    """

    def __call__(self, name: str) -> pa.ChunkedArray:
        """All values of a column."""

    def batches(self, name: str) -> Iterator[pa.Array]:
        """All values of a column piece by piece, for one that is too large to be held: some megabytes at a time."""


@dataclass(frozen=True, kw_only=True)
class ColumnGroup:
    """Columns computed together."""

    outputs: pa.Schema
    """Fields written, narrowest last, their making in the metadata (`schema.computed_field`): where it is another than
    the table's, the group is computed anew for every row, and so is each `TableColumns` after it."""
    inputs: tuple[str, ...]
    """Columns of the table that the batch function is given."""
    nullable: tuple[str, ...] = ()
    """Outputs in which NULL is a value; never the last one, by which a row is known to be computed."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns written."""
        return tuple(self.outputs.names)


@dataclass(frozen=True, kw_only=True)
class RowColumns(ColumnGroup):
    """Columns in which the values of a row depend on that row alone: any number of workers compute them."""

    make: Callable[[Worker], BatchFunction]
    """Builds the batch function, once per worker: a tokenizer or a model is loaded here. A module-level function, or a
    `functools.partial` of one with plain arguments, since it travels to the workers by name."""
    batch_rows: int | None = None
    """Rows per call of the batch function at most; None: as many as fit the batch size in bytes. Set it for slow
    functions: work is saved between calls."""
    worker_bytes: int = 16 << 20
    """Input that pays for starting a worker, some two seconds; the default is a tokenizer's. Set it high for fast
    functions, low for slow ones."""
    num_gpus: float = 0.0
    """GPUs that each worker needs; a fraction shares one."""

    @property
    def error_name(self) -> str:
        """Column with the reason for every row that could not be computed; there once `on_error` was `null`."""
        return self.names[0] + ERROR_SUFFIX


@dataclass(frozen=True, kw_only=True)
class TableColumns(ColumnGroup):
    """Columns in which the value of a row depends on other rows: computed in one process, from numbers only."""

    make: Callable[[ColumnReader], BatchFunction]
    """Builds the batch function from whole columns of the table."""


@dataclass(frozen=True, kw_only=True)
class Fill:
    """A stage that computes columns."""

    stage: str
    """Stage name."""
    groups: tuple[RowColumns | TableColumns, ...]
    """Column groups in the order they are computed."""
    code_version: str
    """Version of the code that computes the values, for the record."""
    parameters: dict[str, Any]
    """Parameters that change the values, as plain JSON, for the record."""
    batch_bytes: int
    """Bytes of input held per batch and worker."""
    on_error: Literal["raise", "null"] = "raise"
    """A row that fails stops the fill (`raise`), or gets NULL, a reason and a place in the ledger (`null`)."""
    max_failed_share: float = 0.001
    """Share of failed rows above which the check `failed_share` alarms."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Limits that checks hold the stage to, by the name of the check; in the record, and no value depends on them."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """More for the record's details, such as what computed the values; no value depends on them."""
    summarize: Callable[[ColumnReader], dict[str, int]] | None = None
    """Ledger of the rows filled, from the columns just computed: `in` is every row, NULL a row that failed, and what is
    not failed closes on `in`. None: all rows are `written`."""
