"""A long walk with a window: whether a steady chunk stays as fast and as small as it was."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from lingbot_core.engine.world import World
from lingbot_core.presets import Preset, get_preset

from .host import Captured, HostTimer, captures, compiled, implicit_waits, sleeping_waits
from .worlds import GIB, MIB, allocated, controls, milliseconds, peak_gib, picture, start, tidy, without_decoder

FROM = 8
"""The first chunk that counts as steady: the window is full, and what happens once has happened."""


def windowed(window: int = 18, sink: int = 3) -> Preset:
    """v1-fast with a window: chunks of 3 latent frames, 4 steps."""
    return get_preset("v1-fast").with_overrides(window=window, sink=sink)


def measure(
    world: World,
    preset: Preset,
    height: int,
    width: int,
    chunks: int,
    *,
    decode: bool = True,
    seconds: float = 1e9,
    sleep: bool = True,
) -> dict[str, Any]:
    """Of a walk through WorldSession.advance; it ends early, with ``stopped``, after so many seconds.

    Every stage is milliseconds on the device; ``wall_ms``, ``host_ms`` and ``cpu_ms`` are those of host.py, from one
    chunk's return to the next. ``spread``: (largest - smallest) / mean over the chunks from FROM on. Memory is what
    living tensors take once the chunk's frames are let go of.
    """
    device = world.device
    tidy(device)
    if not decode:
        world = without_decoder(world)
    session = start(world, picture(height, width), preset)
    rows: list[dict[str, Any]] = []
    memory: list[int | None] = []
    timer, begun, finite, failed = HostTimer(), time.perf_counter(), True, ""
    seen: dict[str, dict[str, int | None]] = {}
    with sleeping_waits(device, wanted=sleep) as cost, Captured() as captured, timer.watching():
        for index in range(chunks):
            timer.reset()
            try:
                chunk = session.advance(controls(session))
            except Exception as error:  # what was measured before it counts all the same
                failed = f"chunk {index}: {type(error).__name__}: {error}"[:300]
                break
            rows.append(timer.lap() | {stage: milliseconds(value) for stage, value in chunk.timings.items()})
            finite = finite and bool(torch.isfinite(chunk.latents).all())
            del chunk
            memory.append(allocated(device))
            now = {"compiled": compiled(), "graphs": captured.count, "captures": captures(session)}
            if index == FROM:
                seen[f"chunk {FROM}"] = now
            seen["end"] = now
            if time.perf_counter() - begun > seconds:
                break
    made = len(rows)
    row = {
        "window": preset.window,
        "sink": preset.sink,
        "decode": decode,
        "made": made,
        **({"failed": failed} if failed else {"stopped": f"after {seconds:.0f} s"} if made < chunks else {}),
        "finite": finite,
        "chunks": [_shown(index, rows[index], memory[index]) for index in _some(made)],
        "steady": summary(rows[FROM:]) if made > FROM else f"there are no chunks from {FROM} on",
        "waits_cost": cost,
        "once": seen,
        "peak_gib": peak_gib(device),
    }
    if steady := [size for size in memory[FROM:] if size is not None]:
        row["growth_mib"] = round((steady[-1] - steady[0]) / MIB, 3)
        row["largest_growth_mib"] = round((max(steady) - steady[0]) / MIB, 3)
    row["implicit_waits"] = None if failed else implicit_waits(session)
    session.close()
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and spread of every column; ``late``: the mean of the last tenth over that of the first."""
    found: dict[str, Any] = {}
    tenth = max(1, len(rows) // 10)
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name, 0.0) for row in rows]
        mean = statistics.fmean(values)
        if not mean:
            continue
        found[name] = {
            "mean": round(mean, 2),
            "median": round(statistics.median(values), 2),
            "least": min(values),
            "most": max(values),
            "spread": round((max(values) - min(values)) / mean, 4),
            "late": round(statistics.fmean(values[-tenth:]) / max(1e-9, statistics.fmean(values[:tenth])), 4),
        }
    return found


def _some(count: int) -> list[int]:
    """The first ten, then every twentieth, and the last."""
    return sorted({*range(min(10, count)), *range(20, count, 20), max(0, count - 1)} & {*range(count)})


def _shown(index: int, row: dict[str, Any], size: int | None) -> dict[str, Any]:
    held = {} if size is None else {"allocated_gib": round(size / GIB, 3)}
    return {"chunk": index, **row, **held}
