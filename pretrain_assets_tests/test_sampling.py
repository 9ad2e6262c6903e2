"""Sampling: the cache changes no token, settings are checked, and text comes whole characters at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from pretrain_assets.config import ModelConfig
from pretrain_assets.errors import CheckpointError, ConfigError
from pretrain_assets.train.model import GPT
from pretrain_assets.train.sampling import choose, generate, pieces, stream, window_start
from pretrain_assets_tests.runs import EOS, TOKENIZER, VOCAB

CONTEXT = 16
SHAPE = ModelConfig(n_layer=2, n_head=2, n_embd=16)


def model_of(shape: ModelConfig = SHAPE, seq_len: int = CONTEXT) -> GPT:
    """A model whose next token depends on all that it reads."""
    model = GPT(shape, TOKENIZER, seq_len)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(mean=float("norm" in name and "weight" in name), std=0.5, generator=generator)
    return model.eval()


@torch.no_grad()
def without_cache(model: GPT, ids: list[int], num_tokens: int, temperature: float) -> list[int]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(num_tokens):
        read = ids[window_start(len(ids), model.seq_len) :]
        ids = [*ids, choose(model.logits(torch.tensor([read]))[0, -1], temperature, VOCAB, generator)]
    return ids


@pytest.mark.parametrize("temperature", [0, 3])
@pytest.mark.parametrize("seq_len", [2, 3, CONTEXT, 17])
def test_the_cache_changes_no_token(seq_len: int, temperature: float) -> None:
    """Up to the end of the context and beyond it, for prompts that are shorter, as long, and longer."""
    model = model_of(seq_len=seq_len)
    for prompt_tokens in (1, 16, 40):
        prompt = torch.randint(0, VOCAB, (prompt_tokens,), generator=torch.Generator().manual_seed(1)).tolist()
        found = generate(model, prompt, num_tokens=24, temperature=temperature, top_k=0, seed=5)
        assert found == without_cache(model, prompt, 24, temperature)
        assert not temperature or len(set(found[prompt_tokens:])) > 10


def test_the_window_holds_all_that_fits_then_at_least_half_a_context() -> None:
    for seq_len in (2, 3, 8, 1024):
        starts = [window_start(n, seq_len) for n in range(1, 4 * seq_len)]
        assert starts[:seq_len] == [0] * seq_len and starts == sorted(starts)
        read = [n - start for n, start in enumerate(starts, 1)][seq_len:]
        assert min(read) == seq_len // 2 + 1 and max(read) == seq_len
        assert len(set(starts)) <= 8  # the context is read afresh once per half of it


def test_one_seed_one_text_and_top_k() -> None:
    model = model_of()

    def tokens(**settings: Any) -> list[int]:
        return generate(model, [1, 2], **{"num_tokens": 30, **settings})

    assert tokens(seed=3) == tokens(seed=3) != tokens(seed=4)
    assert tokens(top_k=0) == tokens(top_k=VOCAB) == tokens(top_k=10**9) != tokens(top_k=5)
    greedy = tokens(temperature=0)
    assert tokens(top_k=1) == tokens(temperature=1e-320) == greedy == tokens(temperature=0, seed=9)
    assert tokens(num_tokens=0) == [1, 2]
    hot = tokens(temperature=1e6, top_k=0, num_tokens=100)
    assert len(set(hot)) > 60 and max(hot) < VOCAB


def test_draws_follow_the_model_s_probabilities() -> None:
    model = model_of()
    with torch.no_grad():
        logits = model.logits(torch.tensor([[7]]))[0, -1] / 2.0
    best, generator = logits.topk(3), torch.Generator().manual_seed(0)
    expected = dict(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))
    drawn = [choose(logits * 2.0, 2.0, 3, generator) for _ in range(2000)]
    assert {token: drawn.count(token) / 2000 for token in expected} == pytest.approx(expected, abs=0.04)


def test_it_stops_at_the_end_of_the_text() -> None:
    model = model_of()
    tokens = generate(model, [1], num_tokens=20, temperature=0)[1:]
    stop = tokens[6]
    found = list(stream(model, [1], num_tokens=20, temperature=0, stop_id=stop))
    assert found == tokens[: tokens.index(stop)]


def test_a_model_in_training_samples_as_one_at_rest_and_goes_on_training() -> None:
    shape = dataclasses.replace(SHAPE, dropout=0.5)
    at_rest, training = model_of(shape), model_of(shape).train()
    assert generate(training, [1], num_tokens=9) == generate(at_rest, [1], num_tokens=9)
    assert training.training and not at_rest.training
    left = stream(training, [1], num_tokens=9)
    next(left)
    left.close()  # type: ignore[attr-defined]
    assert training.training and torch.is_grad_enabled()


def test_a_model_with_a_document_mask_samples_the_same_way() -> None:
    masked = model_of(dataclasses.replace(SHAPE, document_mask=True))
    assert generate(masked, [EOS, 1], num_tokens=20) == generate(model_of(), [EOS, 1], num_tokens=20)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_tokens": -1},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"seed": -1},
        {"seed": 2**63},
        {"prompt": []},
        {"prompt": [1, VOCAB]},
        {"prompt": [-1]},
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(wrong: dict[str, Any]) -> None:
    settings = {"prompt": [1], "num_tokens": 1, **wrong}
    with pytest.raises(ConfigError, match=f"^{next(iter(wrong))}="):
        generate(model_of(), **settings)


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_has_diverged_is_refused(temperature: float, value: float) -> None:
    model = model_of()
    with torch.no_grad():
        model.norm.bias[0] = value
    with pytest.raises(CheckpointError, match="diverged"):
        generate(model, [1], num_tokens=1, temperature=temperature)


def decode(ids: Any) -> str:
    return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("text", ["naïve 日本語 🙂", "", "plain"])
def test_pieces_are_whole_characters_and_add_up(text: str) -> None:
    ids = list(text.encode())
    found = list(pieces(decode, iter(ids)))
    assert "".join(found) == text and all("\ufffd" not in piece for piece in found)
    assert "".join(pieces(decode, text[3:].encode(), after=text[:3].encode())) == text[3:]


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    assert list(pieces(decode, [65, 0xF0, 0x9F])) == ["A", "\ufffd"]
    assert "".join(pieces(decode, [0xFF, 66])) == "\ufffdB"
