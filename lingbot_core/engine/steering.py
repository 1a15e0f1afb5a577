"""From motion to the Controls of the chunk that comes next, and what a model accepts of them. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..camera.controls import Controls, KeyMotion, to_controls
from ..camera.intrinsics import check_pixels
from ..camera.pose import check_poses
from ..errors import CameraError
from ..presets import Preset
from .history import History

STILL = 1e-6
"""Largest entry of a step's matrix beside the identity's that is no movement: radians, and units of the session."""


def next_controls(
    history: History,
    motion: np.ndarray | KeyMotion,
    *,
    prompt: str | None = None,
    actions: np.ndarray | None = None,
    intrinsics: Sequence[float] | None = None,
) -> Controls:
    """Controls of the chunk after ``history`` from absolute poses [N, 4, 4] or held keys, in its unit and rules."""
    start = history.start
    controls, _ = to_controls(
        motion,
        latents=start.preset.chunk,
        unit=start.translation_unit,
        first_delta=start.first_delta,
        carry=history.carry,
        prompt=prompt,
        intrinsics=None if intrinsics is None else check_pixels(intrinsics),
        actions=actions,
    )
    return controls


def stands_still(controls: Controls) -> bool:
    """Whether the camera does not move within a chunk, nor from the one before it, and no action is held.

    Poses that are composed one after the other differ in their last digits even where nothing moves: `STILL`.
    """
    held = controls.actions is not None and bool(np.any(controls.actions))
    return not held and bool((np.abs(controls.relative - np.eye(4)) <= STILL).all())


def require_controls(controls: Controls, preset: Preset, control: str) -> None:
    """Raises CameraError unless these are Controls of one chunk for a model of that ``control``, 'cam' or 'act'."""
    if not isinstance(controls, Controls):
        raise CameraError(f"advance takes Controls, not {type(controls).__name__}; see WorldSession.controls")
    check_poses(controls.relative, name="controls: relative")
    if controls.relative.shape != (preset.chunk, 4, 4):
        raise CameraError(
            f"controls hold {len(controls.relative)} poses; preset {preset.name} takes {preset.chunk} per chunk"
        )
    if control == "act" and controls.actions is None:
        raise CameraError("this model is steered by actions (control 'act'): give w a s d rows, one per latent frame")
    if control != "act" and controls.actions is not None:
        raise CameraError("this model is steered by the camera (control 'cam') and takes no actions; leave them out")
