"""Whole sessions of the largest kinds, once each, and the peaks of short ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from lingbot_core.engine.world import World
from lingbot_core.presets import Preset

from .worlds import controls, milliseconds, peak_gib, picture, skip, start, tidy


def session(world: World, preset: Preset, height: int, width: int, chunks: int, *, made: int = 0) -> dict[str, Any]:
    """Milliseconds of every stage and the peak of a session, the start image's encoding and the decode included.

    made: chunks at the beginning that are committed and decoded, but not denoised, which needs the same memory.
    """
    tidy(world.device)
    walk = start(world, picture(height, width), preset, chunks=chunks)
    rows = []
    skip(walk, made)
    for _ in range(made, chunks):
        begin = time.perf_counter()
        timings = walk.advance(controls(walk)).timings
        wall = milliseconds(time.perf_counter() - begin)  # stages may run side by side
        rows.append({stage: milliseconds(seconds) for stage, seconds in timings.items()} | {"all": wall})
    latents = walk.history.chunks[-1].latents
    walk.close()
    return {
        "size": f"{height}x{width}",
        "frames": preset.frames(chunks),
        "chunks": rows,
        "sum_ms": round(sum(row["all"] for row in rows), 1),
        "finite": bool(latents.isfinite().all()),
        "peak_gib": peak_gib(world.device),
    }


def measure(world: World, preset: Preset, sizes: dict[str, tuple[int, int, int]]) -> Iterator[dict[str, Any]]:
    """sizes: name -> height, width, chunks."""
    for name, (height, width, chunks) in sizes.items():
        yield {"case": name, **session(world, preset, height, width, chunks)}
