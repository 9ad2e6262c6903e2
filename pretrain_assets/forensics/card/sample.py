"""The sample that a run ended with, attributed: which runs of it stand word for word in what it was trained on.

Invariant: only the continuation is attributed, for the prompt is not the model's; and a sample is shown only on the
card of the very checkpoint that wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pretrain_assets.errors import CheckpointError
from pretrain_assets.forensics.attribution.attribution import Attribution, attribute
from pretrain_assets.forensics.attribution.sources import Source
from pretrain_assets.forensics.card.lineage import public
from pretrain_assets.forensics.checkpoints import Checkpoint
from pretrain_assets.table.storage import Location

LIMIT = 5
"""Documents that are named beside the sample."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a model wrote, and where that may come from."""

    prompt: str
    """What it was given; empty where the recipe's prompt is no longer that of the sample."""
    text: str
    """What it wrote."""
    attribution: Attribution
    """Runs of it in the table's rows, and what they amount to."""


def sample_of(
    location: Location, checkpoint: Checkpoint, result: Mapping[str, Any] | None, told: Callable[[str], str]
) -> Sample:
    """The run's sample with its sources; `told` makes a sentence one that may be published.

    Raises:
        CheckpointError: there is none of this checkpoint.
        PretrainError: it cannot be attributed; see `attribute`.
    """
    text, step = (result or {}).get("sample"), (result or {}).get("step")
    how = "`pretrain sample` writes one, and `pretrain attribute` traces it"
    if not isinstance(text, str) or not text:
        raise CheckpointError(f"The run kept no sample: a finished one does. {how.capitalize()}.")
    if step != checkpoint.step:
        raise CheckpointError(f"The run's sample is of step {step}, not of this checkpoint: {how}.")
    prompt = checkpoint.recipe.sample_prompt
    prompt = prompt if text.startswith(prompt) else ""
    written = text[len(prompt) :]
    found = attribute(location, checkpoint, text=written, limit=LIMIT)
    published = replace(
        found,
        checkpoint=checkpoint.run_dir.rstrip("/").rsplit("/", 1)[-1],
        sources=tuple(_published(source, told) for source in found.sources),
        notes=tuple(map(told, found.notes)),
        seconds=0.0,  # another one each time
    )
    return Sample(prompt=prompt, text=written, attribution=published)


def _published(source: Source, told: Callable[[str], str]) -> Source:
    """A document without places: neither where it is from, nor in the reason why it was not seen."""
    return replace(source, source=public(source.source), seen=replace(source.seen, reason=told(source.seen.reason)))
