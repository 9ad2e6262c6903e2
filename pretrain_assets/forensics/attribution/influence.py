"""How a gradient step on a document changes a model's loss on a text: to first order, and as it is measured.

Invariant: the model is left as it was. The step is plain gradient descent on the document's mean loss, theta - eta *
grad L(document), for which the change is -eta <grad L(text), grad L(document)> + O(eta^2): TracIn with one checkpoint
(Pruthi et al. 2020, "Estimating Training Data Influence by Tracing Gradient Descent", section 3.2). The run's own
optimizer scales each weight, so its step is another one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import functional_call

from pretrain_assets.convert import require
from pretrain_assets.forensics.attribution.sources import documents_of
from pretrain_assets.forensics.checkpoints import Checkpoint
from pretrain_assets.forensics.subject import table_of
from pretrain_assets.table.storage import Location
from pretrain_assets.train.checkpoint import open_checkpoint
from pretrain_assets.train.model import GPT
from pretrain_assets.train.sampling import check_finite
from pretrain_assets.train.state import load_model

if TYPE_CHECKING:
    from pretrain_assets.forensics.attribution.attribution import Attribution

MOST_BLOCKS = 8
"""Of a longer document, so many contexts' worth of tokens around the run that it shares with the text."""


@dataclass(frozen=True, kw_only=True)
class Influence:
    """What a gradient step on one document does to the loss on the text."""

    learning_rate: float
    """Size of the step, eta."""
    loss: float
    """Loss on the text at the checkpoint, in nats per token."""
    first_order: float
    """Change of it by the gradients at the checkpoint, in nats per token; negative: the document teaches the text."""
    measured: float
    """Change of it when the step is made, in nats per token."""
    document_loss: float
    """Loss on the document at the checkpoint, in nats per token."""
    document_tokens: int
    """Tokens of the document that the step is on; a longer one is cut."""


def influences(
    model: GPT,
    text: Sequence[int],
    documents: Sequence[Sequence[int]],
    *,
    context: Sequence[int],
    learning_rate: float,
) -> list[Influence]:
    """The influence of documents, one by one. Memory of three models beside the given one, and of one block.

    Args:
        model: The model, on any device, in float32.
        text: Token ids whose loss is asked for.
        documents: Token ids as the run packs them: an end of text, which is no target, the document, its own.
        context: Token ids before the text, which are no targets: a prompt, or an end of text.
        learning_rate: Size of the step.

    Raises:
        CheckpointError: the model has diverged.
    """
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    asked = list(_blocks([*context, *text], len(context), model.seq_len))
    was_training = model.training
    model.eval()
    try:
        loss, gradient = _gradient(model, asked)
        found = []
        for document in documents:
            document_loss, step = _gradient(model, list(_blocks(document, 1, model.seq_len)))
            product = sum(float((gradient[name].double() * step[name].double()).sum()) for name in weights)
            moved = {name: weight - learning_rate * step[name] for name, weight in weights.items()}
            with torch.no_grad():
                after = float(torch.stack([_loss(model, moved, *block) for block in asked]).sum()) / _targets(asked)
            found.append(
                Influence(
                    learning_rate=learning_rate,
                    loss=loss,
                    first_order=-learning_rate * product,
                    measured=after - loss,
                    document_loss=document_loss,
                    document_tokens=len(document) - 1,
                )
            )
        return found
    finally:
        model.train(was_training)


def with_influence(
    location: Location, checkpoint: Checkpoint, found: Attribution, *, most: int, learning_rate: float | None = None
) -> Attribution:
    """An attribution with the influence of its first documents on the text, after its prompt or an end of text.

    Args:
        location: The table.
        checkpoint: The one that was asked about, whose weights are read. On CUDA where there is a device.
        found: What was found.
        most: So many documents, the likeliest sources.
        learning_rate: Size of the step; None for the peak of the run's.

    Raises:
        ConfigError: a learning rate that is not positive.
        CheckpointError: the weights cannot be read, or have diverged.
    """
    data, size = (
        checkpoint.recipe.data,
        checkpoint.recipe.train.learning_rate if learning_rate is None else learning_rate,
    )
    require(0 < size < math.inf, "learning rate", size, "use a positive number")
    eos_id = int(checkpoint.passport["tokenizer"]["eos_id"])
    chosen = {source.id: source for source in found.sources[:most]}
    documents = {}
    for i, tokens in documents_of(table_of(checkpoint.run_dir, checkpoint.pin, location), checkpoint, chosen):
        matches = chosen[i].matches
        middle = matches[0].document_start + matches[0].tokens // 2 if matches else 0
        documents[i] = _excerpt([eos_id, *tokens.tolist(), eos_id], middle, MOST_BLOCKS * data.seq_len)
    with open_checkpoint(checkpoint.run_dir, checkpoint.step) as folder:
        model = load_model(folder, device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    context = found.prompt_ids or [eos_id]
    made = influences(model, found.ids, list(documents.values()), context=context, learning_rate=size)
    by_id = dict(zip(documents, made, strict=True))
    sources = tuple(replace(source, influence=by_id.get(source.id)) for source in found.sources)
    return replace(found, sources=sources)


def _excerpt(document: list[int], middle: int, most: int) -> list[int]:
    """As much of a long document as is trained on, around its middle place."""
    first = min(max(0, middle - most // 2), max(0, len(document) - most))
    return document[first : first + most]


Block = tuple[list[int], int]
"""Token ids, and how many of the first ones are no targets."""


def _blocks(ids: Sequence[int], first: int, seq_len: int) -> Iterator[Block]:
    """Blocks in which every token from `first` on is a target once: each begins with the last token of the one before.

    Of more than half a block before `first`, the end is read.
    """
    cut = max(0, first - seq_len // 2)
    ids, first = list(ids[cut:]), first - cut
    for start in range(0, max(1, len(ids) - 1), seq_len - 1):
        block = ids[start : start + seq_len]
        skipped = max(1, first - start)
        if skipped < len(block):
            yield block, skipped


def _targets(blocks: Sequence[Block]) -> int:
    return sum(len(ids) - skipped for ids, skipped in blocks)


def _loss(model: GPT, weights: dict[str, Tensor], ids: list[int], skipped: int) -> Tensor:
    """Sum of a block's losses, in float64."""
    inputs = torch.tensor([ids], device=next(iter(weights.values())).device)
    losses: Tensor = functional_call(model, weights, (inputs,), {"reduction": "none"})
    return losses[0, skipped - 1 : len(ids) - 1].double().sum()  # the loss at a place is that of the token after it


def _gradient(model: GPT, blocks: Sequence[Block]) -> tuple[float, dict[str, Tensor]]:
    """Mean loss of blocks, and its gradient, block by block."""
    weights = {name: weight.detach().requires_grad_() for name, weight in model.named_parameters()}
    total, count = 0.0, _targets(blocks)
    for ids, skipped in blocks:
        loss = _loss(model, weights, ids, skipped)
        torch.autograd.backward(loss / count)
        check_finite(loss.detach())
        total += float(loss.detach())
    return total / count, {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
