"""A World with random weights of any size, for measurements: nothing is downloaded, nothing is learnt."""

from __future__ import annotations

import torch

from lingbot_core.engine.world import World
from lingbot_core.models.attention import sdpa
from lingbot_core.models.dit import CausalWanDiT, DiTConfig
from lingbot_core.models.vae import VAEConfig, WanVAE
from lingbot_core.presets import Preset

from .random_weights import randomise


def random_world(
    preset: Preset,
    *,
    device: torch.device,
    dtype: torch.dtype,
    dit: DiTConfig | None = None,
    vae: VAEConfig | None = None,
    attention: str = "auto",
) -> World:
    """dit, vae: None for the full size of LingBot-World-Fast. dtype: not of the VAE's encoder, which is float32."""
    torch.manual_seed(0)
    transformer = CausalWanDiT(dit or DiTConfig(), device=device, dtype=dtype, attention=sdpa(attention))
    coder = WanVAE(vae or VAEConfig(), device=device, dtype=torch.float32)
    for module in (transformer, coder):
        module.eval().requires_grad_(False)
        randomise(module)
    coder.decode_in(dtype)
    return World(dit=transformer, vae=coder, text=None, preset=preset, device=device, cache_dtype=dtype, name="random")
