"""Which training runs were pinned to which version of a table.

Invariant: a run that cannot be read is named, in a warning or an error, never left out silently. Only `run.json`
and the passports are read, never a tensor, and torch is not needed.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from pretrain_assets.errors import CheckpointError
from pretrain_assets.launch.contract import CHECKPOINTS_NAME, PASSPORT_NAME, RUN_NAME, read_file
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import filesystem, is_remote, join

_FILE = re.compile(rf"(?P<run>[^/]+)/(?:{RUN_NAME}|{CHECKPOINTS_NAME}/step_(?P<step>\d{{8}})/{PASSPORT_NAME})")
_READERS = 16
"""Files read at once: on an object store each waits for one answer."""
_MANY = 3
"""Up to this many checkpoints are named one by one."""
_log = logging.getLogger(__name__)


def pinned_by_runs(runs_uri: str, table_id: str, *, strict: bool = False) -> dict[int, list[str]]:
    """Training runs by the version they were pinned to, in words such as `run demo-v3-1a2b (steps 100, 200)`.

    A run counts by its `run.json` and by the passport of each checkpoint, complete or not. Runs of other tables are
    left out; a file that cannot be read is named in a warning.

    Args:
        runs_uri: Folder of all runs, local or `s3://`.
        table_id: Identity of the table.
        strict: Raise instead of warning.

    Raises:
        CheckpointError: a file cannot be read, and `strict`.
    """
    names = list(run_files(runs_uri))
    with ThreadPoolExecutor(_READERS) as pool:
        pins = list(pool.map(lambda name: _pin(join(runs_uri, name), strict), names))
    found: dict[tuple[int, str], set[int]] = {}
    for name, pin in zip(names, pins, strict=True):
        match = _FILE.fullmatch(name)
        if match and pin and pin.table_id == table_id:
            steps = found.setdefault((pin.version, match["run"]), set())
            steps.update([int(match["step"])] if match["step"] else [])
    by_version: dict[int, list[str]] = {}
    for (version, run), steps in sorted(found.items()):
        by_version.setdefault(version, []).append(f"run {run}{_steps_text(steps)}")
    return by_version


def run_files(runs_uri: str) -> Iterator[str]:
    """Paths under `runs_uri` of every `run.json` and passport."""
    fs, path = filesystem(runs_uri)
    fs.invalidate_cache()
    if not fs.exists(path):
        return
    options = {} if is_remote(runs_uri) else {"on_error": lambda error: _log.warning("cannot list: %s", error)}
    start = len(path.rstrip("/")) + 1
    yield from (entry[start:] for entry in fs.find(path, **options) if _FILE.fullmatch(entry[start:]))


def _pin(uri: str, strict: bool) -> Pin | None:
    """The pin in a `run.json` or passport; None when the file is gone, or cannot be read."""
    try:
        data = read_file(uri)
        return Pin.parse(json.loads(data)["pin"]) if data is not None else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if strict:
            raise CheckpointError(
                f"{uri} cannot be read ({error}), so the version it pins is not known and none is freed. Mend it, or "
                "remove that run's folder, and run this again."
            ) from error
        _log.warning("%s cannot be read, so the version it pins is not known: %s", uri, error)
        return None


def _steps_text(steps: Iterable[int]) -> str:
    ordered = sorted(steps)
    if not ordered:
        return ""
    if len(ordered) <= _MANY:
        return f" (step{'s' if len(ordered) > 1 else ''} {', '.join(map(str, ordered))})"
    return f" ({len(ordered)} checkpoints, steps {ordered[0]} to {ordered[-1]})"
