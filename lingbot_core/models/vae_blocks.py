"""Parts of the Wan 2.1 VAE: causal convolutions and their feature caches, residual blocks, attention, resampling."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Tape:
    """The caches of one step: reads the old ones and records the new ones, in order of execution."""

    def __init__(self, slots: tuple[Tensor | None, ...]) -> None:
        self.first = not slots
        self._old = list(reversed(slots))
        self._new: list[Tensor | None] = []

    def take(self) -> Tensor | None:
        """The next slot's cache, which the tape itself then lets go of."""
        return None if self.first else self._old.pop()

    def put(self, cache: Tensor | None) -> None:
        """Records the new cache of the slot that was taken last."""
        self._new.append(cache)

    def exchange(self, x: Tensor, keep: int) -> Tensor | None:
        """Returns this slot's cache and records the last ``keep`` frames of [cache or zeros, x] as the new one."""
        past = self.take()
        kept = x[:, :, -keep:]
        if kept.shape[2] < keep:
            missing = keep - kept.shape[2]
            before = (
                torch.zeros_like(x[:, :, :1]).expand(-1, -1, missing, -1, -1) if past is None else past[:, :, -missing:]
            )
            self.put(torch.cat((before, kept), dim=2))
        else:
            # A view would keep the whole activation alive.
            self.put(kept.clone(memory_format=torch.contiguous_format))
        return past

    def skip(self) -> None:
        """Leaves this slot empty."""
        self.take()
        self.put(None)

    @property
    def slots(self) -> tuple[Tensor | None, ...]:
        return tuple(self._new)


def causal(conv: nn.Module, x: Tensor, tape: Tape) -> Tensor:
    """A convolution of three taps in time over x [1, C, T, H, W], preceded by the last two frames (or zeros)."""
    past = tape.exchange(x, keep=2)
    return _convolve(conv, F.pad(x, (0, 0, 0, 0, 2, 0)) if past is None else torch.cat((past, x), dim=2))


def _convolve(conv: nn.Module, x: Tensor) -> Tensor:
    """conv(x) for x [1, C, T, H, W] without padding in time.

    PyTorch has no fast 3D convolution for CPUs. There, frames are stacked into channels and the same sum is left to
    the 2D one, which is three to six times faster at this model's widths.
    """
    if type(conv) is not nn.Conv3d or x.device.type != "cpu":
        return conv(x)
    weight: Tensor = conv.weight
    taps, stride = conv.kernel_size[0], conv.stride[0]
    frames = x[0].transpose(0, 1)
    last = len(frames) - taps
    stacked = torch.cat([frames[tap : tap + last + 1 : stride] for tap in range(taps)], dim=1)
    kernel = weight.transpose(1, 2).flatten(1, 2)
    spatial: dict[str, Any] = {"stride": conv.stride[1:], "padding": conv.padding[1:]}
    return F.conv2d(stacked, kernel, conv.bias, **spatial).transpose(0, 1).unsqueeze(0)


def framewise(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies a 2D layer to each frame of x [1, C, T, H, W]."""
    return layer(x[0].transpose(0, 1)).transpose(0, 1).unsqueeze(0)


class RMSNorm(nn.Module):
    """Each position's channels scaled to the length sqrt(C), then by gamma. ``axes``: axes after the channels."""

    def __init__(self, channels: int, axes: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.scale = channels**0.5
        self.gamma = nn.Parameter(torch.ones(channels, *(1,) * axes, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1) * self.scale * self.gamma.to(x)


class ResidualBlock(nn.Module):
    """Two causal convolutions beside a shortcut: [1, inner, T, H, W] -> [1, outer, T, H, W]."""

    def __init__(self, inner: int, outer: int, operations: Any, **where: Any) -> None:
        super().__init__()
        # The Identity stands where upstream has a dropout: the checkpoint's names count it.
        self.residual = nn.Sequential(
            RMSNorm(inner, 3, **where),
            nn.SiLU(),
            operations.Conv3d(inner, outer, 3, padding=(0, 1, 1), **where),
            RMSNorm(outer, 3, **where),
            nn.SiLU(),
            nn.Identity(),
            operations.Conv3d(outer, outer, 3, padding=(0, 1, 1), **where),
        )
        self.shortcut = operations.Conv3d(inner, outer, 1, **where) if inner != outer else nn.Identity()

    def forward(self, x: Tensor, tape: Tape) -> Tensor:
        norm1, act1, conv1, norm2, act2, _, conv2 = self.residual
        h = causal(conv1, act1(norm1(x)), tape)
        h = causal(conv2, act2(norm2(h)), tape)
        return h + (_convolve(self.shortcut, x) if isinstance(self.shortcut, nn.Conv3d) else self.shortcut(x))


class AttentionBlock(nn.Module):
    """Self-attention with one head over the positions of each frame."""

    def __init__(self, channels: int, operations: Any, **where: Any) -> None:
        super().__init__()
        self.norm = RMSNorm(channels, 2, **where)
        self.to_qkv = operations.Conv2d(channels, 3 * channels, 1, **where)
        self.proj = operations.Conv2d(channels, channels, 1, **where)

    def forward(self, x: Tensor, tape: Tape) -> Tensor:
        return x + framewise(self._attend, x)

    def _attend(self, x: Tensor) -> Tensor:
        frames, channels, height, width = x.shape
        qkv = self.to_qkv(self.norm(x)).view(frames, 1, 3 * channels, height * width).transpose(2, 3).contiguous()
        q, k, v = qkv.chunk(3, dim=-1)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.squeeze(1).transpose(1, 2).reshape(frames, channels, height, width))


class Downsample(nn.Module):
    """Halves height and width and, with ``temporal``, the frame rate; the first frame of a clip stays single."""

    def __init__(self, channels: int, temporal: bool, operations: Any, **where: Any) -> None:
        super().__init__()
        self.resample = nn.Sequential(
            nn.ZeroPad2d((0, 1, 0, 1)), operations.Conv2d(channels, channels, 3, stride=2, **where)
        )
        self.time_conv = (
            operations.Conv3d(channels, channels, (3, 1, 1), stride=(2, 1, 1), **where) if temporal else None
        )

    def forward(self, x: Tensor, tape: Tape) -> Tensor:
        x = framewise(self.resample, x)
        if self.time_conv is None:
            return x
        past = tape.exchange(x, keep=1)
        return x if past is None else _convolve(self.time_conv, torch.cat((past, x), dim=2))


class Upsample(nn.Module):
    """Doubles height and width, halves the channels and, with ``temporal``, doubles the frame rate.

    The first latent of a clip stays one frame and is not remembered: the second one sees zeros before it.
    """

    def __init__(self, channels: int, temporal: bool, operations: Any, **where: Any) -> None:
        super().__init__()
        self.resample = nn.Sequential(
            nn.Upsample(scale_factor=2.0, mode="nearest-exact"),
            operations.Conv2d(channels, channels // 2, 3, padding=1, **where),
        )
        self.time_conv = operations.Conv3d(channels, 2 * channels, (3, 1, 1), padding=0, **where) if temporal else None

    def forward(self, x: Tensor, tape: Tape) -> Tensor:
        if self.time_conv is not None:
            if tape.first:
                tape.skip()
            else:
                x = causal(self.time_conv, x, tape)
                # The first half of the channels is the earlier frame of each pair.
                x = torch.stack(x.chunk(2, dim=1), dim=3).flatten(2, 3)
        return framewise(self.resample, x)


def through(conv1: nn.Module, blocks: Iterable[nn.Module], head: nn.Sequential, x: Tensor, tape: Tape) -> Tensor:
    """What encoder and decoder share: a convolution, blocks, and a head of norm, SiLU and convolution."""
    x = causal(conv1, x, tape)
    for block in blocks:
        x = block(x, tape)
    norm, act, conv = head
    return causal(conv, act(norm(x)), tape)


def middle(channels: int, operations: Any, **where: Any) -> nn.Sequential:
    return nn.Sequential(
        ResidualBlock(channels, channels, operations, **where),
        AttentionBlock(channels, operations, **where),
        ResidualBlock(channels, channels, operations, **where),
    )


def head(channels: int, out: int, operations: Any, **where: Any) -> nn.Sequential:
    conv = operations.Conv3d(channels, out, 3, padding=(0, 1, 1), **where)
    return nn.Sequential(RMSNorm(channels, 3, **where), nn.SiLU(), conv)
