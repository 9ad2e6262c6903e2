"""One class per experiment tracker: how a run is opened (new or again), gets its points, and ends.

Invariant: nothing leaves this machine unless the user's own environment says so (WANDB_MODE, MLFLOW_TRACKING_URI,
TRACKIO_SPACE_ID or TRACKIO_SERVER_URL), and no package sends telemetry. The packages are imported where they are used.
"""

from __future__ import annotations

import getpass
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

PROJECT = "pretrain_assets"
"""Project or experiment of all runs, where the environment names none."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker is told of a run before its first point."""

    name: str
    """Name of the run's folder: the same whenever the run is resumed."""
    folder: Path
    """Local folder for the tracker's files."""
    settings: dict[str, Any]
    """Recipe and data by dotted name, plain JSON values."""


class Tracker(Protocol):
    """A run in a tracker, new or opened again."""

    where: str
    """Where its points go, and how to look at them."""
    newest_step: int
    """Newest optimizer step that it held when it was opened; -1 for none."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add points at an optimizer step."""

    def finish(self, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """Add the summary, whose `status` is done, stopped or failed, and end."""


class TensorBoard:
    """Event files; the recipe as text, and as hyperparameters with the final numbers."""

    def __init__(self, run: TrackedRun):
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from torch.utils.tensorboard import SummaryWriter

        files = sorted(str(path) for path in run.folder.glob("events.out.tfevents.*"))
        events = (event for file in files for event in EventFileLoader(file).Load())
        points = (e.step for e in events if any(v.tag.startswith(("train/", "val/")) for v in e.summary.value))
        self.newest_step = max(points, default=-1)
        self.where = f"tensorboard --logdir {run.folder}"
        self._settings = {
            name: value if isinstance(value, (int, float)) else str(value) for name, value in run.settings.items()
        }
        self._step = 0
        self._writer = SummaryWriter(str(run.folder))
        rows = "".join(f"| {name} | `{value}` |\n" for name, value in self._settings.items())
        self._writer.add_text("recipe", f"| setting | value |\n|---|---|\n{rows}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add points at an optimizer step."""
        self._step = step
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """Add the summary and end."""
        for name, text in texts.items():
            self._writer.add_text(f"final/{name}", text, self._step)
        self._writer.add_hparams(self._settings, dict(numbers), run_name=".", global_step=self._step)
        self._writer.close()


class WeightsAndBiases:
    """A W&B run, offline unless WANDB_MODE says otherwise; `wandb sync` sends it later.

    An offline run cannot be continued, so it is made again, complete; the folder that lies there is then all of it.
    """

    def __init__(self, run: TrackedRun):
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or "offline"
        if mode == "offline":
            shutil.rmtree(run.folder, ignore_errors=True)
        run.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=run.name,
            name=run.name,
            resume=None if mode == "offline" else "allow",
            dir=str(run.folder),
            mode=mode,
            config=run.settings,
            allow_val_change=True,
            settings=wandb.Settings(console="off", disable_git=True, disable_code=True),
        )
        self.newest_step = self._run.step - 1
        self.where = f"wandb sync {Path(self._run.dir).parent}" if mode == "offline" else str(self._run.url)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add points at an optimizer step."""
        self._run.log(dict(values), step=step)

    def finish(self, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """Add the summary and end."""
        self._run.summary.update({**numbers, **texts})
        self._run.finish(exit_code=int(texts["status"] == "failed"))


class MLflow:
    """An MLflow run, in a local SQLite file unless MLFLOW_TRACKING_URI names a server."""

    _STATUS: Mapping[str, Literal["FINISHED", "KILLED", "FAILED"]] = {
        "done": "FINISHED",
        "stopped": "KILLED",
        "failed": "FAILED",
    }

    def __init__(self, run: TrackedRun):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        run.folder.mkdir(parents=True, exist_ok=True)
        chosen = os.environ.get("MLFLOW_TRACKING_URI")
        uri = chosen or f"sqlite:///{run.folder}/mlflow.db"
        self.where = chosen or f"mlflow ui --backend-store-uri {uri}"
        self._client, project = MlflowClient(uri), os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        experiment = self._client.get_experiment_by_name(project)
        artifacts = None if chosen else str(run.folder / "artifacts")
        number = experiment.experiment_id if experiment else self._client.create_experiment(project, artifacts)
        found = self._client.search_runs([number], f"attributes.run_name = '{run.name}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            self._run = self._client.create_run(number, run_name=run.name).info.run_id
            parameters = [Param(name, str(value)[:6000]) for name, value in run.settings.items()]
            self._client.log_batch(self._run, params=parameters)
        histories = (self._client.get_metric_history(self._run, name) for name in ("train/loss", "val/loss"))
        self.newest_step = max((point.step for history in histories for point in history), default=-1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add points at an optimizer step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._run, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def finish(self, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """Add the summary and end."""
        for name, value in numbers.items():
            self._client.log_metric(self._run, name, value)
        for name, text in texts.items():
            self._client.set_tag(self._run, name, text[:5000])
        self._client.set_terminated(self._run, status=self._STATUS[texts["status"]])


class Trackio:
    """A trackio run, in local files unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says otherwise."""

    def __init__(self, run: TrackedRun):
        remote = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        os.environ.setdefault("TRACKIO_DIR", str(run.folder))  # read when trackio is imported
        import trackio

        if not remote:
            trackio.run._get_default_namespace = getpass.getuser  # it would ask huggingface.co who the user is
        project = os.environ.get("TRACKIO_PROJECT") or PROJECT
        self._run = trackio.init(
            project=project,
            name=run.name,
            resume="allow",
            config=run.settings,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.newest_step = self._step = self._run._next_step - 1
        self.where = remote or f"TRACKIO_DIR={os.environ['TRACKIO_DIR']} trackio show --project {project}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add points at an optimizer step."""
        self._step = step
        self._run.log(dict(values), step=step)

    def finish(self, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """Add the summary at the last step, and end."""
        self._run.log(dict(numbers), step=self._step)
        self._run.finish()


KINDS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}
"""Every tracker by its name, which is also its package's and its extra's."""
