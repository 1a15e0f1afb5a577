"""`vae_planes.PlanePieces` in Triton: one pass over memory for each step between convolutions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .vae_blocks import RMSNorm
from .vae_convolution import convolve, tiles_for
from .vae_planes import PLAIN, SPACE, TIME, Kernel, PlanePieces, Planes

# Columns that the last convolution's nine products a pixel (of three colours each) are stored in.
COLOURS = 32


@triton.jit(do_not_specialize=["height", "width", "frames"])
def _prepare(
    x_ptr, past_ptr, gamma_ptr, out_ptr, slot_ptr, height, width, frames, scale,
    channels: tl.constexpr, block: tl.constexpr, block_m: tl.constexpr,
    before: tl.constexpr, past: tl.constexpr, norm: tl.constexpr, act: tl.constexpr, keep: tl.constexpr,
):  # fmt: skip
    """out = [past, act(norm(x))] with zeros where planes have them; slot = its last two frames without those.

    past, slot: [2, height, width, channels]. frames: of out. A program has a part of one line, so that where it is
    costs no division for each row.
    """
    pitch = width + 1
    blocks = tl.cdiv(pitch, block_m)
    line = tl.program_id(0) // blocks  # of all lines of all frames
    frame = line // (height + 1)
    y = line % (height + 1)
    x = tl.program_id(0) % blocks * block_m + tl.arange(0, block_m)
    c = tl.arange(0, block)[None, :]
    there = c < channels
    reach = tl.where(y < height, width, 0)  # of the picture in this line; the next three: if its frame is such a one
    new = tl.where(frame >= before, reach, 0)
    old = tl.where(frame < before, reach, 0)
    last = tl.where(frame >= frames - 2, reach, 0)
    place = x[:, None] * channels + c
    start = line.to(tl.int64) * pitch * channels
    ahead = before * (height + 1) * pitch * channels
    value = tl.load(x_ptr + (start - ahead) + place, mask=(x < new)[:, None] & there, other=0.0).to(tl.float32)
    if norm:
        length = tl.sqrt(tl.sum(value * value, 1))
        gamma = tl.load(gamma_ptr + c, mask=there, other=0.0).to(tl.float32)
        value = value * (scale / tl.maximum(length, 1e-12))[:, None] * gamma
    if act:
        value = value / (1.0 + tl.exp(-value))
    if past:
        at = (frame * height + y).to(tl.int64) * width * channels
        value += tl.load(past_ptr + at + place, mask=(x < old)[:, None] & there, other=0.0).to(tl.float32)
    value = value.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + start + place, value, mask=(x < pitch)[:, None] & there)
    if keep:
        at = ((frame - (frames - 2)) * height + y).to(tl.int64) * width * channels
        tl.store(slot_ptr + at + place, value, mask=(x < last)[:, None] & there)


@triton.jit(do_not_specialize=["rows", "height", "width", "channel_stride"])
def _picture(
    z_ptr, bias_ptr, out_ptr, rows, height, width, channel_stride, columns: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """out[c, t, y, x] = clamp(bias[c] + the sum over nine taps of z[row of (y + dy, x + dx), 3 * tap + c])."""
    line = tl.program_id(0)  # of all lines of all frames
    frame = line // height
    y = line % height
    x = tl.program_id(1) * block + tl.arange(0, block)
    c = tl.arange(0, 4)[None, :]
    start = (frame * (height + 1) + y) * (width + 1)
    value = tl.zeros((block, 4), dtype=tl.float32) + tl.load(bias_ptr + c, mask=c < 3, other=0.0).to(tl.float32)
    for tap in tl.static_range(9):
        row = start + (tap // 3 - 1) * (width + 1) + x + (tap % 3 - 1)
        there = (row >= 0) & (row < rows) & (x < width)
        at = z_ptr + row.to(tl.int64)[:, None] * columns + 3 * tap + c
        value += tl.load(at, mask=there[:, None] & (c < 3), other=0.0)
    value = tl.minimum(tl.maximum(value, -1.0), 1.0)
    to = c.to(tl.int64) * channel_stride + line.to(tl.int64) * width + x[:, None]
    tl.store(out_ptr + to, value, mask=(x < width)[:, None] & (c < 3))


class FusedPlanePieces(PlanePieces):
    """For CUDA devices. Every result depends on its own pixels alone: clips cut anywhere give the same bits."""

    def __init__(self, device: torch.device) -> None:
        self.tiles = tiles_for(device)

    def prepared(self, x: Planes, past: Tensor | None, norm: RMSNorm | None) -> tuple[Planes, Tensor]:
        frames, channels = x.count + 2, x.rows.shape[1]
        out = x.rows.new_empty(frames * x.area, channels)
        slot = x.rows.new_empty(2, x.height, x.width, channels)
        before = None if past is None else past[0].permute(1, 2, 3, 0).to(x.rows).contiguous()
        _launch(x, norm, out, act=norm is not None, past=before, slot=slot)
        return Planes(out, x.height, x.width), slot.permute(3, 0, 1, 2).unsqueeze(0)

    def normed(self, x: Planes, norm: RMSNorm, *, act: bool = False) -> Planes:
        out = torch.empty_like(x.rows)
        _launch(x, norm, out, act=act)
        return Planes(out, x.height, x.width)

    def convolved(self, x: Planes, kernel: Kernel, place: int = PLAIN, add: Planes | None = None) -> Planes:
        outer = len(kernel.weight) // {PLAIN: 1, TIME: 2, SPACE: 4}[place]
        frames = x.count - (kernel.taps[0] - 1)
        height, width = x.height, x.width
        if place == TIME:
            frames *= 2
        if place == SPACE:
            height, width = 2 * height, 2 * width
        rows = x.rows.new_empty(frames * (height + 1) * (width + 1), outer) if add is None else add.rows
        convolve(
            x.rows, kernel.weight, kernel.bias, rows, size=(x.height, x.width), taps=kernel.taps, place=place,
            tile=self.tiles(x.rows.shape[1], outer), add=None if add is None else add.rows,
        )  # fmt: skip
        return Planes(rows, height, width)

    def picture(self, x: Planes, kernel: Kernel, out: Tensor) -> None:
        """Three colours are too few for a matrix product, so it gives those of all nine taps; a second pass adds."""
        weight = kernel.weight.permute(2, 3, 0, 1, 4).flatten(0, 2)  # [y, x, colour] of [t, inner]
        nine = weight.new_zeros(COLOURS, weight.shape[1], 1, 1, weight.shape[2])
        nine[: len(weight), :, 0, 0] = weight
        frames = x.count - 2
        z = torch.empty(frames * x.area, COLOURS, dtype=torch.float32, device=x.rows.device)
        tile = self.tiles(x.rows.shape[1], COLOURS)
        convolve(x.rows, nine, None, z, size=(x.height, x.width), taps=(3, 1, 1), tile=tile)
        block = 128
        _picture[(frames * x.height, triton.cdiv(x.width, block))](
            z, kernel.bias, out, len(z), x.height, x.width, out.stride(0), columns=COLOURS, block=block
        )


def _launch(
    x: Planes, norm: RMSNorm | None, out: Tensor, *, act: bool, past: Tensor | None = None, slot: Tensor | None = None
) -> None:
    channels = out.shape[1]
    frames = len(out) // x.area
    block = triton.next_power_of_2(channels)
    block_m = max(1, 4096 // block)
    _prepare[(frames * (x.height + 1) * triton.cdiv(x.width + 1, block_m),)](
        x.rows, out if past is None else past, out if norm is None else norm.gamma.to(x.rows), out,
        out if slot is None else slot, x.height, x.width, frames, 1.0 if norm is None else norm.scale,
        channels=channels, block=block, block_m=block_m, before=0 if slot is None else 2, past=past is not None,
        norm=norm is not None, act=act, keep=slot is not None, num_warps=4,
    )  # fmt: skip
