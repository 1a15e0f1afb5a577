"""Walks that a world is judged by: which scene, which keys, what it should look like, and what a model makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lingbot_core.camera import KeyMotion
from lingbot_core.engine.image import prepare_image
from lingbot_core.engine.session import WorldSession
from lingbot_core.engine.world import World

from .clips import PRESETS, held_states, walk_clips
from .scene import INTRINSICS, INTRINSICS_SIZE, PERIOD, clear_path, random_scenes, render
from .styles import PHRASES, STYLES

# Below all seeds that training draws from (source.FIRST_SEED).
UNSEEN_SEED = 500_000
ONE_KEY = ("w", "s", "a", "d", "j", "l", "ik", "ki")
CHUNK = 3


@dataclass(frozen=True)
class Walk:
    """keys: one text per latent frame. styles: one per chunk, rows of STYLES. steps: row of clips.PRESETS."""

    seed: int
    keys: tuple[str, ...]
    styles: tuple[int, ...]
    steps: int = 0
    name: str = ""

    @property
    def chunks(self) -> int:
        return len(self.styles)


def key_walk(scene: int, key: str, chunks: int, steps: int = 0) -> Walk:
    """One key all the way; 'ik' and 'ki' look up and down around the horizon, a chunk away from it at most."""
    latents = chunks * CHUNK
    if len(key) == 2:
        swing = [key[0]] * CHUNK + [key[1]] * (2 * CHUNK) + [key[0]] * CHUNK
        keys = tuple((swing * (latents // len(swing) + 1))[:latents])
    else:
        keys = (key,) * latents
    return Walk(UNSEEN_SEED + scene, keys, (scene % len(STYLES),) * chunks, steps, key)


def mixed_walks(scene: int, chunks: int, steps: int = 0) -> list[Walk]:
    """Two walks that hold every key for two chunks (I and K for one each), beginning with another one per scene."""
    walks = []
    for number, order in enumerate((("w", "l", "d", "ik"), ("s", "j", "a", "ki"))):
        keys: list[str] = []
        for key in order[scene % 4 :] + order[: scene % 4]:
            keys += [key[0]] * CHUNK + [key[-1]] * CHUNK
        whole = tuple((keys * (chunks // 8 + 1))[: chunks * CHUNK])
        walks.append(Walk(UNSEEN_SEED + scene, whole, (scene % len(STYLES),) * chunks, steps, f"mixed {number}"))
    return walks


def wander(scene: int, chunks: int) -> Walk:
    """A long walk as people take it: forward, with turns and looks that come back."""
    tour = ["w", "w", "w", "wl", "wl", "w", "d", "d", "l", "i", "i", "k", "k", "", "w", "wj", "wj", "w", "a", "j", "s"]
    keys = tuple((tour * (chunks * CHUNK // len(tour) + 1))[: chunks * CHUNK])
    return Walk(UNSEEN_SEED + scene, keys, (scene % len(STYLES),) * chunks, 0, "wander")


def switch_walk(scene: int, chunks: int, at: int) -> Walk:
    """The wander with another style from chunk ``at`` on."""
    first, second = scene % len(STYLES), (scene + 1 + scene // len(STYLES) % (len(STYLES) - 1)) % len(STYLES)
    base = wander(scene, chunks)
    return Walk(base.seed, base.keys, (first,) * at + (second,) * (chunks - at), 0, "switch")


def truth(walk: Walk, height: int, width: int, *, styles: Sequence[int] | None = None, device: str = "cpu") -> Tensor:
    """The rendered frames, uint8 [F, 3, height, width]. styles: other looks of the same walk, one per chunk."""
    rng = np.random.default_rng(walk.seed)
    start = np.array([[rng.random() * PERIOD, rng.random() * PERIOD, rng.random() * 2 * np.pi, 0.0]])
    clips = walk_clips(
        start,
        held_states([walk.keys]),
        np.array([walk.steps]),
        np.array([False]),
        np.array([styles or walk.styles]),
        [[""] * walk.chunks],
        chunk=CHUNK,
    )
    if clips.keys(0) != list(walk.keys):
        raise ValueError(f"walk {walk.name}: its keys look beyond the limit of {PRESETS[walk.steps].name}")
    scenes = clear_path(random_scenes([walk.seed]), clips.c2w).to(device)
    return render(scenes, clips.c2w.to(device), clips.palette().to(device), height, width)[0]


def session_intrinsics(height: int, width: int) -> tuple[float, ...]:
    """The camera of the scenes in pixels of a picture."""
    sx, sy = width / INTRINSICS_SIZE[0], height / INTRINSICS_SIZE[1]
    return tuple(value * scale for value, scale in zip(INTRINSICS, (sx, sy, sx, sy), strict=True))


def start_session(
    world: World, picture: Tensor, walk: Walk, *, window: int | None = None, seed: int = 0
) -> WorldSession:
    """A session that begins with a picture uint8 [3, H, W] of this size."""
    height, width = picture.shape[-2:]
    preset = world.preset if window is None else world.preset.with_overrides(window=window)
    return WorldSession.start(
        world,
        prepare_image(picture.permute(1, 2, 0).cpu().numpy(), size=(height, width)),
        prompt_of(walk, 0),
        preset=preset,
        seed=seed,
        translation_unit=PRESETS[walk.steps].move_per_latent,
        unit_rule="key",
        first_delta="identity",
        intrinsics=session_intrinsics(height, width),
    )


def prompt_of(walk: Walk, chunk: int) -> str:
    """One of the phrases of that chunk's style, chosen by the scene."""
    return PHRASES[STYLES[walk.styles[chunk]]][walk.seed % 3]


def advance(session: WorldSession, walk: Walk, index: int) -> Any:
    """The next chunk of a walk."""
    changed = index > 0 and walk.styles[index] != walk.styles[index - 1]
    motion = KeyMotion(walk.keys[CHUNK * index : CHUNK * (index + 1)], PRESETS[walk.steps])
    return session.advance(session.controls(motion, prompt=prompt_of(walk, index) if changed else None))


def drive(world: World, walk: Walk, picture: Tensor, *, window: int | None = None, seed: int = 0) -> Tensor:
    """What the model shows, float32 [F, 3, H, W] in 0..1, on the CPU."""
    session = start_session(world, picture, walk, window=window, seed=seed)
    frames = [advance(session, walk, index).frames.float().cpu() for index in range(walk.chunks)]
    session.close()
    return (torch.cat(frames, dim=1).permute(1, 0, 2, 3) / 2 + 0.5).clamp(0, 1)
