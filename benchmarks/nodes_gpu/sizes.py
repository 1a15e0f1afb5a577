"""Sizes of the random worlds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """A world: sizes of transformer and VAE, of its picture in pixels, and how far it walks.

    big: bytes of the other model that ComfyUI is given to hold.
    """

    name: str
    dim: int
    ffn_dim: int
    layers: int
    heads: int
    vae_dim: int
    vae_blocks: int
    width: int
    height: int
    chunks: int
    preset: str
    big: int


TINY = Size("tiny", 128, 256, 3, 2, 16, 1, 64, 32, 3, "v1-fast", 2**20)
MID = Size("mid", 2048, 8192, 20, 16, 96, 2, 832, 480, 3, "v1-fast", 8 * 2**30)
"""1.7e9 parameters; the VAE is of full size."""

FULL = Size("full", 5120, 13824, 40, 40, 96, 2, 832, 480, 3, "v1-fast", 8 * 2**30)
"""LingBot-World-Fast's own: 37 GB of files are written first."""

SIZES = {size.name: size for size in (TINY, MID, FULL)}
TEXT_DIM = 64
"""Of the embedded model's text encoder, which the worlds share."""
