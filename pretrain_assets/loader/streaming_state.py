"""The state of LanceDB's StreamingDataset from a position of ours, and back: a run can change loaders on the way.

Invariant: the state written is the one that `StreamingDataset.state_dict()` gives there, merged over its ranks. Nothing
in one that is read is believed without looking: it names no table version and no filter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pretrain_assets.errors import CheckpointError, ConfigError
from pretrain_assets.loader.plan import EpochPlan, Position
from pretrain_assets.loader.read import take_rows
from pretrain_assets.loader.state import check_same, same_order_hint

if TYPE_CHECKING:
    from pretrain_assets.loader.stream import BlockLoader

KEYS = (
    *("shuffle_seed", "num_splits", "epoch", "pack_sequences", "eos_id", "pad_id", "blocks_per_epoch"),
    *("samples_consumed_per_split", "blocks_emitted_per_split", "pack_buffers"),
)
"""Keys of a packed `StreamingDataset.state_dict()`."""


def to_streaming_state(loader: BlockLoader, epoch: int, cycle: int) -> dict[str, Any]:
    """The `state_dict()` of a `StreamingDataset` at a cycle, merged over its ranks: every rank can load it.

    Reads one document per split: theirs carries the tokens that a split's last document still has to give.

    Raises:
        ConfigError: the data is a mixture, which StreamingDataset cannot give.
    """
    plan = loader.plan(epoch)
    position = plan.position(cycle)
    tails = _tails(loader, plan, position) if cycle else []
    return _streaming_settings(loader, epoch) | {
        "samples_consumed_per_split": position.docs_consumed.tolist(),
        "blocks_emitted_per_split": [cycle] * plan.num_splits,
        # no tail holds a document's start: the next document is read only when the block before it is not full
        "pack_buffers": {split: {"tokens": tail, "starts": []} for split, tail in enumerate(tails)},
    }


def from_streaming_state(loader: BlockLoader, state: Mapping[str, Any]) -> tuple[int, int]:
    """Epoch and cycle of a packed `StreamingDataset.state_dict()`, merged over its ranks.

    Such a state names no table version and no filter, so every number and token in it is held against the plan.

    Raises:
        DataIdentityError: it belongs to other data; lists what differs.
        CheckpointError: it lacks a key, or its ranks were not merged.
        ConfigError: the data is a mixture.
    """
    missing = [key for key in KEYS if key not in state]
    if missing:
        raise CheckpointError(f"This is no packed StreamingDataset state: it lacks {', '.join(missing)}")
    epoch, emitted = int(state["epoch"]), [int(count) for count in state["blocks_emitted_per_split"]]
    if len(set(emitted)) != 1:
        raise CheckpointError(
            f"blocks_emitted_per_split={emitted[:8]} are not all equal: this is the state of one rank, or of a stream "
            "inside a cycle. Merge those of all ranks at one step with StreamingDataset.merge_state_dicts."
        )
    own, cycle = _streaming_settings(loader, epoch), emitted[0]
    sentence = "This StreamingDataset state cannot be loaded by this loader"
    remedy = (
        f"{same_order_hint(state['shuffle_seed'], loader.data.seed, epoch)}Give both the same table version, filter, "
        "seed, tokens, splits and blocks_per_epoch, or start without a state."
    )
    between = ("state", "this loader")
    check_same({key: state[key] for key in own}, own, between=between, sentence=sentence, remedy=remedy)
    if not 0 <= cycle * loader.data.num_splits <= own["blocks_per_epoch"]:
        raise CheckpointError(f"{cycle} blocks of every split are more than blocks_per_epoch={own['blocks_per_epoch']}")
    had, asked = _by_split(state), _by_split(to_streaming_state(loader, epoch, cycle))
    wrong = [split for split in asked if had.get(split) != asked[split]]
    if wrong:
        sentence = f"{sentence}: {len(wrong)} of {len(asked)} splits stand elsewhere after {cycle} blocks"
        sides = ({wrong[0]: side.get(wrong[0])} for side in (had, asked))
        check_same(*sides, between=between, sentence=sentence, remedy=remedy)
    return epoch, cycle


def _streaming_settings(loader: BlockLoader, epoch: int) -> dict[str, Any]:
    if loader.data.mixture:
        raise ConfigError("data.mixture is set, and StreamingDataset has no mixtures: none of its states is like ours")
    if loader.data.without:
        raise ConfigError("data.without is set, and StreamingDataset has no holes: it would give those documents")
    return {
        "shuffle_seed": loader.data.seed,
        "num_splits": loader.data.num_splits,
        "epoch": epoch,
        "pack_sequences": loader.data.seq_len,
        "eos_id": loader.tokenizer.eos_id,
        "pad_id": loader.tokenizer.pad_id,
        "blocks_per_epoch": loader.plan(epoch).blocks_per_epoch,
    }


def _tails(loader: BlockLoader, plan: EpochPlan, position: Position) -> list[list[int]]:
    """Per split, the tokens (EOS included) of the last document taken that are still to be emitted."""
    entries = plan.offsets[:-1] + np.maximum(position.docs_consumed, 1) - 1
    row_ids = plan.rows.row_ids[plan.order[entries]]
    order, column = np.argsort(row_ids), loader.data.token_column
    documents = take_rows(loader.dataset, row_ids[order], [column])[column].take(np.argsort(order)).to_pylist()
    return [
        [*document, loader.tokenizer.eos_id][len(document) + 1 - tail :]
        for document, tail in zip(documents, position.tail_tokens.tolist(), strict=True)
    ]


def _by_split(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a StreamingDataset state says of every split; keys of its buffers may have become text in JSON."""
    buffers = {int(split): buffer for split, buffer in state["pack_buffers"].items()}
    empty: dict[str, Any] = {"tokens": [], "starts": []}
    return {
        f"split {split}": {"documents": int(count), "buffer": buffers.get(split, empty)}
        for split, count in enumerate(state["samples_consumed_per_split"])
    }
