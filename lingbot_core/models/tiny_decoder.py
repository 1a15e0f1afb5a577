"""A draft in place of the VAE's decoder: the tiny video autoencoder of Wan 2.1 (TAEHV, files taew2_1 and lighttaew2_1).

2D convolutions with one frame of memory each; a small part of the VAE's work, and pictures that are softer and not the
model's own. Parameter names are those of the published files. What a running decode remembers is a `DecoderState`, in
the caller's hands.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (256, 128, 64, 64)
# Of the three levels: whether a level doubles the number of frames.
GROWS = (False, True, True)
STRIDE = 4
PREFIX = "decoder."


class Squash(nn.Module):
    """Latents kept between -3 and 3, softly."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / 3) * 3


class Memory(nn.Module):
    """Three convolutions over a frame and the one before it, beside a shortcut: x, past [T, C, H, W]."""

    def __init__(self, channels: int, **where: Any) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(2 * channels, channels, 3, padding=1, **where),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, **where),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, **where),
        )

    def forward(self, x: Tensor, past: Tensor) -> Tensor:
        return F.relu(self.conv(torch.cat((x, past), dim=1)) + x)


class Grow(nn.Module):
    """``times`` frames from each: [T, C, H, W] -> [times * T, C, H, W]."""

    def __init__(self, channels: int, times: int, **where: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, times * channels, 1, bias=False, **where)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).reshape(-1, *x.shape[1:])


class TinyDecoder:
    """Latents to frames, a few at a time.

    Not a Module: a `WanVAE` that has one as its ``draft`` is no other VAE for that. name: of the weights. raw: whether
    they take latents as the VAE does, not normalised (lighttaew2_1 does, taew2_1 does not).
    """

    def __init__(
        self,
        name: str,
        *,
        raw: bool,
        z_dim: int = 16,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.name, self.raw = name, raw
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        layers: list[nn.Module] = [Squash(), nn.Conv2d(z_dim, WIDTHS[0], 3, padding=1, **where), nn.ReLU()]
        for width, narrower, grows in zip(WIDTHS, WIDTHS[1:], GROWS, strict=False):
            layers += [Memory(width, **where) for _ in range(3)]
            layers += [nn.Upsample(scale_factor=2), Grow(width, 2 if grows else 1, **where)]
            layers.append(nn.Conv2d(width, narrower, 3, padding=1, bias=False, **where))
        layers += [nn.ReLU(), nn.Conv2d(WIDTHS[-1], 3, 3, padding=1, **where)]
        self.layers = nn.Sequential(*layers).eval().requires_grad_(False)

    @property
    def label(self) -> str:
        """What reports and videos call it."""
        return f"{self.name} (draft)"

    @torch.no_grad()
    def decode(
        self, latents: Tensor, slots: tuple[Tensor | None, ...], *, first: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Goes on with a clip: latents [z_dim, t, h, w] -> float32 [3, T, 8h, 8w] in [-1, 1] and the new slots.

        T is 4t, and three fewer where a clip starts (``first``): those see nothing but zeros. latents: normalised, or
        not, as ``raw`` says. slots: one frame for each `Memory`, () at the start; old ones are never written into.
        """
        parameter = next(self.layers.parameters())
        x = latents.transpose(0, 1).to(device=parameter.device, dtype=parameter.dtype)
        if x.is_cuda:
            x = x.contiguous(memory_format=torch.channels_last)
        old, new = iter(slots), []
        for layer in self.layers:
            if isinstance(layer, Memory):
                before = next(old, None)
                earlier = torch.zeros_like(x[:1]) if before is None else before
                new.append(x[-1:].clone())
                x = layer(x, torch.cat((earlier, x[:-1])))
            else:
                x = layer(x)
        frames = (x[STRIDE - 1 :] if first else x).transpose(0, 1).float()
        return (2 * frames - 1).clamp(-1.0, 1.0).contiguous(), tuple(new)
