"""A trained model assessed on rows of any version of the table: what `pretrain evaluate` asks.

Invariant: an answer names the version and the filter that it is of. Tokens of another tokenizer are refused, and rows
that the model may have been trained on are counted, never hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pretrain_assets.config import DataConfig, LoaderConfig, TokenizerIdentity, to_dict
from pretrain_assets.errors import TableError
from pretrain_assets.loader.state import check_same
from pretrain_assets.progress import Progress
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.schema import tokenizer_identity
from pretrain_assets.table.storage import Location
from pretrain_assets.table.versions import open_pin
from pretrain_assets.train.distributed import World
from pretrain_assets.train.engine import Engine
from pretrain_assets.train.evaluation import HeldOut
from pretrain_assets.train.model import GPT
from pretrain_assets.train.sampling import check_finite
from pretrain_assets.train.scores import Evaluation


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A trained model, and what is known of its training."""

    name: str
    """Where it is."""
    model: GPT
    """On the CPU."""
    tokenizer: TokenizerIdentity
    """Of its tokens."""
    data: DataConfig
    """Rows of its training; its `held_out_filter` and `token_column` are those to evaluate."""
    pin: Pin | None
    """Version that it was trained on; None for a model of somebody else, which says nothing about its data."""


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """How well a model predicts some rows, and whether it may have seen them."""

    subject: str
    """Where the model is."""
    pin: str
    """Version evaluated."""
    trained_pin: str | None
    """Version that the model was trained on, where known."""
    filter: str
    """Rows evaluated, as SQL."""
    rows: int
    """Rows that the filter keeps there."""
    documents: int
    """Those of them that the blocks evaluated hold something of."""
    documents_trained: int | None
    """Those of these that the training filter keeps at the version trained on; None where that cannot be told."""
    blocks_there: int
    """Blocks that all rows make."""
    seq_len: int
    """Tokens per block."""
    evaluation: Evaluation
    """The numbers."""


def assess(
    location: Location,
    subject: Subject,
    pin: Pin,
    world: World,
    *,
    num_blocks: int | None,
    micro_batch_blocks: int,
    settings: LoaderConfig,
    tokenizer_place: str | None = None,
) -> Assessment:
    """Evaluate a model, and show how far that is.

    Args:
        location: The table.
        subject: The model, its rows and tokenizer.
        pin: Version to evaluate on.
        world: The ranks.
        num_blocks: Blocks at most, from the first; None for all.
        micro_batch_blocks: Blocks per forward pass at most.
        settings: How blocks are read.
        tokenizer_place: As for `HeldOut`.

    Raises:
        TableError: the version is not there, or has no tokens.
        DataIdentityError: its tokens are of another tokenizer than the model's.
        FilterError: the filter cannot be used, or keeps nothing to predict.
        CheckpointError: the model has diverged.
    """
    if pin != subject.pin:
        _check_tokenizer(location, subject, pin)
    held_out = HeldOut(
        location,
        pin,
        subject.data,
        subject.tokenizer,
        world,
        num_blocks=num_blocks,
        micro_batch_blocks=micro_batch_blocks,
        document_mask=subject.model.config.document_mask,
        settings=settings,
        setting="--filter",
        tokenizer_place=tokenizer_place,
    )
    length = held_out.plan.seq_len
    with Progress("evaluating", total=len(held_out.share) * length, unit="tokens") as progress:
        found = held_out.evaluate(
            Loaded(subject.model, world), progress=lambda blocks: progress.update(blocks * length)
        )
    assert found is not None  # nobody asked it to stop
    check_finite(torch.tensor(found.loss))
    return Assessment(
        subject=subject.name,
        pin=str(pin),
        trained_pin=None if subject.pin is None else str(subject.pin),
        filter=subject.data.held_out_filter,
        rows=len(held_out.plan.rows),
        documents=len(held_out.doc_ids),
        documents_trained=_count_trained(location, subject, held_out.doc_ids),
        blocks_there=held_out.plan.blocks_per_epoch,
        seq_len=length,
        evaluation=found,
    )


class Loaded(Engine):
    """A trained model that predicts as the trainer's does, without an optimizer."""

    def __init__(self, model: GPT, world: World):
        self.world = world
        self.model = model.to(world.device)
        self.network = self.model


def _check_tokenizer(location: Location, subject: Subject, pin: Pin) -> None:
    """Refuse a version whose tokens mean something else to the model than those that it was trained on."""
    ours, there = subject.tokenizer, tokenizer_identity(open_pin(location, pin), subject.data.token_column)
    if ours.fingerprint != there.fingerprint:  # names follow the place that a tokenizer was loaded from
        check_same(
            to_dict(ours),
            to_dict(there),
            between=("model", f"version {pin.version}"),
            sentence=f"{subject.name} cannot be evaluated on version {pin.version} of {location.uri}",
            remedy=f"Tokenize the documents with {ours.name} (`pretrain tokenize --beside` keeps both), or give "
            "another --version.",
        )


def _count_trained(location: Location, subject: Subject, doc_ids: npt.NDArray[np.int64]) -> int | None:
    """How many of the documents the training filter keeps at the version trained on; None where that is not known."""
    if subject.pin is None:
        return None
    try:
        dataset = open_pin(location, subject.pin)
    except TableError:  # freed, or another table
        return None
    doc_ids, count = np.sort(doc_ids), 0
    for batch in dataset.scanner(columns=["id"], filter=subject.data.filter).to_batches():
        trained = batch["id"].to_numpy()
        nearest = np.minimum(np.searchsorted(doc_ids, trained), len(doc_ids) - 1)
        count += int((doc_ids[nearest] == trained).sum())
    return count
