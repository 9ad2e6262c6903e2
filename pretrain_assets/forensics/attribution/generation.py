"""Letting a checkpoint's model write: the ids that it draws, for attribution.

Invariant: the same checkpoint, prompt and seed give the ids that `pretrain sample` draws on the same device.
"""

from __future__ import annotations

from dataclasses import dataclass

from pretrain_assets.config import TokenizerIdentity, from_dict
from pretrain_assets.forensics.checkpoints import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What a model was given and what it wrote."""

    prompt_ids: tuple[int, ...]
    """Token ids of the prompt; one end of text where it was empty."""
    ids: tuple[int, ...]
    """Token ids drawn, without the end of text that may have ended them."""


def generate(
    checkpoint: Checkpoint,
    prompt: str,
    *,
    num_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    tokenizer: str | None = None,
) -> Generation:
    """Continue a prompt, up to the end of the text; settings as `sampling.stream` takes them.

    Raises:
        ConfigError: a setting out of range.
        CheckpointError: the weights cannot be read, or have diverged.
        TokenizerError: the checkpoint's tokenizer is not found.
    """
    from pretrain_assets.tokenize.pretrained import tokenizer_of
    from pretrain_assets.train.checkpoint import open_checkpoint
    from pretrain_assets.train.sampling import stream
    from pretrain_assets.train.state import load_model

    identity = from_dict(TokenizerIdentity, checkpoint.passport["tokenizer"])
    asked = tokenizer_of(identity, tokenizer).encode_batch([prompt])[0].tolist() or [identity.eos_id]
    with open_checkpoint(checkpoint.run_dir, checkpoint.step) as folder:
        model = load_model(folder)
    drawn = stream(
        model,
        asked,
        num_tokens=num_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        stop_id=identity.eos_id,
    )
    return Generation(prompt_ids=tuple(asked), ids=tuple(drawn))
