"""What several verbs share: options, the pin of a stage, and how a stage's result is printed.

Invariant: imports nothing heavy and no verb, so that every file of verbs can import it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from pretrain_assets.table.storage import Location

if TYPE_CHECKING:
    from pretrain_assets.table.lineage import Pin, StageResult

as_json = click.option("--json", "json_output", is_flag=True, help="Print one JSON document instead of text.")


def pin_of(location: Location, stage: str) -> Pin:
    """The pin that a stage last committed."""
    from pretrain_assets.table.versions import find_record

    return find_record(location, stage).pin


def print_stage(result: StageResult, json_output: bool) -> None:
    """Print what a stage did."""
    record = result.record
    if json_output:
        click.echo(json.dumps({**asdict(record), "tag": record.tag, "changed": result.changed}, indent=2))
    elif result.changed:
        ledger = ", ".join(f"{name} {count:,}" for name, count in record.ledger.items())
        click.echo(f"{record.tag}: {record.rows:,} rows, {record.bytes_added / 1e6:.2f} MB added ({ledger})")
    else:
        click.echo(f"{record.tag}: nothing to do, no new version")
