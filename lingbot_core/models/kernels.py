"""One pass over memory for each of `pieces.Pieces`, in Triton.

Every row is one program and stays in registers: at this model's width (5120) all of them are bound by memory, and run
at about the speed of a copy (benchmarks/RESULTS.md). Sums are float32; values are rounded where PyTorch rounds them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .pieces import Pieces
from .rope import Rope


@triton.jit
def _residual(
    x_ptr, y_ptr, gate_ptr, camera_scale_ptr, camera_shift_ptr, scale_ptr, shift_ptr, out_ptr, normed_ptr, eps,
    dim: tl.constexpr, block: tl.constexpr,
    add: tl.constexpr, gated: tl.constexpr, camera: tl.constexpr, norm: tl.constexpr, one_more: tl.constexpr,
):  # fmt: skip
    """out = camera(x + gate * y); normed = layer_norm(out) * (scale or 1 + scale) + shift. Every part is optional."""
    row = tl.program_id(0).to(tl.int64) * dim
    column = tl.arange(0, block)
    inside = column < dim
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    if add:
        y = tl.load(y_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
        if gated:
            y = y * tl.load(gate_ptr + column, mask=inside, other=0.0)
        x = x + y
    if camera:
        camera_scale = tl.load(camera_scale_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
        camera_shift = tl.load(camera_shift_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
        x = camera_scale * x + camera_shift
    if add:
        tl.store(out_ptr + row + column, x, mask=inside)
    if norm:
        centred = tl.where(inside, x - tl.sum(x, 0) / dim, 0.0)
        normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / dim + eps)
        scale = tl.load(scale_ptr + column, mask=inside, other=0.0).to(tl.float32)
        if one_more:
            scale = 1 + scale
        shift = tl.load(shift_ptr + column, mask=inside, other=0.0).to(tl.float32)
        normed = normed * scale + shift
        tl.store(normed_ptr + row + column, normed.to(normed_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _heads(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, stride, out_stride, eps,
    dim: tl.constexpr, pairs: tl.constexpr, block: tl.constexpr, turn: tl.constexpr,
):  # fmt: skip
    """RMS norm over a row, then the rotation of neighbouring elements. cos, sin: [rows, pairs] of one head."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < dim
    kind: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, 0) / dim + eps)).to(kind).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(kind).to(tl.float32)
    result = (normed * weight).to(kind).to(tl.float32)
    if turn:
        pair = tl.arange(0, block // 2)
        angle = row * pairs + pair % pairs
        cos = tl.load(cos_ptr + angle, mask=pair < dim // 2, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=pair < dim // 2, other=0.0)
        real, imaginary = tl.split(tl.reshape(result, (block // 2, 2)))
        result = tl.reshape(tl.join(real * cos - imaginary * sin, real * sin + imaginary * cos), (block,))
    result = result.to(kind).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + column, result, mask=inside)


class FusedPieces(Pieces):
    """`Pieces` for CUDA devices; the residual is overwritten in place from the first gate on."""

    def modulated(self, x: Tensor, shift: Tensor, scale: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        if x.dtype != torch.float32:  # the first block's, which is rounded once more
            return super().modulated(x, shift, scale, eps, dtype)
        normed = _empty(x, dtype)
        _launch(x, normed=normed, scale=scale, shift=shift, eps=eps, one_more=True)
        return normed

    def heads(self, x: Tensor, weight: Tensor, eps: float, rope: Rope | None, heads: int, out: Tensor | None) -> Tensor:
        tokens, dim = x.shape
        if out is None:
            out = torch.empty((tokens, heads, dim // heads), dtype=x.dtype, device=x.device)
        cos, sin = (x, x) if rope is None else (rope.cos, rope.sin)
        _heads[(tokens,)](
            _rows(x), weight.to(x.device), cos, sin, out, x.stride(0), out.stride(0), eps,
            dim=dim, pairs=dim // heads // 2, turn=rope is not None, **_shape(dim),
        )  # fmt: skip
        return out

    def camera(
        self, x: Tensor, y: Tensor, gate: Tensor, modulation: tuple[Tensor, Tensor], norm: Any, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        out, normed = _wide(x), _empty(x, dtype)
        _launch(x, y, gate, modulation, out=out, normed=normed, scale=norm.weight, shift=norm.bias, eps=norm.eps)
        return out, normed

    def added(
        self, x: Tensor, y: Tensor, shift: Tensor, scale: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        out, normed = _wide(x), _empty(x, dtype)
        _launch(x, y, out=out, normed=normed, scale=scale, shift=shift, eps=eps, one_more=True)
        return out, normed

    def gated(self, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        out = _wide(x)
        _launch(x, y, gate, out=out)
        return out


def _launch(
    x: Tensor,
    y: Tensor | None = None,
    gate: Tensor | None = None,
    camera: tuple[Tensor, Tensor] | None = None,
    *,
    out: Tensor | None = None,
    normed: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 0.0,
    one_more: bool = False,
) -> None:
    tokens, dim = x.shape
    camera_scale, camera_shift = camera or (None, None)

    def given(tensor: Tensor | None) -> Tensor:
        return x if tensor is None else tensor.to(x.device).contiguous()

    _residual[(tokens,)](
        given(x), given(y), given(gate), given(camera_scale), given(camera_shift), given(scale), given(shift),
        x if out is None else out, x if normed is None else normed, eps,
        dim=dim, add=y is not None, gated=gate is not None, camera=camera is not None, norm=normed is not None,
        one_more=one_more, **_shape(dim),
    )  # fmt: skip


def _wide(x: Tensor) -> Tensor:
    """Where the new residual goes: over the old one, or into float32 after the first gate."""
    return x if x.dtype == torch.float32 and x.is_contiguous() else _empty(x, torch.float32)


def _empty(x: Tensor, dtype: torch.dtype) -> Tensor:
    # Not empty_like: the kernels write rows, and x may lie transposed.
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _shape(dim: int) -> dict[str, int]:
    block = triton.next_power_of_2(dim)
    return {"block": block, "num_warps": 8 if block >= 4096 else 4}
