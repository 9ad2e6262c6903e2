"""Verbs that use a trained model: sample, export.

Invariant: they read the checkpoint and change neither it nor the table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import click

from pretrain_assets.cli.common import as_json
from pretrain_assets.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from pretrain_assets.config import TokenizerIdentity
    from pretrain_assets.tokenize import Tokenizer
    from pretrain_assets.train.model import GPT

tokenizer_place = click.option(
    "--tokenizer",
    envvar="PRETRAIN_TOKENIZER",
    help="For models of an hf: tokenizer, its place: hf:<name or directory> [PRETRAIN_TOKENIZER]",
)


@click.command()
@click.argument("checkpoint", required=False)
@click.option("--prompt", default="", help="Text to continue; it begins a new text without.")
@click.option("--num-tokens", type=click.IntRange(0), default=100, show_default=True, help="Most tokens to draw.")
@click.option("--temperature", type=float, default=0.8, show_default=True, help="0: the likeliest token each time.")
@click.option("--top-k", type=int, default=50, show_default=True, help="Draw from so many tokens; 0: from all.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same text.")
@click.option("--num-samples", type=click.IntRange(1), default=1, show_default=True, help="Seeds from SEED on.")
@tokenizer_place
@as_json
@click.pass_obj
def sample(
    obj: dict[str, Any],
    checkpoint: str | None,
    prompt: str,
    num_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    num_samples: int,
    tokenizer: str | None,
    json_output: bool,
) -> None:
    """Let a model continue a prompt, as it draws, up to the end of the text.

    CHECKPOINT: folder of a run, checkpoint or exported model, or a recipe's name [the newest run]. What was said more
    than half a context ago may be forgotten.
    """
    from pretrain_assets.train.sampling import pieces, stream, window_start

    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"--prompt {prompt!r} is not UTF-8 text: {error.reason}. Give it in UTF-8.") from error
    settings = {"num_tokens": num_tokens, "temperature": temperature, "top_k": top_k}
    model, codec, facts = _load(checkpoint, obj["runs"], tokenizer)
    asked, end = [int(token) for token in codec.encode_batch([prompt])[0]], codec.identity.eos_id
    read = len(asked) - window_start(len(asked), model.seq_len)
    if read < len(asked):
        message = f"the prompt has {len(asked):,} tokens, and the context of this model {model.seq_len:,}"
        click.echo(f"warning: {message}: it reads the last {read:,}", err=True)
    samples = []
    if not json_output:
        click.echo(f"{facts['model']} ({facts['pin'] or 'pin unknown'})")
    for number in range(seed, seed + num_samples):
        tokens = stream(model, asked or [end], seed=number, stop_id=end, **settings)  # type: ignore[arg-type]
        if json_output:
            ids = list(tokens)
            text = "".join(pieces(codec.decode, ids, after=asked))
            samples.append({"seed": number, "text": text, "ids": ids, "ended": len(ids) < num_tokens})
            continue
        click.echo(f"\n--- seed {number}" if num_samples > 1 else "")
        for piece in chain([prompt], pieces(codec.decode, tokens, after=asked)):
            click.echo(piece, nl=False)
        click.echo()
    if json_output:
        click.echo(
            json.dumps(
                {
                    **facts,
                    "prompt": prompt,
                    "prompt_tokens": len(asked),
                    "prompt_tokens_read": read,
                    **settings,
                    "samples": samples,
                },
                indent=2,
            )
        )


@click.command()
@click.argument("checkpoint", required=False)
@click.option("--out", help="Folder to write, local or s3:// [a folder in the run's directory]")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Type of the weights.",
)
@click.option("--overwrite", is_flag=True, help="Replace whatever is in the folder.")
@tokenizer_place
@as_json
@click.pass_obj
def export(
    obj: dict[str, Any],
    checkpoint: str | None,
    out: str | None,
    dtype: str,
    overwrite: bool,
    tokenizer: str | None,
    json_output: bool,
) -> None:
    """Write a model as a Hugging Face folder: GPT-2 safetensors, tokenizer, and a card with its data's lineage.

    CHECKPOINT: folder of a run or checkpoint, or a recipe's name [the newest run].
    """
    from pretrain_assets.forensics.checkpoints import with_checkpoint
    from pretrain_assets.report.model_card import model_card
    from pretrain_assets.report.text import megabytes
    from pretrain_assets.table.storage import absolute
    from pretrain_assets.train.export import export as run

    found, made = with_checkpoint(
        checkpoint,
        obj["runs"],
        lambda found: run(
            obj["location"],
            found.run_dir,
            found.step,
            write_card=model_card,
            uri=absolute(out) if out else None,
            dtype=dtype,  # type: ignore[arg-type]  # one of the choices
            tokenizer=tokenizer,
            overwrite=overwrite,
        ),
    )
    if json_output:
        click.echo(json.dumps({"from": found.uri, **asdict(made)}, indent=2))
        return
    click.echo(f"{found.uri} ({found.pin})")
    for name, num_bytes in made.files.items():
        click.echo(f"  {megabytes(num_bytes):>12}  {name}")
    click.echo(f"{made.uri}: {'written' if made.changed else 'all there already, nothing written'}")


@dataclass(frozen=True, kw_only=True)
class FoundModel:
    """A trained model by what a person types."""

    name: str
    """Where it is."""
    model: GPT
    """In evaluation mode, on the CPU."""
    tokenizer: TokenizerIdentity
    """Of its tokens."""
    facts: Mapping[str, Any]
    """Its passport, or its lineage where it was exported; empty for a model of somebody else."""
    folder: Path | None
    """The files of an exported model; None for a checkpoint."""


@contextmanager
def found_model(which: str | None, runs_uri: str) -> Iterator[FoundModel]:
    """The exported model in a folder, or the checkpoint that `find_checkpoint` finds."""
    from pretrain_assets.config import TokenizerIdentity, from_dict
    from pretrain_assets.forensics.checkpoints import Checkpoint, with_checkpoint
    from pretrain_assets.train.checkpoint import open_checkpoint
    from pretrain_assets.train.exported import is_exported, load_exported, open_exported
    from pretrain_assets.train.state import load_model

    if which and is_exported(which):
        with open_exported(which) as folder:
            model, identity, lineage = load_exported(folder)
            yield FoundModel(name=which, model=model, tokenizer=identity, facts=lineage, folder=folder)
        return

    def load(found: Checkpoint) -> GPT:
        with open_checkpoint(found.run_dir, found.step) as opened:
            return load_model(opened)

    found, model = with_checkpoint(which, runs_uri, load)
    identity = from_dict(TokenizerIdentity, found.passport["tokenizer"])
    yield FoundModel(name=found.uri, model=model, tokenizer=identity, facts=found.passport, folder=None)


def _load(which: str | None, runs_uri: str, place: str | None) -> tuple[GPT, Tokenizer, dict[str, str | int | None]]:
    """A model, its tokenizer, and where they come from."""
    from pretrain_assets.tokenize.pretrained import tokenizer_of

    with found_model(which, runs_uri) as found:
        codec = tokenizer_of(found.tokenizer, f"hf:{found.folder}" if found.folder else place)
    return found.model, codec, {"model": found.name, "pin": found.facts.get("pin"), "step": found.facts.get("step")}


VERBS = (sample, export)
