"""The verb that trains a run again without some documents, and compares the two: replay.

Invariant: the original run is read and never written; the same command again goes on, or compares what is done.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pretrain_assets import project
from pretrain_assets.cli.common import as_json, check_folder, parse_change
from pretrain_assets.cli.training import exit_unfinished, run_here
from pretrain_assets.errors import ConfigError, InputError

if TYPE_CHECKING:
    from pretrain_assets.forensics.replays.compare import Comparison
    from pretrain_assets.forensics.replays.replay import ReplayPlan


@click.command()
@click.argument("checkpoint", required=False)
@click.option("--without", "file", metavar="FILE", help="Ids of documents to leave out, one per line; - for stdin.")
@click.option("--id", "names", multiple=True, metavar="ID", help="Leave this document out too; may be repeated.")
@click.option("--where", metavar="SQL", help="Leave out the rows of which this is true too.")
@click.option("--from-step", type=click.IntRange(0), help="Begin at this checkpoint of the original [newest clean one]")
@click.option("--steps", type=click.IntRange(1), help="Stop after so many steps from there [train to the end]")
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE", help="Change a setting of execution or loader.")
@click.option("--nproc", type=int, help="Ranks on this machine [PRETRAIN_NPROC_PER_NODE; 2]")
@click.option("--dry-run", is_flag=True, help="Only say what would be done, and what it would cost.")
@click.option(
    "--compare", "only_compare", is_flag=True, help="Only compare: CHECKPOINT, a replay, or the one of these documents."
)
@click.option("--plot", type=click.Path(path_type=Path), help="Draw both loss curves: FILE.svg or FILE.html.")
@as_json
@click.pass_obj
def replay(
    obj: dict[str, Any],
    checkpoint: str | None,
    file: str | None,
    names: tuple[str, ...],
    where: str | None,
    from_step: int | None,
    steps: int | None,
    changes: tuple[str, ...],
    nproc: int | None,
    dry_run: bool,
    only_compare: bool,
    plot: Path | None,
    json_output: bool,
) -> None:
    """Train a run again without some documents, everything else in place, and compare.

    CHECKPOINT: folder of a run or checkpoint, or a recipe's name [the newest run that is no replay]. Ids that are no
    numbers are the sources' own. The documents' places become holes: padding that nothing is learned from. It begins
    at the newest checkpoint that had seen none of them, which gives what a run from step 0 would; its folder lies
    beside the original's. The same command again goes on, and compares once all is trained.
    """
    from pretrain_assets.forensics.checkpoints import find_checkpoint, find_run
    from pretrain_assets.forensics.chosen import choose
    from pretrain_assets.forensics.replays.compare import compare, is_replay
    from pretrain_assets.forensics.replays.replay import plan_replay
    from pretrain_assets.forensics.subject import table_of
    from pretrain_assets.launch import contract, local
    from pretrain_assets.report.replay_text import plan_text
    from pretrain_assets.table.tags import protect_run

    _check_plot(plot)
    wanted = [*names, *(_names(file) if file else [])]
    if not (file or names or where is not None):
        run_dir = find_run(checkpoint, obj["runs"])
        if not only_compare and not is_replay(run_dir):
            raise ConfigError("Which documents? Give --without FILE, --id ID once or more, or --where SQL.")
        _show(compare(run_dir), plot, json_output)
        return
    original = find_checkpoint(checkpoint, obj["runs"], digests=False)
    location = table_of(original.run_dir, original.pin, obj["location"])
    chosen = choose(location, original.pin, wanted, where)
    settings = dict(parse_change(change) for change in changes)
    plan = plan_replay(location, original, chosen, from_step=from_step, steps=steps, changes=settings)
    if only_compare:
        _show(compare(plan.run_dir), plot, json_output, plan)
        return
    ranks = project.nproc_per_node() if nproc is None else nproc
    local.check_nproc(plan.spec, ranks)
    if dry_run:
        click.echo(json.dumps(plan.to_dict(), indent=2) if json_output else plan_text(plan))
        return
    click.echo(plan_text(plan), err=True)
    protect_run(location, original.pin, plan.run_dir)
    result: dict[str, Any] = {"status": "done"} if contract.finished_result(plan.spec) else run_here(plan.spec, ranks)
    as_asked = result["status"] == "stopped" and result.get("step", 0) >= plan.last_step
    if result["status"] != "done" and not as_asked:
        exit_unfinished(plan.spec, result, json_output)
    _show(compare(plan.run_dir), plot, json_output, plan)


def _names(file: str) -> list[str]:
    """The ids in a file, or on the standard input."""
    from pretrain_assets.forensics.chosen import names_in

    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--without {file} cannot be read: {error}. Give a text file with one id per line.") from error
    found = names_in(text.splitlines())
    if not found:
        raise InputError(f"--without {file} names no document: give one id per line")
    return found


def _check_plot(plot: Path | None) -> None:
    check_folder("--plot", plot)
    if plot is not None and plot.suffix not in (".svg", ".html"):
        raise ConfigError(f"--plot {plot}: give a name that ends in .svg or .html")


def _show(found: Comparison, plot: Path | None, json_output: bool, plan: ReplayPlan | None = None) -> None:
    from pretrain_assets.report.replay_plot import replay_html, replay_svg
    from pretrain_assets.report.replay_text import comparison_text

    if plot is not None:
        plot.write_text(replay_html(found) if plot.suffix == ".html" else replay_svg(found))
    if json_output:
        facts = asdict(found) | ({"plan": plan.to_dict()} if plan else {})
        click.echo(json.dumps(facts, indent=2))
        return
    click.echo(comparison_text(found))
    if plot is not None:
        click.echo(f"\nboth curves: {plot}")


VERBS = (replay,)
