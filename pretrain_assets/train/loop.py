"""The training loop: one optimizer step after the other, with evaluation, checkpoints and metrics on the way.

Invariant: a step is the same set of blocks whatever the number of ranks, and nothing waits for the device between two
log lines.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from typing import Any, Literal

from pretrain_assets.config import ReplayOf, RunSpec
from pretrain_assets.errors import DivergenceError
from pretrain_assets.loader.holes import Targets, describe_holes
from pretrain_assets.loader.parts import describe_mixture
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.loader.stream import Batch, BlockLoader
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location
from pretrain_assets.train import pauses
from pretrain_assets.train.device import device_name
from pretrain_assets.train.distributed import World
from pretrain_assets.train.divergence import divergence, seen_command
from pretrain_assets.train.engine import Blocks, Engine
from pretrain_assets.train.evaluation import HeldOut
from pretrain_assets.train.feed import feed
from pretrain_assets.train.flops import flops_per_token, mfu
from pretrain_assets.train.lines import opening, spike_line
from pretrain_assets.train.measure import Clock, memory_bytes
from pretrain_assets.train.metrics import MetricsLog, Record
from pretrain_assets.train.origin import restore_original, restore_own
from pretrain_assets.train.passport import make_passport
from pretrain_assets.train.preflight import check_memory
from pretrain_assets.train.reporting import Reporter
from pretrain_assets.train.saver import Saver
from pretrain_assets.train.spikes import Curve, Point, Spike, SpikeDetector
from pretrain_assets.train.state import capture

_log = logging.getLogger(__name__)


class Trainer:
    """One rank of a run."""

    def __init__(self, spec: RunSpec, world: World, reporters: list[Reporter], clock: Clock | None = None):
        data, self.config, self.execution = spec.recipe.data, spec.recipe.train, spec.recipe.execution
        location = Location(database_uri=spec.database_uri, table_name=spec.table_name)
        self.spec, self.world, self.reporters = spec, world, reporters
        self.loader = BlockLoader(
            location,
            Pin.parse(spec.pin),
            data,
            spec.tokenizer,
            rank=world.rank,
            world_size=world.size,
            settings=spec.recipe.loader,
        )
        self.schedule = Schedule(self.loader.plan, spec.recipe.cycles_per_step)
        self.total_steps = self.schedule.total_steps(max_steps=self.config.max_steps, epochs=self.config.epochs)
        if world.is_main and data.mixture:
            describe_mixture(self.loader.plan(0).ledger()["parts"])
        if world.is_main and data.without:
            describe_holes(self.loader.plan(data.without_from[0]), data.without)
        world.pulse.at("starting")
        self.held_out = HeldOut.of_run(location, spec, world)
        world.pulse.at("starting")
        check_memory(spec.recipe, spec.tokenizer)
        self.engine = Engine(spec.recipe, spec.tokenizer, world)
        self.saver = Saver(spec.run_dir, world, self.execution)
        self.step = self.saved = 0
        self._targets = Targets(self.schedule)
        self._last: Point | None = None
        self.clock = clock or Clock()
        self._curve, self._spikes = Curve(), SpikeDetector(self.config.warmup_steps)
        self._jumps: list[Spike] = []

    def resume(self, step: int) -> None:
        """Go on from the checkpoint of a step.

        Raises:
            DataIdentityError: it was trained on other data.
            ConfigError: it is past the run's last step.
        """
        restore_own(self.spec, self.schedule, self.engine, step, total_steps=self.total_steps)
        self.step = self.saved = step

    def start_replay(self, origin: ReplayOf) -> None:
        """Begin from a checkpoint of the original run; nothing is saved here yet.

        Raises:
            DataIdentityError: it is another one than was chosen, or had seen what this run leaves out before.
        """
        restore_original(self.spec, self.schedule, self.engine, origin)
        self.step = origin.start_step

    def train(self, metrics: MetricsLog | None, should_stop: Callable[[], bool]) -> Literal["done", "stopped"]:
        """Train to the last step, or until a rank is told to stop; saves in both cases.

        Args:
            metrics: The run's history, on the main rank.
            should_stop: Asked after every step and during evaluations; when any rank says yes, all save and return. An
                evaluation that is left out or broken off is made up for when the run goes on.

        Raises:
            PretrainError: the loss is no longer finite.
            CheckpointError: a checkpoint cannot be written.
        """
        self._metrics, self._began, self._should_stop = metrics, self.step, should_stop
        pulse, stop_after = self.world.pulse, self.execution.stop_after or self.total_steps
        self._announce()
        if stop_after < self.total_steps and self.step >= stop_after:
            return "stopped"
        if self._lacks_evaluation():
            self.clock.lap("start")
            if not self._evaluate():
                return "stopped"
            if self.step == self.total_steps:
                self._save(again=True)  # for its passport to name the loss
        with pauses.deferred(), closing(self._batches()) as batches, closing(self._feed(batches)) as blocks:
            pulse.at("waiting for data", self.step + 1)
            first = list(itertools.islice(blocks, int(self.step < self.total_steps)))
            self.clock.lap("start")  # waiting for the first blocks is part of starting
            self._logged = (self.step, 0.0, 0.0)
            stream = itertools.chain(first, blocks)
            while self.step < self.total_steps:
                pulse.at("waiting for data", self.step + 1)
                ids = next(stream)
                self.clock.lap("data_wait")
                self.step += 1
                pulse.at("training", self.step)
                if self._targets.any_in(self.step):  # else nothing changes, not even a moment, and the step counts
                    loss, norm = self.engine.train_step(ids, step=self.step, total_steps=self.total_steps)
                    self._curve.add(self.step, loss, norm)
                ending = self.step == stop_after < self.total_steps
                if not self._after_step(self.world.any(should_stop() or self.saver.failed or ending)):
                    return "stopped"
        return "done"

    def passport(self) -> dict[str, Any]:
        """The passport of the current step, on the main rank."""
        assert self._metrics is not None
        return make_passport(
            self.spec,
            self.schedule,
            step=self.step,
            total_steps=self.total_steps,
            losses=self._metrics.last_losses(),
        )

    def _batches(self) -> Generator[Batch, None, None]:
        """The batch of every step from the next one on, in host memory."""
        epoch, cycle = self.schedule.locate(self.step + 1)
        masked, cuda = self.spec.recipe.model.document_mask, self.world.device.type == "cuda"
        while True:
            stream = self.loader.batches(
                epoch,
                cycle,
                self.schedule.cycles_per_step,
                dtype="int32",
                doc_ids=masked,
                position_ids=masked,
                pin_memory=cuda,
            )
            with closing(stream) as batches:
                yield from batches
            epoch, cycle = epoch + 1, 0
            self.schedule.steps_in(epoch)

    def _feed(self, batches: Iterable[Batch]) -> Generator[Blocks, None, None]:
        left = self.total_steps - self.step  # reading ahead must not plan an epoch that is not trained on
        return feed(itertools.islice(batches, left), self.world.device)

    def _after_step(self, stopping: bool) -> bool:
        """Log, evaluate and save as is due; returns whether to go on."""
        last, pulse = self.step == self.total_steps, self.world.pulse
        reporting, evaluating, saving = (
            last or self.step % every == 0
            for every in (self.execution.log_every, self.config.eval_every, self.execution.checkpoint_every)
        )
        if reporting or stopping or self.step == self._began + 1:
            self._log()
        elif evaluating or saving:
            self._check_finite()  # waits for the device, so that what follows is timed alone
        self.clock.lap("training")
        if evaluating or saving:
            pauses.collect()
        if evaluating and not stopping:
            stopping = not self._evaluate()
        if saving or stopping:
            pulse.at("saving")
            self._save()
            self.clock.lap("checkpoints")
        return not stopping

    def _log(self) -> None:
        self._check_finite()
        self.clock.lap("training")  # after the device has caught up
        step, stepping, waited = self._logged
        seconds, steps = self.clock.stepping - stepping, self.step - step
        learned = self._last if self._last and self._last.step == self.step else None
        rate = steps * self.config.global_batch_tokens / seconds
        stats = self.loader.stats()
        record = {
            "step": self.step,
            "epoch": self.schedule.locate(self.step)[0],
            **({"loss": learned.loss, "grad_norm": learned.norm} if learned else {}),
            "lr": self.engine.optimizers[-1].param_groups[0]["lr"],
            "tokens": self.step * self.config.global_batch_tokens,
            "tok_per_s": rate,
            "mfu": mfu(rate, self._flops_per_token, device_name(self.world.device), self.world.size),
            "data_wait": (self.clock.seconds["data_wait"] - waited) / seconds,
            "seconds": seconds,
            "ranks": self.world.size,
            "queue_rows": stats.rows_read + stats.rows_packed,
            "memory_bytes": memory_bytes(self.world.device),
            "eta_seconds": (self.total_steps - self.step) * seconds / steps,
        }
        if self._jumps:
            record["spikes"] = [spike._asdict() for spike in self._jumps]
        self._report(record)
        for spike in self._jumps if self.world.is_main else ():
            _log.warning("%s", spike_line(spike, seen_command(self.spec, spike.step)))
        self._jumps = []
        self._logged = (self.step, self.clock.stepping, self.clock.seconds["data_wait"])

    def _lacks_evaluation(self) -> bool:
        """Whether the step is one to evaluate, and was not: none was made, or the run was stopped before it."""
        due = self.step == self.total_steps or self.step % self.config.eval_every == 0
        metrics = self._metrics
        return self.world.any(due and metrics is not None and metrics.last_losses()["val_loss_step"] != self.step)

    def _evaluate(self) -> bool:
        """Evaluate and report; False, and nothing is reported, when a rank was told to stop meanwhile."""
        self.world.pulse.at("evaluating")
        found = self.held_out.evaluate(self.engine, should_stop=self._should_stop)
        self.clock.lap("evaluation")
        if found is None:
            return False
        if self.step and not math.isfinite(found.loss):
            raise self._diverged(self.step, f"The validation loss after step {self.step} is not finite")
        self._report({"step": self.step, **found.metrics()})
        return True

    def _report(self, record: Record) -> None:
        record["total_steps"] = self.total_steps
        if self._metrics is not None:
            self._metrics.append(record)
        for reporter in self.reporters:
            reporter.progress(record)

    def _save(self, *, again: bool = False) -> None:
        """Save the current step, unless it is saved already."""
        self._check_finite()
        if again or self.saved != self.step:
            if not self.engine.is_sound():
                what = f"The weights after step {self.step} are not finite, or too large to compute with"
                raise self._diverged(self.step, what)
            self.saver.save(self.step, capture(self.engine), self.passport() if self.world.is_main else None)
            self.saved = self.step

    def _check_finite(self) -> None:
        """Look at the losses since the last look; waits for the device.

        Raises:
            DivergenceError: one of them, or its gradient norm, is not finite.
        """
        points = self._curve.look()
        for point in points:
            if not point.is_finite:
                what = "gradient norm" if math.isfinite(point.loss) else "loss"
                numbers = f"(loss {point.loss:.4g}, gradient norm {point.norm:.4g})"
                raise self._diverged(point.step, f"The {what} of step {point.step} is not finite {numbers}")
            self._last = point
        self._jumps += self._spikes.find(points)

    def _diverged(self, step: int, what: str) -> DivergenceError:
        return divergence(self.spec, self.schedule, step, self.saved, what)

    def _announce(self) -> None:
        if self.world.is_main:
            text = opening(
                self.spec,
                num_parameters=self.engine.num_parameters,
                ranks=self.world.size,
                device_name=device_name(self.world.device),
                step=self.step,
                total_steps=self.total_steps,
                epoch_steps=self.schedule.steps_in(0),
            )
            _log.info("%s", text)

    @property
    def _flops_per_token(self) -> int:
        recipe = self.spec.recipe
        return flops_per_token(self.engine.num_parameters, recipe.model, recipe.data.seq_len)
