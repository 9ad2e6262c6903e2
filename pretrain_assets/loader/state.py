"""Loader state: one cycle number bound to its data.

Invariant: a state that is accepted goes on exactly where its stream stopped; whatever would make another stream of it
(version, filter, holes, seed, tokenizer, seq_len, splits, changed rows) is refused with what differs. Rank, world size
and read-ahead are no part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pretrain_assets.config.data import data_identity
from pretrain_assets.errors import CheckpointError, DataIdentityError
from pretrain_assets.loader.plan import EpochPlan
from pretrain_assets.loader.planner import EPOCH_SEED_STRIDE

if TYPE_CHECKING:
    from pretrain_assets.loader.stream import BlockLoader

FORMAT = 1
"""Version of the state's layout."""

SETTINGS = {
    "table_version": "version of the table",
    "filter": "data.filter",
    "mixture": "data.mixture",
    "token_column": "data.token_column",
    "shuffle_clump_size": "data.shuffle_clump_size",
    "tokenizer": "fingerprint of the tokenizer",
    "seed": "data.seed",
    "num_splits": "data.num_splits",
    "seq_len": "data.seq_len",
    "eos_id": "end-of-text id of the tokenizer",
    "pad_id": "padding id of the tokenizer",
    "global_batch_tokens": "train.global_batch_tokens",
    "without": "documents left out as holes, data.without",
    "reads": "rows, or blocks of tokens",
}
"""What a field of an identity is, for messages: the setting of a recipe that it comes from, if there is one."""


def state_at(loader: BlockLoader, epoch: int, cycle: int) -> dict[str, Any]:
    """The state of a stream that has handed out `cycle` cycles (blocks of every split) of an epoch; plain JSON."""
    return {
        "format": FORMAT,
        "epoch": epoch,
        "cycle": cycle,
        "plan": loader.plan(epoch).digest,
        "data": identity_of(loader),
    }


def position_from(loader: BlockLoader, state: Mapping[str, Any]) -> tuple[int, int]:
    """Epoch and cycle at which a stream goes on from a state: the arguments of `loader.batches`.

    Raises:
        DataIdentityError: the state belongs to other data; lists every field that differs with both values.
        CheckpointError: it is no state, or one of a single DataLoader worker.
    """
    if "worker" in state:
        raise CheckpointError(
            f"This is the state of one DataLoader worker, {state['worker']!r}: only the same worker of an equal "
            "DataLoader can go on from it. Save `PackedDataset.state_after(num_batches)` instead."
        )
    epoch, cycle = checked_position(state, identity_of(loader))
    plan = loader.plan(epoch)
    check_digest(state["plan"], plan, "This state cannot be loaded")
    if cycle > plan.cycles_per_epoch:
        raise CheckpointError(f"The state's cycle={cycle} is past the {plan.cycles_per_epoch} of epoch {epoch}")
    return epoch, cycle


def checked_position(state: Mapping[str, Any], identity: Mapping[str, Any]) -> tuple[int, int]:
    """Epoch and cycle of a state whose data have the given identity.

    Raises:
        DataIdentityError: they have another; lists every field that differs with both values.
        CheckpointError: it is no state.
    """
    epoch, cycle, data = state.get("epoch"), state.get("cycle"), state.get("data")
    numbers = all(type(number) is int and number >= 0 for number in (epoch, cycle))
    if state.get("format") != FORMAT or not numbers or not isinstance(data, dict) or "plan" not in state:
        raise CheckpointError(
            f"This is no loader state of format {FORMAT}: {str(dict(state))[:200]}. States come from `state_at` or a "
            "dataset's `state_dict`; `from_streaming_state` reads those of LanceDB's StreamingDataset."
        )
    assert isinstance(epoch, int) and isinstance(cycle, int)
    hint = same_order_hint(data.get("seed"), identity.get("seed"), epoch)
    check_same(
        data,
        identity,
        between=("state", "this loader"),
        sentence="This state cannot be loaded by this loader",
        remedy=f"{hint}Give the loader the state's settings to go on from it, or start without a state.",
    )
    return epoch, cycle


def identity_of(loader: BlockLoader) -> dict[str, Any]:
    """What makes two streams of blocks equal."""
    return data_identity(str(loader.pin), loader.data, loader.tokenizer)


def check_same(
    had: Mapping[str, Any], asked: Mapping[str, Any], *, between: tuple[str, str], sentence: str, remedy: str
) -> None:
    """Refuse to go on with other data than before.

    Args:
        had: Fields of the side that was saved.
        asked: Fields of the side that wants to go on.
        between: Names of the two sides.
        sentence: What cannot be done, without a full stop.
        remedy: What to do next.

    Raises:
        DataIdentityError: lists every field that differs with both values.
    """
    differing = [name for name in {**had, **asked} if had.get(name) != asked.get(name)]
    if not differing:
        return
    width = max(map(len, between)) + 1
    lines = [f"{sentence}, which differs in {', '.join(differing)}:"]
    for name in differing:
        lines.append(f"  {name} ({SETTINGS[name]}):" if name in SETTINGS else f"  {name}:")
        lines += (
            f"    {f'{side}:':{width}} {fields.get(name)!r}" for side, fields in zip(between, (had, asked), strict=True)
        )
    raise DataIdentityError("\n".join([*lines, remedy]))


def check_digest(had: object, plan: EpochPlan, sentence: str) -> None:
    """Refuse to go on where an epoch's plan has changed although everything it is a function of is the same.

    Raises:
        DataIdentityError: the digests differ.
    """
    if had != plan.digest:
        raise DataIdentityError(
            f"{sentence}: version, filter, seed, tokenizer, seq_len and splits are the same, yet the plan of epoch "
            f"{plan.epoch} has digest {plan.digest}, no longer {had}: rows or their token counts were changed under "
            "the same version number. Restore the table, or start afresh."
        )


def same_order_hint(had: object, asked: object, epoch: int) -> str:
    """Why two seeds may look alike: seed s in epoch e shuffles as seed s + 100003 does in epoch e - 1."""
    if not isinstance(had, int) or not isinstance(asked, int) or had == asked or (had - asked) % EPOCH_SEED_STRIDE:
        return ""
    other = epoch + (had - asked) // EPOCH_SEED_STRIDE
    if other < 0:
        return ""
    return (
        f"Note that seed {had} shuffles epoch {epoch} as seed {asked} shuffles epoch {other} (the seed of an epoch is "
        f"seed + {EPOCH_SEED_STRIDE} * epoch): choose seeds that do not differ by a multiple of {EPOCH_SEED_STRIDE}. "
    )
