"""Verbs about the table's versions.

Invariant: a verb that only looks never makes a version.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from pretrain_assets.cli.common import as_json


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


VERBS = (versions, diff)
