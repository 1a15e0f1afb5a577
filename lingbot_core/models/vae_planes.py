"""The VAE's decoder with channels last: how frames lie in memory, and what is done to them there.

A frame of height x width is (height + 1) * (width + 1) rows of channels: each line ends with a row of zeros, each frame
with a line of them, so that a convolution finds zeros wherever it reaches over a border. `PlanePieces` does each step
with PyTorch, anywhere; `vae_kernels.FusedPlanePieces` in one kernel each on NVIDIA GPUs. `decoded` is the decoder.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .vae_blocks import AttentionBlock, ResidualBlock, RMSNorm, Tape, Upsample

PLAIN, TIME, SPACE = 0, 1, 2
"""Where a convolution's results go: to their own place; twice the channels become two frames; four times as many
become squares of four pixels."""

OLDEST = (8, 0)
"""Compute capability from which on the hardware computes in bfloat16."""


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
    def of(cls, conv: Any) -> Kernel:
        """A Conv2d's or Conv3d's; no copy where its weights lie channels last already."""
        weight: Tensor = conv.weight
        last = weight.movedim(1, -1).contiguous()
        return cls(last.unsqueeze(1) if last.ndim == 4 else last, conv.bias)

    @classmethod
    def folded(cls, conv: Any) -> Kernel:
        """A 3 x 3 convolution that follows a nearest upsampling by two, as one of 2 x 2 before it.

        Every pixel of the large picture sees 2 x 2 of the small one, and the taps that meet on one of them are added
        beforehand (in float32, then rounded like any weight). Channels: four times as many, [row, column] of the
        square, then outer.
        """
        wide = conv.weight.detach().float().movedim(1, -1)  # [outer, y, x, inner]
        upper = _met(wide, 1)
        both = [_met(part, 2) for part in upper]
        weight = torch.cat([part for pair in both for part in pair])
        return cls(weight.to(conv.weight.dtype).unsqueeze(1).contiguous(), conv.bias)

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


def decoded(decoder: Any, conv2: Any, latents: Tensor, tape: Tape, pieces: PlanePieces, out: Tensor) -> None:
    """Decodes latents [1, z_dim, t, h, w], not normalised, in the decoder's dtype, into out, float32 [3, T, 8h, 8w].

    t is 1 where a clip starts. tape: as the decoder's own forward reads and writes it, slot by slot.
    """
    x = pieces.convolved(Planes.of(latents), Kernel.of(conv2))
    x = pieces.convolved(_prepared(x, tape, pieces), Kernel.of(decoder.conv1))
    for block in (*decoder.middle, *decoder.upsamples):
        x = _block(block, x, tape, pieces)
    norm, _, conv = decoder.head
    ready = _prepared(x, tape, pieces, norm)
    del x
    pieces.picture(ready, Kernel.of(conv), out)


def _prepared(x: Planes, tape: Tape, pieces: PlanePieces, norm: Any = None) -> Planes:
    ready, slot = pieces.prepared(x, tape.take(), norm)
    tape.put(slot)
    return ready


def _block(block: nn.Module, x: Planes, tape: Tape, pieces: PlanePieces) -> Planes:
    if isinstance(block, ResidualBlock):
        return _residual(block, x, tape, pieces)
    if isinstance(block, AttentionBlock):
        return _attention(block, x, pieces)
    assert isinstance(block, Upsample)
    if block.time_conv is not None:
        if tape.first:
            tape.skip()
        else:
            x = pieces.convolved(_prepared(x, tape, pieces), Kernel.of(block.time_conv), TIME)
    return pieces.convolved(x, Kernel.folded(block.resample[1]), SPACE)


def _residual(block: ResidualBlock, x: Planes, tape: Tape, pieces: PlanePieces) -> Planes:
    norm1, _, conv1, norm2, _, _, conv2 = block.residual
    # Nothing that is not needed any more keeps a name: these are the largest tensors of all.
    ready = _prepared(x, tape, pieces, norm1)
    beside = x if isinstance(block.shortcut, nn.Identity) else pieces.convolved(x, Kernel.of(block.shortcut))
    del x
    between = pieces.convolved(ready, Kernel.of(conv1))
    del ready
    ready = _prepared(between, tape, pieces, norm2)
    del between
    return pieces.convolved(ready, Kernel.of(conv2), add=beside)


def _attention(block: AttentionBlock, x: Planes, pieces: PlanePieces) -> Planes:
    frames, channels = x.count, x.rows.shape[1]
    together = pieces.convolved(pieces.normed(x, block.norm), Kernel.of(block.to_qkv)).frames
    q, k, v = together.reshape(frames, 1, x.height * x.width, 3 * channels).chunk(3, dim=-1)
    seen = F.scaled_dot_product_attention(q, k, v).view(frames, x.height, x.width, channels)
    return pieces.convolved(Planes.of_frames(seen), Kernel.of(block.proj), add=x)


def usable(modules: Iterable[nn.Module], device: torch.device) -> bool:
    """Whether every convolution's own weights can be read as they are: on the device, of one dtype of 16 bits.

    A host's convolutions (ComfyUI's, which are PyTorch's with a few attributes) may keep them elsewhere, in another
    dtype, or patch them as they are used; then only calling them gives the right result.
    """
    convs = [module for module in modules if isinstance(module, nn.Conv2d | nn.Conv3d)]
    kinds = {(conv.weight.dtype, conv.weight.device) for conv in convs}
    widths = [conv.in_channels for conv in convs] + [conv.out_channels for conv in convs if conv.out_channels > 3]
    return (
        kinds in ({(torch.bfloat16, device)}, {(torch.float16, device)})
        and not any(_patched(conv) for conv in convs)
        and not any(width % 16 for width in widths)
    )


def _patched(module: nn.Module) -> bool:
    return any(getattr(module, name, None) for name in ("comfy_cast_weights", "weight_function", "bias_function"))


@functools.cache
def fused_planes(device: torch.device) -> PlanePieces | None:
    """Kernels for a CUDA device, tried once; None where they cannot run: an older card, no Triton, no C compiler."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < OLDEST:
        return None
    return working(device)


def working(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> PlanePieces | None:
    """Kernels if a small picture comes out as it should on this device; a warning says why not."""
    try:
        from .vae_kernels import FusedPlanePieces

        pieces = FusedPlanePieces(device)
        right = _same(pieces, device, dtype)
    except ImportError:  # PyTorch comes without Triton on some systems
        return None
    except Exception as error:  # whatever compiling may raise: all of it works without, only slower
        logging.warning("LingBot World: its decoder's kernels cannot run on %s and are left out: %s", device, error)
        return None
    if not right:
        logging.warning("LingBot World: its decoder's kernels are wrong on %s and are left out", device)
        return None
    return pieces


def _same(pieces: PlanePieces, device: torch.device, dtype: torch.dtype) -> bool:
    channels = 96  # as many as where most of the time goes
    noise = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise).to(device, dtype)

    x, past = Planes.of(rand(1, channels, 1, 3, 5)), rand(1, channels, 2, 3, 5)
    norm = RMSNorm(channels, 3, device=device, dtype=dtype)
    kernel = Kernel(rand(channels, 3, 3, 3, channels) / 50, rand(channels))

    def result(which: PlanePieces) -> Tensor:
        return which.convolved(which.prepared(x, past, norm)[0], kernel, add=x).volume.float()

    with torch.no_grad():
        expected = result(PlanePieces())
        return bool((result(pieces) - expected).norm() < 0.02 * expected.norm())


def pieces_for(modules: Iterable[nn.Module], device: torch.device) -> PlanePieces | None:
    """What `decoded` should be given on this device, None where the decoder's own forward is the way."""
    if device.type != "cuda" or torch.compiler.is_compiling() or not usable(modules, device):
        return None
    return fused_planes(device)
