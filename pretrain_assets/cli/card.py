"""The verb that makes a run card: card.

Invariant: it writes the card and changes nothing else, neither in the table nor in a run.
"""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

import click

from pretrain_assets.cli.common import as_json
from pretrain_assets.errors import ConfigError


@click.command()
@click.argument("checkpoint", required=False)
@click.option("-o", "--out", metavar="PLACE", help="A file.html, a file.md, or a folder for both [the run's folder]")
@as_json
@click.pass_obj
def card(obj: dict[str, Any], checkpoint: str | None, out: str | None, json_output: bool) -> None:
    """One page on a model: its data from the files on, what it saw of them, how training went, what it writes.

    CHECKPOINT: folder of a run or checkpoint, or a recipe's name [the newest run]. The HTML needs no other file, no
    script and no network; it names no host and no path. With --json the facts are printed, and written only with -o.
    """
    from pretrain_assets.forensics.card.run_card import make_run_card
    from pretrain_assets.forensics.checkpoints import with_checkpoint
    from pretrain_assets.report.card.files import write_run_card
    from pretrain_assets.table.storage import absolute

    if out and PurePosixPath(out).suffix not in ("", ".html", ".md"):
        raise ConfigError(f"--out {out}: give a name that ends in .html or .md, or a folder for both files")
    found, made = with_checkpoint(
        checkpoint, obj["runs"], lambda one: make_run_card(obj["location"], one), digests=False
    )
    written = write_run_card(made, absolute(out) if out else found.run_dir) if out or not json_output else ()
    if json_output:
        click.echo(json.dumps({"files": written, **made.to_dict()}, indent=2, ensure_ascii=False))
        return
    click.echo(f"{found.uri} ({found.pin})")
    for place in written:
        click.echo(f"  {place}")
    for part, reason in made.missing.items():
        click.echo(f"  not in it: {part}: {reason}")


VERBS = (card,)
