"""Clips as the transformer sees them: latents, conditions, controls and prompts of thousands of walks on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lingbot_core.models.vae import WanVAE

from .dit_forward import Batch
from .latents import encode_clips, encode_conditions
from .rays import ray_tokens
from .source import Source
from .text import Prompts
from .vae_forward import Ways

MASK_CHANNELS = 4


@dataclass(frozen=True, eq=False)
class Encoded:
    """N clips of n chunks. latents, image: float16 [N, n, 16, c, h, w]; relative: [N, n, c, 4, 4]; intrinsics: [N, 4];
    prompts: rows int64 [N, n]."""

    latents: Tensor
    image: Tensor
    relative: Tensor
    intrinsics: Tensor
    prompts: Tensor

    def __len__(self) -> int:
        return len(self.latents)

    def fields(self) -> tuple[Tensor, ...]:
        return self.latents, self.image, self.relative, self.intrinsics, self.prompts


@torch.no_grad()
def encode_walks(
    vae: WanVAE,
    source: Source,
    prompts: Prompts,
    count: int,
    chunks: int,
    chunk: int,
    seed: int,
    *,
    ways: Ways | None = None,
    dtype: torch.dtype,
    at_once: int = 16,
) -> Encoded:
    """Draws and encodes clips."""
    ways = ways or Ways()
    walks = source(count, chunks * chunk, seed)
    latents, images = [], []
    for video in walks.video.split(at_once):
        latents.append(encode_clips(vae, video, ways, dtype).half())
        images.append(encode_conditions(vae, video[:, 0], chunks * chunk, ways, dtype).half())

    def cut(parts: list[Tensor]) -> Tensor:
        """[B, 16, L, h, w] -> [B, n, 16, c, h, w]"""
        return torch.cat(parts).unflatten(2, (chunks, chunk)).transpose(1, 2).contiguous()

    rows = prompts.indices(walks.prompts, seed).to(walks.video.device)
    relative = walks.relative.unflatten(1, (chunks, chunk))
    return Encoded(cut(latents), cut(images), relative, walks.intrinsics.contiguous(), rows)


class Pool:
    """Encoded clips, a part of which is replaced from time to time, and what the model made of some of them itself."""

    def __init__(self, first: Encoded) -> None:
        self.data = first
        self._next = 0
        self.contexts = torch.zeros(0, *first.latents.shape[1:], dtype=torch.float16, device=first.latents.device)
        self.rolled = torch.zeros(0, dtype=torch.int64, device=first.latents.device)

    @classmethod
    def of(cls, parts: list[Encoded]) -> Pool:
        return cls(Encoded(*(torch.cat(group) for group in zip(*(p.fields() for p in parts), strict=True))))

    def replace(self, new: Encoded) -> None:
        """Puts ``new`` in the place of the oldest clips; contexts rolled out for those are forgotten."""
        count = min(len(new), len(self.data) - self._next)
        here = slice(self._next, self._next + count)
        for old, fresh in zip(self.data.fields(), new.fields(), strict=True):
            old[here] = fresh[:count]
        keep = (self.rolled < here.start) | (self.rolled >= here.stop)
        self.contexts, self.rolled = self.contexts[keep], self.rolled[keep]
        self._next = (self._next + count) % len(self.data)

    def set_contexts(self, clips: Tensor, latents: Tensor) -> None:
        """What the model made of these clips: [M], [M, n, 16, c, h, w]."""
        self.rolled, self.contexts = clips, latents.half()

    def batch(self, clips: Tensor, start: Tensor, chunks: int, patch: tuple[int, int, int]) -> tuple[Tensor, Batch]:
        """Latents float32 [B, chunks, 16, c, h, w] and the rest for pieces of clips [B] from chunk ``start`` [B] on."""
        d = self.data
        index = start[:, None] + torch.arange(chunks, device=start.device)
        rows = clips[:, None]
        image = d.image[rows, index].float()
        mask = torch.zeros_like(image[:, :, :MASK_CHANNELS])
        mask[:, :, :, 0] = (index == 0).view(*index.shape, 1, 1, 1)
        height, width = image.shape[-2] * 8, image.shape[-1] * 8
        rays = ray_tokens(d.relative[rows, index].flatten(1, 2), d.intrinsics[clips], height, width, patch)
        condition = torch.cat([mask, image], dim=2)
        return d.latents[rows, index].float(), Batch(condition, rays.unflatten(1, (chunks, -1)), d.prompts[rows, index])
