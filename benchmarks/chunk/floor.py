"""The least time of a chunk: every matrix product and attention at the card's measured best, nothing else.

A chunk is four forwards and the commit, which leaves out the last block behind its keys and values; the camera layers
run once. Elementwise work, norms, the head and the time path count as free.
"""

from __future__ import annotations

from lingbot_core.models.dit import DiTConfig

from .ceilings import Ceilings


def floor_ms(c: Ceilings, config: DiTConfig, frames: int, *, steps: int = 4, fp8: bool = False) -> float:
    """frames: latent frames that self-attention sees, the chunk's own included."""
    linear = c.fp8 if fp8 else c.linear
    d, f = config.dim, config.ffn_dim
    one = linear[d, d]
    block = linear[d, 3 * d] + 3 * one + linear[d, f] + linear[f, d]  # qkv; o, cross q, cross o; feed-forward
    block += c.self_attention[frames] + c.cross_attention
    camera = 4 * c.linear[d, d]  # never in float8: it runs once
    return config.num_layers * (block * (steps + 1) + camera) - block + linear[d, 2 * d]
