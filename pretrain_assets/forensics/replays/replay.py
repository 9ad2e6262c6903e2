"""Counterfactual replay: the run that would have been without some documents, from the last point that is the same.

Invariant: the replay is the original run but for holes in the places of those documents (`data.without`): same rows,
order, blocks, initial weights and schedule. It begins at a checkpoint that had seen none of them, which gives what step
0 would give, or at one that is chosen, which is then part of its identity. The original is only read.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pretrain_assets.config import Recipe, ReplayOf, RunSpec, override
from pretrain_assets.errors import ConfigError
from pretrain_assets.forensics.checkpoints import Checkpoint
from pretrain_assets.forensics.chosen import Chosen
from pretrain_assets.forensics.exposure import schedule_of
from pretrain_assets.forensics.replays.start import begun, check_start, clean_start, holes_since
from pretrain_assets.forensics.why import why_outside
from pretrain_assets.loader.exposure import Totals, totals
from pretrain_assets.loader.plan import Int64Array
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location, absolute
from pretrain_assets.train import checkpoint as checkpoints
from pretrain_assets.train.metrics import read_metrics
from pretrain_assets.train.spec import make_spec

REASONS = {
    "unknown": "no version has such a row",
    "later": "added after the pinned version",
    "deleted": "deleted before the pinned version",
    "filter": "left out by the run's filter",
    "duplicate": "left out as a copy of another row",
    "near_duplicate": "left out as a near copy of another row",
    "contaminated": "left out as contaminated",
    "held_out": "held out for validation",
}
"""Why a document was not trained on, by `Why.kind`, for many of them."""
CHANGEABLE = ("execution", "loader")
"""Groups of settings that change no result, and may be other than the original's."""
_IDS_PER_QUESTION = 10_000


@dataclass(frozen=True, kw_only=True)
class ReplayPlan:
    """What a replay would do."""

    original: str
    """Folder of the original run."""
    checkpoint: str
    """Its checkpoint that was asked about."""
    run_dir: str
    """Folder of the replay."""
    asked: int
    """Documents named or matched."""
    left_out: int
    """Those whose places become holes."""
    not_trained: dict[str, int]
    """The others, by the reason why the original has nothing of them to leave out."""
    first_step: int
    """First step of the original that saw one of them."""
    seen: int
    """Documents of `left_out` that the checkpoint had trained on."""
    tokens_seen: int
    """Tokens of them that it had trained on, over all epochs."""
    from_step: int | None
    """The start asked for; None: the newest clean one."""
    start_step: int
    """Step that the replay begins after; 0: from new weights."""
    start: str | None
    """Checkpoint that it begins with; None at 0."""
    seen_at_start: int
    """Documents of `left_out` trained on by then: 0 is a clean start."""
    saved_step: int
    """Newest checkpoint of the replay itself, from an earlier try; it goes on from there."""
    last_step: int
    """Step that it trains to."""
    total_steps: int
    """Steps of the whole run."""
    steps: int
    """Steps still to train."""
    tokens: int
    """Tokens still to train on, without holes and padding."""
    seconds: float | None
    """How long that took the original, by the median of its speed; None if it does not say."""
    spec: RunSpec = field(repr=False)
    """The replay as a run."""

    @property
    def is_clean(self) -> bool:
        """Whether it gives what a run from step 0 gives."""
        return not self.seen_at_start

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, the run itself left out."""
        facts = {name: value for name, value in vars(self).items() if name != "spec"}
        return {**facts, "is_clean": self.is_clean}


def plan_replay(
    location: Location,
    original: Checkpoint,
    chosen: Chosen,
    *,
    from_step: int | None = None,
    steps: int | None = None,
    changes: Mapping[str, Any] | None = None,
) -> ReplayPlan:
    """Find out what a replay without some documents is, and where it begins.

    Args:
        location: The table.
        original: Checkpoint of the run to repeat.
        chosen: Documents to leave out.
        from_step: Begin with this checkpoint of the original, or with 0; None for the newest that is clean.
        steps: Stop after so many steps from there; None to train to the end.
        changes: Settings of `CHANGEABLE` by dotted name.

    Raises:
        ConfigError: the original was trained on none of the documents, or what is asked leaves nothing to do.
        CheckpointError: the original has no such checkpoint.
        TableError: the pinned version is gone.
    """
    original = dataclasses.replace(original, run_dir=absolute(original.run_dir.rstrip("/")))
    recipe = override(original.recipe, _checked(changes or {}))
    schedule = schedule_of(location, original.pin, recipe)
    total_steps = schedule.total_steps(max_steps=recipe.train.max_steps, epochs=recipe.train.epochs)
    asked = np.array(chosen.ids, np.int64)
    ever = totals(schedule, asked, last_step=max(total_steps, original.step))
    ids = asked[ever.first > 0]
    by_then = totals(schedule, ids, last_step=original.step)
    not_trained = _not_trained(location, original, recipe, asked[ever.first == 0])
    if chosen.unknown:
        few = ", ".join(chosen.unknown[:3])
        not_trained[f"no row has this doc_id ({few}{', ...' if len(chosen.unknown) > 3 else ''})"] = len(chosen.unknown)
    if not by_then.tokens.any():
        raise ConfigError(_nothing(original, ever, not_trained))
    first_step = int(ever.first[ever.first > 0].min())
    start_step = clean_start(original.run_dir, first_step) if from_step is None else from_step
    if start_step >= total_steps:
        raise ConfigError(f"--from-step {start_step} is the last step of the run: nothing is left to train")
    since = holes_since(schedule, recipe, start_step, total_steps, ids)
    holes = {"data.without": sorted({*recipe.data.without, *ids.tolist()}), "data.without_from": since}
    runs_uri, tag = original.run_dir.rpartition("/")[0], str(original.passport["tag"])
    spec = make_spec(location, original.pin, tag, override(recipe, holes), runs_uri)
    saved = checkpoints.newest(spec.run_dir) or 0
    origin = begun(spec.run_dir, original.run_dir) if saved else None
    if origin:
        start_step = origin.start_step
    elif from_step is not None:
        check_start(original.run_dir, from_step)
    at_start = totals(schedule, ids, last_step=start_step)
    stop = {"execution.stop_after": None if steps is None else start_step + steps}
    spec = dataclasses.replace(
        spec, recipe=override(spec.recipe, stop), replay=origin or _origin(original, start_step, at_start)
    )
    last_step = min(spec.recipe.execution.stop_after or total_steps, total_steps)
    to_train = max(0, last_step - max(saved, start_step))
    return ReplayPlan(
        original=original.run_dir,
        checkpoint=original.uri,
        run_dir=spec.run_dir,
        asked=len(asked) + len(chosen.unknown),
        left_out=len(ids),
        not_trained=not_trained,
        first_step=first_step,
        seen=int((by_then.tokens > 0).sum()),
        tokens_seen=int(by_then.tokens.sum()),
        from_step=from_step,
        start_step=start_step,
        start=checkpoints.checkpoint_uri(original.run_dir, start_step) if start_step else None,
        seen_at_start=int((at_start.tokens > 0).sum()),
        saved_step=saved,
        last_step=last_step,
        total_steps=total_steps,
        steps=to_train,
        tokens=_tokens(location, spec, last_step - to_train, last_step),
        seconds=_seconds(original.run_dir, to_train * recipe.train.global_batch_tokens),
        spec=spec,
    )


def _origin(original: Checkpoint, start_step: int, at_start: Totals) -> ReplayOf:
    """What a replay is of, and where it begins."""
    start = checkpoints.checkpoint_uri(original.run_dir, start_step)
    return ReplayOf(
        run_dir=original.run_dir,
        step=original.step,
        checkpoint=checkpoints.digest(original.uri),
        start_step=start_step,
        start=checkpoints.digest(start) if start_step else "",
        documents_seen=int((at_start.tokens > 0).sum()),
        tokens_seen=int(at_start.tokens.sum()),
    )


def _checked(changes: Mapping[str, Any]) -> Mapping[str, Any]:
    wrong = [name for name in changes if name.partition(".")[0] not in CHANGEABLE]
    if wrong:
        raise ConfigError(
            f"--set {wrong[0]} would make another run of it: a replay changes nothing but the documents left out. Only "
            "execution.* and loader.* may be set."
        )
    return changes


def _not_trained(location: Location, original: Checkpoint, recipe: Recipe, ids: Int64Array) -> dict[str, int]:
    """Why a run has nothing of these documents to leave out, and of how many."""
    holes = np.isin(ids, np.array(recipe.data.without, np.int64))
    left, counts = ids[~holes].tolist(), Counter[str]()
    for start in range(0, len(left), _IDS_PER_QUESTION):
        found = why_outside(location, original.pin, recipe.data, left[start : start + _IDS_PER_QUESTION])
        counts.update(REASONS.get(why.kind, why.kind) for why in found.values())
    counts["left out by that run already"] = int(holes.sum())
    counts["kept by the filter, but in no step of the run"] = len(left) - (counts.total() - int(holes.sum()))
    return {reason: count for reason, count in sorted(counts.items()) if count}


def _nothing(original: Checkpoint, ever: Totals, not_trained: Mapping[str, int]) -> str:
    reasons = [f"{reason}: {count:,}" for reason, count in not_trained.items()]
    if later := int((ever.first > original.step).sum()):
        step = int(ever.first[ever.first > 0].min())
        reasons.append(f"first seen later, from step {step:,} on (ask about a later checkpoint): {later:,}")
    return (
        f"There is nothing to replay: {original.uri} was trained on none of these documents. "
        f"{'; '.join(reasons) or 'No document was named'}."
    )


def _tokens(location: Location, spec: RunSpec, after: int, upto: int) -> int:
    """Tokens that a run trains on after one step and up to another."""
    schedule = schedule_of(location, Pin.parse(spec.pin), spec.recipe)
    trained = [sum(e["tokens_trained"] for e in schedule.ledgers(step).values()) for step in (after, upto)]
    return int(trained[1] - trained[0])


def _seconds(run_dir: str, tokens: int) -> float | None:
    speeds: Sequence[float] = [record["tok_per_s"] for record in read_metrics(run_dir) if record.get("tok_per_s")]
    return tokens / statistics.median(speeds) if speeds else None
