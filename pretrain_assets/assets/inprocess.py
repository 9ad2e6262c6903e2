"""Run a job of this project in the current process, on the persistent instance: what `pretrain demo` does.

Invariant: the same assets, events and instance as in the UI; only the processes differ.
"""

import os

import dagster as dg

from pretrain_assets.definitions import build_defs
from pretrain_assets.errors import PretrainError
from pretrain_assets.project import home

QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
"""Dagster's own event lines go to the instance; people read the stages' log lines."""

INTERRUPTIONS = {error.__name__ for error in (dg.DagsterExecutionInterruptedError, KeyboardInterrupt)}
"""What a step ends with upon SIGTERM or Ctrl-C."""


def run_job(name: str, *, partition: str | None = None) -> None:
    """Run a job to its end.

    Raises:
        PretrainError: a step failed, and the message is the step's own; or the job was stopped (SIGTERM, Ctrl-C).
    """
    os.environ.setdefault("DAGSTER_HOME", str(home()))
    home().mkdir(parents=True, exist_ok=True)
    with dg.DagsterInstance.get() as instance:
        job = build_defs().resolve_job_def(name)
        result = job.execute_in_process(
            run_config=QUIET, instance=instance, partition_key=partition, raise_on_error=False
        )
    if result.success:
        return
    for event in result.all_events:
        if event.is_step_failure:
            data = event.step_failure_data
            if data.error and data.error.cls_name in INTERRUPTIONS:
                raise PretrainError(
                    f"{event.step_key} was stopped. Finished stages are kept, training saved what it had, and the same "
                    "command goes on from there."
                )
            failure = data.user_failure_data
            reason = failure.description if failure else (data.error.message if data.error else "unknown error")
            raise PretrainError(f"{event.step_key}: {reason}")
        if event.event_type == dg.DagsterEventType.ASSET_CHECK_EVALUATION:
            evaluation = event.asset_check_evaluation_data
            if not evaluation.passed and evaluation.blocking:
                raise PretrainError(f"check {evaluation.check_name} failed: {evaluation.description}")
    raise PretrainError(f"job {name} failed; the Dagster UI (`make ui`) shows where")
