"""How long a video becomes: from a wish and a camera path to whole chunks. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..camera.keys import check_key_array
from ..camera.pose import MAX_POSES, Array, interpolate
from ..camera.trajectory import CameraTrajectory, SnapMode
from ..errors import CameraError, LengthError
from ..presets import Preset

Snap = Literal["down", "up"]
SNAPS: tuple[Snap, ...] = get_args(Snap)
LENGTHS: tuple[SnapMode, ...] = get_args(SnapMode)


@dataclass(frozen=True)
class LengthPlan:
    """Chunks and frames of a run, and what becomes of the camera path.

    asked: frames wished for, None without a wish. frames: that will be made. poses: rows of the path. used: first rows
    that lie inside what is generated. held: frames added by repeating the last pose.
    """

    asked: int | None
    chunks: int
    frames: int
    poses: int
    used: int
    held: int
    length: SnapMode
    snap: Snap

    @property
    def left_over(self) -> int:
        """Rows of the path that nothing is made of."""
        return self.poses - self.used

    def describe(self) -> str:
        """One line for people, such as "133 frames asked: 129 frames from 133 of 269 poses (compress)"."""
        wish = "every pose asked" if self.asked is None else f"{self.asked} frames asked"
        held = f", the last held for {self.held} frames" if self.held else ""
        return f"{wish}: {self.frames} frames from {self.used} of {self.poses} poses ({self.length}{held})"


def plan_length(
    poses: int,
    preset: Preset,
    *,
    num_frames: int | None = None,
    snap: Snap | None = None,
    length: SnapMode = "compress",
) -> LengthPlan:
    """Decides how many chunks a path of ``poses`` poses, one per video frame, is made into.

    num_frames: the wish; None counts every pose. snap: which way a wish between two valid totals goes; None is down,
    and up where the last pose is held and there is no wish, so that the whole path is seen. length: ``compress`` is
    the reference's rule, the wish cut to 4n + 1 poses and spread evenly over the latent frames; ``cut`` takes every 4th
    pose; ``hold`` takes every 4th and repeats the last pose when they run out. Raises LengthError.
    """
    if snap is None:
        snap = "up" if length == "hold" and num_frames is None else "down"
    check_num_frames(num_frames)
    wish = poses if num_frames is None else num_frames
    if length != "hold" and wish > poses:
        raise LengthError(
            f"{poses} poses for {wish} frames: ask for {valid_frames(poses)} frames or less, use a longer path, or "
            "stand still at the last pose (hold)"
        )
    if num_frames is None and snap == "down" and poses < preset.frames(1):
        raise LengthError(
            f"a path of {poses} poses is shorter than one chunk of {preset.frames(1)} frames (preset {preset.name}, "
            f"{preset.chunk} latent frames a chunk): use a longer path, or stand still at the last pose (hold)"
        )
    chunks = preset.chunks_for(wish, snap=snap)
    frames = preset.frames(chunks)
    if length != "hold" and frames > poses:
        raise LengthError(
            f"{poses} poses for {frames} frames ({wish} snapped up to whole chunks): snap down, use a longer path, or "
            "stand still at the last pose (hold)"
        )
    used = max(valid_frames(wish), frames) if length == "compress" else min(frames, poses)
    held = max(0, frames - poses)
    return LengthPlan(num_frames, chunks, frames, poses, used, held, length, snap)


def plan_script(lines: int, preset: Preset, *, num_frames: int | None = None, snap: Snap | None = None) -> int:
    """Chunks of an event script with ``lines`` events: one each, or as many as the wish gives."""
    check_num_frames(num_frames)
    return lines if num_frames is None else preset.chunks_for(num_frames, snap=snap or "down")


def valid_frames(frames: int) -> int:
    """The largest 4n + 1 that is not above ``frames``: what fits whole latent frames."""
    return (frames - 1) // 4 * 4 + 1


def fit_path(path: CameraTrajectory, plan: LengthPlan, chunk: int) -> CameraTrajectory:
    """The path at the plan's latent frames, one pose each; its first pose is the first latent frame."""
    if plan.length != "hold":
        path = path.first(plan.used)
    return path.to_latent(chunk, plan.chunks, plan.length)


def fit_onward(path: CameraTrajectory, plan: LengthPlan, chunk: int) -> Array:
    """Poses [F, 4, 4] of the plan's latent frames when the frame before them is the path's first pose already.

    For a path that is joined to an earlier one: the camera moves from the very first latent frame on, where
    :func:`fit_path` would show the joint twice. A ``cut`` path stands still at its last pose once that is reached.
    """
    return interpolate(path.poses, _onward(plan, chunk))


def _onward(plan: LengthPlan, chunk: int) -> Array:
    latents = chunk * plan.chunks
    if plan.length == "compress":
        return np.linspace(0, plan.used - 1, latents + 1)[1:]
    return np.minimum(np.arange(1, latents + 1) * 4.0, plan.poses - 1)


def fit_actions(rows: NDArray, plan: LengthPlan, chunk: int, *, onward: bool = False) -> Array:
    """Key states w a s d, one row per video frame, at the plan's latent frames, [F, 4].

    Every 4th row, as in the reference; of a compressed path the row of the nearest pose; no key while the last pose
    is held. onward: at the latent frames of :func:`fit_onward`. Raises CameraError when there are fewer rows than
    poses used.
    """
    checked = check_key_array(rows, "actions")
    if len(checked) < plan.used:
        raise CameraError(f"{len(checked)} rows of actions for {plan.used} poses; give one row per pose")
    latents = chunk * plan.chunks
    if plan.length == "compress":
        at = _onward(plan, chunk) if onward else np.linspace(0, plan.used - 1, latents)
        return checked[np.rint(at).astype(int)]
    rows_at = np.arange(latents) * 4 + (4 if onward else 0)
    last = min(plan.poses, len(checked)) if onward else plan.used
    out = np.zeros((latents, 4))
    out[rows_at < last] = checked[rows_at[rows_at < last]]
    return out


def check_num_frames(num_frames: int | None) -> None:
    """Raises LengthError for a wish beyond the longest path there can be; presets refuse those that are too short."""
    if num_frames is not None and num_frames > MAX_POSES:
        raise LengthError(f"{num_frames} frames were asked for; at most {MAX_POSES} can be made in one run")
