"""One run from its RunSpec to `result.json`, on this rank: resume or begin, train, sample, report.

Invariant: the same command again goes on from the newest complete checkpoint, and does nothing when the run is done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from pretrain_assets.config import RunSpec
from pretrain_assets.errors import ConfigError, PretrainError
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
from pretrain_assets.train.lock import sole_writer
from pretrain_assets.train.loop import Trainer
from pretrain_assets.train.metrics import MetricsLog, data_wait
from pretrain_assets.train.reporting import Reporter, open_reporters
from pretrain_assets.train.sampling import sample_text

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
    started = time.monotonic()
    with sole_writer(spec.run_dir), join_world() as world, open_reporters(world.is_main) as reporters:
        try:
            result = _train(spec, world, reporters, should_stop)
        except Exception as error:
            failure = {
                "status": "failed",
                "error": str(error),
                "error_type": type(error).__name__,
                "is_mistake": isinstance(error, PretrainError),  # which the same command would meet again
            }
            _finish(spec, world, reporters, failure, started)
            raise
        _finish(spec, world, reporters, result, started)
    return EXIT_STOPPED if result["status"] == "stopped" else EXIT_DONE


def _train(spec: RunSpec, world: World, reporters: list[Reporter], should_stop: Callable[[], bool]) -> dict[str, Any]:
    check_disjoint(Location(database_uri=spec.database_uri, table_name=spec.table_name), spec)
    step = _resume_step(spec, world)
    trainer = Trainer(spec, world, reporters)
    if step:
        trainer.resume(step)
        _log.info("going on from %s", checkpoint.checkpoint_uri(spec.run_dir, step))
    metrics = None
    if world.is_main:
        clear_unfinished_result(spec.run_dir)
        metrics = MetricsLog(spec.run_dir, last_step=step or -1)
    status = trainer.train(metrics, should_stop)
    if metrics is None:
        return {"status": status}
    with checkpoint.open_checkpoint(spec.run_dir, trainer.step) as folder:
        digest = checkpoint.digest(folder)
    return {
        "status": status,
        "step": trainer.step,
        "total_steps": trainer.total_steps,
        "tokens": trainer.step * spec.recipe.train.global_batch_tokens,
        "first_loss": metrics.first("loss"),
        "train_loss": metrics.last("loss"),
        "first_val_loss": metrics.first("val_loss"),
        "val_loss": metrics.last("val_loss"),
        "data_wait": data_wait(metrics.records),
        "checkpoint": checkpoint.checkpoint_uri(spec.run_dir, trainer.step),
        "digest": digest,
        "sample": sample_text(trainer.engine.model, spec.tokenizer, spec.recipe.sample_prompt)
        if status == "done"
        else None,
        "passport": trainer.passport(),
    }


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


def _finish(spec: RunSpec, world: World, reporters: list[Reporter], result: dict[str, Any], started: float) -> None:
    """Write and report the result, on the main rank."""
    if not world.is_main:
        return
    result["seconds"] = time.monotonic() - started
    write_result(spec.run_dir, result)
    for reporter in reporters:
        reporter.result(result)
