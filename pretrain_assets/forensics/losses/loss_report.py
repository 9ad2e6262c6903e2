"""What a loss column says: documents trained on against held-out ones, the hardest, and the ones known by heart.

Invariant: the column is read at one version and has to be the checkpoint's; who was trained on is what the plan says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pretrain_assets.errors import TableError
from pretrain_assets.forensics.checkpoints import Checkpoint
from pretrain_assets.forensics.exposure import SeenBy, schedule_of, seen_by
from pretrain_assets.forensics.losses.document_loss import STAGE
from pretrain_assets.loader.exposure import times_seen
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.lookup import rows_by_id
from pretrain_assets.table.schema import making_parameters
from pretrain_assets.table.storage import Location, open_dataset
from pretrain_assets.table.verify import Finding
from pretrain_assets.table.versions import latest_record, open_pin
from pretrain_assets.train.checkpoint import digest

if TYPE_CHECKING:
    import lance

GROUPS = ("trained on", "held out", "neither")
MIN_TOKENS = 16
"""Documents of fewer predicted tokens are not listed: the mean of a few says little."""
PLAUSIBLE_SHARE = 0.25
"""The held-out documents' loss may differ by this share from the validation loss of training, in which documents stand
behind each other in blocks and only the first blocks are judged."""
PREVIEW_CHARACTERS = 100
READ_ROWS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class LossGroup:
    """Documents by what the checkpoint saw of them."""

    name: str
    """One of `GROUPS`."""
    documents: int
    """With a loss."""
    tokens: int
    """Predicted in them."""
    loss: float | None
    """Mean over those tokens, in nats; None without any."""
    quantiles: tuple[float, ...]
    """Loss per document below which 5, 50 and 95% of the documents are; empty without any."""


@dataclass(frozen=True, kw_only=True)
class LossDocument:
    """One document that stands out."""

    id: int
    """The table's `id`."""
    source: str | None
    """Where it comes from."""
    loss: float
    """Mean, in nats per token."""
    loss_max: float
    """Of the token that was predicted worst."""
    tokens: int
    """Predicted."""
    held_out_below: float | None
    """Share of the held-out documents with a lower loss; None where none is held out."""
    seen: SeenBy
    """What the checkpoint saw of it."""
    preview: str
    """How it begins."""


@dataclass(frozen=True, kw_only=True)
class LossReport:
    """A loss column at one version."""

    column: str
    """Its name."""
    checkpoint: str
    """The checkpoint that it was measured under."""
    version: int
    """The version read."""
    max_tokens: int | None
    """Tokens of a document that were predicted at most; None: all."""
    without_tokens: int
    """Rows in which there was nothing to predict."""
    groups: tuple[LossGroup, ...]
    """In the order of `GROUPS`."""
    highest: tuple[LossDocument, ...]
    """The hardest or broken: highest losses of all documents of at least `MIN_TOKENS`."""
    lowest: tuple[LossDocument, ...]
    """The best known: lowest losses of those trained on. Memorised is what hardly a held-out document comes below."""
    val_loss: float | None
    """Validation loss of training nearest before the checkpoint."""


class _Extremes:
    """The documents of lowest value so far, at most `limit`."""

    def __init__(self, limit: int):
        self._limit = limit
        self.rows = np.empty((0, 4))
        """Value, id, largest loss, tokens: whole numbers below 2^53 in float64; (rows, 4)."""

    def add(self, values: npt.NDArray[Any], *columns: npt.NDArray[Any]) -> None:
        """Look at more documents."""
        rows = np.concatenate([self.rows, np.column_stack([values, *columns])])
        self.rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))[: self._limit]]


def loss_report(location: Location, checkpoint: Checkpoint, name: str, *, limit: int = 5) -> LossReport:
    """Compare documents by what the checkpoint saw of them, and name those that stand out.

    Memory is 4 bytes per row of the table for the quantiles, and 8 per document trained on or held out.

    Args:
        location: The table.
        checkpoint: Under which the column was measured.
        name: The column's, as in `loss_<name>`.
        limit: Documents named, the highest and the lowest.

    Raises:
        TableError: the column is not there, or was measured under another checkpoint.
    """
    dataset = open_measured(location, checkpoint, name)
    cut = making_parameters(dataset.schema.field(f"loss_{name}"))["max_tokens"]
    trained, held_out = _trained(location, checkpoint), _held_out(location, checkpoint)
    losses: list[list[npt.NDArray[np.float32]]] = [[np.empty(0, np.float32)] for _ in GROUPS]
    tokens, totals = np.zeros(3, np.int64), np.zeros(3)
    high, low, without = _Extremes(limit), _Extremes(limit), 0
    for ids, loss, most, count in _read(dataset, name):
        known = count > 0
        without += int((~known).sum())
        ids, loss, most, count = (column[known] for column in (ids, loss, most, count))
        group = np.where(_among(ids, trained), 0, np.where(_among(ids, held_out), 1, 2))
        for number, mine in enumerate(losses):
            mine.append(loss[group == number])
        tokens += np.bincount(group, count, 3).astype(np.int64)
        totals += np.bincount(group, count * loss.astype(np.float64), 3)
        enough = count >= min(MIN_TOKENS, cut or MIN_TOKENS)
        high.add(-loss[enough], ids[enough], most[enough], count[enough])
        mine = enough & (group == 0)
        low.add(loss[mine], ids[mine], most[mine], count[mine])
    whole = [np.sort(np.concatenate(mine)) for mine in losses]
    return LossReport(
        column=f"loss_{name}",
        checkpoint=checkpoint.uri,
        version=dataset.version,
        max_tokens=cut,
        without_tokens=without,
        groups=tuple(
            LossGroup(
                name=group,
                documents=len(mine),
                tokens=int(num_tokens),
                loss=float(total / num_tokens) if num_tokens else None,
                quantiles=tuple(np.quantile(mine, (0.05, 0.5, 0.95)).tolist()) if len(mine) else (),
            )
            for group, mine, num_tokens, total in zip(GROUPS, whole, tokens, totals, strict=True)
        ),
        highest=_documents(location, checkpoint, dataset, high.rows * (-1, 1, 1, 1), whole[1]),
        lowest=_documents(location, checkpoint, dataset, low.rows, whole[1]),
        val_loss=checkpoint.passport.get("val_loss"),
    )


def open_measured(location: Location, checkpoint: Checkpoint, name: str) -> lance.LanceDataset:
    """The newest version at which the column was measured.

    Raises:
        TableError: it never was, or under another checkpoint.
    """
    record = latest_record(open_dataset(location), f"{STAGE}_{name}")
    remedy = f"Run `pretrain measure-loss {checkpoint.uri} --name {name}`."
    if record is None:
        raise TableError(f"{location.uri} has no column loss_{name}. {remedy}")
    dataset = open_pin(location, record.pin)
    made = making_parameters(dataset.schema.field(f"loss_{name}"))
    if made["checkpoint"] != digest(checkpoint.uri):
        raise TableError(
            f"loss_{name} of {location.uri} was measured under step {made['step']} of {made['run']} (digest "
            f"{made['checkpoint']}), not under {checkpoint.uri}. {remedy}"
        )
    return dataset


def losses_plausible(report: LossReport) -> Finding:
    """The mean loss of the held-out documents is near the validation loss of training."""
    found, expected = report.groups[1].loss, report.val_loss
    known = found is not None and expected is not None and report.max_tokens is None
    return Finding(
        name="losses_plausible",
        passed=not known or abs(found - expected) <= PLAUSIBLE_SHARE * expected,  # type: ignore[operator]
        description=f"held-out documents {found:.4f}, validation loss of training {expected:.4f}"
        if known
        else "not compared: beginnings alone were measured, no document is held out, or training did not evaluate",
        details={"held_out": found, "val_loss": expected} if known else {},
    )


def losses_complete(dataset: lance.LanceDataset, name: str) -> Finding:
    """Every measured row has finite losses, the largest at least the mean, exactly where a token was predicted."""
    loss, most, count = (f"loss_{part}{name}" for part in ("", "max_", "tokens_"))
    sound = f"{loss} >= 0 AND {loss} <= {most} * 1.001 + 0.001 AND {most} < 1e30"
    wrong = dataset.count_rows(
        f"({count} > 0 AND NOT coalesce({sound}, false)) OR ({count} = 0 AND {loss} IS NOT NULL)"
    )
    return Finding(
        name="losses_complete",
        passed=wrong == 0,
        description=f"{wrong:,} rows have a loss that is missing, not finite, or larger than their largest",
        details={"wrong": wrong, "rows": dataset.count_rows(f"{count} IS NOT NULL")},
    )


def _trained(location: Location, checkpoint: Checkpoint) -> npt.NDArray[np.int64]:
    """Ids of the documents that the checkpoint trained on, ascending."""
    schedule = schedule_of(location, checkpoint.pin, checkpoint.recipe)
    times = times_seen(schedule, last_step=checkpoint.step)
    return np.sort(schedule.plan(0).rows.doc_ids[times > 0])


def _held_out(location: Location, checkpoint: Checkpoint) -> npt.NDArray[np.int64]:
    """Ids of the held-out documents of the version trained on, ascending."""
    rows = open_pin(location, checkpoint.pin).scanner(["id"], filter=checkpoint.recipe.data.held_out_filter)
    return np.sort(rows.to_table()["id"].to_numpy())


def _read(dataset: lance.LanceDataset, name: str) -> Any:
    """Ids, mean and largest losses, and tokens of the measured rows, batch by batch."""
    columns = ["id", *(f"loss_{part}{name}" for part in ("", "max_", "tokens_"))]
    rows = dataset.scanner(columns, filter=f"{columns[3]} IS NOT NULL", batch_size=READ_ROWS)
    for batch in rows.to_batches():
        yield [column.to_numpy(zero_copy_only=False) for column in batch.columns]


def _among(ids: npt.NDArray[np.int64], ascending: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    if not len(ascending):
        return np.zeros(len(ids), bool)
    found: npt.NDArray[np.bool_] = ascending[np.minimum(np.searchsorted(ascending, ids), len(ascending) - 1)] == ids
    return found


def _documents(
    location: Location,
    checkpoint: Checkpoint,
    dataset: lance.LanceDataset,
    rows: npt.NDArray[np.float64],
    held_out: npt.NDArray[np.float32],
) -> tuple[LossDocument, ...]:
    ids: Sequence[int] = rows[:, 1].astype(np.int64).tolist()
    facts = rows_by_id(location, Pin(checkpoint.pin.table_id, dataset.version), ids, ["source", "text"])
    seen = seen_by(location, pin=checkpoint.pin, recipe=checkpoint.recipe, step=checkpoint.step, ids=ids)
    return tuple(
        LossDocument(
            id=one,
            source=facts[one].get("source"),
            loss=float(loss),
            loss_max=float(most),
            tokens=int(count),
            held_out_below=float(np.searchsorted(held_out, loss) / len(held_out)) if len(held_out) else None,
            seen=seen[one],
            preview=" ".join((facts[one].get("text") or "").split())[:PREVIEW_CHARACTERS],
        )
        for one, (loss, _, most, count) in zip(ids, rows, strict=True)
    )
