"""From a chunk's boundary to its first new frame on the host, in the steady window."""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import replace
from typing import Any

import torch

from lingbot_core.engine.chunk import Chunk
from lingbot_core.engine.image import frames_to_uint8
from lingbot_core.engine.world import World
from lingbot_core.models.graphs import RecordedDiT
from lingbot_core.models.vae import DecoderState
from lingbot_core.presets import Preset

from ..parity import CHUNK, Inputs, OurRun
from .timing import milliseconds, synchronize
from .worlds import chunks_to_fill, controls, picture, skip, start, tidy


def measure(world: World, preset: Preset, height: int, width: int, runs: int = 4) -> dict[str, Any]:
    """Milliseconds from the call of ``advance``, with the device idle, until ``on_frames`` has the frames as uint8.

    Beside it what cannot be left out, measured alone: so many forwards in a full window, as a graph where sessions of
    this world record them, the decode of a steady chunk, and the copy of its frames. ``ratio`` is of the first to
    forwards and decode; ``ratio_to_stages`` to the session's own denoise and decode, which a commit beside it slows.
    """
    tidy(world.device)
    session = start(world, picture(height, width), preset)
    skip(session, chunks_to_fill(preset))
    for _ in range(2):
        session.advance(controls(session))
    firsts, wholes, stages = [], [], []
    for _ in range(runs):
        wanted = controls(session)
        synchronize(world.device)
        first_frame = _FirstFrame()
        begin = time.perf_counter()
        chunk = session.advance(wanted, on_frames=first_frame)
        synchronize(world.device)
        wholes.append(1000 * (time.perf_counter() - begin))
        firsts.append(1000 * (first_frame.at() - begin))
        stages.append({name: 1000 * seconds for name, seconds in chunk.timings.items()})
    latents = session.history.chunks[-1].latents.to(world.device)
    session.close()
    first = statistics.median(firsts)
    medians = {name: statistics.median(stage[name] for stage in stages) for name in stages[0]}
    eager, graph = forward_alone(world, preset, height, width)
    decode, copy = decode_alone(world, latents)
    forward = eager if graph is None else graph
    alone = preset.steps * forward + decode
    return {
        "window": preset.window,
        "first_frame_ms": round(first, 2),
        "all_ms": [round(value, 2) for value in firsts],
        "whole_chunk_ms": round(statistics.median(wholes), 2),
        "alone": {
            "forward_ms": round(forward, 2),
            "eager_forward_ms": round(eager, 2),
            "decode_ms": round(decode, 2),
            "to_host_ms": round(copy, 2),
            "forwards_and_decode_ms": round(alone, 2),
        },
        "stages_ms": {name: round(value, 2) for name, value in medians.items()},
        "ratio": round(first / alone, 4),
        "ratio_to_stages": round(first / (medians["denoise"] + medians["decode"]), 4),
    }


class _FirstFrame:
    """When the first frames were on the host, whichever thread they came in."""

    def __init__(self) -> None:
        self._seen, self._at = threading.Event(), 0.0

    def __call__(self, chunk: Chunk) -> None:
        frames_to_uint8(chunk.frames)
        if not self._seen.is_set():
            self._at = time.perf_counter()
            self._seen.set()

    def at(self) -> float:
        if not self._seen.wait(60):
            raise RuntimeError("on_frames was not called within a minute after advance had returned")
        return self._at


@torch.inference_mode()
def forward_alone(world: World, preset: Preset, height: int, width: int) -> tuple[float, float | None]:
    """Milliseconds of one forward of a chunk with the whole window before it; and as a graph, where there are any."""
    count = chunks_to_fill(preset) + 1
    inputs = Inputs(world.dit.config, count, height, width, world.device)
    assert preset.chunk == CHUNK
    run = OurRun(world.dit, inputs, preset.window, preset.sink)
    for index in range(count - 1):
        with run.chunk(index):
            run.remember(inputs.draw(index, 0), 0.0)
    x = inputs.draw(count - 1, 0)
    with run.chunk(count - 1) as forward:
        eager = milliseconds(lambda: forward(x, 900.0), world.device)
        if not world.records:
            return eager, None
        recorded = RecordedDiT(world.dit)
        camera = recorded.encode_camera(inputs.rays(count - 1), steady=run.cache.steady)
        context = replace(run._context, camera=camera)
        graph = milliseconds(lambda: recorded(x, 900.0, context), world.device, warm=3)
        recorded.forget()
        return eager, graph


@torch.inference_mode()
def decode_alone(world: World, latents: torch.Tensor) -> tuple[float, float]:
    """Milliseconds of the decode of these latents in the middle of a clip, and of its frames' way to the host."""
    state = DecoderState()
    for _ in range(2):  # from here on every decode has the same shapes
        frames = world.vae.decode(latents, state)
    decode = milliseconds(lambda: world.vae.decode(latents, state.copy()), world.device)
    return decode, milliseconds(lambda: frames_to_uint8(frames), world.device)
