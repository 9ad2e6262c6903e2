"""Whether transformers computes with an exported model what our model computes with the checkpoint.

Invariant: the two come by different ways, theirs from the exported files and ours from the checkpoint's.
"""

from __future__ import annotations

import torch

from pretrain_assets.table.verify import Finding
from pretrain_assets.train.checkpoint import open_checkpoint
from pretrain_assets.train.export import Dtype
from pretrain_assets.train.exported import open_exported
from pretrain_assets.train.state import load_model

TOLERANCE = 1e-5
"""Largest difference of two logits, absolute, or relative to those beyond 1."""
POSITIONS = 128
"""Most tokens that are compared: two rows of half as many, drawn at random from the vocabulary."""


@torch.no_grad()
def logits_match(uri: str, run_dir: str, step: int, dtype: Dtype) -> Finding:
    """Compare logits and likeliest tokens, computed in float32 from weights rounded to `dtype`."""
    import transformers

    with open_checkpoint(run_dir, step) as source:
        model = load_model(source)
    for weight in model.parameters():
        weight.copy_(weight.to(getattr(torch, dtype)))
    shape = (2, min(POSITIONS // 2, model.seq_len))
    ids = torch.randint(0, model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    with open_exported(uri) as folder:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, dtype=torch.float32
        )
        found = theirs.eval()(ids).logits
    expected = model.logits(ids)
    if found.shape != expected.shape:
        text = f"logits of the shape {tuple(found.shape)}, not {tuple(expected.shape)}"
        return Finding(name="logits_match", passed=False, description=text)
    close = torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    difference, same = float((found - expected).abs().max()), found.argmax(-1) == expected.argmax(-1)
    return Finding(
        name="logits_match",
        passed=close and bool(same.all()),
        description=f"logits differ by {difference:.1e} at most; the likeliest token is the same at {int(same.sum())} "
        f"of {same.numel()} positions",
        details={"largest_difference": difference},
    )
