"""Convolutions over channels-last pictures as one matrix product each, in Triton.

A plane (`vae_layout.Plane`) lies in memory as rows of channels with a column of zeros after each line and a line of
zeros after each frame. A tap of a convolution is then the same matrix at another row: no border has to be asked for,
and what comes out at the zeros' places is rubbish that nobody reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.4
    TensorDescriptor = None


@dataclass(frozen=True)
class Tile:
    """What one program computes. more: a second, narrower strip of channels, for widths that are no power of two.

    described: the hardware's own copying of tiles (TMA) instead of pointers. joined: horizontal taps as one run of
    memory.
    """

    rows: int = 128
    channels: int = 128
    more: int = 0
    depth: int = 64
    stages: int = 3
    warps: int = 8
    described: bool = True
    joined: bool = False
    cached: bool = False

    @property
    def name(self) -> str:
        """Short and readable, for tables of measurements."""
        strips = f"{self.channels}+{self.more}" if self.more else str(self.channels)
        kind = (
            ("tma" if self.described else "ptr") + ("-joined" if self.joined else "") + ("-ca" if self.cached else "")
        )
        return f"{kind} {self.rows}x{strips}x{self.depth} s{self.stages} w{self.warps}"


@triton.jit
def _convolve(
    x_ptr, w_ptr, w_more_ptr, bias_ptr, add_ptr, out_ptr, rows, guard, pitch, plane,
    run: tl.constexpr, stride: tl.constexpr, outer: tl.constexpr, width: tl.constexpr,
    taps_t: tl.constexpr, taps_y: tl.constexpr, taps_x: tl.constexpr, left: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, more: tl.constexpr, block_k: tl.constexpr, strips: tl.constexpr,
    tma: tl.constexpr, cache: tl.constexpr, biased: tl.constexpr, add: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """out[m, n] = bias[n] + add[m, n] + sum over taps and k of x[guard + m + shift(tap), k] * w[tap, k, n]."""
    program = tl.program_id(0)
    first = (program // strips) * block_m
    column = (program % strips) * (block_n + more)
    chunks: tl.constexpr = (run + block_k - 1) // block_k
    steps: tl.constexpr = taps_t * taps_y * taps_x * chunks
    row = tl.arange(0, block_m)
    depth = tl.arange(0, block_k)
    narrow = tl.arange(0, block_n)
    acc = tl.zeros((block_m, block_n), dtype=tl.float32)
    if more:
        acc_more = tl.zeros((block_m, more), dtype=tl.float32)
    if not tma:
        start = x_ptr + (first + guard).to(tl.int64) * stride
        inside = row[:, None] < rows - first
    for step in tl.range(0, steps, num_stages=stages):
        tap = step // chunks
        k = (step % chunks) * block_k
        shift = (
            (tap // (taps_x * taps_y)) * plane + ((tap // taps_x) % taps_y - taps_y // 2) * pitch + tap % taps_x - left
        )
        if tma:
            a = x_ptr.load([first + guard + shift, k])
            b = w_ptr.load([step * block_k, column])
            acc = tl.dot(a, b, acc)
            if more:
                acc_more = tl.dot(a, w_more_ptr.load([step * block_k, column + block_n]), acc_more)
        else:
            a = tl.load(
                start + (row[:, None] + shift) * stride + (k + depth)[None, :],
                mask=inside, other=0.0, cache_modifier=cache,
            )  # fmt: skip
            at = w_ptr + (step * block_k + depth)[:, None] * width
            acc = tl.dot(a, tl.load(at + (column + narrow)[None, :]), acc)
            if more:
                b = tl.load(at + (column + block_n + tl.arange(0, more))[None, :])
                acc_more = tl.dot(a, b, acc_more)
    _finish(acc, bias_ptr, add_ptr, out_ptr, first, rows, column, outer, block_m, block_n, biased, add)
    if more:
        _finish(acc_more, bias_ptr, add_ptr, out_ptr, first, rows, column + block_n, outer, block_m, more, biased, add)


@triton.jit
def _finish(
    acc, bias_ptr, add_ptr, out_ptr, first, rows, column, outer: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, biased: tl.constexpr, add: tl.constexpr,
):  # fmt: skip
    """Bias and sum in float32, one rounding, and out."""
    n = column + tl.arange(0, block_n)
    row = tl.arange(0, block_m)
    inside = (row[:, None] < rows - first) & (n[None, :] < outer)
    place = first.to(tl.int64) * outer + row[:, None] * outer + n[None, :]
    if biased:
        acc += tl.load(bias_ptr + n, mask=n < outer, other=0.0).to(tl.float32)[None, :]
    if add:
        acc = acc.to(out_ptr.dtype.element_ty).to(tl.float32)
        acc += tl.load(add_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=inside)


def packed(weight: Tensor, tile: Tile) -> Tensor:
    """A convolution's weight [outer, inner, (t,) y, x] as `convolve` reads it: [taps * inner, outer], zeros added."""
    outer, inner = weight.shape[:2]
    taps = weight.reshape(outer, inner, -1, weight.shape[-1]) if weight.ndim > 2 else weight[:, :, None, None]
    moved = taps.permute(2, 3, 1, 0)  # [t * y, x, inner, outer]
    if tile.joined:
        moved = moved.reshape(len(moved), 1, -1, outer)
    run = moved.shape[2]
    depth, wide = -run % tile.depth, -outer % (tile.channels + tile.more)
    return torch.nn.functional.pad(moved, (0, wide, 0, depth)).reshape(-1, outer + wide).contiguous()


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    add: Tensor | None,
    out: Tensor,
    *,
    rows: int,
    guard: int,
    pitch: int,
    plane: int,
    taps: tuple[int, int, int],
    tile: Tile,
) -> Tensor:
    """Fills out [rows, outer] with the sum of a convolution, its bias and ``add``, which is like out.

    x: [guard + rows + what the taps reach, inner]; the tap (0, 0, 0) of output row m reads row guard + m, taps in time
    read ``plane`` rows further each, taps beside and above the rows around. weight: from `packed`.
    """
    inner, outer = x.shape[1], out.shape[1]
    run, across, left = (inner * taps[2], 1, taps[2] // 2) if tile.joined else (inner, taps[2], taps[2] // 2)
    source: Any = x
    kernel: Any = weight
    kernel_more: Any = weight
    if tile.described:
        # Beyond the last row that has all of its run behind it nothing is ever asked for that counts.
        lines = x.shape[0] - (taps[2] - 1 if tile.joined else 0)
        source = TensorDescriptor(x, [lines, run], [inner, 1], [tile.rows, tile.depth])
        kernel = TensorDescriptor.from_tensor(weight, [tile.depth, tile.channels])
        if tile.more:
            kernel_more = TensorDescriptor.from_tensor(weight, [tile.depth, tile.more])
    elif run % tile.depth:
        raise ValueError(f"pointers need a depth that divides {run}")
    strips = weight.shape[1] // (tile.channels + tile.more)
    _convolve[(triton.cdiv(rows, tile.rows) * strips,)](
        source, kernel, kernel_more, x if bias is None else bias, out if add is None else add, out,
        rows, guard, pitch, plane,
        run=run, stride=inner, outer=outer, width=weight.shape[1],
        taps_t=taps[0], taps_y=taps[1], taps_x=across, left=left,
        block_m=tile.rows, block_n=tile.channels, more=tile.more, block_k=tile.depth, strips=strips,
        tma=tile.described, cache=".ca" if tile.cached else "", biased=bias is not None, add=add is not None,
        stages=tile.stages, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
