"""GPT-2, as trained from scratch today: fused QKV, scaled_dot_product_attention, tied embeddings, a padded vocabulary.

Invariant: the padding of the vocabulary never reaches the loss. The embedding has rows for it (matrix shapes that
GPUs like, and a place for the pad id), but logits are cut to the real vocabulary first.
"""

from __future__ import annotations

import math
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pretrain_assets.config import ModelConfig, TokenizerIdentity
from pretrain_assets.recipes import VOCABULARY_MULTIPLE
from pretrain_assets.train.attention import KeyValueCache, Mask, attend

CHUNK_TOKENS = 4096
"""Positions whose logits stand in memory at once where the loss is computed in chunks: 0.8 GB as float32 for GPT-2."""


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.num_heads, self.dropout, self.layer = config.n_head, config.dropout, layer
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.projection = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, mask: Mask | None, cache: KeyValueCache | None) -> Tensor:
        """Attend; (blocks, positions, width) to the same shape."""
        blocks, positions, width = x.shape
        heads = self.qkv(x).view(blocks, positions, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        causal = k.shape[2] == positions  # a single position after cached ones sees them all
        mixed = attend(q, k, v, mask, causal=causal, dropout=self.dropout if self.training else 0.0)
        return cast(Tensor, self.projection(mixed.transpose(1, 2).reshape(blocks, positions, width)))


class Layer(nn.Module):
    """One transformer block: attention and a feed-forward network, each on a normalized residual stream."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.n_embd, eps=1e-5)
        self.attention = Attention(config, layer)
        self.norm_2 = nn.LayerNorm(config.n_embd, eps=1e-5)
        self.expand = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.projection = nn.Linear(4 * config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Mask | None = None, cache: KeyValueCache | None = None) -> Tensor:
        """Residual stream in, residual stream out; (blocks, positions, width)."""
        x = x + self.dropout(self.attention(self.norm_1(x), mask, cache))
        hidden = F.gelu(self.expand(self.norm_2(x)), approximate="tanh")
        return x + cast(Tensor, self.dropout(self.projection(hidden)))


class GPT(nn.Module):
    """GPT-2 with learned positions and the output head tied to the token embedding."""

    def __init__(self, config: ModelConfig, tokenizer: TokenizerIdentity, seq_len: int, *, chunked_loss: bool = False):
        super().__init__()
        self.config, self.seq_len, self.chunked_loss = config, seq_len, chunked_loss
        self.vocab_size, self.pad_id = tokenizer.vocab_size, tokenizer.pad_id
        rows = max(tokenizer.vocab_size, tokenizer.pad_id + 1)
        padded = math.ceil(rows / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        self.token_embedding = nn.Embedding(padded, config.n_embd)
        self.position_embedding = nn.Embedding(seq_len, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd, eps=1e-5)

    def init_weights(self, seed: int) -> None:
        """Draw initial weights: N(0, 0.02), residual projections scaled by 1/sqrt(2 * layers), biases 0 (GPT-2)."""
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                nn.init.zeros_(weight) if name.endswith("bias") else nn.init.ones_(weight)
                continue
            scale = 1 / math.sqrt(2 * self.config.n_layer) if name.endswith("projection.weight") else 1.0
            nn.init.normal_(weight, std=0.02 * scale, generator=generator)

    @property
    def num_parameters(self) -> int:
        """Parameters that count for FLOPs: all, the tied head once, vocabulary padding included."""
        return sum(weight.numel() for weight in self.parameters())

    def logits(self, input_ids: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Next-token logits over the real vocabulary; (blocks, positions) int64 to (blocks, positions, vocab_size).

        With a cache, `input_ids` are the positions after those in it: any number into an empty one, then one at a time.
        """
        return self._logits(self._hidden(input_ids, None, None, cache))

    def forward(
        self,
        input_ids: Tensor,
        mask: Mask | None = None,
        position_ids: Tensor | None = None,
        *,
        reduction: Literal["sum", "none"] = "sum",
    ) -> Tensor:
        """Cross entropy of predicting each block's next tokens; targets equal to the pad id count nothing.

        Args:
            input_ids: Token ids; (blocks, positions) int64.
            mask: From `attention.document_mask`; None for plain causal attention.
            position_ids: Place of each token in its document; None to count from the start of the block.
            reduction: "none" for every target's own loss, (blocks, positions) float32.
        """
        hidden = self._hidden(input_ids, mask, position_ids, None).flatten(0, 1)
        targets = targets_of(input_ids, self.pad_id).flatten()
        if self.chunked_loss:  # the backward pass makes the logits of a chunk again, instead of keeping those of all
            parts = zip(torch.split(hidden, CHUNK_TOKENS), torch.split(targets, CHUNK_TOKENS), strict=True)
            losses = torch.cat([checkpoint(self._losses, *part, use_reentrant=False) for part in parts])
        else:
            losses = self._losses(hidden, targets)
        return losses.sum() if reduction == "sum" else losses.view(input_ids.shape)

    def _hidden(
        self, input_ids: Tensor, mask: Mask | None, position_ids: Tensor | None, cache: KeyValueCache | None
    ) -> Tensor:
        """The normalized residual stream after the last layer; (blocks, positions, width)."""
        if position_ids is None:
            start = 0 if cache is None else cache.length
            position_ids = torch.arange(start, start + input_ids.shape[1], device=input_ids.device)
        x = self.dropout(self.token_embedding(input_ids) + self.position_embedding(position_ids))
        for layer in self.layers:
            x = layer(x, mask, cache)
        return cast(Tensor, self.norm(x))

    def _losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self._logits(hidden), targets, ignore_index=self.pad_id, reduction="none")

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits over the real vocabulary, cut from those of all rows: the product of matrices keeps its even shape."""
        return F.linear(hidden, self.token_embedding.weight)[..., : self.vocab_size]


def targets_of(input_ids: Tensor, pad_id: int) -> Tensor:
    """The token after each position of a block; the last position has none and gets the pad id."""
    return F.pad(input_ids[:, 1:], (0, 1), value=pad_id)
