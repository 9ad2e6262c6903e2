"""The device of a rank: settings made once before the first kernel, and a line that says what will compute.

Invariant: nothing here decides what is learned, up to the order of sums.
"""

from __future__ import annotations

import logging
import os

import torch

from pretrain_assets.config import ExecutionConfig, ModelConfig
from pretrain_assets.errors import ConfigError
from pretrain_assets.plural import counted

HOPPER_CUDNN = 91500
"""cuDNN from which its attention is sound and preferred on sm90 (PyTorch's `sdp_utils.cpp`): 9.15."""

_log = logging.getLogger(__name__)


def prepare(execution: ExecutionConfig, device: torch.device) -> None:
    """Settings of the whole process that a run's `execution` asks for.

    Training multiplies matrices as bfloat16 on CUDA; what is left as float32 (sampling, for one) may use TF32 there.

    Raises:
        ConfigError: FlashAttention 3 is asked for and not installed.
    """
    if execution.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which cuBLAS then asks for
    torch.use_deterministic_algorithms(execution.deterministic)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    _choose_flash_attention(execution.attention == "fa3")


def _choose_flash_attention(third: bool) -> None:
    from torch.nn import attention

    if not third:
        if attention.current_flash_attention_impl() is not None:
            attention.restore_flash_attention_impl()
            torch.backends.cuda.enable_cudnn_sdp(True)
        return
    try:
        attention.activate_flash_attention_impl("FA3")
    except Exception as error:
        raise ConfigError(
            f"execution.attention='fa3' cannot work: {error}. Install FlashAttention 3 (flash_attn_interface) for this "
            "PyTorch and a Hopper GPU, or use execution.attention=sdpa."
        ) from error
    torch.backends.cuda.enable_cudnn_sdp(False)  # which comes before it on Hopper


def device_name(device: torch.device) -> str:
    """Name of the device as its maker gives it, or `CPU`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def attention_kernel(model: ModelConfig, seq_len: int, device: torch.device) -> str:
    """What PyTorch chooses for causal attention of such a model in training: flash, cudnn, efficient or math."""
    from torch.nn.attention import SDPBackend

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (1, model.n_head, seq_len, model.n_embd // model.n_head)
    heads = torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
    choice = torch._fused_sdp_choice(heads, heads, heads, dropout_p=model.dropout, is_causal=True)
    return SDPBackend(choice).name.lower().removesuffix("_attention")


def describe(model: ModelConfig, seq_len: int, device: torch.device) -> str:
    """One line: device, attention kernel and cuDNN. Logs a warning where a newer cuDNN would make attention faster."""
    kernel = "flex" if model.document_mask and device.type == "cuda" else attention_kernel(model, seq_len, device)
    if device.type != "cuda":
        return f"{device_name(device)}, {counted(torch.get_num_threads(), 'thread')}, attention: {kernel}"
    capability = torch.cuda.get_device_capability(device)
    cudnn: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    advice = cudnn_advice(capability, cudnn)
    if advice:
        _log.warning("%s", advice)
    sm = "".join(map(str, capability))
    return f"{device_name(device)} (sm{sm}), attention: {kernel}, cuDNN {_dotted(cudnn)}, PyTorch {torch.__version__}"


def cudnn_advice(capability: tuple[int, int], cudnn: int | None) -> str | None:
    """What to do about a cuDNN (as 91501 for 9.15.1) whose attention PyTorch does not use on this GPU; None if it does.

    Args:
        capability: Compute capability of the GPU.
        cudnn: Version in use; None for none.
    """
    if capability != (9, 0) or (cudnn or 0) >= HOPPER_CUDNN:
        return None
    return (
        f"cuDNN {_dotted(cudnn)} is older than 9.15, from which on PyTorch takes its faster attention on this GPU: "
        "install a newer nvidia-cudnn package"
    )


def _dotted(cudnn: int | None) -> str:
    """91501 as `9.15.1`."""
    return "none" if cudnn is None else f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"
