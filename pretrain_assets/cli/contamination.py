"""The verb that shows which evaluation items stand in which documents, and what a checkpoint had seen of them.

Invariant: it changes nothing; the search itself is the stage `pretrain decontaminate`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from pretrain_assets.cli.common import as_json


@click.command()
@click.option("--checkpoint", help="Folder of a run or checkpoint, or a recipe name: whose scores stand?")
@click.option("--set", "set_name", help="With --checkpoint: this eval set only.")
@click.option("--results", metavar="FILE", help="With --checkpoint: scores per item, to print over the clean ones too.")
@click.option("--score", "score_field", metavar="FIELD", help="With --results: field of the score [score, acc, ...]")
@click.option("--limit", type=click.IntRange(0), default=20, show_default=True, help="Number of matches shown.")
@click.option("--tag", help="A tag of the decontaminated stage [its newest; of a checkpoint: the version trained on]")
@as_json
@click.pass_obj
def contamination(
    obj: dict[str, Any],
    checkpoint: str | None,
    set_name: str | None,
    results: str | None,
    score_field: str | None,
    limit: int,
    tag: str | None,
    json_output: bool,
) -> None:
    """Evaluation items in the corpus: documents by eval set and source, and the largest matches with their text.

    With --checkpoint: when its run first trained on each item, so which of its checkpoints' scores stand. With
    --results FILE (JSON lines with `set`, `id` and a score, or samples_*.jsonl of lm-evaluation-harness): the score
    over all items and over those that it had not seen.
    """
    if checkpoint is not None:
        _in_time(obj, checkpoint, set_name, results, score_field, limit, tag, json_output)
        return
    for option, value in (("--set", set_name), ("--results", results), ("--score", score_field)):
        if value is not None:
            raise click.UsageError(f"{option} asks about a checkpoint: give --checkpoint as well.")
    from pretrain_assets.curate.contamination_report import contamination_report
    from pretrain_assets.report.contamination_text import contamination_text
    from pretrain_assets.table.versions import find_record, open_pin

    location = obj["location"]
    pin = find_record(location, "decontaminated", tag).pin
    found = contamination_report(open_pin(location, pin), limit=limit)
    click.echo(json.dumps(asdict(found), indent=2) if json_output else contamination_text(found))


def _in_time(
    obj: dict[str, Any],
    which: str,
    set_name: str | None,
    results: str | None,
    score_field: str | None,
    limit: int,
    tag: str | None,
    json_output: bool,
) -> None:
    if score_field is not None and results is None:
        raise click.UsageError("--score names a field of the results: give --results as well.")
    from pretrain_assets.forensics.checkpoints import find_checkpoint
    from pretrain_assets.forensics.contamination.contamination import contamination_in_time
    from pretrain_assets.forensics.contamination.eval_results import score_clean
    from pretrain_assets.forensics.subject import table_of
    from pretrain_assets.report.contamination_in_time_text import in_time_text, scores_text

    subject = find_checkpoint(which, obj["runs"], digests=False)
    location = table_of(subject.run_dir, subject.pin, obj["location"])
    found = contamination_in_time(location, subject, tag=tag, only=set_name, limit=limit)
    scores = () if results is None else score_clean(location, found, results, set_name=set_name, field=score_field)
    if json_output:
        facts = {**asdict(found), "stands": found.stands, "scores": [asdict(one) for one in scores]}
        click.echo(json.dumps(facts, indent=2))
        return
    click.echo("\n\n".join([in_time_text(found), *([scores_text(scores)] if scores else [])]))


VERBS = (contamination,)
