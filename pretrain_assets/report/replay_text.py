"""Text of a replay: what it would do, and how it compares with its original.

Invariant: prints what it is given, and says where two numbers cannot be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tabulate import tabulate

from pretrain_assets.plural import counted
from pretrain_assets.train.lines import duration

if TYPE_CHECKING:
    from pretrain_assets.forensics.replays.blocks import BlocksLoss
    from pretrain_assets.forensics.replays.compare import Comparison, LossPoint
    from pretrain_assets.forensics.replays.replay import ReplayPlan

MAX_ROWS = 16
"""Steps of a table; of more, so many evenly spaced ones."""


def plan_text(plan: ReplayPlan) -> str:
    """What a replay does, and what it costs."""
    found = counted(plan.left_out, "document")
    seen = "" if plan.seen == plan.left_out else f", {plan.seen:,} of them seen by this checkpoint"
    cost = f"{counted(plan.steps, 'step')}, {counted(plan.tokens, 'token')}"
    if plan.seconds is not None:
        cost += f", about {duration(plan.seconds)} at the original's speed"
    rows = [
        ("original", plan.checkpoint),
        ("left out", f"{found} of {plan.asked:,} asked for{seen}; {counted(plan.tokens_seen, 'token')} so far"),
        *(("not trained on", f"{count:,} {reason}") for reason, count in plan.not_trained.items()),
        ("first seen", f"step {plan.first_step:,} of {plan.total_steps:,}"),
        ("begins", start_text(plan)),
        ("to train", f"{cost}: to step {plan.last_step:,}" if plan.steps else "nothing: it is there already"),
        ("replay", plan.run_dir),
    ]
    return tabulate(rows, tablefmt="plain", disable_numparse=True)


def start_text(plan: ReplayPlan) -> str:
    """Where a replay begins, and what that means."""
    if plan.saved_step > plan.start_step:
        return f"at its own checkpoint of step {plan.saved_step:,}, where it was stopped"
    if plan.start is None:
        kept = f"as no checkpoint from before step {plan.first_step:,} is kept"
        return f"with new weights, {'as asked for' if plan.from_step == 0 else kept}"
    if plan.is_clean:
        return f"at step {plan.start_step:,} of the original, which had seen none of them: as good as from step 0"
    return (
        f"at step {plan.start_step:,} of the original, which is NOT clean: it had seen {plan.seen_at_start:,} of them. "
        "This goes on without them; it is not what a run without them would be"
    )


def comparison_text(found: Comparison) -> str:
    """Losses of both side by side, then what both models make of the documents left out."""
    at = f"step {found.step:,}" + (f" of {found.total_steps:,}" if found.total_steps else "")
    unclean = f", which had seen {counted(found.seen_at_start, 'document')} of them" if found.seen_at_start else ""
    head = (
        f"{found.replay} ({found.status} at {at})\nreplays {found.original}\nwithout {found.holes}, on {found.pin}, "
        f"from step {found.start_step:,}{unclean}"
    )
    parts = [head]
    for title, points in (("validation loss", found.validation), ("training loss", found.training)):
        if points:
            parts.append(_table(title, [point for point in points if point.step >= found.start_step] or points))
    if any(point.tokens_in_holes for point in found.training):
        parts.append("Where a step has tokens in holes, the two training losses are means over different tokens.")
    parts.append(_blocks_text(found.blocks) if found.blocks else _no_blocks(found))
    return "\n\n".join(parts)


def _table(title: str, points: Sequence[LossPoint]) -> str:
    shown = _spread(points)
    holes = any(point.tokens_in_holes for point in shown)
    rows = [
        [
            f"{point.step:,}",
            f"{point.original:.4f}",
            f"{point.replay:.4f}",
            f"{point.difference:+.4f}",
            *([f"{point.tokens_in_holes:,}" if point.tokens_in_holes else ""] if holes else []),
        ]
        for point in shown
    ]
    headers = ["step", f"{title}: original", "replay", "difference", *(["tokens in holes"] if holes else [])]
    table = tabulate(rows, headers=headers, disable_numparse=True, colalign=["right"] * len(headers))
    left = len(points) - len(shown)
    return table + (f"\n{counted(left, 'more step')} in --json" if left else "")


def _spread(points: Sequence[LossPoint]) -> list[LossPoint]:
    """At most `MAX_ROWS` of them, evenly spaced, first and last among them."""
    last = len(points) - 1
    if last < MAX_ROWS:
        return list(points)
    return [points[round(i * last / (MAX_ROWS - 1))] for i in range(MAX_ROWS)]


def _blocks_text(blocks: BlocksLoss) -> str:
    rows = [["documents left out", f"{blocks.tokens_left_out:,}", *_losses(blocks.left_out)]]
    if blocks.others:
        rows.append(["the rest of those blocks", f"{blocks.tokens_others:,}", *_losses(blocks.others)])
    asked = f"{blocks.num_blocks:,} of " if blocks.num_blocks < blocks.num_with_holes else ""
    where = f"at step {blocks.step:,}, in {asked}{counted(blocks.num_with_holes, 'block')}"
    headers = [where, "tokens", "original", "replay", ""]
    table = tabulate(rows, headers=headers, disable_numparse=True, colalign=["left"] + ["right"] * 4)
    learned, beside = (round(pair[1] - pair[0], 4) for pair in (blocks.left_out, blocks.others or (0.0, 0.0)))
    more = f", and on the text beside them {_change(beside)}" if blocks.others else ""
    verdict = (
        "counterfactual memorisation, as far as one pair of runs can show it"
        if learned > max(beside, 0)
        else "no memorisation shown"
    )
    return (
        f"{table}\nHaving been trained on them makes the loss on the documents left out {_change(learned)}{more}:\n"
        f"{verdict}."
    )


def _change(lower_by: float) -> str:
    return f"{'lower' if lower_by > 0 else 'higher'} by {abs(lower_by):.4f}" if lower_by else "no different"


def _losses(pair: tuple[float, float]) -> list[str]:
    return [f"{pair[0]:.4f}", f"{pair[1]:.4f}", f"{pair[1] - pair[0]:+.4f}"]


def _no_blocks(found: Comparison) -> str:
    return (
        f"{found.original} and the replay keep no checkpoint of the same step after the documents came: their losses "
        "on the documents left out were not measured."
    )
