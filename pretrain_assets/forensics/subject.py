"""What a question about a run is about: a checkpoint, or a run as far as it got, with its table and its ranks.

Invariant: a run needs no checkpoint to be asked about, and a checkpoint no run beside it; only small files are read.
"""

from __future__ import annotations

import bisect
import logging
import sys
from dataclasses import dataclass, fields
from functools import cached_property

from pretrain_assets.config import Recipe, RunSpec, TokenizerIdentity, from_dict
from pretrain_assets.errors import CheckpointError, TableError
from pretrain_assets.forensics.checkpoints import find_checkpoint, find_run, placed
from pretrain_assets.launch.contract import CHECKPOINTS_NAME, RUN_NAME, read_file, read_spec
from pretrain_assets.loader.exposure import Exposure
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location, join, open_dataset
from pretrain_assets.table.versions import table_id
from pretrain_assets.train.checkpoint import checkpoint_uri, newest
from pretrain_assets.train.metrics import Record, read_metrics

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, order=True)
class Span:
    """A run of one document's tokens inside one block of one step."""

    step: int
    """Optimizer step, from 1."""
    epoch: int
    """Epoch, from 0."""
    block: int
    """Block in the epoch's order, cycle-major then split: cycle * num_splits + split."""
    split: int
    """Split that the block belongs to."""
    offset: int
    """First token's place in the block."""
    tokens: int
    """Tokens of the document in the block, its EOS included."""
    doc_start: int
    """First token's place in the document."""
    rank: int | None
    """Rank that trained on it; None where that is not known, or has not happened yet."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A run up to a step."""

    uri: str
    """Folder of the checkpoint, or of a run without one."""
    run_dir: str
    """Folder of the run."""
    step: int
    """Optimizer steps done: the checkpoint's; of a run its newest one's, or without any those in its metrics."""
    pin: Pin
    """Table version it trains on."""
    recipe: Recipe
    """Recipe it trains with."""
    tokenizer: TokenizerIdentity
    """Of its tokens."""
    location: Location
    """Its table."""
    ranks: int | None = None
    """Number of ranks to assume for all steps; None: those that the metrics name."""

    @cached_property
    def _reports(self) -> list[tuple[int, int | None]]:
        """Steps that were reported, in order, and the number of ranks that made them."""
        return [(record["step"], record.get("ranks")) for record in metrics_of(self.run_dir)]

    @cached_property
    def _sessions(self) -> list[tuple[int, int]]:
        """First steps from which on so many ranks trained.

        Every time that a run starts or goes on it reports its first step, and drops what was reported after that.
        """
        return [(step, ranks) for step, ranks in self._reports if ranks is not None]

    def ranks_at(self, step: int) -> int | None:
        """How many ranks made a step; None where the run has not made it, or its metrics do not say."""
        if self.ranks is not None:
            return self.ranks
        if not self._reports or step > self._reports[-1][0]:
            return None
        at = bisect.bisect_right(self._sessions, (step, sys.maxsize)) - 1
        return self._sessions[at][1] if at >= 0 else None

    def rank_of(self, split: int, step: int) -> int | None:
        """The rank that had a split at a step; None where that is not known."""
        ranks = self.ranks_at(step)
        return None if ranks is None else split * ranks // self.recipe.data.num_splits

    def span(self, exposure: Exposure) -> Span:
        """An exposure, and who had it."""
        values = {field.name: getattr(exposure, field.name) for field in fields(exposure) if field.name != "doc_id"}
        return Span(**values, rank=self.rank_of(exposure.split, exposure.step))


def find_subject(which: str | None, runs_uri: str, location: Location, *, ranks: int | None = None) -> Subject:
    """Find what is asked about.

    Args:
        which: Folder of a run or checkpoint, name of a run or recipe, or None for the run that was changed last.
        runs_uri: Folder of all runs.
        location: The project's table; see `table_of`.
        ranks: Number of ranks, where the metrics do not say or another number is of interest.

    Raises:
        CheckpointError: no such run or checkpoint.
        ConfigError: that many ranks cannot share the splits.
        TableError: its table or version is gone.
    """
    which = placed(which, runs_uri)
    at_step = which is not None and f"/{CHECKPOINTS_NAME}/" in which
    run_dir = find_checkpoint(which, runs_uri, digests=False).run_dir if at_step else find_run(which, runs_uri)
    step = None if at_step else newest(run_dir, digests=False)
    if at_step or step is not None:
        wanted = which if step is None else checkpoint_uri(run_dir, step)
        found = find_checkpoint(wanted, runs_uri, digests=False)
        uri, step, pin, recipe = found.uri, found.step, found.pin, found.recipe
        tokenizer = from_dict(TokenizerIdentity, found.passport["tokenizer"])
    elif spec := _spec(run_dir):
        uri, pin, recipe, tokenizer = run_dir, Pin.parse(spec.pin), spec.recipe, spec.tokenizer
        step = max((record["step"] for record in metrics_of(run_dir)), default=0)
    else:
        raise CheckpointError(
            f"There is no run in {run_dir}: it has neither a {RUN_NAME} nor a complete checkpoint. `pretrain runs` "
            "lists the runs."
        )
    if ranks is not None:
        from pretrain_assets.loader.stream import check_world_size  # compiles the loader's kernels: half a second

        check_world_size(recipe.data.num_splits, ranks)
    return Subject(
        uri=uri,
        run_dir=run_dir,
        step=step,
        pin=pin,
        recipe=recipe,
        tokenizer=tokenizer,
        location=table_of(run_dir, pin, location),
        ranks=ranks,
    )


def table_of(run_dir: str, pin: Pin, given: Location) -> Location:
    """The one table that every question about a run is answered from.

    That is the project's own where it is the table that the run was trained on: a copy of a project is asked itself,
    not the original that its runs still name. Else it is the one that `run.json` names, which is said; where that is
    not there either, the project's, whose error says what is wrong.

    Args:
        run_dir: Folder of the run.
        pin: Table version it trains on.
        given: The project's table.
    """
    if _is_table(given, pin) or (spec := _spec(run_dir)) is None:
        return given
    own = Location(database_uri=spec.database_uri, table_name=spec.table_name)
    if own == given or not _is_table(own, pin):
        return given
    _log.warning("%s is not the table of %s; its own answers: %s", given.uri, run_dir, own.uri)
    return own


def _is_table(location: Location, pin: Pin) -> bool:
    """Whether the table of a pin stands there, whichever versions of it are left."""
    try:
        return table_id(open_dataset(location)) == pin.table_id
    except TableError:
        return False


def _spec(run_dir: str) -> RunSpec | None:
    run_json = join(run_dir, RUN_NAME)
    return read_spec(run_json) if read_file(run_json) is not None else None


def metrics_of(run_dir: str) -> list[Record]:
    """Metrics of a run, oldest first; of a replay also those of the original before the step that it goes on from."""
    spec = _spec(run_dir)
    replay = spec.replay if spec else None
    before = metrics_of(replay.run_dir) if replay and replay.start_step else []
    return [*(r for r in before if replay and r["step"] <= replay.start_step), *read_metrics(run_dir)]
