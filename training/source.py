"""Training clips from the procedural world, ready for the device: pictures, controls, prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .clips import sample_clips
from .scene import INTRINSICS, INTRINSICS_SIZE, clear_path, random_scenes, render

HEIGHT, WIDTH = 96, 160
# Training scenes have seeds from here on; those below are kept for evaluation.
FIRST_SEED = 1_000_000
RENDER_AT_ONCE = 4096  # pictures


@dataclass(frozen=True, eq=False)
class Walks:
    """video: uint8 [B, 4 n - 3, 3, H, W]. relative: float32 [B, n, 4, 4], in units. intrinsics: fx, fy, cx, cy in
    pixels of the picture [B, 4]. prompts: of every chunk."""

    video: Tensor
    relative: Tensor
    intrinsics: Tensor
    prompts: list[list[str]]


Source = Callable[[int, int, int], Walks]
"""(clips, latents, seed) -> Walks; the same seed gives the same clips."""


def procedural(device: torch.device, *, chunk: int = 3, height: int = HEIGHT, width: int = WIDTH) -> Source:
    """Walks through the procedural world, rendered on ``device``. Latents are rounded up to whole chunks."""

    def make(count: int, latents: int, seed: int) -> Walks:
        clips = sample_clips(seed, count, latents=-(-latents // chunk) * chunk, chunk=chunk)
        seeds = FIRST_SEED + seed * 100_000 + torch.arange(count)
        c2w = clips.c2w.to(device)
        scenes = clear_path(random_scenes(seeds, device), c2w)
        palette = clips.palette().to(device)
        frames = 4 * latents - 3
        piece = max(1, RENDER_AT_ONCE // c2w.shape[1])
        parts = [
            render(scenes[begin : begin + piece], c2w[begin : begin + piece, :frames],
                   palette[begin : begin + piece, :frames], height, width)
            for begin in range(0, count, piece)
        ]  # fmt: skip
        fx, fy, cx, cy = INTRINSICS
        sx, sy = width / INTRINSICS_SIZE[0], height / INTRINSICS_SIZE[1]
        intrinsics = torch.tensor([fx * sx, fy * sy, cx * sx, cy * sy], dtype=torch.float64, device=device)
        relative = clips.relative[:, :latents].float().to(device)
        return Walks(torch.cat(parts), relative, intrinsics.expand(count, 4), clips.prompts)

    return make


def videos_of(source: Source) -> Callable[[int, int, int], Tensor]:
    """Just the pictures, for the VAE: (clips, video frames, seed) -> uint8 [clips, frames, 3, H, W]."""

    def make(count: int, frames: int, seed: int) -> Tensor:
        return source(count, -(-(frames - 1) // 4) + 1, seed).video[:, :frames]

    return make
