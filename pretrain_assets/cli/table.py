"""Verbs about the table's versions: versions, diff, maintain, delete, release.

Invariant: a verb that only looks never makes a version, and rows go only after they were counted and confirmed.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any

import click

from pretrain_assets.cli.common import as_json
from pretrain_assets.config import MaintainConfig
from pretrain_assets.plural import counted


@click.command()
@as_json
@click.pass_obj
def versions(obj: dict[str, Any], json_output: bool) -> None:
    """The table's versions: what each added, the stage that made it, and who pins it."""
    from pretrain_assets.forensics.pins import pinned_by_runs
    from pretrain_assets.report.text import versions_text
    from pretrain_assets.table.history import list_versions
    from pretrain_assets.table.storage import open_dataset
    from pretrain_assets.table.versions import table_id

    dataset = open_dataset(obj["location"])
    found = list_versions(dataset, pinned_by_runs(obj["runs"], table_id(dataset)))
    if json_output:
        listed = [{**asdict(entry), "pinned_by": entry.pinned_by} for entry in found]
        click.echo(json.dumps(listed, indent=2, default=str))
    else:
        click.echo(versions_text(found))


@click.command()
@click.argument("one", metavar="VERSION")
@click.argument("other", metavar="VERSION")
@as_json
@click.pass_obj
def diff(obj: dict[str, Any], one: str, other: str, json_output: bool) -> None:
    """What changed between two versions: rows, columns, parameters, bytes, stages.

    VERSION: 3, v3 or a tag. The order does not matter: the newer is compared with the older.
    """
    from pretrain_assets.report.text import diff_text
    from pretrain_assets.table.diff import diff as run

    found = run(obj["location"], one, other)
    click.echo(json.dumps(asdict(found), indent=2) if json_output else diff_text(found))


def _seconds(_: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """A time such as 0s, 90m, 12h or 7d, in seconds."""
    match = re.fullmatch(r"([0-9]{1,6})([smhd])", text) if text is not None else None
    if text is not None and match is None:
        raise click.BadParameter(f"{text!r} is not a time such as 0s, 90m, 12h or 7d", param=parameter)
    return int(match[1]) * {"s": 1, "m": 60, "h": 3_600, "d": 86_400}[match[2]] if match else None


@click.command()
@click.option("--dry-run", is_flag=True, help="Only print what would be done.")
@click.option("--older-than", callback=_seconds, metavar="TIME", help="Younger versions stay [7d].")
@click.option("--keep-last", type=click.IntRange(1), help="Versions of every stage that stay [3].")
@click.option(
    "--keep-unfinished", callback=_seconds, metavar="TIME", help="Younger files of unfinished work stay; 0s: none [7d]."
)
@click.option("--deleted-share", type=click.FloatRange(0, 1), help="Rewrite fragments with more deleted rows [0.1].")
@click.option("--purge", is_flag=True, help="The same as --older-than 0s --keep-last 1 --deleted-share 0.")
@as_json
@click.pass_obj
def maintain(
    obj: dict[str, Any],
    dry_run: bool,
    older_than: int | None,
    keep_last: int | None,
    keep_unfinished: int | None,
    deleted_share: float | None,
    purge: bool,
    json_output: bool,
) -> None:
    """Extend the index, merge small fragments, free versions that nobody names, remove leftovers.

    A version stays while a training run, a checkpoint, a person's tag or the index names it, and while it is young or
    one of the newest of its stage. Nothing is done while somebody works on the table.
    """
    from pretrain_assets.forensics.maintenance import maintain as run
    from pretrain_assets.report.text import maintain_text

    asked = {
        "older_than_seconds": older_than,
        "keep_last": keep_last,
        "keep_unfinished_seconds": keep_unfinished,
        "max_deleted_share": deleted_share,
    }
    purging = {"older_than_seconds": 0, "keep_last": 1, "max_deleted_share": 0.0} if purge else {}
    config = MaintainConfig(**{**purging, **{name: value for name, value in asked.items() if value is not None}})  # type: ignore[arg-type]
    report = run(obj["location"], obj["runs"], config, dry_run=dry_run)
    click.echo(json.dumps(asdict(report), indent=2) if json_output else maintain_text(report))


@click.command()
@click.option("--id", "ids", type=click.IntRange(0, 2**63 - 1), multiple=True, help="This row; may be repeated.")
@click.option("--where", help="Rows that satisfy this SQL predicate.")
@click.option("--with-duplicates", is_flag=True, help="Rows with the same text, too.")
@click.option("--dry-run", is_flag=True, help="Only print how many rows match.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
@click.pass_obj
def delete(
    obj: dict[str, Any],
    ids: tuple[int, ...],
    where: str | None,
    with_duplicates: bool,
    dry_run: bool,
    yes: bool,
    json_output: bool,
) -> None:
    """Delete rows in one new version (opt-out). Older versions keep them until they are freed.

    Says which versions those are, what holds them, and what to run.
    """
    from pretrain_assets.forensics.pins import pinned_by_runs
    from pretrain_assets.report.text import deletion_text
    from pretrain_assets.table import delete as table
    from pretrain_assets.table.storage import open_dataset
    from pretrain_assets.table.versions import table_id

    location = obj["location"]
    request = table.Request(ids=ids, where=where, with_duplicates=with_duplicates)
    runs = pinned_by_runs(obj["runs"], table_id(open_dataset(location)))
    found = table.preview(location, request, pinned_by_runs=runs)
    if found.rows and not dry_run:
        if not yes:
            click.echo(deletion_text(found), err=True)
            click.confirm(f"Delete {counted(found.rows, 'row')}?", abort=True, err=True)
        found = table.delete(location, request, pinned_by_runs=runs)
    click.echo(json.dumps(asdict(found), indent=2) if json_output else deletion_text(found))


@click.command()
@click.argument("tag")
@click.option("--force", is_flag=True, help="Release a run's tag although the run is still there.")
@click.pass_obj
def release(obj: dict[str, Any], tag: str, force: bool) -> None:
    """Take TAG away, so that the version it names can be freed: a run's (run.NAME) or a person's."""
    from pretrain_assets.forensics.pins import pinned_by_runs
    from pretrain_assets.table import tags
    from pretrain_assets.table.storage import open_dataset
    from pretrain_assets.table.versions import table_id

    location = obj["location"]
    runs = pinned_by_runs(obj["runs"], table_id(open_dataset(location)))
    version = tags.release(location, tag, pinned_by_runs=runs, force=force)
    click.echo(f"{tag} released; version {version} goes with `pretrain maintain` unless something else names it")


VERBS = (versions, diff, maintain, delete, release)
