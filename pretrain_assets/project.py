"""Where this project stands on disk, and the settings that the environment may change.

Invariant: relative local paths mean the same in the CLI, in Dagster and in a training process.
"""

from __future__ import annotations

import os
from pathlib import Path

from pretrain_assets.errors import ConfigError
from pretrain_assets.table.storage import absolute


def home() -> Path:
    """DAGSTER_HOME, else the nearest folder from the working directory up with a dagster.yaml, else that directory."""
    if os.environ.get("DAGSTER_HOME"):
        return Path(os.environ["DAGSTER_HOME"])
    here = Path.cwd()
    return next((folder for folder in (here, *here.parents) if (folder / "dagster.yaml").is_file()), here)


def setting(name: str, default: str) -> str:
    """The environment variable `PRETRAIN_<name>`, or the default when it is unset or empty."""
    return os.environ.get(f"PRETRAIN_{name}") or default


def database_uri() -> str:
    """PRETRAIN_DATABASE_URI: the LanceDB database, local or `s3://`."""
    return setting("DATABASE_URI", ".pretrain/lancedb")


def table_name() -> str:
    """PRETRAIN_TABLE_NAME: the table in it."""
    return setting("TABLE_NAME", "corpus")


def runs_uri() -> str:
    """PRETRAIN_RUNS_URI: the folder of training runs, local or `s3://`."""
    return setting("RUNS_URI", ".pretrain/runs")


def sources() -> list[str]:
    """PRETRAIN_SOURCES: what to ingest, separated by commas; local paths are made absolute from `home`."""
    named = [source.strip() for source in setting("SOURCES", "bundled").split(",")]
    made_here = ("bundled", "synthetic")
    return [source if source.partition(":")[0] in made_here else absolute(source, home()) for source in named]


def eval_sets() -> list[str]:
    """PRETRAIN_EVAL_SETS: evaluation sets to search for, separated by commas; local paths are absolute from `home`."""
    from pretrain_assets.curate.eval_sets import parse_source

    return [parse_source(one).written(home()) for one in setting("EVAL_SETS", "bundled").split(",")]


def tokenizer() -> str:
    """PRETRAIN_TOKENIZER: the tokenizer of `input_ids`."""
    return setting("TOKENIZER", "gpt2")


def engine() -> str:
    """PRETRAIN_ENGINE: where columns are computed."""
    return setting("ENGINE", "local")


def workers() -> int | None:
    """PRETRAIN_WORKERS: worker processes of the engine; unset is as many as there are cores."""
    return _number("WORKERS", "worker processes") if setting("WORKERS", "") else None


def ray_address() -> str | None:
    """PRETRAIN_RAY_ADDRESS: the Ray cluster; unset starts one on this machine."""
    return setting("RAY_ADDRESS", "") or None


def nproc_per_node() -> int:
    """PRETRAIN_NPROC_PER_NODE: ranks that torchrun starts on this node."""
    return _number("NPROC_PER_NODE", "ranks", "2")


def _number(name: str, of_what: str, default: str = "") -> int:
    text = setting(name, default)
    if not text.isdigit():
        raise ConfigError(f"PRETRAIN_{name}={text!r} is not a number of {of_what}; set it to 1 or more")
    return int(text)
