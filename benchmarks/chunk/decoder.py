"""Milliseconds of the steady chunk's decode in several dtypes and layouts, beside the encoder's."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lingbot_core.models.vae import DecoderState, VAEConfig, WanVAE, _advance

from ..random_weights import randomise
from .timing import milliseconds

GIB = 2**30


@torch.no_grad()
def measure(
    config: VAEConfig, height: int, width: int, device: torch.device, latents: int = 3
) -> Iterator[dict[str, Any]]:
    """A row for each way: ms of ``latents`` latent frames in the middle of a clip, peak memory, error to float32."""
    torch.manual_seed(0)
    base = WanVAE(config, device=device, dtype=torch.float32).eval().requires_grad_(False)
    randomise(base)
    z = torch.randn(16, latents, height // 8, width // 8, device=device)
    exact: Tensor | None = None
    cuda = device.type == "cuda"
    dtypes = [torch.float32, torch.bfloat16, torch.float16] if cuda else [torch.float32]
    for dtype in dtypes:
        for layout in (torch.contiguous_format, torch.channels_last_3d):
            for together in (False, True):
                way = {
                    "dtype": str(dtype).removeprefix("torch."),
                    "layout": str(layout).removeprefix("torch."),
                    "latents_at_once": latents if together else 1,
                }
                try:
                    base.decoder.to(dtype)
                    base.conv2.to(dtype)
                    for module in base.decoder.modules():
                        if isinstance(module, torch.nn.Conv3d):
                            module.weight.data = module.weight.data.contiguous(memory_format=layout)
                        elif isinstance(module, torch.nn.Conv2d) and layout == torch.channels_last_3d:
                            module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)
                    yield way | _one(base, z, layout, together, exact, device)
                    if exact is None:
                        exact = _decode(base, z, layout, together, _state(base, z, layout))[0]
                except (RuntimeError, torch.OutOfMemoryError) as error:
                    yield way | {"error": str(error)[:200]}
    del base
    gc.collect()


def _one(
    vae: WanVAE, z: Tensor, layout: torch.memory_format, together: bool, exact: Tensor | None, device: torch.device
) -> dict[str, Any]:
    state = _state(vae, z, layout)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    ms = milliseconds(lambda: _decode(vae, z, layout, together, state.copy()), device, runs=3, warm=2)
    row: dict[str, Any] = {"ms": round(ms, 2)}
    if device.type == "cuda":
        row["beside_gib"] = round((torch.cuda.max_memory_allocated() - held) / GIB, 2)
    if exact is not None:
        frames = _decode(vae, z, layout, together, state.copy())[0]
        row["relative"] = float(f"{float((frames - exact).norm() / exact.norm()):.3e}")
    return row


def _state(vae: WanVAE, z: Tensor, layout: torch.memory_format) -> DecoderState:
    state = DecoderState(size=(z.shape[2], z.shape[3]))
    _decode(vae, z, layout, False, state)
    return state


def _decode(
    vae: WanVAE, z: Tensor, layout: torch.memory_format, together: bool, state: DecoderState
) -> tuple[Tensor, DecoderState]:
    dtype = next(vae.decoder.parameters()).dtype
    mean, std = vae._statistics()
    raw = (z.unsqueeze(0) * std + mean).to(dtype)
    groups = [raw] if together else raw.split(1, dim=2)
    frames = []
    for group in groups:
        out = _advance(vae.decoder, vae.conv2(group).contiguous(memory_format=layout), state)
        frames.append(out.float().clamp(-1.0, 1.0))
    return torch.cat(frames, dim=2)[0], state
