"""One run from its RunSpec to `result.json`, on this rank: resume or begin, train, sample, report.

Invariant: the same command again goes on from the newest complete checkpoint, and does nothing when the run is done.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from pretrain_assets.config import RunSpec
from pretrain_assets.errors import ConfigError
from pretrain_assets.launch.contract import (
    EXIT_DONE,
    EXIT_STOPPED,
    METRICS_NAME,
    clear_unfinished_result,
    finished_result,
    read_file,
    write_result,
)
from pretrain_assets.table.storage import Location, join
from pretrain_assets.train import checkpoint
from pretrain_assets.train.distributed import World, join_world
from pretrain_assets.train.evaluation import check_disjoint
from pretrain_assets.train.failure import Failure
from pretrain_assets.train.liveness import watching
from pretrain_assets.train.lock import sole_writer
from pretrain_assets.train.loop import Trainer
from pretrain_assets.train.measure import Clock
from pretrain_assets.train.metrics import MetricsLog, data_wait
from pretrain_assets.train.preflight import check_way
from pretrain_assets.train.reporting import Reporter, open_reporters
from pretrain_assets.train.sampling import sample_text
from pretrain_assets.train.state import load_model

_log = logging.getLogger(__name__)


def run(spec: RunSpec, should_stop: Callable[[], bool] = lambda: False) -> int:
    """Train as `spec` says, stopping after a step when `should_stop` says so; returns the exit code.

    Raises:
        PretrainError: anything the user can mend; result.json then says `failed` and why.
        ConfigError: another process is training in this run's directory; nothing is touched.
    """
    if finished_result(spec):  # asked before the ranks meet: nobody writes a result until they do
        _log.info("the run in %s is done already: nothing to do", spec.run_dir)
        return EXIT_DONE
    clock = Clock()
    with sole_writer(spec.run_dir), join_world() as world, open_reporters(spec, world.is_main) as reporters:

        def fail(failure: Failure) -> None:
            _finish(spec, world, reporters, failure.result, clock)

        with watching(world, fail):
            result = _train(spec, world, reporters, should_stop, clock)
            _finish(spec, world, reporters, result, clock)
    return EXIT_STOPPED if result["status"] == "stopped" else EXIT_DONE


def _train(
    spec: RunSpec, world: World, reporters: list[Reporter], should_stop: Callable[[], bool], clock: Clock
) -> dict[str, Any]:
    check_way(spec.run_dir)
    check_disjoint(Location(database_uri=spec.database_uri, table_name=spec.table_name), spec)
    step, before = _resume_step(spec, world), spec.run_dir
    trainer = Trainer(spec, world, reporters, clock)
    if step:
        trainer.resume(step)
        _log.info("going on from %s", checkpoint.checkpoint_uri(spec.run_dir, step))
    elif spec.replay and spec.replay.start_step:
        step, before = spec.replay.start_step, spec.replay.run_dir
        trainer.start_replay(spec.replay)
        _log.info("a replay: going on from %s", checkpoint.checkpoint_uri(before, step))
    metrics = None
    if world.is_main:
        clear_unfinished_result(spec.run_dir)
        metrics = MetricsLog(spec.run_dir, last_step=step or -1, before=before)
    with contextlib.closing(trainer.saver):
        status = trainer.train(metrics, should_stop)
        world.pulse.at("saving")
        trainer.saver.wait()
    world.pulse.at("finishing")
    if metrics is None:
        return {"status": status}
    metrics.flush()
    saved = checkpoint.checkpoint_uri(spec.run_dir, trainer.saved) if trainer.saved else None
    return {
        "status": status,
        "step": trainer.step,
        "total_steps": trainer.total_steps,
        "tokens": trainer.step * spec.recipe.train.global_batch_tokens,
        "tokens_here": (trainer.step - step) * spec.recipe.train.global_batch_tokens,
        "first_loss": metrics.first("loss"),
        "first_val_loss": metrics.first("val_loss"),
        **metrics.last_losses(),
        "data_wait": data_wait(metrics.records),
        "checkpoint": saved,
        "digest": checkpoint.digest(saved) if saved else None,
        "sample": _sample(spec, trainer.step) if status == "done" else None,
        "passport": trainer.passport() if saved else None,
    }


def _sample(spec: RunSpec, step: int) -> str:
    """What the finished model continues the recipe's prompt with; loaded anew, as its ranks may have shared it out."""
    with checkpoint.open_checkpoint(spec.run_dir, step) as folder:
        return sample_text(load_model(folder), spec.tokenizer, spec.recipe.sample_prompt)


def _resume_step(spec: RunSpec, world: World) -> int:
    """Step that all ranks resume from; 0 to begin."""
    if spec.resume == "never":
        if checkpoint.steps(spec.run_dir) or read_file(join(spec.run_dir, METRICS_NAME)):
            raise ConfigError(
                f"resume='never' but {spec.run_dir} holds a run already; use resume='auto' to go on with it, or "
                "another run_dir"
            )
        return 0
    return world.from_main((checkpoint.newest(spec.run_dir) or 0) if world.is_main else 0)


def _finish(spec: RunSpec, world: World, reporters: list[Reporter], result: dict[str, Any], clock: Clock) -> None:
    """Write and report the result, on the main rank."""
    if not world.is_main:
        return
    clock.lap("finish")
    result |= {"seconds": clock.total, "seconds_by_part": clock.seconds}
    if "tokens_here" in result:
        result["goodput_tok_per_s"] = result["tokens_here"] / clock.total
    write_result(spec.run_dir, result)
    for reporter in reporters:
        reporter.result(result)
