"""Sampling: continue a prompt with the trained model.

Invariant: the same model, prompt and seed give the same text.
"""

from __future__ import annotations

import logging

import torch

from pretrain_assets.config import TokenizerIdentity
from pretrain_assets.train.model import GPT

_log = logging.getLogger(__name__)


@torch.no_grad()
def generate(
    model: GPT, prompt: list[int], *, num_tokens: int, temperature: float = 0.8, top_k: int = 50, seed: int = 0
) -> list[int]:
    """Prompt and `num_tokens` more token ids; temperature 0 takes the likeliest token each time."""
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    ids = torch.tensor([prompt], dtype=torch.int64, device=device)
    for _ in range(num_tokens):
        logits = model.logits(ids[:, -model.seq_len :])[:, -1].float()
        if temperature == 0:
            chosen = logits.argmax(-1, keepdim=True)
        else:
            best, places = logits.topk(min(top_k, logits.shape[-1]))
            drawn = torch.multinomial((best / temperature).softmax(-1), 1, generator=generator)
            chosen = places.gather(-1, drawn)
        ids = torch.cat([ids, chosen], dim=1)
    return [int(token) for token in ids[0]]


def sample_text(model: GPT, tokenizer: TokenizerIdentity, prompt: str, *, num_tokens: int = 100) -> str:
    """Text that the model continues the prompt with, ends of text left out; raw ids without the tokenizer."""
    try:
        from pretrain_assets.tokenize import load_tokenizer

        codec = load_tokenizer(tokenizer.name)
    except (ImportError, ValueError, OSError) as error:
        _log.warning("cannot load tokenizer %s (%s): the sample is given as token ids", tokenizer.name, error)
        return str(generate(model, [tokenizer.eos_id], num_tokens=num_tokens))
    values, _ = codec.encode_batch([prompt])
    ids = generate(model, [int(v) for v in values] or [tokenizer.eos_id], num_tokens=num_tokens)
    return codec.decode([token for token in ids if token != tokenizer.eos_id])
