"""Resources: where the table lives, what is read into it, where columns are computed, and where training runs.

Every value can be set in the launchpad; the defaults come from the environment, so that one deployment needs no code.
"""

import os

import dagster as dg
from pydantic import Field

from pretrain_assets import project
from pretrain_assets.config import EngineConfig, IngestConfig, from_dict
from pretrain_assets.table.storage import Location, absolute


class CorpusResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """The one LanceDB table."""

    database_uri: str = Field(default_factory=project.database_uri)
    """Local directory (relative to DAGSTER_HOME) or `s3://bucket/prefix`; credentials come from `AWS_*` variables."""
    table_name: str = Field(default_factory=project.table_name)
    """Table name."""
    storage_env: dict[str, str] = Field(default={})
    """Environment variables for the storage clients, where the process has them under other names: for example
    `{"AWS_SECRET_ACCESS_KEY": {"env": "TEAM_SECRET"}}`, in code `EnvVar("TEAM_SECRET")`. Never a secret itself: a run's
    configuration is stored and shown."""

    def location(self) -> Location:
        """Where the table is, with local paths made absolute. Makes `storage_env` known to this process."""
        os.environ.update(self.storage_env)
        return Location(database_uri=absolute(self.database_uri, project.home()), table_name=self.table_name)


class SourceResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """What is ingested. Shared by the observed source, the ingest asset, the sensor and the schedule."""

    sources: list[str] = Field(default_factory=project.sources)
    """Paths, globs, `s3://`, `hf://datasets/...`, `bundled` or `synthetic:rows:seed`."""
    extra_columns: list[str] = Field(default=[])
    """More columns to keep, by name."""
    on_bad_row: str = "raise"
    """`raise`, or `skip` to leave bad rows out and count them."""

    def config(self) -> IngestConfig:
        """The domain's configuration."""
        return from_dict(IngestConfig, self.model_dump(include={"sources", "extra_columns", "on_bad_row"}))


class EvalSetsResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Evaluation sets that documents are searched for. Shared by the observed source and the decontaminated asset."""

    eval_sets: list[str] = Field(default_factory=project.eval_sets)
    """`[NAME=]FILES[#FIELD+FIELD]` each: `bundled`, or JSON lines or parquet at a path, glob, `s3://` or `hf://`."""


class EngineResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Where columns are computed. Changes no value."""

    engine: str = Field(default_factory=project.engine)
    """`local`, `ray` or `geneva`."""
    workers: int | None = Field(default_factory=project.workers)
    """Worker processes; None is one per core, or what the Ray cluster has room for."""
    ray_address: str | None = Field(default_factory=project.ray_address)
    """Ray cluster: `auto`, `ray://host:10001`, or None to start one on this machine."""

    def config(self) -> EngineConfig:
        """The domain's configuration."""
        return from_dict(EngineConfig, self.model_dump(include={"engine", "workers", "ray_address"}))


class LauncherResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Where and how training runs are launched."""

    runs_uri: str = Field(default_factory=project.runs_uri)
    """Folder of training runs: local (relative to DAGSTER_HOME) or `s3://...`."""
    nproc_per_node: int = Field(default_factory=project.nproc_per_node)
    """Ranks that torchrun starts on this node: the number of GPUs, or 2 on a CPU."""

    def runs(self) -> str:
        """The folder of training runs, local paths made absolute."""
        return absolute(self.runs_uri, project.home())


def table_metadata() -> dict[str, str]:
    """Definition metadata of every asset on the table: what the UI's storage box shows."""
    corpus = CorpusResource()
    return {"dagster/table_name": corpus.table_name, "dagster/uri": corpus.location().uri}


def default_resources() -> dict[str, object]:
    """Resources as the environment configures them (see project.py)."""
    return {
        "corpus": CorpusResource(),
        "source": SourceResource(),
        "eval_sets": EvalSetsResource(),
        "engine": EngineResource(),
        "launcher": LauncherResource(),
    }
