"""The VAE's decoder with channels last: how frames lie in memory, and what is done to them there.

A frame of height x width is (height + 1) * (width + 1) rows of channels: each line ends with a row of zeros, each frame
with a line of them, so that a convolution finds zeros wherever it reaches over a border. `PlanePieces` does each step
with PyTorch, anywhere; `vae_kernels.FusedPlanePieces` in one kernel each on NVIDIA GPUs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .vae_blocks import RMSNorm

PLAIN, TIME, SPACE = 0, 1, 2
"""Where a convolution's results go: to their own place; twice the channels become two frames; four times as many
become squares of four pixels."""


@dataclass(frozen=True)
class Planes:
    """Frames as rows [frames * (height + 1) * (width + 1), channels]."""

    rows: Tensor
    height: int
    width: int

    @classmethod
    def of(cls, x: Tensor) -> Planes:
        """From [1, C, T, H, W]."""
        return cls.of_frames(x[0].permute(1, 2, 3, 0))

    @classmethod
    def of_frames(cls, x: Tensor) -> Planes:
        """From [T, H, W, C]."""
        return cls(F.pad(x, (0, 0, 0, 1, 0, 1)).reshape(-1, x.shape[-1]), x.shape[1], x.shape[2])

    @property
    def area(self) -> int:
        """Rows of one frame."""
        return (self.height + 1) * (self.width + 1)

    @property
    def count(self) -> int:
        """Frames."""
        return len(self.rows) // self.area

    @property
    def frames(self) -> Tensor:
        """A view [T, H, W, C] of what is picture."""
        lines = self.rows.view(-1, self.height + 1, self.width + 1, self.rows.shape[1])
        return lines[:, : self.height, : self.width]

    @property
    def volume(self) -> Tensor:
        """The same view as [1, C, T, H, W]."""
        return self.frames.permute(3, 0, 1, 2).unsqueeze(0)


@dataclass(frozen=True)
class Kernel:
    """A convolution's weights as rows of a matrix: weight [outer, t, y, x, inner], contiguous; bias [outer]."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> Kernel:
        """A Conv2d's or Conv3d's; no copy where its weights lie channels last already."""
        last = weight.movedim(1, -1).contiguous()
        return cls(last.unsqueeze(1) if last.ndim == 4 else last, bias)

    @classmethod
    def folded(cls, weight: Tensor, bias: Tensor | None) -> Kernel:
        """A 3 x 3 convolution that follows a nearest upsampling by two, as one of 2 x 2 before it.

        Every pixel of the large picture sees 2 x 2 of the small one, and the taps that meet on one of them are added
        beforehand (in float32, then rounded like any weight). Channels: four times as many, [row, column] of the
        square, then outer.
        """
        wide = weight.float().movedim(1, -1)  # [outer, y, x, inner]
        squares = [part for upper in _met(wide, 1) for part in _met(upper, 2)]
        return cls(torch.cat(squares).to(weight.dtype).unsqueeze(1).contiguous(), bias)

    @property
    def taps(self) -> tuple[int, int, int]:
        t, y, x = self.weight.shape[1:4]
        return t, y, x


def _met(weight: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Three taps along an axis as the two that the first, and the second, of a doubled pixel see."""
    a, b, c = weight.unbind(axis)
    return torch.stack((a, b + c), axis), torch.stack((a + b, c), axis)


class PlanePieces:
    """The steps, with PyTorch: in the dtype of the rows, sums and norms in float32 wherever one kernel has them."""

    def prepared(self, x: Planes, past: Tensor | None, norm: RMSNorm | None) -> tuple[Planes, Tensor]:
        """What a convolution of three taps in time reads: two frames of the past, or zeros, and after them x.

        norm: x is normed, and goes through SiLU. Returns also the last two frames of it all, [1, C, 2, H, W], which
        are the next call's past.
        """
        new = (x if norm is None else self.normed(x, norm, act=True)).frames
        before = new.new_zeros(2, *new.shape[1:]) if past is None else past[0].permute(1, 2, 3, 0).to(new)
        whole = torch.cat((before, new))
        return Planes.of_frames(whole), whole[-2:].clone().permute(3, 0, 1, 2).unsqueeze(0)

    def normed(self, x: Planes, norm: RMSNorm, *, act: bool = False) -> Planes:
        """RMS norm of every row, then SiLU with ``act``."""
        rows = F.normalize(x.rows.float(), dim=1) * norm.scale * norm.gamma.flatten().to(x.rows).float()
        return Planes((F.silu(rows) if act else rows).to(x.rows.dtype), x.height, x.width)

    def convolved(self, x: Planes, kernel: Kernel, place: int = PLAIN, add: Planes | None = None) -> Planes:
        """A convolution with zeros around the picture and none in time, and with ``add`` a sum, which may replace it.

        place: TIME for a kernel whose first half of the channels is the earlier frame of each pair, SPACE for one that
        is `Kernel.folded`.
        """
        weight = kernel.weight.movedim(-1, 1)
        volume = x.volume
        if place == SPACE:
            wide = F.pad(volume, (1, 1, 1, 1))
            parts = [
                F.conv3d(wide[..., y : y + x.height + 1, x_ : x_ + x.width + 1], part, kernel.bias)
                for (y, x_), part in zip(itertools.product((0, 1), (0, 1)), weight.chunk(4), strict=True)
            ]
            squares = torch.stack(parts).unflatten(0, (2, 2))  # [y, x, 1, C, T, H, W]
            return Planes.of(squares.permute(2, 3, 4, 5, 0, 6, 1).flatten(3, 4).flatten(4, 5))
        out = F.conv3d(volume, weight, kernel.bias, padding=(0, *(taps // 2 for taps in kernel.taps[1:])))
        if place == TIME:
            out = torch.stack(out.chunk(2, dim=1), dim=3).flatten(2, 3)
        return Planes.of(out if add is None else out + add.volume)

    def picture(self, x: Planes, kernel: Kernel, out: Tensor) -> None:
        """The last convolution, clamped to [-1, 1], into ``out``, float32 [3, T, H, W]."""
        weight = kernel.weight.movedim(-1, 1)
        out.copy_(F.conv3d(x.volume, weight, kernel.bias, padding=(0, 1, 1))[0].float().clamp(-1.0, 1.0))
