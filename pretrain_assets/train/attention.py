"""Causal self-attention kernels: over whole blocks, over the documents in a block, and over cached positions.

Invariant: with a document mask, nothing of one document reaches another: its output is bitwise independent of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Union, cast

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Mask = Union[Tensor, "BlockMask"]
"""Which positions may see which: booleans of shape (blocks, 1, positions, positions), or FlexAttention's own form."""


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, *, causal: bool, dropout: float) -> Tensor:
    """Attention of heads; (blocks, heads, positions, width of a head) each.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        mask: From `document_mask`; None for all earlier positions.
        causal: Whether a position sees earlier ones only, where there is no mask.
        dropout: Probability.
    """
    if mask is None or isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal and mask is None, dropout_p=dropout)
    from torch.nn.attention.flex_attention import flex_attention

    compute = cast(Any, flex_attention if torch.compiler.is_compiling() else _compiled(flex_attention))
    return cast(Tensor, compute(q, k, v, block_mask=mask))


def document_mask(doc_ids: Tensor) -> Mask:
    """The mask that confines each position to the earlier ones of its own document.

    On CUDA it is one of FlexAttention, which skips what is masked; elsewhere an array of booleans.

    Args:
        doc_ids: Number of the document of every position; (blocks, positions).
    """
    if not doc_ids.is_cuda:
        same = doc_ids[:, None, :, None] == doc_ids[:, None, None, :]
        return same.tril()
    from torch.nn.attention.flex_attention import create_block_mask

    blocks, positions = doc_ids.shape
    make = _compiled(create_block_mask)
    return cast(Mask, make(may_see(doc_ids), blocks, None, positions, positions, device=doc_ids.device))


def may_see(doc_ids: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule of the mask as FlexAttention wants it: for a block, head, query and key, whether it sees it."""

    def rule(block: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (doc_ids[block, query] == doc_ids[block, key])

    return rule


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of FlexAttention, which otherwise computes every pair of positions and then throws most away."""
    return torch.compile(function, dynamic=False)


class KeyValueCache:
    """Keys and values of the positions seen so far, of every layer; for generation."""

    def __init__(self, num_layers: int, max_positions: int):
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self._max_positions = max_positions
        self.length = 0
        """Positions that all layers have seen."""

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add new positions of a layer; returns all of them so far."""
        stored = self._layers[layer]
        if stored is None:
            blocks, heads, _, width = k.shape
            stored = (
                k.new_empty(blocks, heads, self._max_positions, width),
                v.new_empty(blocks, heads, self._max_positions, width),
            )
            self._layers[layer] = stored
        stop = self.length + k.shape[2]
        for whole, new in zip(stored, (k, v), strict=True):
            whole[:, :, self.length : stop] = new
        if layer == len(self._layers) - 1:
            self.length = stop
        return stored[0][:, :, :stop], stored[1][:, :, :stop]
