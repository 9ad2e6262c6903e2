"""Data files for the documents of many source files, unit by unit, journaled, not yet committed.

Invariant: rows are numbered in the order of the files; a unit that is in the journal is taken as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pretrain_assets.ingest.commit import refuse_if
from pretrain_assets.ingest.documents import Layout, Tally, to_documents
from pretrain_assets.ingest.journal import Entry, Journal, units
from pretrain_assets.ingest.jsonl import read_jsonl
from pretrain_assets.ingest.parquet import read_parquet
from pretrain_assets.ingest.readahead import Pump, read_ahead
from pretrain_assets.ingest.sources import SourceFile
from pretrain_assets.ingest.synthetic import read_synthetic
from pretrain_assets.progress import Progress
from pretrain_assets.table.lineage import digest
from pretrain_assets.table.storage import Location, exists, storage_options

if TYPE_CHECKING:
    import lance
    import pyarrow as pa


def read_documents(file: SourceFile, layout: Layout, tally: Tally) -> Iterator[pa.RecordBatch]:
    """Documents of one file of any format, without ids."""
    if file.format == "parquet":
        yield from read_parquet(file, layout, tally)
    elif file.format == "jsonl":
        yield from read_jsonl(file, layout, tally)
    else:
        for raw in read_synthetic(file.path, layout.config):
            tally.rows_in += raw.num_rows
            yield to_documents(raw, file, layout)


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where data files go."""

    location: Location
    """The table."""
    dataset: lance.LanceDataset | None
    """The table to append to; None when it is yet to be created."""
    table_id: str
    """Its identity."""
    first_id: int
    """First free id."""


class UnitWriter:
    """Writes units of files one after the other."""

    def __init__(self, target: Target, layout: Layout, journal: Journal, progress: Progress):
        self._target, self._layout, self._journal, self._progress = target, layout, journal, progress
        self._next_id = target.first_id

    def write(self, files: Sequence[SourceFile], key: str) -> list[Entry]:
        """One entry per unit. `key` stands for all that decides the result, short of the files."""
        keyed: list[tuple[str, list[SourceFile]]] = []
        for unit in units(files):
            key = digest([key, [[file.name, file.fingerprint] for file in unit]])
            keyed.append((key, unit))
        done = list(self._finished(keyed))
        rest = keyed[len(done) :]
        tallies = [Tally(file, self._layout.config) for _, unit in rest for file in unit]
        streams = [partial(read_documents, tally.file, self._layout, tally) for tally in tallies]
        with closing(read_ahead(streams, self._layout.config.files_in_flight)) as pumps:
            readers = zip(tallies, pumps, strict=True)
            for key, unit in rest:
                done.append(self._write_unit(len(unit), readers))
                self._journal.save(key, done[-1])
        return done

    def _finished(self, keyed: Sequence[tuple[str, list[SourceFile]]]) -> Iterator[Entry]:
        """The journaled units, up to the first that is not there."""
        for key, _ in keyed:
            entry = self._journal.load(key)
            if entry is None:
                return
            self._next_id = entry.next_id
            self._progress.update(entry.ledger["written"])
            yield entry

    def _write_unit(self, num_files: int, readers: Iterator[tuple[Tally, Pump[pa.RecordBatch]]]) -> Entry:
        files: list[dict[str, Any]] = []
        ledger: Counter[str] = Counter({"in": 0, "written": 0})

        def batches() -> Iterator[pa.RecordBatch]:
            for _ in range(num_files):
                tally, pump = next(readers)
                first_id = self._next_id
                yield from map(self._numbered, pump)
                written = self._next_id - first_id
                assert tally.rows_in == written + tally.left_out.total(), f"{tally.file.name}: rows unaccounted for"
                files.append(_facts(tally.file, written))
                ledger.update({"in": tally.rows_in, "written": written})
                ledger.update({f"left_out:{reason}": rows for reason, rows in tally.left_out.items()})

        fragments = [fragment.to_json() for fragment in self._write_fragments(batches())]
        return Entry(
            table_id=self._target.table_id,
            next_id=self._next_id,
            fragments=fragments,
            files=files,
            ledger=dict(ledger),
        )

    def _numbered(self, documents: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with its ids."""
        import numpy as np
        import pyarrow as pa

        first_id, self._next_id = self._next_id, self._next_id + documents.num_rows
        ids = pa.array(np.arange(first_id, self._next_id, dtype=np.int64))
        self._progress.update(documents.num_rows, documents.nbytes)
        return pa.RecordBatch.from_arrays([ids, *documents.columns], schema=self._layout.schema)

    def _write_fragments(self, batches: Iterator[pa.RecordBatch]) -> list[lance.FragmentMetadata]:
        """Write data files. Lance would turn a reader's error into text: the error itself is raised."""
        import pyarrow as pa
        from lance.fragment import write_fragments

        failures: list[BaseException] = []

        def guarded() -> Iterator[pa.RecordBatch]:
            try:
                yield from batches
            except BaseException as error:
                failures.append(error)
                raise

        target = self._target
        try:
            fragments: list[lance.FragmentMetadata] = write_fragments(
                pa.RecordBatchReader.from_batches(self._layout.schema, guarded()),
                target.location.uri if target.dataset is None else target.dataset,
                schema=self._layout.schema,
                mode="create" if target.dataset is None else "append",
                data_storage_version="2.2",
                enable_stable_row_ids=True,
                storage_options=storage_options(target.location.uri),
            )
            return fragments
        except OSError:
            if failures:
                raise failures[0] from None
            if target.dataset is None:
                refuse_if(exists(target.location), target.location)
            raise


def _facts(file: SourceFile, rows: int) -> dict[str, Any]:
    return {"name": file.name, "fingerprint": file.fingerprint, "rows": rows, "bytes": file.size}
