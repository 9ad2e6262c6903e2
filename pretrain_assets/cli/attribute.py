"""The verb that asks where a text comes from: attribute.

Invariant: changes nothing, neither in the table nor in a run.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

import click

from pretrain_assets.cli.common import as_json
from pretrain_assets.cli.model import tokenizer_place
from pretrain_assets.errors import ConfigError

if TYPE_CHECKING:
    from pretrain_assets.forensics.attribution.attribution import Attribution
    from pretrain_assets.forensics.checkpoints import Checkpoint


@click.command()
@click.argument("checkpoint", required=False)
@click.option("--text", help="The text.")
@click.option("--file", type=click.File(encoding="utf-8"), help="A file with the text; - for standard input.")
@click.option("--prompt", help="Let the model continue this, and attribute what it writes.")
@click.option("--with-prompt", is_flag=True, help="Attribute the prompt's own words as well.")
@click.option(
    "--num-tokens", "--tokens", type=click.IntRange(1), default=100, show_default=True, help="Most it writes."
)
@click.option("--temperature", type=float, default=0.8, show_default=True, help="0: the likeliest token each time.")
@click.option("--top-k", type=int, default=50, show_default=True, help="Draw from so many tokens; 0: from all.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same text.")
@click.option("--min-tokens", type=click.IntRange(1), help="Tokens of the shortest run that counts [8; 32 of bytes]")
@click.option("--limit", type=click.IntRange(1), default=5, show_default=True, help="Documents to show.")
@click.option("--exact/--candidates", default=None, help="Read all rows, or candidates alone [all, up to 100 M tokens]")
@click.option(
    "--influence", type=click.IntRange(0), default=0, help="Make a gradient step on each of so many of the documents."
)
@click.option("--learning-rate", type=float, help="Size of that step [the peak of the run's]")
@click.option("--model", help="Where the model of the table's vectors is, if not under its name.")
@tokenizer_place
@as_json
@click.pass_obj
def attribute(
    obj: dict[str, Any],
    checkpoint: str | None,
    text: str | None,
    file: TextIO | None,
    prompt: str | None,
    with_prompt: bool,
    num_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    min_tokens: int | None,
    limit: int,
    exact: bool | None,
    influence: int,
    learning_rate: float | None,
    model: str | None,
    tokenizer: str | None,
    json_output: bool,
) -> None:
    """Where a text comes from: the rows that share runs of its tokens, and whether the model has seen them.

    CHECKPOINT: folder of a run or checkpoint, or a recipe's name [the newest run].
    """
    from pretrain_assets.forensics.attribution.attribution import attribute as run
    from pretrain_assets.forensics.checkpoints import with_checkpoint
    from pretrain_assets.report.attribution_text import attribution_text

    given = _given(text, file, prompt)
    asking: dict[str, Any] = {
        "min_tokens": min_tokens,
        "limit": limit,
        "exact": exact,
        "tokenizer": tokenizer,
        "model": model,
    }

    def answer(found: Checkpoint) -> Attribution:
        what: dict[str, Any] = {"text": given}
        if prompt is not None:
            from pretrain_assets.forensics.attribution.generation import generate

            drawing = {"num_tokens": num_tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
            made = generate(found, given, tokenizer=tokenizer, **drawing)  # type: ignore[arg-type]
            what = {"ids": made.ids, "prompt_ids": made.prompt_ids}
            if with_prompt and given:
                what = {"ids": [*made.prompt_ids, *made.ids]}
        attributed = run(obj["location"], found, **what, **asking)
        if influence:
            from pretrain_assets.forensics.attribution.influence import with_influence

            return with_influence(obj["location"], found, attributed, most=influence, learning_rate=learning_rate)
        return attributed

    _, attributed = with_checkpoint(checkpoint, obj["runs"], answer)
    if json_output:
        facts = {**asdict(attributed), "verdict": attributed.verdict}
        click.echo(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        click.echo(attribution_text(attributed))


def _given(text: str | None, file: TextIO | None, prompt: str | None) -> str:
    """The one text that was given: to attribute, or to continue."""
    if sum(one is not None for one in (text, file, prompt)) != 1:
        raise ConfigError(
            "Give one text: --text TEXT, --file PATH (- for standard input), or --prompt TEXT to continue."
        )
    try:
        found = file.read().rstrip("\r\n") if file is not None else text if text is not None else prompt or ""
        found.encode()
    except UnicodeError as error:
        raise ConfigError(f"The text is not UTF-8: {error.reason}. Give it in UTF-8.") from error  # type: ignore[attr-defined]
    return found


VERBS = (attribute,)
