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

from .float8 import FLOAT8, Activations, quantise_rows
from .kv_cache import KVCache
from .rope import Rope, rotate


class Pieces:
    """Precision follows the reference: the residual is float32 from the first gate on, so are modulation and gates.

    x: residual [tokens, dim], which a method may overwrite once its result replaces it. y: what a matrix product gave,
    [tokens, dim] in the compute dtype. shift, scale, gate: float32 [1, dim] of one timestep. kind: the dtype of a
    result that a matrix product takes; float8 gives Rows8.
    """

    def modulated(self, x: Tensor, shift: Tensor, scale: Tensor, eps: float, kind: torch.dtype) -> Activations:
        """The normalised, modulated residual."""
        return as_kind(layer_norm(x, eps).float() * (1 + scale) + shift, kind)

    def heads(self, x: Tensor, weight: Tensor, eps: float, rope: Rope | None, heads: int) -> Tensor:
        """Queries: x [tokens, dim] normalised over the full width and, with ``rope``, rotated.

        Returns [tokens, heads, head_dim] in the dtype of x.
        """
        split = rms_norm(x, weight, eps).unflatten(-1, (heads, -1))
        return split if rope is None else rotate(split, rope)

    def keep(
        self, keys: Tensor, values: Tensor, weight: Tensor, eps: float, rope: Rope, cache: KVCache, layer: int
    ) -> None:
        """Writes the open chunk's keys, normalised and rotated as queries are, and its values into the cache.

        Where they go is read on the device, so that a recorded graph finds the slots of the chunk it is replayed for.
        """
        turned = self.heads(keys, weight, eps, rope, cache.shape.heads)
        for buffer, new in zip(cache.buffers(layer), (turned, values), strict=True):
            slots = buffer.view(-1, cache.shape.frame_tokens, keys.shape[1])
            slots.index_copy_(0, cache.open_slots, new.reshape(-1, *slots.shape[1:]).to(buffer.dtype))

    def camera(
        self, x: Tensor, y: Tensor, gate: Tensor, modulation: tuple[Tensor, Tensor], norm: Any, kind: torch.dtype
    ) -> tuple[Tensor, Activations]:
        """Adds the gated y, applies the camera's scale and shift. Returns the residual and norm(residual).

        norm: a LayerNorm with weight and bias.
        """
        scale, shift = modulation
        x = scale * (x + y * gate) + shift
        return x, as_kind(norm(x), kind)

    def added(
        self, x: Tensor, y: Tensor, shift: Tensor, scale: Tensor, eps: float, kind: torch.dtype
    ) -> tuple[Tensor, Activations]:
        """Adds y. Returns the residual and what ``modulated`` makes of it."""
        x = x + y
        return x, self.modulated(x, shift, scale, eps, kind)

    def gated(
        self, x: Tensor, y: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, eps: float, kind: torch.dtype
    ) -> tuple[Tensor, Activations]:
        """Adds the gated y. Returns the residual and what ``modulated`` makes of it, for the block that follows."""
        x = x + y * gate
        return x, self.modulated(x, shift, scale, eps, kind)

    def activated(self, layer: Any, x: Activations, kind: torch.dtype) -> Activations:
        """GELU (tanh) of what a Linear gives for x."""
        return as_kind(F.gelu(layer(x), approximate="tanh"), kind)

    def given(self, x: Tensor, kind: torch.dtype) -> Activations:
        """x as a matrix product takes it."""
        return as_kind(x, kind)


def layer_norm(x: Tensor, eps: float, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Over the last dimension with float32 statistics; result in the dtype of x."""
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension: float32 statistics, result in the dtype of x, then the weight."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight.to(x)


def as_kind(x: Tensor, kind: torch.dtype) -> Activations:
    """x in another dtype, float8 with a scale for each row."""
    return quantise_rows(x) if kind == FLOAT8 else x.to(kind)


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
        row = torch.ones(1, 16, device=device)
        right = bool((pieces.gated(x, x.clone(), row, row, row, 1.0, x.dtype)[0] == 2).all())
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
