"""The camera path that people build, load and look at, and its resampling to whole chunks."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from ..errors import CameraError, LengthError
from .intrinsics import check_intrinsics, default_intrinsics, scale_intrinsics
from .keys import check_key_array
from .pose import Array, check_poses, interpolate, read_only

Rate = Literal["video", "latent"]
SnapMode = Literal["compress", "cut", "hold"]

# The size that the intrinsics in upstream pose files refer to.
UPSTREAM_WIDTH, UPSTREAM_HEIGHT = 832, 480


@dataclass(frozen=True)
class SnapReport:
    """What became of a path when it was fitted to whole chunks.

    poses_in: poses of the path. poses_used: how many of its first poses lie inside what is generated. left_over: those
    after them. held: video frames (latent frames for a latent path) added by repeating the last pose.
    """

    poses_in: int
    poses_used: int
    left_over: int
    latent_frames: int
    mode: SnapMode
    held: int = 0


@dataclass(frozen=True, eq=False)
class CameraTrajectory:
    """A camera path; every operation returns a new one.

    poses: camera-to-world, OpenCV axes, float64 [N, 4, 4]. intrinsics: fx, fy, cx, cy in pixels of width x height,
    float64 [N, 4]. fps: of the video. rate: whether there is one pose per video frame or per latent frame.
    intrinsics_are_default: nobody stated intrinsics, so that they are 500 px whatever size is generated.
    actions: w a s d key states [N, 4] for models that are steered by them; None: there are none.
    Build one with :meth:`from_arrays`. Raises CameraError for anything malformed.
    """

    poses: Array
    intrinsics: Array
    width: int
    height: int
    fps: float = 16.0
    rate: Rate = "video"
    intrinsics_are_default: bool = False
    actions: Array | None = None

    def __post_init__(self) -> None:
        for side in ("width", "height"):
            value = getattr(self, side)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65536:
                raise CameraError(f"camera {side}={value!r} must be a whole number of pixels")
        if not (math.isfinite(self.fps) and self.fps > 0):
            raise CameraError(f"camera fps={self.fps} must be a positive number")
        if self.rate not in get_args(Rate):
            raise CameraError(f"camera rate={self.rate!r} is unknown; use one of {', '.join(get_args(Rate))}")
        poses = check_poses(self.poses)
        intrinsics = check_intrinsics(self.intrinsics, rows=len(poses))
        object.__setattr__(self, "poses", read_only(poses))
        object.__setattr__(self, "intrinsics", read_only(intrinsics))
        if self.actions is not None:
            actions = check_key_array(self.actions, "actions")
            if len(actions) != len(poses):
                raise CameraError(f"{len(actions)} rows of actions for {len(poses)} poses; give one row per pose")
            object.__setattr__(self, "actions", read_only(actions))

    @classmethod
    def from_arrays(
        cls,
        poses: Any,
        intrinsics: Any = None,
        *,
        width: int = UPSTREAM_WIDTH,
        height: int = UPSTREAM_HEIGHT,
        fps: float = 16.0,
        rate: Rate = "video",
        poses_name: str = "poses",
        intrinsics_name: str = "intrinsics",
    ) -> CameraTrajectory:
        """Builds a path from poses [N, 4, 4] or [N, 3, 4] and intrinsics in pixels of width x height.

        intrinsics: [4], [1, 4], [N, 4], [3, 3], [N, 3, 3], or None for 500 px and a centred principal point. The names
        are what messages call the two arrays.
        """
        checked = check_poses(poses, name=poses_name)
        default = intrinsics is None
        if default:
            intrinsics = default_intrinsics(width, height)
        rows = check_intrinsics(intrinsics, rows=len(checked), name=intrinsics_name)
        return cls(checked, rows, width, height, fps, rate, default)

    def __len__(self) -> int:
        return len(self.poses)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CameraTrajectory):
            return NotImplemented
        plain = ("width", "height", "fps", "rate", "intrinsics_are_default")
        return (
            all(getattr(self, field) == getattr(other, field) for field in plain)
            and np.array_equal(self.poses, other.poses)
            and np.array_equal(self.intrinsics, other.intrinsics)
            and _same(self.actions, other.actions)
        )

    def with_actions(self, actions: Any) -> CameraTrajectory:
        """The path with w a s d key states [M, 4]; rows beyond the poses are left out.

        Raises CameraError when there are fewer rows than poses.
        """
        return dataclasses.replace(self, actions=check_key_array(actions, "actions")[: len(self)])

    def intrinsics_at(self, width: int, height: int) -> tuple[float, float, float, float]:
        """The first intrinsics row, which the reference uses for all frames, in pixels of another size."""
        if self.intrinsics_are_default:
            row = default_intrinsics(width, height)
        else:
            row = scale_intrinsics(self.intrinsics[0], (self.width, self.height), (width, height))
        fx, fy, cx, cy = row.tolist()
        return fx, fy, cx, cy

    def first(self, count: int) -> CameraTrajectory:
        """The first ``count`` poses; LengthError when there are fewer."""
        if not 1 <= count <= len(self):
            raise LengthError(
                f"{count} {self.rate} frames were asked for but the camera path has {len(self)} poses; ask for 1 to "
                f"{len(self)} frames, or hold the last pose"
            )
        actions = None if self.actions is None else self.actions[:count]
        return dataclasses.replace(self, poses=self.poses[:count], intrinsics=self.intrinsics[:count], actions=actions)

    def to_video(self) -> CameraTrajectory:
        """One pose per video frame: of a path with one per latent frame every 4th pose, the others between them."""
        return self if self.rate == "video" else self._at(np.linspace(0, len(self) - 1, 4 * len(self) - 3), "video")

    def _at(self, at: Array, rate: Rate) -> CameraTrajectory:
        """The path at fractional indices, with the nearest row of actions."""
        rows = [np.interp(at, np.arange(len(self)), column) for column in self.intrinsics.T]
        actions = None if self.actions is None else self.actions[np.rint(at).astype(int)]
        poses = interpolate(self.poses, at)
        return dataclasses.replace(self, poses=poses, intrinsics=np.stack(rows, axis=1), rate=rate, actions=actions)

    def snap(self, chunk: int, chunks: int | None = None, mode: SnapMode = "compress") -> SnapReport:
        """Reports what :meth:`to_latent` does with the same arguments; raises LengthError where it would."""
        return _snap(len(self), self.rate, chunk, chunks, mode)

    def to_latent(self, chunk: int, chunks: int | None = None, mode: SnapMode = "compress") -> CameraTrajectory:
        """Resamples to one pose per latent frame, a multiple of ``chunk`` of them.

        chunks: how many chunks are wanted; None fits the path. mode: ``compress`` spreads the whole path (its first
        4n + 1 poses) evenly over the latent frames, as the reference does; ``cut`` keeps the speed, takes every 4th
        pose and leaves the rest over; ``hold`` keeps the speed and repeats the last pose up to the end of a chunk.
        Raises LengthError when the path is too short for that.
        """
        report = self.snap(chunk, chunks, mode)
        if mode == "compress":
            at = np.linspace(0, report.poses_used - 1, report.latent_frames)
        else:
            stride = 4 if self.rate == "video" else 1
            at = np.minimum(np.arange(report.latent_frames) * float(stride), len(self) - 1)
        return self._at(at, "latent")

    def latent_poses(self, chunk: int) -> Array:
        """The reference's whole-path rule: ``to_latent(chunk).poses``, float64 [F, 4, 4]."""
        return self.to_latent(chunk).poses


def _same(one: Array | None, other: Array | None) -> bool:
    return one is other if one is None or other is None else np.array_equal(one, other)


def _snap(poses: int, rate: Rate, chunk: int, chunks: int | None, mode: SnapMode) -> SnapReport:
    if mode not in get_args(SnapMode):
        raise CameraError(
            f"there is no way {mode!r} to fit a path to chunks; use one of {', '.join(get_args(SnapMode))}"
        )
    if chunk < 1:
        raise LengthError(f"a chunk of {chunk} latent frames does not exist; use at least 1")
    if chunks is not None and chunks < 1:
        raise LengthError(f"{chunks} chunks were asked for; use at least 1")

    def span(latents: int) -> int:
        """Poses from the first to the last of that many latent frames."""
        return 4 * latents - 3 if rate == "video" else latents

    # Latent frames that lie on the path, and those needed until its last pose has been shown.
    covered = (poses - 1) // 4 + 1 if rate == "video" else poses
    shown = (poses + 2) // 4 + 1 if rate == "video" else poses
    if chunks is not None:
        latents = chunk * chunks
    elif mode == "hold":
        latents = -(-shown // chunk) * chunk
    else:
        latents = covered - covered % chunk
    needed = span(max(latents, chunk))
    if mode != "hold" and needed > poses:
        raise LengthError(
            f"the camera path has {poses} poses, one per {rate} frame, but {max(latents, chunk) // chunk} chunk(s) of "
            f"{chunk} latent frames need {needed}; use a longer path or fewer chunks, or hold the last pose"
        )
    used = span(covered) if mode == "compress" else min(needed, poses)
    held = max(0, needed - poses) if mode == "hold" else 0
    return SnapReport(poses, used, poses - used, latents, mode, held)
