"""FLOPs per token and the peak of the device, for model FLOPs utilization (MFU).

Invariant: an unknown device has no peak and no MFU; nothing here guesses.
"""

from __future__ import annotations

import re

from pretrain_assets.config import ModelConfig

PEAKS_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "A100": 312.0,
    "B200": 2250.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
}
"""Dense bf16 peaks in TFLOP/s from NVIDIA's data sheets, by words of the device's name."""

OTHERS = {"MIG", "Laptop", "D"}
"""Words that make another device of a name: a part of a GPU, a smaller chip."""


def flops_per_token(num_parameters: int, config: ModelConfig, seq_len: int) -> int:
    """Training FLOPs per token, 6 * N + 12 * L * d * T (PaLM, appendix B): attention as if nothing was masked."""
    return 6 * num_parameters + 12 * config.n_layer * config.n_embd * seq_len


def causal_flops_per_token(num_parameters: int, config: ModelConfig, seq_len: int) -> int:
    """The same with half of the attention, as a causal mask leaves it: 6 * N + 6 * L * d * T."""
    return 6 * num_parameters + 6 * config.n_layer * config.n_embd * seq_len


def peak_tflops(device_name: str) -> float | None:
    """Peak of a device; the most specific name wins, and an unknown one has None."""
    words = re.findall(r"[A-Za-z0-9]+", device_name)
    if OTHERS & set(words):
        return None
    named = f" {' '.join(words)} ".lower()
    known = [name for name in PEAKS_TFLOPS if f" {name} ".lower() in named]
    return PEAKS_TFLOPS[max(known, key=len)] if known else None


def mfu(tokens_per_second: float, flops_of_token: int, device_name: str, world_size: int) -> float | None:
    """Share of the devices' peak that training used, or None for unknown devices."""
    peak = peak_tflops(device_name)
    return None if peak is None else tokens_per_second * flops_of_token / (world_size * peak * 1e12)


def describe(num_parameters: int, config: ModelConfig, seq_len: int, device_name: str, world_size: int) -> str:
    """How MFU is computed here, for people: formula, N, L, d, T and peak."""
    flops, causal = (count(num_parameters, config, seq_len) for count in (flops_per_token, causal_flops_per_token))
    peak = peak_tflops(device_name)
    divisor = f"({world_size} x {peak:,.0f} TFLOP/s)" if peak else "n/a: the peak of this device is not known"
    return (
        f"tok/s x {flops:,} FLOPs per token (6N + 12LdT; N = {num_parameters:,}, L = {config.n_layer}, "
        f"d = {config.n_embd}, T = {seq_len:,}; causal, 6N + 6LdT: {causal / flops:.1%} of it) / {divisor}"
    )
