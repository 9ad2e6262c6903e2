"""The verbs that use the loader alone: profile-loader and pack-sample.

Invariant: they read the version, rows and splits that `pretrain train` would, and change nothing but the cached plan,
which that run then opens.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pretrain_assets import project
from pretrain_assets.cli.common import as_json, check_folder, on_table, parse_change
from pretrain_assets.errors import CheckpointError, ConfigError, FilterError
from pretrain_assets.plural import counted

if TYPE_CHECKING:
    from pretrain_assets.config import Recipe
    from pretrain_assets.loader.stream import BlockLoader
    from pretrain_assets.loader.variants import Variant
    from pretrain_assets.table.lineage import LineageRecord
    from pretrain_assets.table.storage import Location

CANDIDATES = ("gpt2_124m", "demo")
"""Recipes to profile when none is named: the first one that the table has rows for."""


@click.command("profile-loader")
@click.argument("recipe", required=False)
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE", help="Change a setting, as for train.")
@click.option("--tag", help="Read this tag of the stage of its tokens instead of the newest.")
@click.option("--ranks", type=click.IntRange(1), help="Ranks of the run; one is measured [PRETRAIN_NPROC_PER_NODE; 2]")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), help="Least time per setting [5]")
@click.option("--batches", type=click.IntRange(1), help="Least number of global batches per setting instead.")
@click.option(
    "--tokens-per-second",
    type=click.FloatRange(0, min_open=True),
    help="What a rank of the trainer takes when it never waits [the newest run of the recipe]",
)
@click.option(
    "--grid",
    "words",
    multiple=True,
    metavar="SETTING=A,B,...",
    help="Values of window_tokens, io_threads or read_ahead_bytes to try; may be repeated [around the recipe's]",
)
@click.option("--order", is_flag=True, help="Also try what would change the order of the data.")
@click.option("--plot", type=click.Path(dir_okay=False, writable=True, path_type=Path), help="Write this SVG.")
@as_json
@click.pass_obj
def profile_loader(
    obj: dict[str, Any],
    recipe: str | None,
    changes: tuple[str, ...],
    tag: str | None,
    ranks: int | None,
    seconds: float | None,
    batches: int | None,
    tokens_per_second: float | None,
    words: tuple[str, ...],
    order: bool,
    plot: Path | None,
    json_output: bool,
) -> None:
    """Run the loader of RECIPE alone over a grid of settings; say what holds it up, and which setting to change.

    Without RECIPE: the first of gpt2_124m and demo that the table has rows for.
    """
    check_folder("--plot", plot)
    from pretrain_assets.loader.diagnosis import diagnose
    from pretrain_assets.loader.profile import SECONDS, act_out, profile
    from pretrain_assets.loader.stream import check_world_size
    from pretrain_assets.loader.variants import default_choices, order_variants, parse_choices, variants_of
    from pretrain_assets.report.profile_plot import profile_svg
    from pretrain_assets.report.profile_text import profile_text
    from pretrain_assets.table.storage import is_remote

    if seconds and batches:
        raise ConfigError(f"--seconds {seconds:g} and --batches {batches} are two ways to say how long: give one")
    choices = parse_choices(words)
    location, world_size = obj["location"], project.nproc_per_node() if ranks is None else ranks
    remote = is_remote(location.uri)
    resolved, record = _resolve(location, recipe, changes, tag)
    check_world_size(resolved.data.num_splits, world_size)
    variants = variants_of(resolved, choices or default_choices(resolved.loader, remote=remote))
    variants += order_variants(resolved, world_size=world_size) if order else []

    def loader_of(variant: Variant) -> BlockLoader:
        return _loader(location, record, variant.recipe, world_size)

    def starting(variant: Variant) -> None:
        click.echo(f"[{variants.index(variant) + 1}/{len(variants)}] {variant.name}", err=True)

    measurements = profile(loader_of, variants, seconds=seconds or SECONDS, batches=batches, starting=starting)
    trainer, run_dir = (tokens_per_second, None) if tokens_per_second else _speed(resolved.name, obj["runs"])
    time = measurements[0].seconds
    pace = act_out(loader_of(variants[0]), variants[0], trainer, seconds=time) if trainer else None
    diagnosis = diagnose(measurements, remote=remote, trainer=trainer, pace=pace)
    head = f"{resolved.name} on {record.tag} ({record.pin}), one of {counted(world_size, 'rank')}"
    if plot:
        plot.write_text(profile_svg(head, measurements, best=diagnosis.best, trainer=trainer))
    if json_output:
        facts = {
            "recipe": resolved.name,
            "pin": str(record.pin),
            "tag": record.tag,
            "ranks": world_size,
            "batch_tokens": resolved.train.global_batch_tokens // world_size,
            "plan_seconds": measurements[0].plan_seconds,
            "measurements": [measured.to_dict() for measured in measurements],
            "trainer": {"tokens_per_second": trainer, "run_dir": run_dir, "acted_out": pace and asdict(pace)},
            "diagnosis": asdict(diagnosis),
            "plot": plot and str(plot),
        }
        click.echo(json.dumps(facts, indent=2))
        return
    click.echo(f"{head}; plan ready after {measurements[0].plan_seconds:.2f} s")
    if trainer:
        source = f" (newest run, {run_dir})" if run_dir else ""
        click.echo(f"a rank of the trainer takes {trainer:,.0f} tokens/s{source}")
    click.echo(profile_text(measurements, diagnosis, recipe=resolved.name))
    if plot:
        click.echo(f"\nplot: {plot}")


@click.command("pack-sample")
@click.argument("recipe")
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="File to write, .npy.")
@click.option("--blocks", type=click.IntRange(1), default=1024, show_default=True, help="Blocks to write.")
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE", help="Change a setting, as for train.")
@click.option("--tag", help="Read this tag of the stage of its tokens instead of the newest.")
@as_json
@click.pass_obj
def pack_sample(
    obj: dict[str, Any],
    recipe: str,
    out: Path,
    blocks: int,
    changes: tuple[str, ...],
    tag: str | None,
    json_output: bool,
) -> None:
    """Write the first packed blocks of RECIPE to a file that numpy maps into memory, for benchmarks elsewhere."""
    from pretrain_assets.loader.sample import write_sample

    location = obj["location"]
    resolved, record = _resolve(location, recipe, changes, tag)
    sample = write_sample(_loader(location, record, resolved, 1), out, blocks)
    if json_output:
        click.echo(json.dumps(sample.facts, indent=2))
        return
    size = out.stat().st_size / 1e6
    count, seq_len = sample.blocks.shape
    click.echo(
        f"{out}: {counted(count, 'block')} of {seq_len:,} tokens as {sample.blocks.dtype}, {size:.1f} MB, "
        f"from {record.tag}"
    )


def _resolve(
    location: Location, name: str | None, changes: tuple[str, ...], tag: str | None
) -> tuple[Recipe, LineageRecord]:
    """The recipe asked for, or the first candidate whose filter keeps enough rows for one step; and its version.

    Raises:
        ConfigError: no candidate fits.
    """
    from pretrain_assets import recipes
    from pretrain_assets.config import override
    from pretrain_assets.loader.schedule import Schedule

    settings = dict(parse_change(change) for change in changes)
    if name:
        return on_table(location, override(recipes.get(name), settings), tag)
    reasons = []
    for candidate in CANDIDATES:
        try:
            recipe, record = on_table(location, override(recipes.get(candidate), settings), tag)
            Schedule(_loader(location, record, recipe, 1).plan, recipe.cycles_per_step).steps_in(0)
            return recipe, record
        except (ConfigError, FilterError) as error:
            reasons.append(f"{candidate}: {error}")
    raise ConfigError(
        "No recipe fits this table as it is; name one and change it, for example `pretrain profile-loader demo --set "
        '"data.filter=NOT is_dup"`.\n' + "\n".join(reasons)
    )


def _loader(location: Location, record: LineageRecord, recipe: Recipe, world_size: int) -> BlockLoader:
    from pretrain_assets.loader.stream import BlockLoader
    from pretrain_assets.table.schema import tokenizer_identity
    from pretrain_assets.table.versions import open_pin

    tokenizer = tokenizer_identity(open_pin(location, record.pin), recipe.data.token_column)
    return BlockLoader(location, record.pin, recipe.data, tokenizer, world_size=world_size, settings=recipe.loader)


def _speed(recipe: str, runs_uri: str) -> tuple[float | None, str | None]:
    """Tokens/s that a rank of the recipe's newest run took while it did not wait for data, and that run's folder."""
    from pretrain_assets.forensics.checkpoints import find_checkpoint
    from pretrain_assets.train.metrics import read_metrics, speed_per_rank

    try:
        run_dir = find_checkpoint(recipe, runs_uri).run_dir
    except CheckpointError:
        return None, None
    speed = speed_per_rank(read_metrics(run_dir))
    return speed, run_dir if speed else None


VERBS = (profile_loader, pack_sample)
