"""What an evaluation measures: loss, perplexity and bits per byte, of all tokens and of every source.

Invariant: sums do not depend on the order of what is summed, so a number is the same on any number of ranks, bit for
bit, wherever the losses of the single tokens are: each is rounded to 2**-20 nats, and sums of those are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

QUANTA = 2.0**20
"""Parts of a nat that losses are rounded to: float64 adds up whole numbers below 2**53 exactly, 8 * 10**9 nats."""
RECORDED_SOURCES = 100
"""Sources that a run records the loss of, those with the most tokens: records stay small."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """How well a model predicts some tokens."""

    tokens: int
    """Tokens predicted, ends of text included."""
    loss: float
    """Mean cross entropy, in nats per token."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float | None
    """Cross entropy of the tokens that stand for text, in bits, by their UTF-8 bytes: comparable over tokenizers. Ends
    of text and other special tokens count on neither side (as in nanochat). None where the bytes are not known."""


@dataclass(frozen=True, kw_only=True)
class Evaluation(Measure):
    """How well a model predicts the held-out tokens."""

    blocks: int
    """Blocks they are in."""
    by_source: dict[str, Measure] = field(default_factory=dict)
    """Of the tokens of every source's documents, by name; empty where the table names no sources."""

    def metrics(self) -> dict[str, Any]:
        """What a run records of it; what is not known is left out."""
        largest = sorted(self.by_source, key=lambda name: -self.by_source[name].tokens)[:RECORDED_SOURCES]
        values = {
            "val_loss": self.loss,
            "val_perplexity": self.perplexity,
            "val_tokens": self.tokens,
            "val_bits_per_byte": self.bits_per_byte,
            "val_loss_by_source": {name: self.by_source[name].loss for name in sorted(largest)} or None,
        }
        return {name: value for name, value in values.items() if value is not None}


class Tally:
    """Sums over tokens, by the source of their document, on the device."""

    def __init__(self, num_sources: int, pad_id: int, token_bytes: npt.NDArray[np.int64] | None, device: torch.device):
        """Begin at zero.

        Args:
            num_sources: Number of sources.
            pad_id: Token id that is no target.
            token_bytes: UTF-8 bytes of every token id, 0 for special tokens, shape (vocab_size,); None if unknown.
            device: Of the sums.
        """
        self._pad_id = pad_id
        self._bytes = None if token_bytes is None else torch.from_numpy(token_bytes).to(device)
        self.sums = torch.zeros(4, num_sources, dtype=torch.float64, device=device)
        """Quanta of loss, tokens, quanta of loss of text, bytes of text; add up those of all ranks."""

    def add(self, input_ids: Tensor, losses: Tensor, sources: Tensor) -> None:
        """Add the targets of some blocks.

        Args:
            input_ids: Token ids; (blocks, seq_len).
            losses: Loss of predicting the token after each; (blocks, seq_len), the last of a block counts nothing.
            sources: Number of the source of each token's document, int64; (blocks, seq_len).
        """
        targets, quanta = input_ids[:, 1:], (losses[:, :-1].double() * QUANTA).round()
        valid = targets != self._pad_id
        if self._bytes is None:  # not a number from here on, on whichever ranks do know
            num_bytes = torch.where(valid, math.nan, 0.0).double()
        else:
            num_bytes = torch.where(valid, self._bytes[targets.where(valid, 0)], 0).double()
        zero = torch.zeros_like(quanta)
        values = (quanta.where(valid, zero), valid.double(), quanta.where(num_bytes > 0, zero), num_bytes)
        self.sums.index_add_(1, sources[:, 1:].flatten(), torch.stack(values).flatten(1))

    def evaluation(self, blocks: int, sources: Sequence[str]) -> Evaluation:
        """The result, from the sums; nothing may have been counted for a source."""
        total, parts = self.sums.sum(1).tolist(), self.sums.T.tolist()
        by_source = {name: Measure(**_measure(part)) for name, part in zip(sources, parts, strict=False) if part[1]}
        return Evaluation(**_measure(total), blocks=blocks, by_source=dict(sorted(by_source.items())))


def _measure(sums: Sequence[float]) -> dict[str, Any]:
    quanta, tokens, text_quanta, num_bytes = sums
    loss = quanta / QUANTA / max(1.0, tokens)
    return {
        "tokens": int(tokens),
        "loss": loss,
        "perplexity": math.exp(loss) if not loss > 700 else math.inf,
        "bits_per_byte": text_quanta / QUANTA / math.log(2) / num_bytes if num_bytes > 0 else None,
    }
