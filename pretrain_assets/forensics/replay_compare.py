"""A replay beside its original: losses step by step, and what each model makes of the documents left out.

Invariant: only what both runs have is compared, at the same step; both models are asked about the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pretrain_assets.config import DataConfig, RunSpec
from pretrain_assets.errors import ConfigError
from pretrain_assets.forensics.exposure import schedule_of
from pretrain_assets.launch.contract import RUN_NAME, read_file, read_result, read_spec
from pretrain_assets.loader.holes import hidden_per_step
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.loader.stream import BlockLoader
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location, join
from pretrain_assets.train import checkpoint as checkpoints
from pretrain_assets.train.metrics import read_metrics

if TYPE_CHECKING:
    import torch

MAX_BLOCKS = 16
"""Blocks with holes that both models are asked about, spread evenly over all: a GPT-2 of 124 M takes some 2 s each."""


@dataclass(frozen=True, kw_only=True)
class LossPoint:
    """A step at which both runs wrote the same loss down."""

    step: int
    """Optimizer step."""
    original: float
    """Loss of the original, in nats per token."""
    replay: float
    """Loss of the replay."""
    tokens_in_holes: int = 0
    """Tokens of the step that only the original had: then the two training losses are means over other tokens."""

    @property
    def difference(self) -> float:
        """The replay's minus the original's."""
        return self.replay - self.original


@dataclass(frozen=True, kw_only=True)
class BlocksLoss:
    """Losses of both models on blocks of the original in which documents were left out, in nats per token."""

    step: int
    """Step of both checkpoints."""
    num_blocks: int
    """Blocks asked about."""
    tokens_left_out: int
    """Tokens predicted in them that are of documents left out."""
    left_out: tuple[float, float]
    """Loss on those: of the original, which trained on them, and of the replay, which did not."""
    tokens_others: int
    """The other tokens predicted in the same blocks."""
    others: tuple[float, float] | None
    """Loss on those, which both trained on; None where the blocks hold nothing else."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A replay and its original."""

    original: str
    """Folder of the original."""
    replay: str
    """Folder of the replay."""
    pin: str
    """Table version of both."""
    holes: str
    """The documents left out, in a line."""
    start_step: int
    """Step of the original that the replay began after."""
    seen_at_start: int
    """Documents left out that the original had trained on by then."""
    status: str
    """How the replay ended, or `unfinished`."""
    step: int
    """Newest step of the replay."""
    total_steps: int | None
    """Steps of the whole run; None before its first record."""
    training: tuple[LossPoint, ...]
    """Training losses."""
    validation: tuple[LossPoint, ...]
    """Validation losses, on the same held-out tokens."""
    curves: dict[str, tuple[tuple[int, float], ...]]
    """`original`, `replay`, `original validation` and `replay validation`: all losses that each wrote down, by step."""
    blocks: BlocksLoss | None
    """What both models make of the documents left out; None without a common checkpoint."""


def is_replay(run_dir: str) -> bool:
    """Whether a run is the replay of another, by its run.json."""
    try:
        return read_spec(join(run_dir, RUN_NAME)).replay is not None
    except ConfigError:
        return False


def compare(run_dir: str, *, measure: bool = True) -> Comparison:
    """Compare a replay, as far as it got, with its original.

    Args:
        run_dir: Folder of the replay.
        measure: Also ask both models about the documents left out, on this machine's CPU.

    Raises:
        ConfigError: the run is no replay, or nothing of it can be compared.
        TableError: the pinned version is gone.
    """
    spec = read_spec(join(run_dir, RUN_NAME))
    if spec.replay is None:
        raise ConfigError(f"{run_dir} is no replay of another run; `pretrain runs` shows which are")
    had, has = read_metrics(spec.replay.run_dir), read_metrics(run_dir)
    last = max((record["step"] for record in has), default=0)
    before = _data_before(spec)
    schedule, full = (_schedule(spec, data) for data in (spec.recipe.data, before))
    hidden = hidden_per_step(schedule, last) - hidden_per_step(full, last)
    training, validation = _points(had, has, "loss", hidden), _points(had, has, "val_loss", None)
    if not training and not validation:
        raise ConfigError(f"{run_dir} and {spec.replay.run_dir} have no loss of the same step: nothing to compare yet")
    result = read_result(run_dir)
    return Comparison(
        original=spec.replay.run_dir,
        replay=run_dir,
        pin=spec.pin,
        holes=str(spec.recipe.data.holes),
        start_step=spec.replay.start_step,
        seen_at_start=spec.replay.documents_seen,
        status=result["status"] if result else "unfinished",
        step=last,
        total_steps=has[-1].get("total_steps") if has else None,
        training=training,
        validation=validation,
        curves={
            f"{name}{kind}": _curve(records, key)
            for kind, key in (("", "loss"), (" validation", "val_loss"))
            for name, records in (("original", had), ("replay", has))
        },
        blocks=_blocks_loss(spec, run_dir, schedule, before) if measure else None,
    )


def location_of(spec: RunSpec) -> Location:
    """The table of a run."""
    return Location(database_uri=spec.database_uri, table_name=spec.table_name)


def _curve(records: list[dict[str, Any]], key: str) -> tuple[tuple[int, float], ...]:
    return tuple((record["step"], float(record[key])) for record in records if record.get(key) is not None)


def _points(
    had: list[dict[str, Any]], has: list[dict[str, Any]], key: str, hidden: npt.NDArray[np.int64] | None
) -> tuple[LossPoint, ...]:
    """Both runs' values of a loss at the steps that both have."""
    one, two = dict(_curve(had, key)), dict(_curve(has, key))
    return tuple(
        LossPoint(
            step=step,
            original=one[step],
            replay=two[step],
            tokens_in_holes=0 if hidden is None else int(hidden[step]),
        )
        for step in sorted(one.keys() & two.keys())
    )


def _common_step(spec: RunSpec, run_dir: str) -> int | None:
    """The newest step of which both runs have a whole checkpoint, after the replay's start."""
    assert spec.replay is not None
    original = spec.replay.run_dir
    for step in checkpoints.steps(run_dir):
        uris = (checkpoints.checkpoint_uri(run_dir, step), checkpoints.checkpoint_uri(original, step))
        if not any(checkpoints.find_fault(uri, digests=False) for uri in uris):
            return step
    return None


def _data_before(spec: RunSpec) -> DataConfig:
    """What the original was trained on: the same without holes, or, itself a replay, with fewer."""
    assert spec.replay is not None
    run_json = join(spec.replay.run_dir, RUN_NAME)
    if read_file(run_json) is not None:
        return read_spec(run_json).recipe.data
    return replace(spec.recipe.data, without=(), without_from=(0, 0))


def _schedule(spec: RunSpec, data: DataConfig) -> Schedule:
    return schedule_of(location_of(spec), Pin.parse(spec.pin), replace(spec.recipe, data=data))


def _blocks_loss(spec: RunSpec, run_dir: str, schedule: Schedule, before: DataConfig) -> BlocksLoss | None:
    assert spec.replay is not None
    step = _common_step(spec, run_dir)
    places = _blocks_with_holes(schedule, step) if step else []
    if step is None or not places:
        return None
    chosen = [places[i] for i in np.unique(np.linspace(0, len(places) - 1, MAX_BLOCKS).astype(int))]
    blocks = [_block(spec, before, *place) for place in chosen]
    sums = np.array([_losses(folder, step, blocks) for folder in (spec.replay.run_dir, run_dir)])  # (2, kinds, 2)
    left_out, others = sums[:, 0], sums[:, 1]
    if not left_out[0, 1]:
        return None
    return BlocksLoss(
        step=step,
        num_blocks=len(blocks),
        tokens_left_out=int(left_out[0, 1]),
        left_out=(left_out[0, 0] / left_out[0, 1], left_out[1, 0] / left_out[1, 1]),
        tokens_others=int(others[0, 1]),
        others=(others[0, 0] / others[0, 1], others[1, 0] / others[1, 1]) if others[0, 1] else None,
    )


def _blocks_with_holes(schedule: Schedule, last_step: int) -> list[tuple[int, int, int]]:
    """Epoch, cycle and split of the blocks, up to a step, in which a hole begins; in training order."""
    epoch, cycle = schedule.locate(last_step)
    found: list[tuple[int, int, int]] = []
    for e in range(epoch + 1):
        plan = schedule.plan(e)
        stop = cycle + schedule.cycles_per_step if e == epoch else schedule.steps_in(e) * schedule.cycles_per_step
        cycles = plan.hole_spans[0] // plan.seq_len
        splits = plan.holes // (len(plan.order) // plan.num_splits)
        inside = cycles < stop
        pairs = np.unique(np.stack([cycles[inside], splits[inside]], axis=1), axis=0)
        found += [(e, c, s) for c, s in pairs.tolist()]
    return found


@dataclass(frozen=True)
class _Block:
    """A block of the original, tensors of shape (1, seq_len)."""

    input_ids: torch.Tensor
    doc_ids: torch.Tensor
    position_ids: torch.Tensor
    is_hole: torch.Tensor


def _block(spec: RunSpec, before: DataConfig, epoch: int, cycle: int, split: int) -> _Block:
    """A block as the original has it, and which of its tokens are holes in the replay."""
    had, has = (_read(spec, data, epoch, cycle, split) for data in (before, spec.recipe.data))
    return _Block(*had, had[0] != has[0])


def _read(
    spec: RunSpec, data: DataConfig, epoch: int, cycle: int, split: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    loader = BlockLoader(
        location_of(spec),
        Pin.parse(spec.pin),
        data,
        spec.tokenizer,
        rank=split,
        world_size=data.num_splits,
        settings=spec.recipe.loader,
    )
    (batch,) = loader.batches(epoch, cycle, 1, max_batches=1, position_ids=True)
    assert batch.doc_ids is not None and batch.position_ids is not None
    return batch.input_ids, batch.doc_ids, batch.position_ids


def _losses(run_dir: str, step: int, blocks: list[_Block]) -> list[tuple[float, int]]:
    """Summed loss and number of the predicted tokens that are in holes, and of all others."""
    import torch

    from pretrain_assets.train.attention import document_mask
    from pretrain_assets.train.model import targets_of
    from pretrain_assets.train.state import load_model

    with checkpoints.open_checkpoint(run_dir, step) as folder:
        model = load_model(folder)
    sums = [[0.0, 0], [0.0, 0]]
    with torch.inference_mode():
        for block in blocks:
            masked = model.config.document_mask
            extra = (document_mask(block.doc_ids), block.position_ids) if masked else (None, None)
            losses = model(block.input_ids, *extra, reduction="none")
            predicted = targets_of(block.input_ids, model.pad_id) != model.pad_id
            in_hole = torch.nn.functional.pad(block.is_hole[:, 1:], (0, 1))
            for kind, which in enumerate((predicted & in_hole, predicted & ~in_hole)):
                sums[kind][0] += float(losses[which].double().sum())
                sums[kind][1] += int(which.sum())
    return [(float(loss), int(count)) for loss, count in sums]
