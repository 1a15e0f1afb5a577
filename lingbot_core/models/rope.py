"""Three-dimensional rotary position embedding over (latent frame, row, column).

Adjacent elements of a head form complex pairs; the pairs are split (c - 2 * (c // 3), c // 3, c // 3) between time,
height and width, c = head_dim / 2. Angles are computed in float64 for any position: there is no table to outgrow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

THETA = 10000.0


@dataclass(frozen=True)
class Rope:
    """Rotation of one chunk's tokens. cos, sin: float32 [tokens, 1, head_dim / 2]."""

    cos: Tensor
    sin: Tensor


def axis_angles(start: int, count: int, pairs: int, device: torch.device) -> Tensor:
    """float64 [count, pairs]: position * THETA ** (-i / pairs), positions start .. start + count - 1."""
    positions = torch.arange(start, start + count, dtype=torch.float64, device=device)
    exponents = torch.arange(pairs, dtype=torch.float64, device=device) / pairs
    return positions[:, None] / THETA**exponents


def rope_for_chunk(first_frame: int, frames: int, rows: int, columns: int, head_dim: int, device: torch.device) -> Rope:
    """Rotations for tokens in the order (frame, row, column); ``first_frame`` is the absolute latent frame."""
    pairs = head_dim // 2
    spatial = pairs // 3
    t = axis_angles(first_frame, frames, pairs - 2 * spatial, device)
    h = axis_angles(0, rows, spatial, device)
    w = axis_angles(0, columns, spatial, device)
    angles = torch.cat(
        [
            t[:, None, None].expand(frames, rows, columns, -1),
            h[None, :, None].expand(frames, rows, columns, -1),
            w[None, None, :].expand(frames, rows, columns, -1),
        ],
        dim=-1,
    ).reshape(frames * rows * columns, 1, pairs)
    return Rope(angles.cos().float(), angles.sin().float())


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """x: [tokens, heads, head_dim] of any float dtype; rotates in float32 and returns the dtype of x."""
    real, imaginary = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = (real * rope.cos - imaginary * rope.sin, real * rope.sin + imaginary * rope.cos)
    return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)
