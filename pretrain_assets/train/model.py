"""GPT-2, as trained from scratch today: fused QKV, scaled_dot_product_attention, tied embeddings, a padded vocabulary.

Invariant: the padding of the vocabulary never reaches the loss. The embedding has rows for it (matrix shapes that
GPUs like, and a place for the pad id), but logits are cut to the real vocabulary first.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain_assets.config import ModelConfig, TokenizerIdentity

VOCABULARY_MULTIPLE = 128
"""The embedding's rows are a multiple of this: 50,304 for GPT-2."""


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.num_heads, self.dropout = config.n_head, config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.projection = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """Attend; (blocks, positions, width) to the same shape."""
        blocks, positions, width = x.shape
        heads = self.qkv(x).view(blocks, positions, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return cast(Tensor, self.projection(mixed.transpose(1, 2).reshape(blocks, positions, width)))


class Layer(nn.Module):
    """One transformer block: attention and a feed-forward network, each on a normalized residual stream."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.n_embd, eps=1e-5)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.n_embd, eps=1e-5)
        self.expand = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.projection = nn.Linear(4 * config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Residual stream in, residual stream out; (blocks, positions, width)."""
        x = x + self.dropout(self.attention(self.norm_1(x)))
        hidden = F.gelu(self.expand(self.norm_2(x)), approximate="tanh")
        return x + cast(Tensor, self.dropout(self.projection(hidden)))


class GPT(nn.Module):
    """GPT-2 with learned positions and the output head tied to the token embedding."""

    def __init__(self, config: ModelConfig, tokenizer: TokenizerIdentity, seq_len: int):
        super().__init__()
        self.config, self.seq_len = config, seq_len
        self.vocab_size, self.pad_id = tokenizer.vocab_size, tokenizer.pad_id
        rows = max(tokenizer.vocab_size, tokenizer.pad_id + 1)
        padded = math.ceil(rows / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        self.token_embedding = nn.Embedding(padded, config.n_embd)
        self.position_embedding = nn.Embedding(seq_len, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
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

    def logits(self, input_ids: Tensor) -> Tensor:
        """Next-token logits over the real vocabulary; (blocks, positions) int64 to (blocks, positions, vocab_size)."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.dropout(self.token_embedding(input_ids) + self.position_embedding(positions))
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.token_embedding.weight)[..., : self.vocab_size]

    def forward(self, input_ids: Tensor) -> Tensor:
        """Summed cross entropy of predicting each block's next tokens; targets equal to the pad id count nothing."""
        logits = self.logits(input_ids)
        targets = targets_of(input_ids, self.pad_id)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=self.pad_id, reduction="sum")


def targets_of(input_ids: Tensor, pad_id: int) -> Tensor:
    """The token after each position of a block; the last position has none and gets the pad id."""
    return F.pad(input_ids[:, 1:], (0, 1), value=pad_id)
