"""The `pretrain` command. Each verb resolves its inputs, makes one domain call and prints the answer.

Invariant: exit code 0 only when the thing asked for happened; an error the user can mend is one message, no traceback.
Heavy imports happen inside the verbs, so `--help` is quick.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from pretrain_assets import project
from pretrain_assets.cli import (
    ask,
    attribute,
    card,
    contamination,
    curate,
    document_loss,
    embed,
    evaluate,
    filters,
    loader,
    model,
    neighbours,
    receipt,
    replay,
    seen,
    stages,
    table,
)
from pretrain_assets.errors import PretrainError
from pretrain_assets.table.storage import Location, absolute


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--database", help="LanceDB database, local or s3:// [PRETRAIN_DATABASE_URI; .pretrain/lancedb]")
@click.option("--table", help="Table in the database [PRETRAIN_TABLE_NAME; corpus]")
@click.option("--runs", help="Folder of training runs, local or s3:// [PRETRAIN_RUNS_URI; .pretrain/runs]")
@click.version_option(package_name="pretrain-assets")
@click.pass_context
def cli(context: click.Context, database: str | None, table: str | None, runs: str | None) -> None:
    """Pretrain language models on one LanceDB table, and ask afterwards what a model has seen.

    Local paths are relative to DAGSTER_HOME, or to the nearest folder with a dagster.yaml.
    """
    home = project.home()
    context.obj = {
        "location": Location(
            database_uri=absolute(database or project.database_uri(), home), table_name=table or project.table_name()
        ),
        "runs": absolute(runs or project.runs_uri(), home),
    }


for _room in (
    *(stages, curate, contamination, embed, document_loss, filters, loader, table, model, evaluate),
    *(ask, attribute, seen, neighbours, card, receipt, replay),
):
    for _verb in _room.VERBS:
        cli.add_command(_verb)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `pretrain`."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("pretrain_assets").setLevel(logging.INFO)
    os.environ.setdefault("DAGSTER_HOME", str(project.home()))
    try:
        cli.main(args=None if arguments is None else list(arguments), prog_name="pretrain", standalone_mode=True)
    except PretrainError as error:
        _fail(str(error))
    except Exception as error:
        if not _is_of_storage(error):
            raise
        _fail(
            f"storage: {error}. Check the uri, the permissions, and for s3:// the AWS_* variables; then run it again."
        )


def _is_of_storage(error: Exception) -> bool:
    """Whether a disk or an object store is the cause, not this program."""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in ("botocore", "aiohttp")


def _fail(message: str) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(1)
