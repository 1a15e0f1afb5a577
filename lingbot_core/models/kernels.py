"""One pass over memory for each of `pieces.Pieces`, in Triton.

Every row is one program and stays in registers: at this model's width (5120) all of them are bound by memory
(benchmarks/RESULTS.md). Sums are float32; values are rounded where PyTorch rounds them. Results in float8 are quantised
while the row is at hand: its largest value is known then.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from .float8 import FLOAT8, LARGEST, SMALLEST, Activations, Rows8
from .kv_cache import KVCache
from .pieces import Pieces
from .rope import Rope

_LARGEST: Any = tl.constexpr(LARGEST)
_SMALLEST: Any = tl.constexpr(SMALLEST)


@triton.jit
def _store(value, out_ptr, out_scale_ptr, row, start, column, inside, rows8: tl.constexpr):
    """A row of float32 in the dtype of out; in float8 with its scale."""
    if rows8:
        largest = tl.maximum(tl.max(tl.abs(value), 0), _SMALLEST)
        tl.store(out_scale_ptr + row, largest / _LARGEST)
        value = tl.clamp(value * (_LARGEST / largest), -_LARGEST, _LARGEST)
    tl.store(out_ptr + start + column, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _residual(
    x_ptr, y_ptr, gate_ptr, camera_scale_ptr, camera_shift_ptr, scale_ptr, shift_ptr, out_ptr, normed_ptr,
    normed_scale_ptr, eps,
    dim: tl.constexpr, block: tl.constexpr,
    add: tl.constexpr, gated: tl.constexpr, camera: tl.constexpr, one_more: tl.constexpr, rows8: tl.constexpr,
):  # fmt: skip
    """out = camera(x + gate * y), all of it optional; normed = layer_norm(out) * (scale or 1 + scale) + shift."""
    row = tl.program_id(0).to(tl.int64)
    start = row * dim
    column = tl.arange(0, block)
    inside = column < dim
    x = tl.load(x_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
    if add:
        y = tl.load(y_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
        if gated:
            y = y * tl.load(gate_ptr + column, mask=inside, other=0.0)
        x = x + y
    if camera:
        camera_scale = tl.load(camera_scale_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
        camera_shift = tl.load(camera_shift_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
        x = camera_scale * x + camera_shift
    if add:
        tl.store(out_ptr + start + column, x, mask=inside)
    centred = tl.where(inside, x - tl.sum(x, 0) / dim, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / dim + eps)
    scale = tl.load(scale_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if one_more:
        scale = 1 + scale
    shift = tl.load(shift_ptr + column, mask=inside, other=0.0).to(tl.float32)
    _store(normed * scale + shift, normed_ptr, normed_scale_ptr, row, start, column, inside, rows8)


@triton.jit
def _head_row(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, row, start, out_start, eps,
    dim: tl.constexpr, pairs: tl.constexpr, block: tl.constexpr, turn: tl.constexpr,
):  # fmt: skip
    """RMS norm over a row, then the rotation of neighbouring elements. cos, sin: [rows, pairs] of one head."""
    column = tl.arange(0, block)
    inside = column < dim
    kind: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
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
    tl.store(out_ptr + out_start + column, result, mask=inside)


@triton.jit
def _heads(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, stride, eps,
    dim: tl.constexpr, pairs: tl.constexpr, block: tl.constexpr, turn: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    _head_row(
        x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, row, row * stride, row * dim, eps, dim, pairs, block, turn
    )  # fmt: skip


@triton.jit
def _keep(
    key_ptr, value_ptr, weight_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, slots_ptr, key_stride, value_stride, eps,
    frame_tokens, dim: tl.constexpr, pairs: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """A token's key and value into the cache. slots: where the chunk's frames lie."""
    row = tl.program_id(0).to(tl.int64)
    frame = row // frame_tokens
    place = (tl.load(slots_ptr + frame) * frame_tokens + row - frame * frame_tokens) * dim
    if tl.program_id(1) == 0:
        _head_row(
            key_ptr, weight_ptr, cos_ptr, sin_ptr, keys_ptr, row, row * key_stride, place, eps, dim, pairs, block, True
        )  # fmt: skip
    else:
        column = tl.arange(0, block)
        inside = column < dim
        value = tl.load(value_ptr + row * value_stride + column, mask=inside, other=0.0)
        tl.store(values_ptr + place + column, value.to(values_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _quantised(x_ptr, out_ptr, scale_ptr, stride, dim: tl.constexpr, block: tl.constexpr, activate: tl.constexpr):
    """A row, through GELU (tanh) if ``activate``, as float8 with its scale."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < dim
    x = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    if activate:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        # tanh, written so that nothing overflows
        x = x / (1 + tl.exp(-2 * inner))
    _store(x, out_ptr, scale_ptr, row, row * dim, column, inside, True)


class FusedPieces(Pieces):
    """`Pieces` for CUDA devices; the residual is overwritten in place from the first gate on."""

    def modulated(self, x: Tensor, shift: Tensor, scale: Tensor, eps: float, kind: torch.dtype) -> Activations:
        if x.dtype != torch.float32:  # the first block's, which is rounded once more
            return super().modulated(x, shift, scale, eps, kind)
        return _launch(x, kind, scale=scale, shift=shift, eps=eps, one_more=True)

    def heads(self, x: Tensor, weight: Tensor, eps: float, rope: Rope | None, heads: int) -> Tensor:
        tokens, dim = x.shape
        out = torch.empty((tokens, heads, dim // heads), dtype=x.dtype, device=x.device)
        cos, sin = (x, x) if rope is None else (rope.cos, rope.sin)
        x = _rows(x)
        _heads[(tokens,)](
            x, weight.to(x.device), cos, sin, out, x.stride(0), eps,
            dim=dim, pairs=dim // heads // 2, turn=rope is not None, **_shape(dim),
        )  # fmt: skip
        return out

    def keep(
        self, keys: Tensor, values: Tensor, weight: Tensor, eps: float, rope: Rope, cache: KVCache, layer: int
    ) -> None:
        key_buffer, value_buffer = cache.buffers(layer)
        tokens, dim = keys.shape
        keys, values = _rows(keys), _rows(values)
        _keep[(tokens, 2)](
            keys, values, weight.to(keys.device), rope.cos, rope.sin, key_buffer, value_buffer, cache.open_slots,
            keys.stride(0), values.stride(0), eps,
            cache.shape.frame_tokens, dim=dim, pairs=cache.shape.head_dim // 2, **_shape(dim),
        )  # fmt: skip

    def camera(
        self, x: Tensor, y: Tensor, gate: Tensor, modulation: tuple[Tensor, Tensor], norm: Any, kind: torch.dtype
    ) -> tuple[Tensor, Activations]:
        out = _wide(x)
        return out, _launch(x, kind, y, gate, modulation, out=out, scale=norm.weight, shift=norm.bias, eps=norm.eps)

    def added(
        self, x: Tensor, y: Tensor, shift: Tensor, scale: Tensor, eps: float, kind: torch.dtype
    ) -> tuple[Tensor, Activations]:
        out = _wide(x)
        return out, _launch(x, kind, y, out=out, scale=scale, shift=shift, eps=eps, one_more=True)

    def gated(
        self, x: Tensor, y: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, eps: float, kind: torch.dtype
    ) -> tuple[Tensor, Activations]:
        out = _wide(x)
        return out, _launch(x, kind, y, gate, out=out, scale=scale, shift=shift, eps=eps, one_more=True)

    def activated(self, layer: Any, x: Activations, kind: torch.dtype) -> Activations:
        if kind == FLOAT8:
            return _rows8(layer(x), activate=True)
        if type(layer) is nn.Linear and isinstance(x, Tensor) and x.is_cuda:
            # The GPU's matrix product has it in its last step, where the sum is still float32.
            return torch._addmm_activation(layer.bias, x, layer.weight.t(), use_gelu=True)
        return super().activated(layer, x, kind)

    def given(self, x: Tensor, kind: torch.dtype) -> Activations:
        return _rows8(x, activate=False) if kind == FLOAT8 else x.to(kind)


def _launch(
    x: Tensor,
    kind: torch.dtype,
    y: Tensor | None = None,
    gate: Tensor | None = None,
    camera: tuple[Tensor, Tensor] | None = None,
    *,
    out: Tensor | None = None,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    one_more: bool = False,
) -> Activations:
    """See _residual. out: where the residual goes. Returns the normed one in ``kind``."""
    tokens, dim = x.shape
    camera_scale, camera_shift = camera or (None, None)
    normed = torch.empty((tokens, dim), dtype=kind, device=x.device)
    rows8 = kind == FLOAT8
    normed_scale = torch.empty((tokens, 1), dtype=torch.float32, device=x.device) if rows8 else x

    def given(tensor: Tensor | None) -> Tensor:
        return x if tensor is None else tensor.to(x.device).contiguous()

    _residual[(tokens,)](
        given(x), given(y), given(gate), given(camera_scale), given(camera_shift), given(scale), given(shift),
        x if out is None else out, normed, normed_scale, eps,
        dim=dim, add=y is not None, gated=gate is not None, camera=camera is not None, one_more=one_more, rows8=rows8,
        **_shape(dim),
    )  # fmt: skip
    return Rows8(normed, normed_scale) if rows8 else normed


def _rows8(x: Tensor, *, activate: bool) -> Rows8:
    x = _rows(x)
    tokens, dim = x.shape
    values = torch.empty((tokens, dim), dtype=FLOAT8, device=x.device)
    scale = torch.empty((tokens, 1), dtype=torch.float32, device=x.device)
    _quantised[(tokens,)](x, values, scale, x.stride(0), dim=dim, activate=activate, **_shape(dim))
    return Rows8(values, scale)


def _wide(x: Tensor) -> Tensor:
    """Where the new residual goes: over the old one, or into float32 after the first gate."""
    if x.dtype == torch.float32 and x.is_contiguous():
        return x
    # Not empty_like: the kernels write rows, and x may lie transposed.
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _shape(dim: int) -> dict[str, int]:
    block = triton.next_power_of_2(dim)
    return {"block": block, "num_warps": 8 if block >= 4096 else 4}
