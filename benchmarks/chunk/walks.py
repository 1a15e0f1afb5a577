"""Walks through one scene by changed means, held against an exact walk with the same noise.

What random weights can show: that something is finite, what it costs in time, the size of one forward's error. What
they cannot: how good a picture is, and how errors grow from chunk to chunk. A net of random weights passes a difference
on as it likes, and a long walk may forget it or drown in it; so the same error means nothing for a trained model. Two
things help: a yardstick (the same numbers summed in another order, whose error is what chance alone does), and the
embedded model, which is trained and tiny: there frames may be compared.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lingbot_core.camera import PER_LATENT, KeyMotion
from lingbot_core.engine.chunk import draws
from lingbot_core.engine.condition import Condition
from lingbot_core.engine.noise import InjectedNoise, SeededNoise
from lingbot_core.engine.session import WorldSession
from lingbot_core.engine.world import World
from lingbot_core.models.dit import CausalWanDiT
from lingbot_core.presets import Preset, TableSteps

from .worlds import KEYS, milliseconds, picture, random_states, tidy, without_decoder

DAY = Path(__file__).resolve().parents[2] / "examples" / "lingbot_tiny_day.png"
TURNS = ("w", "wl", "w", "wj", "s", "a", "wl", "d")


@dataclass(frozen=True, eq=False)
class Scene:
    """Where walks begin. frames: whether they are decoded, so that pictures can be compared.

    keys: held for a chunk each, over and over. states: of the prompt, [L, text_dim].
    """

    name: str
    world: World
    condition: Condition
    states: Tensor
    keys: tuple[str, ...]
    frames: bool

    def with_dit(self, dit: CausalWanDiT) -> Scene:
        """The same scene behind another transformer."""
        return replace(self, world=replace(self.world, dit=dit))


def random_scene(world: World, height: int, width: int) -> Scene:
    """Of random weights; frames would be noise, so that there are none."""
    condition = world.condition(picture(height, width))
    states = random_states(world).to(world.device)
    return Scene("random weights", without_decoder(world), condition, states, (KEYS,), False)


def tiny_scene(device: torch.device, dtype: torch.dtype) -> Scene:
    """Of the embedded model, which is trained: a sunny day, and turns."""
    world = World.load("tiny", device=device, dtype=dtype)
    assert world.text is not None
    # The prompt needs no cleaning, for which another package would have to be there.
    states = world.text.states(world.text.tokens("a sunny day", clean=False))
    return Scene("tiny, trained", world, world.condition(DAY), states, TURNS, True)


@dataclass(frozen=True, eq=False)
class Walk:
    """x0: float32 [16, frames, h, w] of every chunk; frames: [3, T, H, W] of every chunk, or none; all on the CPU.

    ms: of every chunk by the clock, from the call until the device is done; with the decode where there are frames.
    """

    x0: list[Tensor]
    frames: list[Tensor]
    ms: list[float]


def walk(scene: Scene, preset: Preset, chunks: int, *, exact: Preset | None = None) -> Walk:
    """exact: the recipe whose noise is used: a step at one of its own table indices gets the noise it has there."""
    world = scene.world
    tidy(world.device)
    # Encoded before the first chunk is timed; the condition is shared by all walks.
    scene.condition.latents(0, chunks * preset.chunk)
    session = WorldSession.start(
        world,
        scene.condition,
        scene.name,
        preset=preset,
        prompt_states=scene.states,
        translation_unit=PER_LATENT.move,
        chunks=chunks,
    )
    made = Walk([], [], [])
    for index in range(chunks):
        held = (scene.keys[index % len(scene.keys)],) * preset.chunk
        noise = None if exact is None else _noise(session, preset, exact, index)
        wanted = session.controls(KeyMotion(held, PER_LATENT))
        begin = time.perf_counter()
        chunk = session.advance(wanted, noise=noise)
        made.ms.append(milliseconds(time.perf_counter() - begin))
        made.x0.append(chunk.latents.float().cpu())
        if scene.frames:
            made.frames.append(chunk.frames.float().cpu())
    session.close()
    return made


def _noise(session: WorldSession, preset: Preset, exact: Preset, chunk: int) -> InjectedNoise:
    start = session.history.start
    shape = (session.world.dit.config.out_dim, preset.chunk, start.height // 8, start.width // 8)
    source = SeededNoise(start.seed, shape)
    here, there = preset.selection, exact.selection
    assert isinstance(here, TableSteps)
    assert isinstance(there, TableSteps)
    known = {index: step for step, index in enumerate(there.indices)}
    steps = [0, *(known.get(index, step) for step, index in enumerate(here.indices) if step)]
    first, *more = (source.draw(chunk, step) for step in steps[: draws(preset)])
    return InjectedNoise(first, more)


def relative(got: Tensor, expected: Tensor) -> float:
    """Relative L2 error, three digits."""
    error = float((got.double() - expected.double()).norm() / expected.double().norm())
    return float(f"{error:.3e}")


def psnr(got: Tensor, expected: Tensor) -> float | None:
    """dB of pictures in [-1, 1]; None where they are equal, bit for bit."""
    error = float(((got.double() - expected.double()) ** 2).mean())
    return round(10 * math.log10(4 / error), 2) if error else None


def errors(got: Walk, expected: Walk) -> dict[str, Any]:
    """Of x0 by chunk, and of the frames where there are any: dB by chunk, and of the worst."""
    row: dict[str, Any] = {"x0_error": [relative(a, b) for a, b in zip(got.x0, expected.x0, strict=True)]}
    if got.frames:
        decibels = [psnr(a, b) for a, b in zip(got.frames, expected.frames, strict=True)]
        row["frames_psnr_db"] = decibels
        row["worst_psnr_db"] = min((value for value in decibels if value is not None), default=None)
    return row
