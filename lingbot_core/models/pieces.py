"""What a block does between its matrix products, each step as one function.

`Pieces` computes them with PyTorch, anywhere: each is a few passes over memory. On NVIDIA GPUs with Triton `kernels.py`
makes one pass of each; both give the same up to the order of float32 sums (tests/unit/test_pieces.py).
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .rope import Rope, rotate


class Pieces:
    """Precision follows the reference: the residual is float32 from the first gate on, so are modulation and gates.

    x: residual [tokens, dim], which a method may overwrite once its result replaces it. y: what a matrix product gave,
    [tokens, dim] in the compute dtype. shift, scale, gate: float32 [1, dim] of one timestep.
    """

    def modulated(self, x: Tensor, shift: Tensor, scale: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """The normalised, modulated residual in ``dtype``."""
        return (layer_norm(x, eps).float() * (1 + scale) + shift).to(dtype)

    def heads(self, x: Tensor, weight: Tensor, eps: float, rope: Rope | None, heads: int, out: Tensor | None) -> Tensor:
        """Queries or keys: x [tokens, dim] normalised over the full width and, with ``rope``, rotated.

        Returns [tokens, heads, head_dim] in the dtype of x, or ``out``, which is filled.
        """
        split = rms_norm(x, weight, eps).unflatten(-1, (heads, -1))
        result = split if rope is None else rotate(split, rope)
        return result if out is None else out.copy_(result)

    def camera(
        self, x: Tensor, y: Tensor, gate: Tensor, modulation: tuple[Tensor, Tensor], norm: Any, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Adds the gated y, applies the camera's scale and shift. Returns the residual and norm(residual) in ``dtype``.

        norm: a LayerNorm with weight and bias.
        """
        scale, shift = modulation
        x = scale * (x + y * gate) + shift
        return x, norm(x).to(dtype)

    def added(
        self, x: Tensor, y: Tensor, shift: Tensor, scale: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Adds y. Returns the residual and what ``modulated`` makes of it."""
        x = x + y
        return x, self.modulated(x, shift, scale, eps, dtype)

    def gated(self, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        """The residual with the gated y."""
        return x + y * gate


def layer_norm(x: Tensor, eps: float, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Over the last dimension with float32 statistics; result in the dtype of x."""
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension: float32 statistics, result in the dtype of x, then the weight."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight.to(x)


PYTORCH = Pieces()
OLDEST = (8, 0)
"""Compute capability from which on the hardware rounds to bfloat16."""


@functools.cache
def fused_pieces(device: torch.device) -> Pieces | None:
    """Kernels for a CUDA device, tried once; None where they cannot run: an older card, no Triton, no C compiler."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < OLDEST:
        return None
    return working(device)


def working(device: torch.device) -> Pieces | None:
    """Kernels if a small one gives what it should on this device; a warning says why not."""
    try:
        from .kernels import FusedPieces

        pieces = FusedPieces()
        x = torch.ones(2, 16, device=device)
        right = bool((pieces.gated(x, x.clone(), x[:1].clone()) == 2).all())
    except ImportError:  # PyTorch comes without Triton on some systems
        return None
    except Exception as error:  # whatever compiling may raise: all of it works without, only slower
        logging.warning("LingBot World: its kernels cannot run on %s and are left out: %s", device, error)
        return None
    if not right:
        logging.warning("LingBot World: its kernels are wrong on %s and are left out", device)
        return None
    return pieces


def pieces_for(x: Tensor) -> Pieces:
    """Those for the device of x; PyTorch's own inside torch.compile, which fuses them itself."""
    if not x.is_cuda or torch.compiler.is_compiling():
        return PYTORCH
    return fused_pieces(x.device) or PYTORCH
