"""The way that a world has gone, as absolute poses: to draw, to view and edit, and to steer another world with."""

from __future__ import annotations

import numpy as np

from ..camera.pose import Array
from ..camera.trajectory import CameraTrajectory
from ..errors import HistoryError
from .history import ChunkRecord, History


def poses_of_chunk(record: ChunkRecord, before: Array, unit: float) -> Array:
    """Camera-to-world poses [latent frames, 4, 4] of one chunk. before: the pose [4, 4] that it went on from."""
    pose, out = before, []
    for relative in record.controls.relative[:-1]:
        step = relative.copy()
        step[:3, 3] *= unit
        pose = pose @ step
        out.append(pose)
    return np.stack([*out, record.controls.pose_after])


def walked_poses(history: History) -> Array:
    """Of all latent frames, float64 [N, 4, 4]; N is 0 before the first chunk."""
    pose: Array = np.eye(4)
    parts = [np.empty((0, 4, 4))]
    for record in history.chunks:
        parts.append(poses_of_chunk(record, pose, history.start.translation_unit))
        pose = record.controls.pose_after
    return np.concatenate(parts)


def walked_camera(history: History) -> CameraTrajectory:
    """The walk as a path with one pose per latent frame. Raises HistoryError before the first chunk."""
    if not history.chunks:
        raise HistoryError("nothing has been walked yet, so there is no camera path; make a chunk first")
    start = history.start
    return CameraTrajectory.from_arrays(
        walked_poses(history),
        np.array(start.intrinsics),
        width=start.width,
        height=start.height,
        fps=start.fps,
        rate="latent",
    )
