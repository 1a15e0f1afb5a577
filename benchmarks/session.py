"""Seconds per stage and peak memory of whole sessions, beside what engine/memory.py predicts.

    python -m benchmarks.session [--tiny] [--json]

Full size (18.5e9 random parameters) needs a GPU with at least 80 GB; --tiny runs the small sizes anywhere.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import numpy as np
import torch

from lingbot_core.camera import PER_LATENT, KeyMotion
from lingbot_core.engine.image import prepare_image
from lingbot_core.engine.memory import GIB, estimate
from lingbot_core.engine.session import WorldSession
from lingbot_core.engine.world import World
from lingbot_core.models.dit import DiTConfig
from lingbot_core.models.vae import VAEConfig
from lingbot_core.presets import Preset, get_preset

from .chunk.host import SYNCED
from .random_world import random_world

CASES = (("v1-fast", 480, 832, 7), ("v2-causal-fast", 480, 832, 7), ("v2-diffusers", 720, 1280, 3))


def measure(world: World, preset: Preset, height: int, width: int, chunks: int) -> dict[str, Any]:
    """One session: stage seconds per chunk, measured and predicted peak, and syncs inside denoising."""
    device = world.device
    cuda = device.type == "cuda"
    image = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    states = torch.randn(100, world.dit.config.text_dim, generator=torch.Generator().manual_seed(1))
    session = WorldSession.start(
        world,
        prepare_image(image, size=(height, width), mode="stretch"),
        "benchmark",
        preset=preset,
        prompt_states=states.to(device),
        translation_unit=0.05,
        chunks=chunks,
    )
    steps = []
    for _ in range(chunks):
        chunk = session.advance(session.controls(KeyMotion(("w",) * preset.chunk, PER_LATENT)))
        steps.append({stage: round(seconds, 4) for stage, seconds in chunk.timings.items()})
    predicted = estimate(
        world.dit.config,
        world.vae.config,
        preset,
        height=height,
        width=width,
        chunks=chunks,
        dtype=world.cache_dtype,
        vae_dtype=world.vae.decoder_dtype,
    )
    result: dict[str, Any] = {
        "preset": preset.label,
        "size": f"{height}x{width}",
        "chunks": steps,
        "predicted_gib": round(predicted.total / GIB, 2),
        "predicted": predicted.describe(),
    }
    if cuda:
        result["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
        result["stage_peaks_gib"] = stage_peaks(session)
        result["syncs_while_denoising"] = count_syncs(session)
    session.close()
    return result


def stage_peaks(session: WorldSession) -> dict[str, float]:
    """Peak of denoising and commit against the decode's, of one more chunk."""
    peaks: dict[str, float] = {}
    torch.cuda.reset_peak_memory_stats()

    def after_frames(chunk: Any) -> None:
        peaks["denoise_and_decode"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
        torch.cuda.reset_peak_memory_stats()

    motion = KeyMotion(("w",) * session.history.start.preset.chunk, PER_LATENT)
    decode = session._world.vae.decode

    def watched(*args: Any) -> Any:
        peaks["denoise"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
        torch.cuda.reset_peak_memory_stats()
        peaks["before_decode"] = round(torch.cuda.memory_allocated() / GIB, 2)
        return decode(*args)

    session._world.vae.decode = watched  # type: ignore[method-assign]
    session.advance(session.controls(motion), on_frames=after_frames)
    session._world.vae.decode = decode  # type: ignore[method-assign]
    peaks["decode"] = peaks.pop("denoise_and_decode")
    peaks["commit"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
    return peaks


def count_syncs(session: WorldSession) -> int:
    """Warnings of PyTorch's sync debug mode between the first and the last denoising step of one chunk."""
    import warnings

    motion = KeyMotion(("w",) * session.history.start.preset.chunk, PER_LATENT)
    controls = session.controls(motion)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def on_step(step: int, total: int) -> None:
            torch.cuda.set_sync_debug_mode("warn" if step < total - 1 else "default")

        session.advance(controls, on_step=on_step)
    torch.cuda.set_sync_debug_mode("default")
    return sum(SYNCED in str(w.message) for w in caught)


def main() -> None:
    """Runs all cases and prints one JSON object per line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small sizes, any device")
    parser.add_argument("--json", action="store_true", help="one JSON object per line (always so)")
    parser.add_argument("--attention", default="auto")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        sys.exit("full size needs a GPU; use --tiny here")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    dit = DiTConfig(dim=128, ffn_dim=256, num_layers=4, num_heads=2, freq_dim=64, text_dim=64) if options.tiny else None
    vae = VAEConfig(dim=16, num_res_blocks=1) if options.tiny else None
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(json.dumps({"device": name, "torch": torch.__version__, "attention": options.attention}), flush=True)
    world = random_world(
        get_preset("v1-fast"), device=device, dtype=dtype, dit=dit, vae=vae, attention=options.attention
    )
    for name, height, width, chunks in CASES:
        if options.tiny:
            height, width = 96, 160
        print(json.dumps(measure(world, get_preset(name), height, width, chunks)), flush=True)


if __name__ == "__main__":
    main()
