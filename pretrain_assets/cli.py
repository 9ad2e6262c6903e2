"""The `pretrain` command. Each verb resolves its inputs, makes one domain call and prints the answer.

Invariant: exit code 0 only when the thing asked for happened; an error the user can mend is one message, no traceback.
Heavy imports happen inside the verbs, so `--help` is quick.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

import click

from pretrain_assets import project
from pretrain_assets.errors import ConfigError, PretrainError
from pretrain_assets.table.storage import Location, absolute

if TYPE_CHECKING:
    from pretrain_assets.table.lineage import Pin, StageResult

as_json = click.option("--json", "json_output", is_flag=True, help="Print one JSON document instead of text.")
checkpoint_argument = click.argument("checkpoint", required=False)


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


@cli.command()
@click.pass_obj
def demo(obj: dict[str, Any]) -> None:
    """Run the main job on the bundled documents, then show what came of it."""
    from pretrain_assets.demo import run_demo

    run_demo(obj["location"], obj["runs"])


@cli.command()
@click.argument("sources", nargs=-1)
@click.option("--extra-column", "extra_columns", multiple=True, help="Keep this column too; may be repeated.")
@click.option("--on-bad-row", default="raise", show_default=True, help="raise, or skip and count.")
@click.option("--text-column", default="text", show_default=True, help="Column that holds the document.")
@as_json
@click.pass_obj
def ingest(obj: dict[str, Any], /, sources: tuple[str, ...], json_output: bool, **settings: Any) -> None:
    """Append documents to the table; files seen before are skipped.

    SOURCES: paths, globs, s3://, hf://datasets/..., bundled, or synthetic:ROWS:SEED [PRETRAIN_SOURCES; bundled].
    """
    from pretrain_assets.config import IngestConfig, from_dict
    from pretrain_assets.ingest.append import ingest as run

    config = from_dict(IngestConfig, {"sources": list(sources or project.sources()), **settings})
    _print_stage(run(obj["location"], config), json_output)


@cli.command()
@as_json
@click.pass_obj
def dedup(obj: dict[str, Any], json_output: bool) -> None:
    """Mark exact duplicates among the rows that were not compared yet."""
    from pretrain_assets.config import DedupConfig
    from pretrain_assets.curate.dedup import dedup as run

    location = obj["location"]
    _print_stage(run(location, DedupConfig(), input_pin=_pin_of(location, "ingested")), json_output)


@cli.command()
@click.option("--tokenizer", help="gpt2, byte or hf:<name or directory> [PRETRAIN_TOKENIZER; gpt2]")
@as_json
@click.pass_obj
def tokenize(obj: dict[str, Any], tokenizer: str | None, json_output: bool) -> None:
    """Encode the rows that have no tokens yet; with another tokenizer, all rows, in one new version."""
    from pretrain_assets.config import TokenizeConfig
    from pretrain_assets.tokenize.columns import tokenize as run

    location = obj["location"]
    config = TokenizeConfig(tokenizer=tokenizer or project.tokenizer())
    _print_stage(run(location, config, input_pin=_pin_of(location, "deduped")), json_output)


@cli.command()
@click.argument("recipe")
@click.option(
    "--set", "changes", multiple=True, metavar="NAME=VALUE", help="Change a setting: --set train.max_steps=50"
)
@click.option("--nproc", type=int, help="Ranks on this machine [PRETRAIN_NPROC_PER_NODE; 2]")
@click.option("--tag", help="Train on this tag of the tokenized stage instead of the newest.")
@click.option("--write-spec", is_flag=True, help="Only write run.json and print the torchrun command.")
@as_json
@click.pass_obj
def train(
    obj: dict[str, Any],
    recipe: str,
    changes: tuple[str, ...],
    nproc: int | None,
    tag: str | None,
    write_spec: bool,
    json_output: bool,
) -> None:
    """Train RECIPE on the newest tokenized version; the same command again resumes."""
    import shlex
    import signal

    from pretrain_assets import recipes
    from pretrain_assets.config import override
    from pretrain_assets.launch import contract, local
    from pretrain_assets.table.versions import find_record
    from pretrain_assets.train.spec import make_spec

    location = obj["location"]
    record = find_record(location, "tokenized", tag)
    resolved = override(recipes.get(recipe), dict(_parse_change(change) for change in changes))
    spec = make_spec(location, record.pin, record.tag, resolved, obj["runs"])
    ranks = project.nproc_per_node() if nproc is None else nproc
    local.check_nproc(spec, ranks)
    if write_spec:
        argv = local.torchrun_argv(contract.write_spec(spec), ranks)
        click.echo(json.dumps({"run_dir": spec.run_dir, "argv": argv}) if json_output else shlex.join(argv))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both wait until the run has saved
    try:
        result = local.run_local(spec, ranks)
    except KeyboardInterrupt:
        result = contract.read_result(spec.run_dir) or {"status": "stopped"}
    if result["status"] != "done":
        at = f" at step {result['step']}" if "step" in result else ""
        click.echo(
            f"{result['status']}{at}: {result.get('error', 'on request')}\n"
            f"The same command again goes on from the newest checkpoint in {spec.run_dir}.",
            err=True,
        )
        sys.exit(contract.EXIT_STOPPED if result["status"] == "stopped" else contract.EXIT_FAILED)
    if json_output:
        click.echo(json.dumps(result, indent=2))
    else:
        click.echo(f"done: validation loss {result['val_loss']:.4f}, checkpoint {result['checkpoint']}")


@cli.command()
@click.option("--with-position", is_flag=True, help="Keep word positions, needed for phrase search.")
@as_json
@click.pass_obj
def index(obj: dict[str, Any], with_position: bool, json_output: bool) -> None:
    """Bring the full-text index up to date."""
    from pretrain_assets.config import IndexConfig
    from pretrain_assets.forensics.index import build_index

    location = obj["location"]
    config = IndexConfig(with_position=with_position)
    _print_stage(build_index(location, config, input_pin=_pin_of(location, "tokenized")), json_output)


@cli.command()
@click.argument("query")
@click.option("--checkpoint", help="Folder of a run or checkpoint, or a recipe name [the newest run]")
@click.option("--limit", type=click.IntRange(1), default=5, show_default=True, help="Number of hits.")
@click.option("--where", help="SQL predicate that hits must satisfy.")
@as_json
@click.pass_obj
def search(
    obj: dict[str, Any], query: str, checkpoint: str | None, limit: int, where: str | None, json_output: bool
) -> None:
    """Search the rows a checkpoint was pinned to; each hit says whether and when the model saw it."""
    from pretrain_assets.forensics.checkpoints import find_checkpoint
    from pretrain_assets.forensics.search import search_seen
    from pretrain_assets.report.text import hits_text

    found = find_checkpoint(checkpoint, obj["runs"])
    hits = search_seen(obj["location"], query, checkpoint=found, limit=limit, where=where)
    if json_output:
        click.echo(json.dumps({"checkpoint": found.uri, "hits": [asdict(hit) for hit in hits]}, indent=2))
    else:
        click.echo(f"{found.uri} ({found.pin})\n{hits_text(hits)}")


@cli.command()
@checkpoint_argument
@as_json
@click.pass_obj
def lineage(obj: dict[str, Any], checkpoint: str | None, json_output: bool) -> None:
    """The chain from CHECKPOINT (default: of the newest run) back to the source files."""
    from pretrain_assets.forensics.checkpoints import find_checkpoint
    from pretrain_assets.forensics.lineage import lineage_of
    from pretrain_assets.report.text import lineage_text

    found = lineage_of(obj["location"], find_checkpoint(checkpoint, obj["runs"]))
    click.echo(json.dumps(found.to_dict(), indent=2) if json_output else lineage_text(found))


@cli.command()
@as_json
@click.pass_obj
def versions(obj: dict[str, Any], json_output: bool) -> None:
    """The table's versions, and the stage that made each."""
    from pretrain_assets.report.text import versions_text
    from pretrain_assets.table.storage import open_dataset
    from pretrain_assets.table.versions import list_versions

    found = list_versions(open_dataset(obj["location"]))
    if json_output:
        click.echo(json.dumps([asdict(entry) for entry in found], indent=2, default=str))
    else:
        click.echo(versions_text(found))


@cli.command("recipes")
@click.argument("name", required=False)
def recipes_command(name: str | None) -> None:
    """Named recipes, or all settings of one."""
    from pretrain_assets import recipes
    from pretrain_assets.config import to_dict

    if name:
        click.echo(json.dumps(to_dict(recipes.get(name)), indent=2))
        return
    for recipe, make in recipes.RECIPES.items():
        click.echo(f"{recipe:12} {(make.__doc__ or '').splitlines()[0]}")


def _pin_of(location: Location, stage: str) -> Pin:
    from pretrain_assets.table.versions import find_record

    return find_record(location, stage).pin


def _parse_change(text: str) -> tuple[str, Any]:
    """`train.max_steps=50` as name and value; a value that is not JSON is text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text!r} is not NAME=VALUE, for example --set train.max_steps=50")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _print_stage(result: StageResult, json_output: bool) -> None:
    record = result.record
    if json_output:
        click.echo(json.dumps({**asdict(record), "tag": record.tag, "changed": result.changed}, indent=2))
    elif result.changed:
        ledger = ", ".join(f"{name} {count:,}" for name, count in record.ledger.items())
        click.echo(f"{record.tag}: {record.rows:,} rows, {record.bytes_added / 1e6:.2f} MB added ({ledger})")
    else:
        click.echo(f"{record.tag}: nothing to do, no new version")


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


if __name__ == "__main__":
    main()
