"""Which scaled-dot-product attention runs, and nothing else.

``auto`` lets PyTorch take the first backend of PRIORITY that supports the inputs; a named backend is used or an
error says why it cannot be. cuDNN comes first because on current data-centre cards it is 1.7x faster than PyTorch's
flash backend at this model's shapes (benchmarks/RESULTS.md).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import AttentionError

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

BACKENDS: dict[str, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
PRIORITY = [BACKENDS[name] for name in ("cudnn", "flash", "efficient", "math")]
# What PyTorch implements away from CUDA devices.
CPU_BACKENDS = ("flash", "math")


def sdpa(choice: str = "auto") -> Attention:
    """Returns ``attention(q, k, v)``; q [Lq, heads, head_dim], k and v [Lk, heads, head_dim] -> [Lq, heads, head_dim].

    choice: 'auto' or a name of BACKENDS. Raises AttentionError for an unknown name; a backend that the device or the
    dtype does not support raises AttentionError at its first use.
    """
    if choice == "auto":
        return _auto
    if choice not in BACKENDS:
        raise AttentionError(f"there is no attention backend {choice!r}; use auto, {', '.join(BACKENDS)}")
    backend = BACKENDS[choice]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.device.type != "cuda" and choice not in CPU_BACKENDS:
            raise AttentionError(
                f"attention {choice!r} needs an NVIDIA GPU, but the model is on {q.device}; use auto, "
                f"{' or '.join(CPU_BACKENDS)}"
            )
        try:
            with sdpa_kernel(backend):
                return _attend(q, k, v)
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            raise AttentionError(
                f"attention {choice!r} does not support {q.dtype} with head size {q.shape[-1]} on {q.device}; use auto"
            ) from error

    return attention


def _auto(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.device.type != "cuda":
        return _attend(q, k, v)
    with sdpa_kernel(PRIORITY, set_priority=True):
        return _attend(q, k, v)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1)


def available_backends(device: torch.device) -> tuple[str, ...]:
    """Names that may be chosen on this device; whether a dtype is supported shows at the first use."""
    return tuple(BACKENDS) if device.type == "cuda" else CPU_BACKENDS
