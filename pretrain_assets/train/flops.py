"""FLOPs per token and the peak of the device, for model FLOPs utilization (MFU).

Invariant: an unknown device has no peak and no MFU; nothing here guesses.
"""

from __future__ import annotations

from pretrain_assets.config import ModelConfig

PEAKS_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "A100": 312.0,
    "B200": 2250.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
}
"""Dense bf16 peaks in TFLOP/s from NVIDIA's data sheets, by a part of the device's name."""


def flops_per_token(num_parameters: int, config: ModelConfig, seq_len: int) -> int:
    """Training FLOPs per token, 6 * N + 12 * L * d * T (PaLM, appendix B)."""
    return 6 * num_parameters + 12 * config.n_layer * config.n_embd * seq_len


def peak_tflops(device_name: str) -> float | None:
    """Peak of a device; the most specific name wins, and an unknown one has None."""
    for name in sorted(PEAKS_TFLOPS, key=len, reverse=True):
        if name.lower() in device_name.lower():
            return PEAKS_TFLOPS[name]
    return None


def mfu(tokens_per_second: float, flops_of_token: int, device_name: str, world_size: int) -> float | None:
    """Share of the devices' peak that training used, or None for unknown devices."""
    peak = peak_tflops(device_name)
    return None if peak is None else tokens_per_second * flops_of_token / (world_size * peak * 1e12)
