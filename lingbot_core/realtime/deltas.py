"""Steering by rigid deltas, as interactions of the video socket do: a velocity that is held, a target that is reached.

Poses are camera-to-world, float64 [4, 4], OpenCV axes (+X right, +Y down, +Z forward). Pure functions.
"""

from __future__ import annotations

import numpy as np

from ..camera.pose import Array, interpolate


def velocity_poses(pose: Array, delta: Array, latents: int) -> Array:
    """The poses [latents, 4, 4] after ``pose`` when each latent frame is ``delta`` seen from the one before it:
    T = T_base @ T_delta."""
    out = np.empty((latents, 4, 4))
    for index in range(latents):
        pose = pose @ delta
        out[index] = pose
    return out


def approach_poses(origin: Array, target: Array, *, first: int, total: int, latents: int) -> Array:
    """A part of the way from ``origin`` to ``target``, poses [latents, 4, 4].

    total: latent frames of the whole way, 0 for a jump. first: how many of them lie behind. The position goes straight
    and evenly, the rotation by the shorter way; from the end of the way on all poses are exactly the target.
    """
    out = np.repeat(target[None], latents, axis=0)
    moving = min(latents, max(0, total - 1 - first))
    if moving:
        progress = np.arange(first + 1, first + moving + 1) / total
        out[:moving] = interpolate(np.stack([origin, target]), progress)
    return out
