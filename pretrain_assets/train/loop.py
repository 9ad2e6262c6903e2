"""The training loop: one optimizer step after the other, with evaluation, checkpoints and metrics on the way.

Invariant: a step is the same set of blocks whatever the number of ranks, and nothing waits for the device between two
log lines.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from pretrain_assets.config import RunSpec
from pretrain_assets.errors import ConfigError, PretrainError
from pretrain_assets.loader.parts import describe_mixture
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.loader.stream import Batch, BlockLoader
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location
from pretrain_assets.train import checkpoint
from pretrain_assets.train.distributed import World
from pretrain_assets.train.engine import Blocks, Engine
from pretrain_assets.train.evaluation import HeldOut
from pretrain_assets.train.feed import feed
from pretrain_assets.train.flops import flops_per_token, mfu
from pretrain_assets.train.metrics import MetricsLog, Record
from pretrain_assets.train.passport import check_identity, check_plan, make_passport
from pretrain_assets.train.reporting import Reporter
from pretrain_assets.train.state import capture, restore_model, restore_optimizers


class Trainer:
    """One rank of a run."""

    def __init__(self, spec: RunSpec, world: World, reporters: list[Reporter]):
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
        self.held_out = HeldOut(location, spec, world)
        self.engine = Engine(spec.recipe, spec.tokenizer, world)
        self.step = 0

    def resume(self, step: int) -> None:
        """Go on from the checkpoint of a step.

        Raises:
            DataIdentityError: it was trained on other data.
            ConfigError: it is past the run's last step.
        """
        with checkpoint.open_checkpoint(self.spec.run_dir, step) as folder:
            passport = checkpoint.read_passport(folder)
            check_identity(self.spec, passport, folder)
            check_plan(self.schedule, passport, folder)
            if step > self.total_steps:
                raise ConfigError(
                    f"Checkpoint {folder} is past the last step, {self.total_steps}; raise train.max_steps or "
                    "train.epochs, or choose another run_dir"
                )
            restore_model(folder, self.engine.model)
            restore_optimizers(folder, self.engine.model, self.engine.optimizers)
        self.step = step

    def train(self, metrics: MetricsLog | None, should_stop: Callable[[], bool]) -> Literal["done", "stopped"]:
        """Train to the last step, or until a rank is told to stop; saves in both cases.

        Args:
            metrics: The run's history, on the main rank.
            should_stop: Asked after every step; when any rank says yes, all finish the step, save and return.

        Raises:
            PretrainError: the loss is no longer finite.
            CheckpointError: a checkpoint cannot be written.
        """
        self._metrics, self._saved = metrics, self.step
        self._diverged_at = torch.zeros((), dtype=torch.int64, device=self.world.device)
        if self.step == 0:
            self._evaluate()
        with contextlib.closing(self._batches()) as batches, contextlib.closing(self._feed(batches)) as blocks:
            first = list(itertools.islice(blocks, int(self.step < self.total_steps)))
            self._restart_clock()  # waiting for the first blocks is part of starting
            stream = itertools.chain(first, blocks)
            while self.step < self.total_steps:
                asked = time.perf_counter()
                ids = next(stream)
                self._waited += time.perf_counter() - asked
                self.step += 1
                loss, norm = self.engine.train_step(ids, step=self.step, total_steps=self.total_steps)
                stopping = self.world.any(should_stop())
                self._after_step(loss, norm)
                if stopping:
                    self._save()
                    return "done" if self.step == self.total_steps else "stopped"
        return "done"

    def passport(self) -> dict[str, Any]:
        """The passport of the current step, on the main rank."""
        assert self._metrics is not None
        losses = {"train_loss": self._metrics.last("loss"), "val_loss": self._metrics.last("val_loss")}
        return make_passport(self.spec, self.schedule, step=self.step, total_steps=self.total_steps, losses=losses)

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
            with contextlib.closing(stream) as batches:
                yield from batches
            epoch, cycle = epoch + 1, 0
            self.schedule.steps_in(epoch)

    def _feed(self, batches: Iterable[Batch]) -> Generator[Blocks, None, None]:
        left = self.total_steps - self.step  # reading ahead must not plan an epoch that is not trained on
        return feed(itertools.islice(batches, left), self.world.device)

    def _after_step(self, loss: Tensor, norm: Tensor) -> None:
        last = self.step == self.total_steps
        bad = ~torch.isfinite(loss) & (self._diverged_at == 0)
        self._diverged_at = torch.where(bad, self.step, self._diverged_at)
        logging, evaluating, saving = (
            last or self.step % every == 0
            for every in (self.execution.log_every, self.config.eval_every, self.execution.checkpoint_every)
        )
        if logging or self.step == 1:
            self._log(loss, norm)
        if evaluating:
            self._evaluate()
        if saving:
            self._save()
        if evaluating or saving:
            self._restart_clock()

    def _log(self, loss: Tensor, norm: Tensor) -> None:
        self._check_finite()
        value, norm_value = float(loss), float(norm)  # waits for the device, so the clock is read after it
        seconds, steps = time.perf_counter() - self._clock, self.step - self._clock_step
        rate = steps * self.config.global_batch_tokens / seconds
        stats = self.loader.stats()
        self._report(
            {
                "step": self.step,
                "epoch": self.schedule.locate(self.step)[0],
                "loss": value,
                "lr": self.engine.optimizers[-1].param_groups[0]["lr"],
                "grad_norm": norm_value,
                "tokens": self.step * self.config.global_batch_tokens,
                "tok_per_s": rate,
                "mfu": mfu(rate, self._flops_per_token, self._device_name, self.world.size),
                "data_wait": self._waited / seconds,
                "seconds": seconds,
                "ranks": self.world.size,
                "queue_rows": stats.rows_read + stats.rows_packed,
                "eta_seconds": (self.total_steps - self.step) * seconds / steps,
            }
        )
        self._restart_clock()

    def _evaluate(self) -> None:
        loss = self.held_out.loss(self.engine)
        self._report({"step": self.step, "val_loss": loss, "val_tokens": self.held_out.num_tokens})

    def _report(self, record: Record) -> None:
        record["total_steps"] = self.total_steps
        if self._metrics is not None:
            self._metrics.append(record)
        for reporter in self.reporters:
            reporter.progress(record)

    def _save(self) -> None:
        """Save the current step, unless it is saved already."""
        self._check_finite()
        if self._metrics is None or self._saved == self.step:
            return
        checkpoint.save(
            self.spec.run_dir, self.step, capture(self.engine.model, self.engine.optimizers), self.passport()
        )
        checkpoint.prune(self.spec.run_dir, self.execution.keep_last)
        self._saved = self.step

    def _check_finite(self) -> None:
        step = int(self._diverged_at)
        if step:
            raise PretrainError(
                f"The loss of step {step} is not finite. Nothing after the last checkpoint was saved; lower "
                "train.learning_rate or train.grad_clip, or train for longer warm-up, and start again."
            )

    def _restart_clock(self) -> None:
        self._clock, self._clock_step = time.perf_counter(), self.step
        self._waited = 0.0

    @property
    def _flops_per_token(self) -> int:
        recipe = self.spec.recipe
        return flops_per_token(self.engine.num_parameters, recipe.model, recipe.data.seq_len)

    @property
    def _device_name(self) -> str:
        return torch.cuda.get_device_name(self.world.device) if self.world.device.type == "cuda" else "CPU"
