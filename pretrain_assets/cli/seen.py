"""Verbs of the time machine: seen, from a step to its documents; where, from documents to their steps; ledger.

Invariant: they change nothing, neither in the table nor in a run.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import click

from pretrain_assets.cli.common import as_json
from pretrain_assets.cli.model import tokenizer_place

SHOWN_PARTS = 20
"""Parts of documents in the text of a step, unless --limit says otherwise; JSON has all."""

ranks_option = click.option("--ranks", type=click.IntRange(1), help="Number of ranks [as the run's metrics say]")


@click.command()
@click.argument("run", required=False)
@click.option("--step", type=int, required=True, help="Optimizer step, from 1.")
@click.option("--rank", type=int, help="Only what this rank had, from 0.")
@ranks_option
@click.option("--block", type=int, help="Only this block, by its number in the epoch.")
@click.option("--limit", type=click.IntRange(1), help=f"Parts of documents to show [{SHOWN_PARTS}; --json: all]")
@tokenizer_place
@as_json
@click.pass_obj
def seen(
    obj: dict[str, Any],
    run: str | None,
    step: int,
    rank: int | None,
    ranks: int | None,
    block: int | None,
    limit: int | None,
    tokenizer: str | None,
    json_output: bool,
) -> None:
    """The documents that a model saw at one step, in block order, with the text of each part.

    RUN: folder of a run or checkpoint, name of a run or recipe [the newest run]. It needs no checkpoint, and steps that
    it has not made yet can be asked about as well.
    """
    from pretrain_assets.forensics.seen import seen_at
    from pretrain_assets.report.seen_text import seen_text

    found = seen_at(
        run,
        step,
        location=obj["location"],
        runs_uri=obj["runs"],
        rank=rank,
        ranks=ranks,
        block=block,
        limit=limit or (None if json_output else SHOWN_PARTS),
        whole=json_output,
        tokenizer=tokenizer,
    )
    click.echo(json.dumps(asdict(found), indent=2, ensure_ascii=False) if json_output else seen_text(found))


@click.command()
@click.argument("run", required=False)
@click.option("--doc", "docs", multiple=True, required=True, help="Table's id, or the source's doc_id; repeatable.")
@ranks_option
@as_json
@click.pass_obj
def where(obj: dict[str, Any], run: str | None, docs: tuple[str, ...], ranks: int | None, json_output: bool) -> None:
    """Every step, block and place at which a model saw a document, or why it did not.

    RUN: folder of a run or checkpoint, name of a run or recipe [the newest run]. What comes after the checkpoint's step
    is told apart.
    """
    from pretrain_assets.forensics.where import where as find
    from pretrain_assets.report.where_text import where_text

    found = find(run, docs, location=obj["location"], runs_uri=obj["runs"], ranks=ranks)
    click.echo(json.dumps(asdict(found), indent=2, ensure_ascii=False) if json_output else where_text(found))
    if any(document.why and document.why.kind == "unknown" for document in found.documents):
        sys.exit(1)


@click.command()
@click.argument("checkpoint", required=False)
@as_json
@click.pass_obj
def ledger(obj: dict[str, Any], checkpoint: str | None, json_output: bool) -> None:
    """Every row and token on the way into a checkpoint, stage by stage and epoch by epoch: in = out by reason.

    CHECKPOINT: folder of a run or checkpoint, name of a run or recipe [the newest run]. Exit code 1 where something is
    not accounted for.
    """
    from pretrain_assets.forensics.checkpoints import find_checkpoint
    from pretrain_assets.forensics.ledger import ledger_of
    from pretrain_assets.report.ledger_text import ledger_text

    found = ledger_of(obj["location"], find_checkpoint(checkpoint, obj["runs"], digests=False))
    click.echo(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) if json_output else ledger_text(found))
    if found.gaps:
        sys.exit(1)


VERBS = (seen, where, ledger)
