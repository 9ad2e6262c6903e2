"""Sampling: continue a prompt with a trained model, token by token over cached keys and values.

Invariant: the same model, prompt and seed give the same tokens, and the cache changes none of them: every token is
drawn from the logits of the plain model on the tokens from `window_start` on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from pretrain_assets.config import TokenizerIdentity
from pretrain_assets.convert import require
from pretrain_assets.errors import CheckpointError
from pretrain_assets.train.attention import KeyValueCache
from pretrain_assets.train.model import GPT

_log = logging.getLogger(__name__)


def generate(
    model: GPT, prompt: Sequence[int], *, num_tokens: int, temperature: float = 0.8, top_k: int = 50, seed: int = 0
) -> list[int]:
    """Prompt and `num_tokens` more token ids; see `stream`."""
    return [
        *prompt,
        *stream(model, prompt, num_tokens=num_tokens, temperature=temperature, top_k=top_k, seed=seed),
    ]


def stream(
    model: GPT,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    stop_id: int | None = None,
) -> Iterator[int]:
    """The token ids that follow a prompt, one at a time. Sets the model to evaluation mode while it works.

    Args:
        model: The model. One with a document mask samples the same way: what it reads is one document.
        prompt: Token ids, at least one.
        num_tokens: Most tokens to draw.
        temperature: Divides the logits; 0 takes the likeliest token each time.
        top_k: Only so many of the likeliest tokens are drawn from; 0 for all.
        seed: Of the draws.
        stop_id: Once this token is drawn, such as end-of-text, nothing more is; it is not given itself.

    Raises:
        ConfigError: a setting out of range, or a prompt that is empty or has an id outside the vocabulary.
        CheckpointError: the model has diverged.
    """
    require(num_tokens >= 0, "num_tokens", num_tokens, "use 0 or more")
    require(0 <= temperature < math.inf, "temperature", temperature, "use 0 (the likeliest token) or more")
    require(top_k >= 0, "top_k", top_k, "use 1 or more, or 0 for the whole vocabulary")
    require(0 <= seed < 2**63, "seed", seed, "use an integer from 0 to 2**63 - 1")
    require(len(prompt) > 0, "prompt", list(prompt), "give at least one token id, such as end-of-text")
    outside = [token for token in prompt if not 0 <= token < model.vocab_size]
    require(not outside, "prompt", outside[:5], f"token ids go from 0 to {model.vocab_size - 1}")
    return _drawn(model, list(prompt), num_tokens, temperature, top_k or model.vocab_size, seed, stop_id)


@torch.no_grad()
def _drawn(
    model: GPT, ids: list[int], num_tokens: int, temperature: float, top_k: int, seed: int, stop_id: int | None
) -> Iterator[int]:
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    cache, start = KeyValueCache(model.config.n_layer, model.seq_len), 0
    was_training = model.training
    model.eval()
    try:
        for _ in range(num_tokens):
            if window_start(len(ids), model.seq_len) != start:
                start = window_start(len(ids), model.seq_len)
                cache = KeyValueCache(model.config.n_layer, model.seq_len)
            unread = torch.tensor([ids[start + cache.length :]], device=device)
            ids.append(choose(model.logits(unread, cache)[0, -1], temperature, top_k, generator))
            if ids[-1] == stop_id:
                return
            yield ids[-1]
    finally:
        model.train(was_training)


def window_start(num_tokens: int, seq_len: int) -> int:
    """Index of the first of `num_tokens` tokens that the model reads to predict the next one.

    All of them while they fit; beyond, the last half of the context at least. It moves in strides of half a context,
    because positions are learned from 0 on: a window that moved with every token would have to be read afresh for each.
    """
    stride = seq_len - seq_len // 2
    return max(0, math.ceil((num_tokens - seq_len) / stride)) * stride


def choose(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Draw a token from the `top_k` likeliest; logits of shape (vocab_size,). Temperature 0 is the likeliest one.

    Raises:
        CheckpointError: as `check_finite`.
    """
    check_finite(logits)
    if temperature == 0:
        return int(logits.argmax())
    best, places = logits.double().topk(min(top_k, len(logits)))
    drawn = torch.multinomial(((best - best[0]) / temperature).softmax(-1), 1, generator=generator)
    return int(places[drawn])


def check_finite(values: Tensor) -> None:
    """Refuse the logits or losses of a model that has diverged.

    Raises:
        CheckpointError: one of them is infinite or no number.
    """
    if not values.isfinite().all():
        raise CheckpointError("The model's logits are not finite: it has diverged. Use an earlier checkpoint.")


def pieces(decode: Callable[[Sequence[int]], str], ids: Iterable[int], *, after: Sequence[int] = ()) -> Iterator[str]:
    """The text of token ids as they come; a piece ends only where a character does.

    Args:
        decode: Text of ids; bytes that are not UTF-8 are U+FFFD.
        ids: Token ids.
        after: Ids of whole characters whose text stands before it and is not repeated: at the beginning of a text, some
            tokenizers drop a space.
    """
    known = list(after)
    shown = len(decode(known))
    for token in ids:
        known.append(token)
        text = decode(known)
        if not text.endswith("\ufffd"):
            yield text[shown:]
            shown = len(text)
    yield decode(known)[shown:]


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
