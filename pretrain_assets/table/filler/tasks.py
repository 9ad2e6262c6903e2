"""The pieces of work of a column group: ranges of rows to compute, then parts to join into one file per fragment.

Invariant: a task is plain data, can run in any process that reaches the table, and can run again at no cost: it takes
what is finished as it is. A range saves its work every `PART_SECONDS`, so a kill loses no more than that.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from pretrain_assets.table.filler import columnfile, inputs, rows
from pretrain_assets.table.filler.columnfile import ColumnWriter, StagedFile
from pretrain_assets.table.filler.spec import BatchFunction, ColumnGroup, RowColumns, Worker
from pretrain_assets.table.storage import storage_options

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

    from pretrain_assets.table.filler.columnfile import Offsets

RANGE_BYTES = 8 << 20
"""Bytes of input files per range: about a second of tokenizing, so that the cores end together; a fragment of up to one
and a half of it is written once, a larger one as parts that are joined."""
PART_SECONDS = 20.0
"""Seconds of work after which a range saves what it has."""

Report = Callable[[int, int, bool], None]
"""Takes rows and bytes of input done, and whether they were found finished."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all tasks of one column group share."""

    key: str
    """Stands for the function: a worker builds it anew when the key changes."""
    uri: str
    """The table."""
    version: int
    """Version that is read."""
    group: ColumnGroup
    """Columns, their inputs and function."""
    outputs: pa.Schema
    """Columns written: the group's, then the one for reasons when failures are counted or were."""
    judged: tuple[str, ...]
    """A computed row has a value in one of these."""
    error_name: str | None
    """Column that takes the reasons of failed rows, when the table has or gets one."""
    on_error: Literal["raise", "null"]
    """Whether a failing row stops the fill, or becomes NULL with a reason."""
    batch_bytes: int
    """Bytes of input per batch."""
    source: tuple[str, int] | None = None
    """Another table and its version, with the same fragments, that the inputs are read from; None: the table itself."""


class State:
    """What a worker keeps from task to task: the table at its version, and the function with all that it loaded."""

    def __init__(self, worker: Worker):
        self._worker = worker
        self._dataset: lance.LanceDataset | None = None
        self._opened: tuple[str, int] | None = None
        self._function: BatchFunction | None = None
        self._key: str | None = None

    def dataset(self, job: Job) -> lance.LanceDataset:
        """What the inputs are read from: the table at the job's version."""
        import lance

        uri, version = job.source or (job.uri, job.version)
        if self._opened != (uri, version):
            self._dataset = lance.dataset(uri, version=version, storage_options=storage_options(uri))
            self._opened = (uri, version)
        return self._dataset

    def function(self, job: Job) -> BatchFunction:
        """The job's batch function, built at its first use."""
        if self._function is None or self._key != job.key:
            assert isinstance(job.group, RowColumns)
            self._function = None  # before the next one takes its memory
            self._function = job.group.make(self._worker)
            self._key = job.key
        return self._function

    def use(self, job: Job, function: BatchFunction) -> None:
        """Take a function that was built elsewhere."""
        self._function, self._key = function, job.key


class Task(Protocol):
    """A piece of work."""

    def run(self, job: Job, state: State, report: Report) -> list[StagedFile]:
        """Do it, or find it done."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Compute consecutive rows of one fragment, into as many parts as it takes."""

    fragment_id: int
    """The fragment."""
    stem: str
    """Name of its staged file, short of its ending."""
    start: int
    """Physical offset of the first row."""
    stop: int
    """Physical offset after the last row."""
    num_bytes: int
    """Bytes of input, about."""
    begun: bool = False
    """Whether a part that begins here is there already."""

    def run(self, job: Job, state: State, report: Report) -> list[StagedFile]:
        """Its parts, in order."""
        fragment = state.dataset(job).get_fragment(self.fragment_id)
        live = columnfile.live_offsets(fragment)
        parts = list(self.finished_parts(job, live))
        position = self.start + sum(part.num_rows for part in parts)
        if position > self.start:
            report(inputs.count_live(live, self.start, position), 0, True)
        if position < self.stop:
            parts += self._compute(job, state, fragment, live, position, report)
        return parts

    def finished_parts(self, job: Job, live: Offsets | None) -> Iterator[StagedFile]:
        """Its parts that an earlier run finished, up to the first that is missing."""
        position = self.start
        while position < self.stop:
            part = columnfile.finished(
                job.uri,
                columnfile.part_name(self.stem, position),
                job.outputs,
                start=position,
                stop=self.stop,
                live=live,
                judged=job.judged,
            )
            if part is None:
                return
            yield part
            position += part.num_rows

    def _compute(
        self, job: Job, state: State, fragment: lance.LanceFragment, live: Offsets | None, start: int, report: Report
    ) -> list[StagedFile]:
        parts: list[StagedFile] = []
        writer, began, opened = None, start, time.monotonic()
        try:
            for batch, offsets in inputs.batches(job, fragment, live, start, self.stop):
                arrays = rows.call(
                    state.function(job),
                    batch,
                    job.outputs,
                    error_name=job.error_name,
                    nullable=job.group.nullable,
                    on_error=job.on_error,
                    describe=lambda at, offsets=offsets: inputs.describe(fragment, int(offsets[at])),  # type: ignore[misc]
                )
                if writer is None:
                    writer, opened = (
                        ColumnWriter(job.uri, columnfile.part_name(self.stem, began), job.outputs),
                        time.monotonic(),
                    )
                writer.write(arrays, offsets - began)
                report(batch.num_rows, batch.nbytes, False)
                if time.monotonic() - opened >= PART_SECONDS:
                    parts.append(writer.close(writer.num_rows))
                    began, writer = began + writer.num_rows, None
        except BaseException:
            if writer is not None:  # keep what is computed: the next run begins after it
                writer.close(writer.num_rows)
            raise
        if began < self.stop:
            writer = writer or ColumnWriter(job.uri, columnfile.part_name(self.stem, began), job.outputs)
            parts.append(writer.close(self.stop - began))
        return parts


@dataclass(frozen=True, kw_only=True)
class Join:
    """Join the parts of one fragment into its column file."""

    fragment_id: int
    """The fragment."""
    stem: str
    """Name of its staged file, short of its ending."""
    parts: tuple[StagedFile, ...]
    """All its parts, in order."""

    def run(self, job: Job, state: State, report: Report) -> list[StagedFile]:
        """The one file. Parts stay until the commit: a kill in between would lose them otherwise."""
        del state, report
        num_rows = sum(part.num_rows for part in self.parts)
        num_bytes = sum(part.num_bytes for part in self.parts)
        fitting = job.batch_bytes * num_rows // max(1, 2 * num_bytes)  # in memory about twice the size
        batch_rows = min(columnfile.READ_BATCH_ROWS, max(1, fitting))  # a column of one value takes next to no bytes
        writer = ColumnWriter(job.uri, f"{self.stem}.lance", job.outputs)
        parts = (columnfile.read_batches(job.uri, part.name, batch_rows, job.outputs.names) for part in self.parts)
        for batch in inputs.ahead(itertools.chain.from_iterable(parts)):
            writer.append(batch)
        assert writer.num_rows == num_rows, f"{self.stem}: parts hold {num_rows} rows, joined {writer.num_rows}"
        return [writer.close(num_rows)]


def cut(
    dataset: lance.LanceDataset, fragment: lance.LanceFragment, group: ColumnGroup, stem: str, starts: Sequence[int]
) -> list[Range]:
    """Ranges of a fragment, equal in rows, each about `RANGE_BYTES` of the files that hold the inputs.

    Parts that an earlier run left, with other workers perhaps, are ranges as they are: `starts` says where they begin.
    """
    leaves = set(columnfile.leaf_ids(dataset.lance_schema, group.inputs))
    files = [file for file in fragment.metadata.files if leaves.intersection(file.fields)]
    num_bytes = sum(file.file_size_bytes or 0 for file in files)
    num_rows = fragment.physical_rows
    num_ranges = max(1, min(num_rows, round(num_bytes / RANGE_BYTES)))
    edges = {num_rows * at // num_ranges for at in range(num_ranges + 1)}
    begun, end = set(), 0
    for start in sorted(starts):
        rows_there = columnfile.part_rows(dataset.uri, stem, start)
        if start >= end and 0 < rows_there <= num_rows - start:
            end = start + rows_there
            edges = {edge for edge in edges if not start < edge < end} | {start, end}
            begun.add(start)
    return [
        Range(
            fragment_id=fragment.fragment_id,
            stem=stem,
            start=start,
            stop=stop,
            num_bytes=num_bytes * (stop - start) // num_rows,
            begun=start in begun,
        )
        for start, stop in itertools.pairwise(sorted(edges))
    ]


def joined(
    ranges: Sequence[Range], results: Sequence[Sequence[StagedFile]]
) -> tuple[dict[int, StagedFile], list[Join]]:
    """Column files of the fragments that came out in one part, and joins for the others."""
    by_fragment: dict[int, list[tuple[Range, Sequence[StagedFile]]]] = {}
    for piece, parts in zip(ranges, results, strict=True):
        by_fragment.setdefault(piece.fragment_id, []).append((piece, parts))
    whole, joins = {}, []
    for fragment_id, pieces in by_fragment.items():
        ordered = sorted(pieces, key=lambda pair: pair[0].start)
        parts = tuple(part for _, some in ordered for part in some)
        if len(parts) == 1:
            whole[fragment_id] = parts[0]
        else:
            joins.append(Join(fragment_id=fragment_id, stem=ordered[0][0].stem, parts=parts))
    return whole, joins
