"""Experiment trackers behind one adapter: TensorBoard, Weights & Biases, MLflow and trackio, chosen by name.

Invariant: training never depends on a tracker. Each works in a thread of its own; one that fails is off from then on,
with one warning. What a tracker lacks it gets from metrics.jsonl, so a resumed run goes on in the tracker's same run,
every point once, and a tracker that is added later has the run from its beginning. Without settings of the user's own
in the environment, nothing leaves this machine: files lie in the run's folder, or in the cache folder for a run on an
object store, into which they are copied at the end.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain_assets.config import RunSpec, to_dict
from pretrain_assets.errors import ConfigError
from pretrain_assets.loader.store import cache_folder
from pretrain_assets.table.storage import filesystem, is_remote, join
from pretrain_assets.train.metrics import Record, read_metrics
from pretrain_assets.train.tracker_kinds import KINDS, TrackedRun

FOLDER = "trackers"
"""Folder of a run in which each tracker has one of its own."""
CLOSE_SECONDS = 120
"""Seconds that the end of a run waits for a tracker to finish; on a busy machine MLflow takes 40 to make its file."""
_TRAIN = ("loss", "lr", "grad_norm", "epoch", "tokens")
_LEFT_OUT = ("step", "total_steps", "eta_seconds")

_log = logging.getLogger(__name__)


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers whose packages are not installed here.

    Raises:
        ConfigError: with the pip command that installs them.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        extras = ",".join(missing)
        raise ConfigError(
            f"execution.trackers names {' and '.join(missing)}, not installed here: run "
            f"`pip install 'pretrain-assets[{extras}]'`, or leave it out"
        )


class TrackerReporter:
    """A tracker as a reporter (see reporting.py)."""

    def __init__(self, name: str, run_dir: str, run: TrackedRun):
        self._name, self._run_dir, self._run = name, run_dir, run
        self._queue: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)

    def progress(self, record: Record) -> None:
        """Hand over a record."""
        if self._thread.ident is None:
            self._thread.start()
        self._put(record)

    def result(self, result: Record) -> None:
        """Hand over the result; a run that failed before its first record is not worth a tracker's run."""
        self._put(result)

    def close(self) -> None:
        """Wait until all of it is with the tracker, but no longer than `CLOSE_SECONDS`."""
        self._put(None)
        if self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            _log.warning("%s did not finish within %s s and is left behind", self._name, CLOSE_SECONDS)

    def _put(self, message: Record | None) -> None:
        if self._thread.is_alive():
            self._queue.put(message)

    def _work(self) -> None:
        try:
            self._serve()
        except Exception as error:  # whatever the tracker's package raises
            reason = f"{type(error).__name__}: {error}"
            _log.warning("%s is off for the rest of this run, which goes on without it: %s", self._name, reason)

    def _serve(self) -> None:
        first = self._queue.get()
        assert first is not None
        tracker = KINDS[self._name](self._run)
        _log.info("%s: %s", self._name, tracker.where)
        earlier = [record for record in read_metrics(self._run_dir) if record["step"] < first["step"]]
        result: Record = {"status": "failed"}  # where the run ends without one
        for message in itertools.chain(earlier, [first], iter(self._queue.get, None)):
            if "status" in message:
                result = message
            elif message["step"] > tracker.newest_step:
                tracker.log(message["step"], tidy(message))
        numbers = {f"final/{name}": float(value) for name, value in result.items() if type(value) in (int, float)}
        tracker.finish(numbers, {name: value for name, value in result.items() if isinstance(value, str)})
        if is_remote(self._run_dir):
            fs, path = filesystem(join(self._run_dir, FOLDER, self._name))
            fs.put(f"{self._run.folder}/", f"{path}/", recursive=True)


def open_trackers(spec: RunSpec) -> list[TrackerReporter]:
    """The trackers that a run's recipe names; each starts with the first record.

    Raises:
        ConfigError: a package is missing.
    """
    check_trackers(spec.recipe.execution.trackers)
    name = spec.run_dir.rstrip("/").rsplit("/", 1)[-1]
    parent = cache_folder() / FOLDER / name if is_remote(spec.run_dir) else Path(spec.run_dir) / FOLDER
    data = {"pin": spec.pin, "tag": spec.tag, "tokenizer": spec.tokenizer.name}
    settings = flat(to_dict(spec.recipe) | data, ".")
    return [
        TrackerReporter(kind, spec.run_dir, TrackedRun(name=name, folder=parent / kind, settings=settings))
        for kind in spec.recipe.execution.trackers
    ]


def tidy(record: Record) -> dict[str, float]:
    """A record's numbers as trackers group them: `train/loss`, `val/loss`, `speed/tok_per_s` and so on."""
    named = {}
    for name, value in flat(record, "/").items():
        if name not in _LEFT_OUT and isinstance(value, (int, float)):
            group = "train" if name in _TRAIN else "val" if name.startswith("val_") else "speed"
            named[f"{group}/{name.removeprefix('val_')}"] = float(value)
    return named


def flat(values: Mapping[str, Any], separator: str) -> dict[str, Any]:
    """Nested mappings as one, names joined by a separator."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{name}{separator}{inner}": item for inner, item in flat(value, separator).items()}
        else:
            found[name] = value
    return found
