"""The training loop: one optimizer step after the other, with evaluation, checkpoints and metrics on the way.

Invariant: a step is the same set of blocks, and its loss the mean over all valid target tokens of all ranks, whatever
the number of ranks and the micro-batch. Nothing waits for the device between two log lines.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Generator
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pretrain_assets.config import RunSpec
from pretrain_assets.errors import ConfigError, PretrainError
from pretrain_assets.loader.parts import describe_mixture
from pretrain_assets.loader.schedule import Schedule
from pretrain_assets.loader.stream import BlockLoader
from pretrain_assets.table.lineage import Pin
from pretrain_assets.table.storage import Location
from pretrain_assets.train import checkpoint
from pretrain_assets.train.distributed import World
from pretrain_assets.train.evaluation import HeldOut
from pretrain_assets.train.flops import flops_per_token, mfu
from pretrain_assets.train.metrics import MetricsLog, Record
from pretrain_assets.train.model import GPT, targets_of
from pretrain_assets.train.optim import learning_rate, make_optimizer, set_learning_rate
from pretrain_assets.train.passport import check_identity, check_plan, make_passport
from pretrain_assets.train.reporting import Reporter
from pretrain_assets.train.state import capture, restore_model, restore_optimizer


class Trainer:
    """One rank of a run."""

    def __init__(self, spec: RunSpec, world: World, reporters: list[Reporter]):
        data, self.config = spec.recipe.data, spec.recipe.train
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
        self.model = GPT(spec.recipe.model, spec.tokenizer, data.seq_len)
        self.model.init_weights(self.config.init_seed)
        self.model.to(world.device)
        self.optimizer = make_optimizer(self.model, self.config)
        torch.manual_seed(self.config.init_seed)
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
            restore_model(folder, self.model)
            restore_optimizer(folder, self.model, self.optimizer)
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
        compiled = cast(GPT, torch.compile(self.model, dynamic=False)) if self.config.compile else self.model
        self._network = self.world.wrap(compiled)
        self._diverged_at = torch.zeros((), dtype=torch.int64, device=self.world.device)
        if self.step == 0:
            self._evaluate()
        with contextlib.closing(self._batches()) as batches:
            first = list(itertools.islice(batches, int(self.step < self.total_steps)))
            self._restart_clock()  # waiting for the first blocks is part of starting
            stream = itertools.chain(first, batches)
            while self.step < self.total_steps:
                asked = time.perf_counter()
                epoch, ids = next(stream)
                self._waited += time.perf_counter() - asked
                self.step += 1
                loss, norm = self._train_step(ids)
                stopping = self.world.any(should_stop())
                self._after_step(epoch, loss, norm)
                if stopping:
                    self._save()
                    return "done" if self.step == self.total_steps else "stopped"
        return "done"

    def passport(self) -> dict[str, Any]:
        """The passport of the current step, on the main rank."""
        assert self._metrics is not None
        losses = {"train_loss": self._metrics.last("loss"), "val_loss": self._metrics.last("val_loss")}
        return make_passport(self.spec, self.schedule, step=self.step, total_steps=self.total_steps, losses=losses)

    def _batches(self) -> Generator[tuple[int, Tensor], None, None]:
        """(epoch, input_ids) of every step from the next one on."""
        epoch, cycle = self.schedule.locate(self.step + 1)
        while True:
            stream = self.loader.batches(epoch, cycle, self.schedule.cycles_per_step, dtype="int32", doc_ids=False)
            with contextlib.closing(stream) as batches:
                for batch in batches:
                    yield epoch, batch.input_ids
            epoch, cycle = epoch + 1, 0
            self.schedule.steps_in(epoch)

    def _train_step(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """One optimizer step; returns the global batch's mean loss and the gradient norm, on the device."""
        ids = self._to_device(input_ids)
        pad_id = self.spec.tokenizer.pad_id
        count = self.world.sum((targets_of(ids, pad_id) != pad_id).sum()).clamp(min=1)
        total = torch.zeros((), device=self.world.device)
        parts = torch.split(ids, self.config.micro_batch_blocks)
        for index, part in enumerate(parts):
            with self._without_sync(index < len(parts) - 1):
                with self.autocast():
                    loss = self._network(part)
                (loss * (self.world.size / count)).backward()  # DDP takes the mean over ranks
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        set_learning_rate(self.optimizer, learning_rate(self.config, self.step, self.total_steps))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.world.sum(total) / count, norm

    def autocast(self) -> torch.autocast:
        """Compute in bfloat16 on CUDA; weights stay float32."""
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.world.device.type == "cuda")

    def _to_device(self, ids: Tensor) -> Tensor:
        """Token ids on the device as int64: they travel as int32 and are widened there."""
        if self.world.device.type == "cuda":
            ids = ids.pin_memory().to(self.world.device, non_blocking=True)
        return ids.to(torch.int64)

    def _without_sync(self, without: bool) -> contextlib.AbstractContextManager[Any]:
        """Leave gradients on this rank, for all micro-batches but the last."""
        if without and isinstance(self._network, DistributedDataParallel):
            return self._network.no_sync()
        return contextlib.nullcontext()

    def _after_step(self, epoch: int, loss: Tensor, norm: Tensor) -> None:
        last = self.step == self.total_steps
        bad = ~torch.isfinite(loss) & (self._diverged_at == 0)
        self._diverged_at = torch.where(bad, self.step, self._diverged_at)
        logging, evaluating, saving = (
            last or self.step % every == 0
            for every in (self.config.log_every, self.config.eval_every, self.config.checkpoint_every)
        )
        if logging or self.step == 1:
            self._log(epoch, loss, norm)
        if evaluating:
            self._evaluate()
        if saving:
            self._save()
        if evaluating or saving:
            self._restart_clock()

    def _log(self, epoch: int, loss: Tensor, norm: Tensor) -> None:
        self._check_finite()
        value, norm_value = float(loss), float(norm)  # waits for the device, so the clock is read after it
        seconds, steps = time.perf_counter() - self._clock, self.step - self._clock_step
        rate = steps * self.config.global_batch_tokens / seconds
        stats = self.loader.stats()
        self._report(
            {
                "step": self.step,
                "epoch": epoch,
                "loss": value,
                "lr": self.optimizer.param_groups[0]["lr"],
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
        loss = self.held_out.loss(self.model, self.autocast())
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
        checkpoint.save(self.spec.run_dir, self.step, capture(self.model, self.optimizer), self.passport())
        checkpoint.prune(self.spec.run_dir, self.config.keep_last)
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
        return flops_per_token(self.model.num_parameters, recipe.model, recipe.data.seq_len)

    @property
    def _device_name(self) -> str:
        return torch.cuda.get_device_name(self.world.device) if self.world.device.type == "cuda" else "CPU"
