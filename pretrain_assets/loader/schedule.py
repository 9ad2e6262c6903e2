"""Which optimizer step of a run stands in which epoch, at which cycle.

Invariant: step N (from 1, as in metrics and checkpoint names) is the N-th update; steps never straddle two epochs, and
what does not fill the last step of an epoch is left out and counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pretrain_assets.errors import ConfigError
from pretrain_assets.loader.plan import EpochPlan


class Schedule:
    """Maps steps to (epoch, cycle), building the plan of an epoch when first asked about it."""

    def __init__(self, plan: Callable[[int], EpochPlan], cycles_per_step: int):
        self.plan, self.cycles_per_step = plan, cycles_per_step
        self._steps: list[int] = []
        self._ledgers: dict[int, dict[str, Any]] = {}

    def steps_in(self, epoch: int) -> int:
        """Whole steps of an epoch.

        Raises:
            ConfigError: the epoch is too small for one step.
        """
        while len(self._steps) <= epoch:
            plan = self.plan(len(self._steps))
            steps = plan.cycles_per_epoch // self.cycles_per_step
            if steps == 0:
                raise ConfigError(
                    f"Epoch {plan.epoch} has {plan.blocks_per_epoch} blocks of {plan.seq_len} tokens, fewer than the "
                    f"{self.cycles_per_step * plan.num_splits} of one step. Lower train.global_batch_tokens to at most "
                    f"{plan.blocks_per_epoch * plan.seq_len}, or widen the filter."
                )
            self._steps.append(steps)
        return self._steps[epoch]

    def total_steps(self, *, max_steps: int | None, epochs: int) -> int:
        """Steps of a run: `max_steps`, or all whole steps of `epochs` epochs."""
        if max_steps is not None:
            self.steps_in(0)
            return max_steps
        return sum(self.steps_in(epoch) for epoch in range(epochs))

    def locate(self, step: int) -> tuple[int, int]:
        """Epoch of a step (from 1) and its first cycle in that epoch."""
        epoch, index = 0, step - 1
        while index >= self.steps_in(epoch):
            index -= self.steps_in(epoch)
            epoch += 1
        return epoch, index * self.cycles_per_step

    def ledgers(self, last_step: int) -> dict[str, dict[str, Any]]:
        """Ledger of every epoch that a run of `last_step` steps has entered, by epoch number as text."""
        if last_step == 0:
            return {}
        epoch, cycle = self.locate(last_step)
        reached = self.plan(epoch).ledger(cycles_per_step=self.cycles_per_step, cycles=cycle + self.cycles_per_step)
        whole = map(self._ledger, range(epoch))
        return {str(e): ledger for e, ledger in enumerate([*whole, reached])}

    def _ledger(self, epoch: int) -> dict[str, Any]:
        """Ledger of a whole epoch; it is kept, for its plan may not be."""
        if epoch not in self._ledgers:
            self._ledgers[epoch] = self.plan(epoch).ledger(cycles_per_step=self.cycles_per_step)
        return self._ledgers[epoch]
