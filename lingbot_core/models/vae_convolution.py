"""Convolutions over planes (`vae_planes.Planes`) as one matrix product each, in Triton.

A line of a plane ends with a row of zeros and a frame with a line of them. A tap of a convolution is then the same
matrix at another row: no border is ever asked for. The weights' own memory, channels last, is the other matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .vae_planes import PLAIN, SPACE, TIME

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.4
    TensorDescriptor = None


@dataclass(frozen=True)
class Tile:
    """What one program computes: ``rows`` positions times ``channels`` + ``more``, ``depth`` summands at a time.

    more: a second, narrower strip of channels, for widths that are no power of two. described: the hardware's own
    copying of tiles (TMA) instead of pointers; cached: pointers go through the first-level cache. registers: at
    most so many of each thread.
    """

    rows: int = 128
    channels: int = 128
    more: int = 0
    depth: int = 64
    stages: int = 3
    warps: int = 8
    described: bool = True
    cached: bool = False
    registers: int | None = None

    @property
    def name(self) -> str:
        """Short and readable, for tables of measurements."""
        strips = f"{self.channels}+{self.more}" if self.more else str(self.channels)
        kind = ("tma" if self.described else "ptr") + ("-ca" if self.cached else "")
        limit = f" r{self.registers}" if self.registers else ""
        return f"{kind} {self.rows}x{strips}x{self.depth} s{self.stages} w{self.warps}{limit}"


def tiles_for(device: torch.device) -> Callable[[int, int], Tile]:
    """The tile for a convolution from so many channels to so many, on this device."""
    described = TensorDescriptor is not None
    if device.type == "cuda":
        # What data-centre cards from Hopper on have: the copying engine and 227 KiB for a program's tiles.
        newest = torch.cuda.get_device_capability(device)[0] >= 9
        described = described and newest and _shared_memory(device) >= 200 * 1024

    def tile(inner: int, outer: int) -> Tile:
        depth = next(size for size in (64, 32, 16) if inner % size == 0)
        channels, more = next(
            strip for strip in ((128, 0), (128, 64), (64, 32), (64, 0), (32, 0), (16, 0)) if outer % sum(strip) == 0
        )
        if not described:
            return Tile(128, channels, more, min(depth, 32), 3, 8, described=False)
        # Measured on an H200 (benchmarks/chunk/convolutions.py).
        if channels + more == 192:
            return Tile(128, channels, more, depth, 4, 8)
        # Two programs share a core where they are small enough: one computes while the other begins or ends.
        return Tile(256, channels, more, depth, 3, 8, registers=128 if depth < 64 and channels < 128 else None)

    return tile


def _shared_memory(device: torch.device) -> int:
    """Bytes that one program may have."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


@triton.jit(do_not_specialize=["rows", "rows_before", "height", "width"])
def _convolve(
    x_ptr, w_ptr, w_more_ptr, bias_ptr, add_ptr, out_ptr, rows, rows_before, height, width,
    inner: tl.constexpr, outer: tl.constexpr, taps_t: tl.constexpr, taps_y: tl.constexpr, taps_x: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, more: tl.constexpr, block_k: tl.constexpr, strips: tl.constexpr,
    place: tl.constexpr, tma: tl.constexpr, cache: tl.constexpr, biased: tl.constexpr, add: tl.constexpr,
    stages: tl.constexpr,
):  # fmt: skip
    """out[m, n] = bias[n] + add[m, n] + the sum over taps and k of x[m + shift(tap), k] * w[n, tap, k].

    x: [rows_before, inner]; w: [places * outer, taps * inner]; out: [.., outer], rows as ``place`` says.
    """
    program = tl.program_id(0)
    first = (program // strips) * block_m
    column = (program % strips) * (block_n + more)
    which = column // outer  # of the two frames or four pixels
    pitch = width + 1
    plane = pitch * (height + 1)
    top = taps_y // 2
    left = taps_x // 2
    if place == 2:
        top -= which // 2
        left -= which % 2
    chunks: tl.constexpr = inner // block_k
    steps: tl.constexpr = taps_t * taps_y * taps_x * chunks
    row = tl.arange(0, block_m)
    depth = tl.arange(0, block_k)
    n = column - which * outer
    if place == 1:
        bias_ptr += which * outer
    add_ptr += first.to(tl.int64) * outer
    acc = _begin(bias_ptr, add_ptr, row, rows - first, n, outer, block_m, block_n, biased, add)
    if more:
        acc_more = _begin(bias_ptr, add_ptr, row, rows - first, n + block_n, outer, block_m, more, biased, add)
    if not tma:
        start = x_ptr + first.to(tl.int64) * inner
        strip = column + tl.arange(0, block_n)
        at = w_ptr + strip[None, :] * (steps * block_k) + depth[:, None]
        if more:
            strip_more = column + block_n + tl.arange(0, more)
            at_more = w_ptr + strip_more[None, :] * (steps * block_k) + depth[:, None]
    for step in tl.range(0, steps, num_stages=stages):
        tap = step // chunks
        k = (step % chunks) * block_k
        shift = (tap // (taps_x * taps_y)) * plane + ((tap // taps_x) % taps_y - top) * pitch + tap % taps_x - left
        if tma:
            # Rows and columns that are not there read as zeros.
            a = x_ptr.load([first + shift, k])
            acc = tl.dot(a, w_ptr.load([column, step * block_k]).T, acc)
            if more:
                acc_more = tl.dot(a, w_more_ptr.load([column + block_n, step * block_k]).T, acc_more)
        else:
            there = (first + row + shift >= 0) & (first + row + shift < rows_before)
            a = tl.load(
                start + (row[:, None] + shift) * inner + (k + depth)[None, :],
                mask=there[:, None], other=0.0, cache_modifier=cache,
            )  # fmt: skip
            acc = tl.dot(a, tl.load(at + step * block_k, mask=strip[None, :] < (which + 1) * outer, other=0.0), acc)
            if more:
                b = tl.load(at_more + step * block_k, mask=strip_more[None, :] < (which + 1) * outer, other=0.0)
                acc_more = tl.dot(a, b, acc_more)
    m = first + row
    frame = m // plane
    y = (m % plane) // pitch
    x = m % pitch
    real = (y < height) & (x < width)  # the rest of a plane is zeros
    written = m < rows
    # One wide number for all, narrow ones for each: wide ones for each would take registers from everything above.
    origin = first.to(tl.int64)
    to = row
    if place == 1:
        origin += (first // plane + which).to(tl.int64) * plane
        to += (frame - first // plane) * plane
    if place == 2:
        written = written & real
        line = (first // plane) * (2 * height + 1) + 2 * (first % plane // pitch)
        origin = line.to(tl.int64) * (2 * width + 1)
        to = (frame * (2 * height + 1) + 2 * y + which // 2 - line) * (2 * width + 1) + 2 * x + which % 2
    out_ptr += origin * outer
    _finish(acc, out_ptr, to, written, real, n, outer, block_n)
    if more:
        _finish(acc_more, out_ptr, to, written, real, n + block_n, outer, more)


@triton.jit
def _begin(
    bias_ptr, add_ptr, row, rows, column,
    outer: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, biased: tl.constexpr, add: tl.constexpr,
):  # fmt: skip
    """What the products are added to: bias and ``add``."""
    n = column + tl.arange(0, block_n)
    acc = tl.zeros((block_m, block_n), dtype=tl.float32)
    if add:
        inside = (row[:, None] < rows) & (n[None, :] < outer)
        acc += tl.load(add_ptr + row[:, None] * outer + n[None, :], mask=inside, other=0.0).to(tl.float32)
    if biased:
        acc += tl.load(bias_ptr + n, mask=n < outer, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _finish(acc, out_ptr, to, written, real, column, outer: tl.constexpr, block_n: tl.constexpr):
    """One rounding, zeros where a plane has them, and out."""
    n = column + tl.arange(0, block_n)
    acc = tl.where(real[:, None], acc, 0.0)
    inside = written[:, None] & (n[None, :] < outer)
    tl.store(out_ptr + to[:, None] * outer + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    size: tuple[int, int],
    taps: tuple[int, int, int],
    tile: Tile,
    place: int = PLAIN,
    add: Tensor | None = None,
) -> Tensor:
    """Fills ``out`` with a convolution, its bias and ``add``, which is like out or out itself.

    x: [frames * (height + 1) * (width + 1), inner]. size: height and width of x. taps: in time (frames become fewer),
    height and width (frames keep their size). weight: contiguous [outer, t, y, x, inner]; with TIME bias and weight are
    those of twice as many channels as ``out`` has, which go to two frames; with SPACE weight has four times as many
    and taps 2 x 2, see `vae_planes.folded`, and out is twice as high and wide.
    """
    height, width = size
    inner, outer = x.shape[1], out.shape[1]
    if inner % tile.depth:
        raise ValueError(f"a depth of {tile.depth} does not divide {inner} channels")
    parts = {PLAIN: 1, TIME: 2, SPACE: 4}[place]
    wide = tile.channels + tile.more
    if parts > 1 and outer % wide:
        raise ValueError(f"strips of {wide} do not fill {outer} channels")
    strips = triton.cdiv(parts * outer, wide)
    rows = x.shape[0] - (taps[0] - 1) * (height + 1) * (width + 1)
    matrix = weight.reshape(len(weight), -1)
    source: Any = x
    kernel: Any = matrix
    kernel_more: Any = matrix
    if tile.described:
        source = TensorDescriptor.from_tensor(x, [tile.rows, tile.depth])
        kernel = TensorDescriptor.from_tensor(matrix, [tile.channels, tile.depth])
        if tile.more:
            kernel_more = TensorDescriptor.from_tensor(matrix, [tile.more, tile.depth])
    given = (source, kernel, kernel_more, out if bias is None else bias, out if add is None else add, out)
    _convolve[(triton.cdiv(rows, tile.rows) * strips,)](
        *given, rows, x.shape[0], height, width,
        inner=inner, outer=outer, taps_t=taps[0], taps_y=taps[1], taps_x=taps[2],
        block_m=tile.rows, block_n=tile.channels, more=tile.more, block_k=tile.depth, strips=strips, place=place,
        tma=tile.described, cache=".ca" if tile.cached else "", biased=bias is not None, add=add is not None,
        stages=tile.stages, num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
    )  # fmt: skip
    return out
