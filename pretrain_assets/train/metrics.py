"""`metrics.jsonl`: the history of a run, one JSON record per line.

Invariant: the file tells one consistent history. A resumed run first drops what an interrupted one wrote after the
checkpoint that it goes on from, and every line that is not the record of a step. No run ends because its history cannot
be written: what is missing in the file waits in memory and goes in, in order, with a later record.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain_assets.errors import StorageError
from pretrain_assets.launch.contract import METRICS_NAME, read_file, storage_fault, write_file
from pretrain_assets.table.storage import filesystem, is_remote, join
from pretrain_assets.train.checkpoint import checkpoint_uri, read_passport

Record = dict[str, Any]
PAUSE_SECONDS = 60.0
"""How long an object store that did not take the history is left alone; a try can take many seconds."""

_log = logging.getLogger(__name__)


class MetricsLog:
    """Appends records; on object stores the whole (small) file is written again each time."""

    def __init__(self, run_dir: str, *, last_step: int, before: str | None = None):
        """Keep the records up to a step: of this run, or of the one in the folder `before` that it goes on from."""
        self._uri, before = join(run_dir, METRICS_NAME), before or run_dir
        self.records = [record for record in read_metrics(before) if record["step"] <= last_step]
        self._before = read_passport(checkpoint_uri(before, last_step)) if last_step > 0 else {}
        write_file(self._uri, _lines(self.records))
        self._num_stored, self._failing, self._next_try = len(self.records), False, 0.0

    def append(self, record: Record) -> None:
        """Add a record, on disk when this returns; where it cannot be written, it waits, with one warning."""
        self.records.append(record)
        if time.monotonic() >= self._next_try:
            self._store(patience=0.0)

    def flush(self) -> None:
        """Write what still waits, and have patience with an object store."""
        if self._num_stored < len(self.records):
            self._store(patience=None)

    def first(self, key: str) -> float | None:
        """The first record's value of a quantity."""
        return next((record[key] for record in self.records if key in record), None)

    def last_losses(self) -> dict[str, float | int | None]:
        """The newest training and validation loss, each with the step that it was measured at.

        Where the records before the checkpoint are lost, they are those in its passport.
        """
        found = last_losses(self.records)
        return {name: self._before.get(name) if value is None else value for name, value in found.items()}

    def _store(self, patience: float | None) -> None:
        try:
            if is_remote(self._uri):
                write_file(self._uri, _lines(self.records), patience=patience)
            else:
                _append(Path(filesystem(self._uri)[1]), _lines(self.records[self._num_stored :]))
        except (OSError, StorageError) as error:
            if not self._failing:
                reason = error if isinstance(error, StorageError) else storage_fault(self._uri, error)
                _log.warning("%s waits in memory, the run goes on: %s", self._uri, reason)
            self._failing = True
            self._next_try = time.monotonic() + PAUSE_SECONDS if is_remote(self._uri) else 0.0
            return
        if self._failing:
            _log.warning("%s is written again, all of it", self._uri)
        self._num_stored, self._failing = len(self.records), False


def _lines(records: Sequence[Record]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def _append(path: Path, lines: bytes) -> None:
    """Add lines to a local file: all of them or, on a full disk, nothing."""
    with path.open("ab", buffering=0) as handle:
        end = handle.tell()
        try:
            while lines:
                lines = lines[handle.write(lines) :]
        except OSError:
            handle.truncate(end)
            raise


def read_metrics(run_dir: str) -> list[Record]:
    """Records of a run, oldest first; a last line cut off by a kill is left out, damaged ones with a warning."""
    uri = join(run_dir, METRICS_NAME)
    found = [_record(line) for line in (read_file(uri) or b"").split(b"\n")[:-1]]
    damaged = [number for number, record in enumerate(found, 1) if record is None]
    if damaged:
        few = ", ".join(map(str, damaged[:10])) + (", ..." if len(damaged) > 10 else "")
        _log.warning("%s: left out what is not the record of a step, in lines %s", uri, few)
    return [record for record in found if record is not None]


def _record(line: bytes) -> Record | None:
    """The record that a line holds; None when it is not one."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def last(records: Sequence[Record], key: str) -> tuple[Any, int | None]:
    """The newest value of a quantity and its step; None and None without any."""
    return next(((record[key], record["step"]) for record in reversed(records) if key in record), (None, None))


def last_losses(records: Sequence[Record]) -> dict[str, float | int | None]:
    """`train_loss` and `val_loss`, and as `train_loss_step` and `val_loss_step` where they were measured."""
    (train_loss, train_step), (val_loss, val_step) = last(records, "loss"), last(records, "val_loss")
    return {
        "train_loss": train_loss,
        "train_loss_step": train_step,
        "val_loss": val_loss,
        "val_loss_step": val_step,
    }


def data_wait(records: Sequence[Record]) -> float | None:
    """Share of the training time in which the main rank waited for data; None before the first training record."""
    timed = [record for record in records if record.keys() >= {"seconds", "data_wait"}]
    seconds = sum(record["seconds"] for record in timed)
    return sum(record["seconds"] * record["data_wait"] for record in timed) / seconds if seconds else None


def speed_per_rank(records: Sequence[Record]) -> float | None:
    """Tokens/s that a rank took while it did not wait for data, the median of all records; None without any."""
    speeds = [
        record["tok_per_s"] / record["ranks"] / (1 - record["data_wait"])
        for record in records
        if record.keys() >= {"tok_per_s", "ranks", "data_wait"} and record["data_wait"] < 1
    ]
    return statistics.median(speeds) if speeds else None
