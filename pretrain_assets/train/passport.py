"""Passports: what a checkpoint carries about its data, and the refusal to go on with other data.

Invariant: a passport holds no clock, host, rank or path; two equal runs write equal passports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrain_assets import __version__
from pretrain_assets.config import ReplayOf, RunSpec, to_dict
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.loader.state import check_digest, check_same
from pretrain_assets.table.lineage import Pin

_TYPES: dict[str, type] = {
    **dict.fromkeys(("identity", "tokenizer", "budget", "ledger", "recipe"), dict),
    **dict.fromkeys(("pin", "table_id", "tag", "filter", "held_out_filter", "code_version"), str),
    **dict.fromkeys(("version", "seed", "num_splits", "seq_len", "global_batch_tokens"), int),
    **dict.fromkeys(("epoch", "step", "tokens_seen"), int),
}
_NESTED: dict[str, type] = {"recipe.model": dict, "recipe.train.optimizer": str, "budget.total_steps": int}
"""What else is read of a passport without asking first, by its path."""

FIELDS = (*_TYPES, "plan", "train_loss", "train_loss_step", "val_loss", "val_loss_step")
"""Every passport has these, none of them null."""


def make_passport(
    spec: RunSpec, schedule: Schedule, *, step: int, total_steps: int, losses: Mapping[str, float | None]
) -> dict[str, Any]:
    """The passport of a checkpoint after `step` of `total_steps` steps.

    `losses` are the newest ones, with the steps that they were measured at (`metrics.last_losses`); `ledger` has one
    entry per epoch entered; `plan` (digest) and `budget` are those of the last step's epoch; `replay_of`, of replays
    alone, is `config.ReplayOf` without its path.
    """
    pin, recipe = Pin.parse(spec.pin), to_dict(spec.recipe)
    epoch = schedule.locate(max(step, 1))[0]
    ledger = schedule.ledgers(step)
    return {
        "identity": spec.identity,
        "plan": schedule.plan(epoch).digest,
        "pin": spec.pin,
        "table_id": pin.table_id,
        "version": pin.version,
        "tag": spec.tag,
        "filter": spec.recipe.data.filter,
        "held_out_filter": spec.recipe.data.held_out_filter,
        "tokenizer": to_dict(spec.tokenizer),
        "seed": spec.recipe.data.seed,
        "num_splits": spec.recipe.data.num_splits,
        "seq_len": spec.recipe.data.seq_len,
        "global_batch_tokens": spec.recipe.train.global_batch_tokens,
        "epoch": epoch,
        "step": step,
        "tokens_seen": sum(entry["tokens_trained"] for entry in ledger.values()),
        "budget": {
            "blocks_per_epoch": schedule.plan(epoch).blocks_per_epoch,
            "steps_per_epoch": schedule.steps_in(epoch),
            "total_steps": total_steps,
        },
        "ledger": ledger,
        **losses,
        "recipe": recipe,
        "code_version": __version__,
        **({"replay_of": _replay_of(spec.replay)} if spec.replay else {}),
    }


def _replay_of(replay: ReplayOf) -> dict[str, Any]:
    return {name: value for name, value in to_dict(replay).items() if name != "run_dir"}


def missing_fields(passport: Mapping[str, Any]) -> list[str]:
    """Fields that a passport lacks, or has as null."""
    return [name for name in FIELDS if passport.get(name) is None]


def parse(data: bytes) -> dict[str, Any]:
    """A passport from its file; losses may be null, and `plan`, which older ones lack, may be missing.

    Raises:
        ValueError: it is no JSON object, or lacks what is read of it without asking first, or has it of another type.
    """
    try:
        passport = json.loads(data)
    except (ValueError, RecursionError):
        passport = None
    if not isinstance(passport, dict):
        raise ValueError("is not a JSON object")
    for path, kind in {**_TYPES, **_NESTED}.items():
        value: Any = passport
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if type(value) is not kind:
            is_there = f"has {path}={value!r:.60}, which is no {kind.__name__}"
            raise ValueError(f"lacks {path}" if value is None else is_there)
    try:
        Pin.parse(passport["pin"])
    except ValueError as error:
        raise ValueError(f"has no usable pin: {error}") from error
    return passport


def ledger_gaps(passport: Mapping[str, Any]) -> list[str]:
    """What does not add up in a passport's ledgers, epoch by epoch and part by part; empty when everything does."""
    gaps = []
    for epoch, ledger in passport["ledger"].items():
        parts = ledger.get("parts", {})
        for name, lines in {f"epoch {epoch}": ledger, **{f"epoch {epoch}, part {p}": parts[p] for p in parts}}.items():
            for unit, used in (("rows", ("planned",)), ("tokens", ("trained", "not_reached"))):
                came = lines[f"{unit}_in"] + lines.get(f"{unit}_repeated", 0)
                left = [count for line, count in lines.items() if line.startswith(f"{unit}_left_out_")]
                went = sum(lines[f"{unit}_{line}"] for line in used) + sum(left) + lines.get(f"{unit}_in_holes", 0)
                if came != went:
                    gaps.append(f"{name}: {came:,} {unit} came in, {went:,} are accounted for")
        held = ledger["tokens_trained"] + ledger.get("tokens_in_holes", 0) + ledger["tokens_padded"]
        if ledger["blocks"] * passport["seq_len"] != held:
            gaps.append(f"epoch {epoch}: {ledger['blocks']:,} blocks do not hold the tokens trained and padded")
        for line in ("rows_in", "tokens_in", "tokens_trained") if parts else ():
            if sum(part[line] for part in parts.values()) != ledger[line]:
                gaps.append(f"epoch {epoch}: the parts' {line} do not add up to {ledger[line]:,}")
    return gaps


def check_identity(spec: RunSpec, passport: Mapping[str, Any], checkpoint: str | Path) -> None:
    """Refuse to resume a checkpoint with other data, another order, model or optimizer than it was trained with.

    Raises:
        DataIdentityError: lists every field that differs with both values.
    """
    had, asks = passport["recipe"], to_dict(spec.recipe)
    check_same(
        {**passport["identity"], "model": had["model"], "optimizer": had["train"]["optimizer"]},
        {**spec.identity, "model": asks["model"], "optimizer": asks["train"]["optimizer"]},
        between=("checkpoint", "this run"),
        sentence=f"Checkpoint {checkpoint} cannot be resumed by this run",
        remedy="Give the run the checkpoint's settings to resume it, or another run_dir to start afresh.",
    )


def check_plan(schedule: Schedule, passport: Mapping[str, Any], checkpoint: str | Path) -> None:
    """Refuse to resume a checkpoint of the same data, by name, whose rows have changed; call after `check_identity`.

    A checkpoint older than the passport's `plan` passes.

    Raises:
        DataIdentityError: the order or the lengths of the documents of its epoch are others now.
    """
    had = passport.get("plan")
    if had is not None:
        check_digest(had, schedule.plan(passport["epoch"]), f"Checkpoint {checkpoint} cannot be resumed by this run")
