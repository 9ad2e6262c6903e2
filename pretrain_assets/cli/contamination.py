"""The verb that shows which evaluation items stand in which documents.

Invariant: it changes nothing; the search itself is the stage `pretrain decontaminate`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from pretrain_assets.cli.common import as_json


@click.command()
@click.option("--limit", type=click.IntRange(0), default=20, show_default=True, help="Number of matches shown.")
@click.option("--tag", help="A tag of the decontaminated stage instead of its newest version.")
@as_json
@click.pass_obj
def contamination(obj: dict[str, Any], limit: int, tag: str | None, json_output: bool) -> None:
    """Evaluation items in the corpus: documents by eval set and source, and the largest matches with their text."""
    from pretrain_assets.curate.contamination_report import contamination_report
    from pretrain_assets.report.contamination_text import contamination_text
    from pretrain_assets.table.versions import find_record, open_pin

    location = obj["location"]
    pin = find_record(location, "decontaminated", tag).pin
    found = contamination_report(open_pin(location, pin), limit=limit)
    click.echo(json.dumps(asdict(found), indent=2) if json_output else contamination_text(found))


VERBS = (contamination,)
