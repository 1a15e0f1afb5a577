"""Sessions for measurements: start image and prompt of random numbers, held keys, a world without a decoder."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lingbot_core.camera import PER_LATENT, KeyMotion
from lingbot_core.camera.controls import Controls
from lingbot_core.engine.history import ChunkRecord
from lingbot_core.engine.image import PreparedImage, prepare_image
from lingbot_core.engine.session import WorldSession
from lingbot_core.engine.world import World
from lingbot_core.models.vae import DecoderState, WanVAE, frames_for
from lingbot_core.presets import Preset

GIB, MIB = 2**30, 2**20
KEYS = "wl"
PROMPT = "benchmark"


def picture(height: int, width: int) -> PreparedImage:
    """Noise, [3, height, width]; it is not resized."""
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return prepare_image(pixels, size=(height, width), mode="stretch")


def random_states(world: World, tokens: int = 100) -> Tensor:
    """Text states [tokens, text_dim] of no text."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(min(tokens, world.dit.config.text_len), world.dit.config.text_dim, generator=generator)


def start(world: World, image: Any, preset: Preset, *, chunks: int | None = None, **more: Any) -> WorldSession:
    """image: see WorldSession.start. chunks: how many there will be, which matters only without a window."""
    states = random_states(world).to(world.device)
    unit = PER_LATENT.move
    return WorldSession.start(
        world, image, PROMPT, preset=preset, prompt_states=states, translation_unit=unit, chunks=chunks, **more
    )


def controls(session: WorldSession) -> Controls:
    """Of the next chunk: forward and to the right."""
    return session.controls(KeyMotion((KEYS,) * session.history.start.preset.chunk, PER_LATENT))


def skip(session: WorldSession, chunks: int) -> None:
    """Takes over chunks of noise: decoded and committed, not denoised. It fills a window in a fifth of the time."""
    start = session.history.start
    generator = torch.Generator().manual_seed(2)
    for _ in range(chunks):
        channels = session.world.dit.config.out_dim
        size = (channels, start.preset.chunk, start.height // 8, start.width // 8)
        latents = torch.randn(size, generator=generator)
        last_input = latents if start.preset.reuse_last_step_kv else None
        session.adopt(
            ChunkRecord(len(session.history), controls(session), PROMPT, start.noise, latents, last_input, {})
        )


def chunks_to_fill(preset: Preset) -> int:
    """Chunks until a window is full; the next one evicts."""
    return 0 if preset.window is None else -(-preset.window // preset.chunk)


def without_decoder(world: World) -> World:
    """The same networks; frames are grey and tiny, and cost nothing. Denoising and commit do not notice."""

    def decode(latents: Tensor, state: DecoderState | None = None) -> Tensor:
        seen = 0 if state is None else state.latents
        if state is not None:
            state.latents = seen + latents.shape[1]
        return latents.new_zeros(3, frames_for(latents.shape[1], first=not seen), 16, 16)

    vae: WanVAE = copy.copy(world.vae)  # shares every weight
    vae.decode = decode  # type: ignore[method-assign]
    return replace(world, vae=vae)


def tidy(device: torch.device) -> None:
    """Gives memory back that nothing uses, and starts a new peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    """Since the last ``tidy``; None on a CPU."""
    return round(torch.cuda.max_memory_allocated(device) / GIB, 2) if device.type == "cuda" else None


def allocated(device: torch.device) -> int | None:
    """Bytes of living tensors; None on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def milliseconds(seconds: float) -> float:
    """Rounded for a row."""
    return round(1000 * seconds, 2)
