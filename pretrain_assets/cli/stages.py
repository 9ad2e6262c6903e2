"""Verbs that run a stage: demo, ingest, dedup, tokenize, index, train.

Invariant: a verb does what the asset of the same stage does, with the same inputs, and prints the version it made.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from pretrain_assets import project
from pretrain_assets.cli.common import as_json, on_table, parse_change, pin_of, print_stage, with_engine
from pretrain_assets.cli.training import exit_unfinished, run_here
from pretrain_assets.config import EngineConfig
from pretrain_assets.errors import ConfigError
from pretrain_assets.table.storage import Location

if TYPE_CHECKING:
    from pretrain_assets.table.lineage import Pin


@click.command()
@click.pass_obj
def demo(obj: dict[str, Any]) -> None:
    """Run the main job on the bundled documents, then show what came of it."""
    from pretrain_assets.demo import run_demo

    run_demo(obj["location"], obj["runs"])


@click.command()
@click.argument("sources", nargs=-1)
@click.option("--extra-column", "extra_columns", multiple=True, help="Keep this column too; may be repeated.")
@click.option(
    "--on-bad-row", type=click.Choice(["raise", "skip"]), default="raise", show_default=True, help="skip: count it."
)
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
    print_stage(run(obj["location"], config), json_output)


@click.command()
@click.option("--max-share-removed", default=0.5, show_default=True, help="Share of a source above which checks warn.")
@click.option("--memory-bytes", default=2 << 30, show_default=True, help="Past it, comparing uses temporary files.")
@with_engine
@as_json
@click.pass_obj
def dedup(obj: dict[str, Any], /, engine: EngineConfig, json_output: bool, **settings: Any) -> None:
    """Mark exact duplicates among the rows that were not compared yet, each with the row that it repeats."""
    from pretrain_assets.config import DedupConfig, from_dict
    from pretrain_assets.curate.dedup import dedup as run

    location, config = obj["location"], from_dict(DedupConfig, settings)
    print_stage(run(location, config, input_pin=pin_of(location, "ingested"), engine=engine), json_output)


@click.command()
@click.option("--tokenizer", help="gpt2, byte or hf:<name or directory> [PRETRAIN_TOKENIZER; the column's, else gpt2]")
@click.option("--beside", default="", metavar="WORD", help="Fill input_ids_WORD and n_tokens_WORD instead.")
@click.option("--text-column", help="text or text_masked [the column's, else text]")
@click.option(
    "--bpe-engine",
    type=click.Choice(["auto", "fastokens", "tiktoken", "transformers"]),
    default="auto",
    show_default=True,
    help="What runs a byte-level BPE; all give the same ids.",
)
@click.option(
    "--on-error", type=click.Choice(["raise", "null"]), default="raise", show_default=True, help="null: count it."
)
@with_engine
@as_json
@click.pass_obj
def tokenize(
    obj: dict[str, Any],
    tokenizer: str | None,
    beside: str,
    text_column: str | None,
    bpe_engine: str,
    on_error: str,
    engine: EngineConfig,
    json_output: bool,
) -> None:
    """Encode the rows that have no tokens yet; with another tokenizer, all rows, in one new version."""
    from pretrain_assets.config import TokenizeConfig, from_dict
    from pretrain_assets.tokenize.columns import tokenize as run

    location = obj["location"]
    settings = {"tokenizer": tokenizer or _tokenizer(location, beside), "beside": beside, "on_error": on_error}
    settings |= {"text_column": text_column or _text_column(location, beside), "engine": bpe_engine}
    config = from_dict(TokenizeConfig, settings)
    print_stage(run(location, config, input_pin=_before_tokens(location), engine=engine), json_output)


def _text_column(location: Location, beside: str) -> str:
    """The one that made the token column, else `text`: a forgotten option remakes nothing."""
    from pretrain_assets.table.schema import making_parameters
    from pretrain_assets.table.storage import open_dataset

    schema, column = open_dataset(location).schema, f"input_ids_{beside}" if beside else "input_ids"
    made = making_parameters(schema.field(column)) if column in schema.names else {}
    return str(made.get("text_column", "text"))


def _before_tokens(location: Location) -> Pin:
    """The newest version of all stages between ingested and tokenized, such as `model_scored_quality`."""
    from pretrain_assets.table.storage import open_dataset
    from pretrain_assets.table.versions import flow_place, records

    first, last = flow_place("ingested"), flow_place("tokenized")
    made = {record.stage for record in records(open_dataset(location)) if first < flow_place(record.stage) < last}
    return pin_of(location, "deduped", *made)


def _tokenizer(location: Location, beside: str) -> str:
    """The one that the environment names, else the one that made the column: a forgotten option remakes nothing.

    Raises:
        ConfigError: the column's tokenizer cannot be loaded by its name alone.
    """
    from pretrain_assets.table.schema import tokenizer_identity
    from pretrain_assets.table.storage import open_dataset

    dataset, column = open_dataset(location), f"input_ids_{beside}" if beside else "input_ids"
    if project.setting("TOKENIZER", "") or column not in dataset.schema.names:
        return project.tokenizer()
    name = tokenizer_identity(dataset, column).name
    if name.startswith("hf:"):
        raise ConfigError(f"{column} was made by {name}: give its place with --tokenizer hf:<name or directory>.")
    return name


@click.command()
@click.option("--with-position/--without-position", default=True, show_default=True, help="Phrases need positions.")
@click.option(
    "--exact-below",
    type=int,
    default=50_000,
    show_default=True,
    help="Fewer vectors than this get no index: all are read.",
)
@as_json
@click.pass_obj
def index(obj: dict[str, Any], with_position: bool, exact_below: int, json_output: bool) -> None:
    """Bring the indexes up to date: full text, and vectors where the table has them."""
    from pretrain_assets.config import IndexConfig
    from pretrain_assets.forensics.indexes.index import build_index
    from pretrain_assets.report.search_text import index_text

    location = obj["location"]
    config = IndexConfig(with_position=with_position, exact_below=exact_below)
    result = build_index(location, config, input_pin=pin_of(location, "tokenized"))
    print_stage(result, json_output)
    if not json_output:
        click.echo(index_text(result.record))


@click.command()
@click.argument("recipe")
@click.option(
    "--set", "changes", multiple=True, metavar="NAME=VALUE", help="Change a setting: --set train.max_steps=50"
)
@click.option("--nproc", type=int, help="Ranks on this machine [PRETRAIN_NPROC_PER_NODE; 2]")
@click.option("--tag", help="Train on this tag of the stage of its tokens instead of the newest.")
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

    from pretrain_assets import recipes
    from pretrain_assets.config import override
    from pretrain_assets.launch import contract, local
    from pretrain_assets.report.text import data_wait_text
    from pretrain_assets.table.tags import protect_run
    from pretrain_assets.train.spec import make_spec
    from pretrain_assets.train.trackers import check_trackers

    location = obj["location"]
    asked = override(recipes.get(recipe), dict(parse_change(change) for change in changes))
    resolved, record = on_table(location, asked, tag)
    spec = make_spec(location, record.pin, record.tag, resolved, obj["runs"])
    ranks = project.nproc_per_node() if nproc is None else nproc
    local.check_nproc(spec, ranks)
    if not write_spec:  # another node may have what is missing here
        check_trackers(resolved.execution.trackers)
    protect_run(location, record.pin, spec.run_dir)
    if write_spec:
        argv = local.torchrun_argv(contract.write_spec(spec), ranks)
        click.echo(json.dumps({"run_dir": spec.run_dir, "argv": argv}) if json_output else shlex.join(argv))
        return
    result = run_here(spec, ranks)
    if result["status"] != "done":
        exit_unfinished(spec, result, json_output)
    if json_output:
        click.echo(json.dumps(result, indent=2))
    else:
        loss = "n/a" if result.get("val_loss") is None else f"{result['val_loss']:.4f}"
        click.echo(f"done: validation loss {loss}, {data_wait_text(result)}, checkpoint {result['checkpoint']}")


VERBS = (demo, ingest, dedup, tokenize, index, train)
