"""The models that saw some documents: every run in a folder, what it saw of them, and which checkpoints are clean.

Invariant: every run on the table is asked, with or without a checkpoint, done or going on; one that cannot be read or
computed is named with the reason, never left out. Nothing but JSON is read, and the header of exported weights.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pretrain_assets.config import Recipe, from_dict
from pretrain_assets.forensics.exposure import SeenBy, schedule_of, seen_by
from pretrain_assets.forensics.pins import run_files
from pretrain_assets.forensics.receipts.documents import Documents
from pretrain_assets.launch.contract import (
    CHECKPOINTS_NAME,
    PASSPORT_NAME,
    find_size_fault,
    list_folder,
    read_file,
    read_result,
)
from pretrain_assets.loader.exposure import Totals, totals
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location, filesystem, join
from pretrain_assets.train.lock import is_held
from pretrain_assets.train.metrics import read_metrics

EXPORTS_NAME, EXPORT_NAME, WEIGHTS_NAME, LINEAGE_KEY = "exports", "export.json", "model.safetensors", "lineage"
"""Where a run's exports are, and what tells of them; as `train.export` writes it, which takes torch to import."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint or an export of a run."""

    name: str
    """Its folder, inside the run's."""
    step: int | None
    """Optimizer steps done; None where an export does not say."""
    saw: bool | None
    """Whether it was trained on one of the documents; None: not known."""
    sha256: str
    """Digest of its passport; of an export, of its manifest."""


@dataclass(frozen=True, kw_only=True)
class Witness:
    """One run, and what it saw of the documents."""

    run: str
    """Name of its folder."""
    recipe: str
    """Name of its recipe."""
    pin: str
    """Version it trains on."""
    replay_of: str
    """For a replay, the run that it repeats and the step that it began after; empty for others."""
    goes_on: bool
    """A job trains it now, on this machine."""
    step: int
    """Optimizer steps that are known to be done: by its metrics, checkpoints and result."""
    total_steps: int | None
    """Its last step; None where no record says it."""
    num_seen: int
    """Of the documents, how many it trained on."""
    times: int
    """Draws of them with at least one token trained on."""
    tokens: int
    """Tokens of them trained on, end-of-text included."""
    first_step: int | None
    """Step at which the first of their tokens was trained on; None: never."""
    last_step: int | None
    """Step of the last of their tokens so far."""
    unknown: str
    """Why it cannot be computed what the run saw; empty if it can."""
    seen: tuple[tuple[int, SeenBy], ...]
    """Of the documents listed one by one, what it saw of each, or why it did not."""
    checkpoints: tuple[Saved, ...]
    """Its complete checkpoints, oldest first."""
    exports: tuple[Saved, ...]
    """Models exported into the run's folder."""
    clean_step: int
    """Step of the newest checkpoint that has seen none of them; 0: none has, a replay begins at the start."""
    retrain_steps: int
    """Steps from there to where the run stands; 0 where nothing has to be trained again."""
    retrain_tokens: int
    """Tokens trained on in these steps, without padding."""
    retrain_seconds: float | None
    """The same at the run's own median speed; None where its metrics have none."""

    @property
    def saw(self) -> bool:
        """Whether it trained on one of them."""
        return self.first_step is not None


@dataclass(frozen=True, kw_only=True)
class Witnesses:
    """All runs of a folder on one table."""

    runs: tuple[Witness, ...]
    """Runs, by name."""
    inputs: dict[str, str]
    """SHA-256 of every run.json and passport that the answer was computed from, by its path in the folder."""
    unreadable: tuple[str, ...]
    """Runs that may be on this table and cannot be read, with the reason."""


def find_witnesses(location: Location, runs_uri: str, documents: Documents) -> Witnesses:
    """What every run in a folder saw of the documents.

    Args:
        location: The table.
        runs_uri: Folder of all runs, local or `s3://`.
        documents: The documents.

    Raises:
        StorageError: the folder cannot be read.
    """
    files: dict[str, list[str]] = {}
    for name in run_files(runs_uri):
        files.setdefault(name.split("/", 1)[0], []).append(name)
    runs, inputs, unreadable = [], dict[str, str](), []
    for run, names in sorted(files.items()):
        try:
            told, read = _told(runs_uri, names)
            if told and Pin.parse(told["pin"]).table_id == documents.newest.table_id:
                runs.append(_witness(location, runs_uri, run, told, documents))
                inputs |= read
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            unreadable.append(f"{run}: {error}")
    return Witnesses(runs=tuple(runs), inputs=inputs, unreadable=tuple(unreadable))


def _told(runs_uri: str, names: Iterable[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """What a run says of itself, in its run.json or else its newest passport, and digests of all these files.

    Raises:
        ValueError: none of them can be read.
    """
    told, read, fault = dict[str, Any](), dict[str, str](), None
    for name in sorted(names):  # run.json comes after checkpoints/, and the newest passport after older ones
        data = read_file(join(runs_uri, name))
        if data is not None:
            read[name] = hashlib.sha256(data).hexdigest()
            try:
                told = json.loads(data)
            except ValueError as error:
                fault = ValueError(f"{name} is not JSON: {error}")
    if fault and not told:
        raise fault
    return told, read


def _witness(location: Location, runs_uri: str, run: str, told: dict[str, Any], documents: Documents) -> Witness:
    run_dir, recipe, pin = join(runs_uri, run), from_dict(Recipe, told["recipe"]), Pin.parse(told["pin"])
    original = told.get("replay") or {}
    records, result = read_metrics(run_dir), read_result(run_dir) or {}
    steps = _complete(run_dir)
    done = max([0, *(r["step"] for r in records), *steps, *([result["step"]] if "step" in result else [])])
    found = _exposed(location, pin, recipe, done, documents)
    first_step = int(found.totals.first[found.totals.first > 0].min()) if found.totals.times.any() else None
    dirty_from = 1 if found.unknown else first_step  # where it cannot be known, no checkpoint counts as clean
    clean = max((step for step in steps if dirty_from is None or step < dirty_from), default=0)
    again = 0 if dirty_from is None else done - clean
    tokens = found.trained(done) - found.trained(clean) if again else 0
    speeds = [record["tok_per_s"] for record in records if record.get("tok_per_s")]

    def saw(step: int | None) -> bool | None:
        return None if found.unknown or step is None else first_step is not None and step >= first_step

    return Witness(
        run=run,
        recipe=recipe.name,
        pin=str(pin),
        replay_of=f"{original['run_dir'].rpartition('/')[2]} from step {original['start_step']}" if original else "",
        goes_on=is_held(run_dir),
        step=done,
        total_steps=next((r["total_steps"] for r in reversed(records) if "total_steps" in r), None),
        num_seen=int((found.totals.times > 0).sum()),
        times=int(found.totals.times.sum()),
        tokens=int(found.totals.tokens.sum()),
        first_step=first_step,
        last_step=int(found.totals.last.max()) if first_step is not None else None,
        unknown=found.unknown,
        seen=tuple(sorted(found.seen.items())),
        checkpoints=tuple(
            Saved(name=name, step=step, saw=saw(step), sha256=_sha256(join(run_dir, name, PASSPORT_NAME)))
            for step, name in sorted((step, f"{CHECKPOINTS_NAME}/step_{step:08d}") for step in steps)
        ),
        exports=tuple(_exports(run_dir, saw)),
        clean_step=clean,
        retrain_steps=again,
        retrain_tokens=tokens,
        retrain_seconds=round(tokens / statistics.median(speeds), 3) if speeds else None,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Exposed:
    """What a run saw of documents."""

    totals: Totals
    seen: dict[int, SeenBy]
    trained: Callable[[int], int]
    unknown: str = ""


def _exposed(location: Location, pin: Pin, recipe: Recipe, done: int, documents: Documents) -> _Exposed:
    """What a run of so many steps saw of every document, in numbers, and in words of those listed one by one."""
    nothing = Totals(*(np.zeros(len(documents), np.int64) for _ in Totals._fields))

    def upper_bound(step: int) -> int:
        return step * recipe.train.global_batch_tokens

    gone = (documents.created <= pin.version) & (documents.last == 0)
    if not (documents.held_by(pin.version) | gone).any():
        return _Exposed(totals=nothing, seen={}, trained=upper_bound)
    try:
        schedule = schedule_of(location, pin, recipe)
        return _Exposed(
            totals=totals(schedule, documents.ids, last_step=done),
            seen=seen_by(location, pin=pin, recipe=recipe, step=done, ids=[row.id for row in documents.rows]),
            trained=lambda step: sum(ledger["tokens_trained"] for ledger in schedule.ledgers(step).values()),
        )
    except (ValueError, OSError) as error:  # PretrainError, or the engine's own, of a version without such columns
        return _Exposed(totals=nothing, seen={}, trained=upper_bound, unknown=str(error).splitlines()[0][:300])


def _complete(run_dir: str) -> list[int]:
    """Steps of its complete checkpoints, by the names and sizes of their files."""
    folder = join(run_dir, CHECKPOINTS_NAME)
    names = [name for name, is_folder, _ in list_folder(folder) if is_folder and name.startswith("step_")]
    whole = [name for name in names if find_size_fault(join(folder, name)) is None]
    return [int(name.removeprefix("step_")) for name in whole if name.removeprefix("step_").isdigit()]


def _exports(run_dir: str, saw: Callable[[int | None], bool | None]) -> Iterable[Saved]:
    for name, is_folder, _ in sorted(list_folder(join(run_dir, EXPORTS_NAME))):
        folder = join(run_dir, EXPORTS_NAME, name)
        if is_folder and (manifest := read_file(join(folder, EXPORT_NAME))) is not None:
            step = _exported_step(join(folder, WEIGHTS_NAME))
            sha256 = hashlib.sha256(manifest).hexdigest()
            yield Saved(name=f"{EXPORTS_NAME}/{name}", step=step, saw=saw(step), sha256=sha256)


def _exported_step(uri: str) -> int | None:
    """The step in the metadata of a safetensors file (eight bytes of length, then JSON); None where there is none."""
    fs, path = filesystem(uri)
    try:
        size = int.from_bytes(fs.cat_file(path, start=0, end=8), "little")
        header = json.loads(fs.cat_file(path, start=8, end=8 + min(size, 100 << 20)))
        return int(json.loads(header["__metadata__"][LINEAGE_KEY])["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _sha256(uri: str) -> str:
    return hashlib.sha256(read_file(uri) or b"").hexdigest()
