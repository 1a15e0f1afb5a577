"""Training clips: where a walk starts, which keys are held, and what the camera does in every video frame.

A clip of n latent frames has 1 + 4 (n - 1) video frames. Key states belong to latent frames; the controls are those
that ``lingbot_core.camera.to_controls`` gives for the same keys in the unit ``key``. Everything here is numpy over all
clips at once, because a pool holds thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lingbot_core.camera import PER_LATENT, PER_VIDEO, KeySteps

from .scene import EYE, PERIOD, STRIDE
from .styles import PHRASES, STYLES, palettes

Array = NDArray[Any]
KEYS = "wasdijkl"
PRESETS: tuple[KeySteps, ...] = (PER_VIDEO, PER_LATENT)

SINGLE_KEY_SHARE = 0.2  # of clips hold one key, or one pair, all the way
FROM_REST_SHARE = 0.3
PER_LATENT_SHARE = 0.35
SWITCH_SHARE = 0.4
EMPTY_SHARE = 0.1
# Clips that may look up and down to the presets' own limit; the others stay near the horizon.
STEEP_SHARE = 0.2
LEVEL_LIMIT_DEG = 34.0
FADE_FRAMES = 8  # over which a new style comes in

# How often a run of latents holds these keys.
HOLDS: dict[str, float] = {
    "": 7,
    "w": 14, "s": 8, "a": 9, "d": 9,
    "j": 9, "l": 9, "i": 5, "k": 5,
    "wa": 3, "wd": 3, "sa": 1.5, "sd": 1.5,
    "wj": 4, "wl": 4, "dj": 2, "al": 2, "sj": 1, "sl": 1, "aj": 1, "dl": 1,
    "wi": 1, "wk": 1, "ij": 1, "il": 1, "kj": 1, "kl": 1,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Clips:
    """B clips of n latent frames and F = 4 n - 3 video frames, ``chunk`` latents to a chunk.

    c2w: cameras of the video frames in the scene, float64 [B, F, 4, 4]. relative: controls, float64 [B, n, 4, 4].
    held: key states in the order of KEYS, bool [B, n, 8]. latent: the latents' poses in the scene [B, n, 4, 4]; before:
    the pose before the first of them [B, 4, 4]. from_rest: bool [B]. preset: row of PRESETS [B].
    style: int64 [B, chunks]. prompts: text of every chunk.
    """

    c2w: Tensor
    relative: Tensor
    held: Array
    latent: Array
    before: Array
    from_rest: Array
    preset: Array
    style: Tensor
    prompts: list[list[str]]
    chunk: int

    def __len__(self) -> int:
        return len(self.c2w)

    def keys(self, clip: int) -> list[str]:
        """The keys of each latent frame of one clip, such as ['w', 'wj', '']."""
        return ["".join(key for key, down in zip(KEYS, row, strict=True) if down) for row in self.held[clip]]

    def palette(self) -> Tensor:
        """What ``scene.render`` takes as style: palettes [B, F, ROWS + 1, 3], faded where a chunk changes style."""
        return fades(self.style, self.chunk)


def fades(style: Tensor, chunk: int) -> Tensor:
    """Palettes of every video frame, float32 [B, F, ROWS + 1, 3], for the styles of chunks [B, chunks]."""
    frame = torch.arange(4 * chunk * style.shape[1] - 3)
    of = torch.div(frame + 3, 4 * chunk, rounding_mode="floor")
    # Frames of this chunk so far; the first chunk has nothing to fade from.
    at = (frame + 3) % (4 * chunk)
    blend = ((at + 1) / FADE_FRAMES).clamp(max=1.0)[:, None, None]
    table = palettes()
    new, old = table[style.cpu()[:, of]], table[style.cpu()[:, (of - 1).clamp(min=0)]]
    return old + (new - old) * blend


def sample_clips(seed: int, count: int, *, latents: int, chunk: int = 3) -> Clips:
    """Random clips; the same seed gives the same clips. latents: a multiple of ``chunk``."""
    rng = np.random.default_rng(seed)
    preset = (rng.random(count) < PER_LATENT_SHARE).astype(np.int64)
    from_rest = rng.random(count) < FROM_REST_SHARE
    steep = rng.random(count) < STEEP_SHARE
    held = _sample_keys(rng, count, latents)
    start = np.stack(
        [
            rng.random(count) * PERIOD,
            rng.random(count) * PERIOD,
            rng.random(count) * 2 * np.pi,
            # Most walks begin level; the rest in the middle of looking up or down.
            np.where(rng.random(count) < 0.75, 0.0, rng.uniform(-1, 1, count) * np.where(steep, 70, 30)) * np.pi / 180,
        ],
        axis=1,
    )
    limit = np.where(steep, [PRESETS[p].pitch_limit_deg for p in preset], LEVEL_LIMIT_DEG)
    style, prompts = _sample_styles(rng, count, latents // chunk)
    return walk_clips(start, held, preset, from_rest, style, prompts, chunk=chunk, limit_deg=limit)


def walk_clips(
    start: Array,
    held: Array,
    preset: Array,
    from_rest: Array,
    style: Array,
    prompts: list[list[str]],
    *,
    chunk: int = 3,
    limit_deg: Array | None = None,
) -> Clips:
    """Clips for given starts [B, 4] (x, z, yaw, pitch; radians) and key states [B, n, 8].

    limit_deg: pitch keys that would pass it are taken out of ``held``, so that the controls and the recorded keys
    agree; None takes the presets' own limits.
    """
    count, latents = held.shape[:2]
    held = np.array(held, dtype=bool)
    steps = [PRESETS[p] for p in preset]
    move = STRIDE * np.array([s.move for s in steps])
    pitch_step, yaw_step = (np.radians([getattr(s, name) for s in steps]) for name in ("pitch_deg", "yaw_deg"))
    substeps = np.array([s.steps_per_latent for s in steps])
    if limit_deg is None:
        limit_deg = np.array([s.pitch_limit_deg for s in steps])
    limit = np.radians(limit_deg)

    x, z, yaw, pitch = (np.array(column, dtype=np.float64) for column in start.T)
    most = int(substeps.max())
    # states[:, 0] is the pose before the first latent; then come all steps of latent 0, of latent 1, ...
    states = np.empty((count, latents + 1, most, 4))
    states[:, 0] = np.stack([x, z, yaw, pitch], axis=1)[:, None]
    for j in range(latents):
        change = held[:, j, KEYS.index("i")].astype(int) - held[:, j, KEYS.index("k")]
        # One latent is never steered half of its way up: either all of its steps fit below the limit, or none is made.
        after = np.abs(pitch + change * pitch_step * substeps)
        refused = (after > limit + 1e-9) & (after > np.abs(pitch))
        held[refused, j, KEYS.index("i")] = False
        held[refused, j, KEYS.index("k")] = False
        down = held[:, j].astype(np.float64)
        ahead, right, up, turn = (
            down[:, 0] - down[:, 2],
            down[:, 3] - down[:, 1],
            down[:, 4] - down[:, 6],
            down[:, 7] - down[:, 5],
        )
        for k in range(most):
            alive = k < substeps
            pitch = pitch + np.where(alive, up * pitch_step, 0)
            yaw = yaw + np.where(alive, turn * yaw_step, 0)
            level = np.cos(pitch)
            forward = move * ahead * level / (level + 1e-6)  # the guard of lingbot_core.camera.keys
            sideways = move * right / (1 + 1e-6)
            x = x + np.where(alive, forward * np.sin(yaw) + sideways * np.cos(yaw), 0)
            z = z + np.where(alive, forward * np.cos(yaw) - sideways * np.sin(yaw), 0)
            states[:, j + 1, k] = np.stack([x, z, yaw, pitch], axis=1)

    ends = states[:, :, -1]
    latent = poses(ends[:, 1:])
    relative = np.concatenate([np.eye(4)[None, None].repeat(count, 0), _steps(latent[:, :-1], latent[:, 1:])], axis=1)
    before = poses(ends[:, :1])
    relative[from_rest, :1] = _steps(before, latent[:, :1])[from_rest]
    relative[..., :3, 3] /= (move * substeps)[:, None, None]
    c2w = poses(_video_states(states, ends, substeps, from_rest))
    return Clips(
        c2w=torch.from_numpy(c2w),
        relative=torch.from_numpy(relative),
        held=held,
        latent=latent,
        before=before[:, 0],
        from_rest=np.asarray(from_rest),
        preset=np.asarray(preset),
        style=torch.from_numpy(np.ascontiguousarray(style)),
        prompts=prompts,
        chunk=chunk,
    )


def _video_states(states: Array, ends: Array, substeps: Array, from_rest: Array) -> Array:
    """x, z, yaw, pitch of every video frame [B, 4 n - 3, 4].

    The first frame is the picture that a session starts from. With from_rest it shows what lies before the first press,
    which frames 1 to 4 then make up for beside their own; otherwise it shows the first latent.
    """
    count, latents = ends.shape[0], ends.shape[1] - 1
    out = np.empty((count, 4 * latents - 3, 4))
    out[:, 0] = np.where(from_rest[:, None], ends[:, 0], ends[:, 1])
    previous = out[:, 0]
    part = np.arange(1, 5)[:, None] / 4
    for j in range(2, latents + 1):
        line = previous[:, None] + (ends[:, j] - previous)[:, None] * part
        exact = (substeps == 4) & ~(from_rest & (j == 2))
        frames = np.where(exact[:, None, None], states[:, j], line) if states.shape[2] == 4 else line
        out[:, 4 * j - 7 : 4 * j - 3] = frames
        previous = ends[:, j]
    return out


def poses(states: Array) -> Array:
    """Camera-to-world matrices in a scene, float64 [..., 4, 4], of x, z, yaw, pitch [..., 4]."""
    x, z, yaw, pitch = np.moveaxis(np.asarray(states, dtype=np.float64), -1, 0)
    out = np.zeros((*x.shape, 4, 4))
    cy, sy, cp, sp = np.cos(yaw), np.sin(yaw), np.cos(pitch), np.sin(pitch)
    out[..., 0, 0], out[..., 0, 1], out[..., 0, 2] = cy, sy * sp, sy * cp
    out[..., 1, 1], out[..., 1, 2] = cp, -sp
    out[..., 2, 0], out[..., 2, 1], out[..., 2, 2] = -sy, cy * sp, cy * cp
    out[..., 0, 3], out[..., 1, 3], out[..., 2, 3], out[..., 3, 3] = x, -EYE, z, 1
    return out


def _steps(earlier: Array, later: Array) -> Array:
    """inv(earlier) @ later of rigid poses."""
    out = np.zeros_like(later)
    turned = np.swapaxes(earlier[..., :3, :3], -1, -2)
    out[..., :3, :3] = turned @ later[..., :3, :3]
    out[..., :3, 3] = (turned @ (later[..., :3, 3:] - earlier[..., :3, 3:]))[..., 0]
    out[..., 3, 3] = 1
    return out


def held_states(keys: Sequence[Sequence[str]]) -> Array:
    """Key states bool [B, n, 8] of texts such as [['w', 'wj', ''], ...]."""
    return np.array([[[key in text for key in KEYS] for text in clip] for clip in keys])


def _sample_keys(rng: np.random.Generator, count: int, latents: int) -> Array:
    names = list(HOLDS)
    weight = np.array(list(HOLDS.values()), dtype=np.float64)
    table = held_states([names])[0]
    held = np.zeros((count, latents, 8), dtype=bool)
    # Enough runs for any clip; those past its end are cut off.
    choice = rng.choice(len(names), size=(count, latents), p=weight / weight.sum())
    length = rng.integers(1, 7, size=(count, latents))
    run = (np.arange(latents)[None, :, None] >= length.cumsum(axis=1)[:, None]).sum(axis=-1)
    single = rng.random(count) < SINGLE_KEY_SHARE
    run[single] = 0
    held[:] = table[np.take_along_axis(choice, np.minimum(run, latents - 1), axis=1)]
    return held


def _sample_styles(rng: np.random.Generator, count: int, chunks: int) -> tuple[Array, list[list[str]]]:
    style = np.repeat(rng.integers(0, len(STYLES), count)[:, None], chunks, axis=1)
    phrase = rng.integers(0, 3, size=(count, 2))
    empty = rng.random(count) < EMPTY_SHARE
    switches = (rng.random(count) < SWITCH_SHARE) & (chunks > 1)
    at = rng.integers(1, max(chunks, 2), count)
    shift = rng.integers(1, len(STYLES), count)
    prompts = []
    for b in range(count):
        first = PHRASES[STYLES[style[b, 0]]][phrase[b, 0]]
        # Without words nothing can call for another style: the picture alone says which it is.
        texts = [""] * chunks if empty[b] and not switches[b] else [first] * chunks
        if switches[b]:
            style[b, at[b] :] = (style[b, 0] + shift[b]) % len(STYLES)
            second = PHRASES[STYLES[style[b, -1]]][phrase[b, 1]]
            texts = [""] * int(at[b]) if empty[b] else texts[: at[b]]
            texts += [second] * (chunks - int(at[b]))
        prompts.append(texts)
    return style, prompts
