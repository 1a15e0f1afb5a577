"""Frames per second of a caller that writes a video while the world is made, and what its parts take alone.

The caller is the command line's own loop (``lingbot_core.cli.record``), with a world that is loaded already: its
progress, its report and its file are in the time. Without PyAV frames are counted and no file is written.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lingbot_core.camera import PER_LATENT
from lingbot_core.cli import build_parser, record
from lingbot_core.cli.prepare import Job
from lingbot_core.engine.chunk import Chunk
from lingbot_core.engine.route import route_from_keys
from lingbot_core.engine.world import World
from lingbot_core.models.text import Encoded
from lingbot_core.presets import Preset
from lingbot_core.weights.layout import TINY, find_layout

from .boundary import decode_alone
from .worlds import KEYS, PROMPT, chunks_to_fill, controls, picture, random_states, skip, start, tidy, without_decoder

WARM = 2
"""Chunks of a full window that do not count: kernels are compiled and graphs captured there."""


def measure(world: World, preset: Preset, height: int, width: int, runs: int = 4) -> dict[str, Any]:
    """Milliseconds per steady chunk: streamed, of denoising and commit without a decoder, and of the decode alone.

    ``decode_hidden``: the share of the decode's time that the streamed chunk does not take longer than one without a
    decoder: 0 where everything runs in turn, 1 where the decode costs nothing. The way of the frames to the host and
    into the file counts against it. ``write_ms``: inside the loop's callback, by its own clock.
    """
    frames = 4 * preset.chunk
    fill = chunks_to_fill(preset)
    streamed, write, writer = _streamed(world, preset, height, width, fill + WARM, runs)
    bare = _without_decoder(world, preset, height, width, fill, runs)
    shape = (world.dit.config.out_dim, preset.chunk, height // 8, width // 8)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(world.device)
    decode, to_host = decode_alone(world, latents)
    seen = streamed - bare
    return {
        "window": preset.window,
        "frames_per_chunk": frames,
        "writer": writer,
        "streamed_fps": round(1000 * frames / streamed, 3),
        "denoise_and_commit_fps": round(1000 * frames / bare, 3),
        "decode_fps": round(1000 * frames / decode, 3),
        "streamed_ms": round(streamed, 2),
        "denoise_and_commit_ms": round(bare, 2),
        "decode_ms": round(decode, 2),
        "to_host_ms": round(to_host, 2),
        "write_ms": round(write, 2),
        "decode_seen_ms": round(seen, 2),
        "decode_hidden": round(1 - seen / decode, 4),
    }


def _without_decoder(world: World, preset: Preset, height: int, width: int, fill: int, runs: int) -> float:
    tidy(world.device)
    session = start(without_decoder(world), picture(height, width), preset)
    skip(session, fill)
    laps = []
    for _ in range(WARM + runs):
        begin = time.perf_counter()
        session.advance(controls(session))
        laps.append(1000 * (time.perf_counter() - begin))
    session.close()
    return statistics.fmean(laps[WARM:])


def _streamed(world: World, preset: Preset, height: int, width: int, warm: int, runs: int) -> tuple[float, float, str]:
    """Milliseconds per chunk and of writing one, and who wrote. The last ``runs`` of ``warm + runs`` chunks count."""
    tidy(world.device)
    laps = _Laps()
    with tempfile.TemporaryDirectory(prefix="stream-") as folder, _loaded(world) as writer:
        job = _job(preset, height, width, warm + runs, Path(folder))
        with contextlib.redirect_stdout(sys.stderr):
            code = record.record(job, laps)
    if code:
        raise RuntimeError(f"the command line's loop ended with {code}")
    write = statistics.fmean(1000 * chunk["write"] for chunk in laps.report["seconds"]["by_chunk"][warm:])
    return 1000 * (laps.at[-1] - laps.at[warm - 1]) / runs, write, writer


class _Laps:
    """Looks on: when each chunk's frames were in the video, and the report."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.report: dict[str, Any] = {}

    def take(self, chunk: Chunk, frames: NDArray[np.uint8]) -> None:
        self.at.append(time.perf_counter())

    def add_to(self, report: dict[str, Any]) -> None:
        self.report = dict(report)


def _job(preset: Preset, height: int, width: int, chunks: int, folder: Path) -> Job:
    """What ``lingbot-world generate`` would make of its arguments; the names in it are of the embedded model."""
    video = folder / "stream.mp4"
    arguments = ["generate", "--model", TINY, "--image", "none", "--prompt", PROMPT, "--action-string", "w-1"]
    args: argparse.Namespace = build_parser().parse_args([*arguments, "--output", str(video)])
    route = route_from_keys(KEYS, preset, chunks=chunks)
    return Job(
        args=args,
        layout=find_layout(TINY),
        preset=preset,
        route=route,
        image=picture(height, width),
        unit=PER_LATENT.move,
        unit_rule="key",
        first_delta=route.first_delta,
        intrinsics=(500.0, 500.0, width / 2, height / 2),
        output=video,
        report=video.with_suffix(".json"),
        warnings=(),
    )


@contextlib.contextmanager
def _loaded(world: World) -> Iterator[str]:
    """The loop gets this world in place of one from files; gives the name of what writes its frames."""
    ready = replace(world, text=_AnyPrompt(random_states(world).to(world.device)))  # type: ignore[arg-type]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(World, "load", return_value=ready))
        if importlib.util.find_spec("av") is not None:
            yield "VideoWriter"
            return
        stack.enter_context(mock.patch.object(record, "VideoWriter", _Counter))
        yield "nobody: PyAV is not installed, frames are counted"


class _AnyPrompt:
    """A text encoder that has one answer."""

    def __init__(self, states: Tensor) -> None:
        self._states = states
        self.model = nn.Module()

    def encode(self, prompt: str) -> Encoded:
        return Encoded(self._states, len(self._states), False)


class _Counter:
    """What the loop asks of a VideoWriter."""

    def __init__(self, path: Any, **_: Any) -> None:
        self.path, self.frames = path, 0
        self.closed = self.published = False

    def write(self, frames: NDArray[np.uint8]) -> None:
        self.frames += len(frames)

    def close(self) -> int:
        self.closed = True
        return self.frames

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
