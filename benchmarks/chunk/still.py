"""What a smaller window for chunks whose camera stands still gains, and how far its latents are from the exact ones."""

from __future__ import annotations

import statistics
import time
from typing import Any

from lingbot_core.camera.controls import KeyMotion
from lingbot_core.camera.keys import PER_LATENT
from lingbot_core.engine.world import World
from lingbot_core.presets import Preset

from .timing import synchronize
from .worlds import picture, start, without_decoder

MOVING, STILL = 8, 4
"""Chunks: the window is full after the moving ones."""


def measure(world: World, preset: Preset, height: int, width: int, still_window: int = 9) -> dict[str, Any]:
    """Median ms of a still chunk (no decode), exact and limited, and the relative error of each still chunk's x0."""
    world = without_decoder(world)
    recipes = {"exact": preset, "limited": preset.with_overrides(still_window=still_window)}
    latents: dict[str, list[Any]] = {}
    ms: dict[str, float] = {}
    for name, recipe in recipes.items():
        session = start(world, picture(height, width), recipe)
        laps, made = [], []
        for index in range(MOVING + STILL):
            held = ("w" if index < MOVING else "",) * preset.chunk
            synchronize(world.device)
            begin = time.perf_counter()
            made.append(session.advance(session.controls(KeyMotion(held, PER_LATENT))).latents)
            synchronize(world.device)
            laps.append(1000 * (time.perf_counter() - begin))
        session.close()
        ms[name], latents[name] = statistics.median(laps[MOVING:]), made[MOVING:]
    errors = [
        float((got - want).norm() / want.norm()) for got, want in zip(latents["limited"], latents["exact"], strict=True)
    ]
    return {
        "window": preset.window,
        "still_window": still_window,
        "exact_ms": round(ms["exact"], 1),
        "limited_ms": round(ms["limited"], 1),
        "gain": round(ms["exact"] / ms["limited"], 3),
        "x0_error": [float(f"{error:.3e}") for error in errors],
    }
