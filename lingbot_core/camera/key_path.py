"""A camera path from keys that are written down beforehand."""

from __future__ import annotations

import dataclasses

import numpy as np

from ..errors import CameraError
from .key_text import key_segments
from .keys import PER_VIDEO, KeySteps, arrays_from_keys, frames_of, pad_to_4k1, walk
from .pose import MAX_POSES
from .trajectory import CameraTrajectory


def path_from_keys(text: str, steps: KeySteps = PER_VIDEO, *, fps: float = 16.0) -> CameraTrajectory:
    """The path of a text such as ``w-12, wj-8, none-4``, one pose per video frame, 4k + 1 of them, with its actions.

    The camera is at rest first. Where a latent frame has several steps (``per-video``), segments count video frames
    and are filled up to 4k + 1 with no keys, as upstream does with an action string; otherwise they count latent
    frames, with the poses of the video frames between them. Raises CameraError.
    """
    segments = key_segments(text)
    if segments is None:
        raise CameraError(
            "these keys do not say how long they are held: write a number of frames behind each, such as w-12, wj-8"
        )
    held = frames_of(segments)
    if steps.steps_per_latent > 1:
        held = pad_to_4k1(held)
        _check_length(len(held))
        poses = np.concatenate([np.eye(4)[None], walk(np.eye(4), held[:-1], steps, per_latent=False)])
        return CameraTrajectory.from_arrays(poses, fps=fps).with_actions(arrays_from_keys(held)[0])
    _check_length(4 * len(held) + 1)
    poses = np.concatenate([np.eye(4)[None], walk(np.eye(4), held, steps, per_latent=True)])
    actions = arrays_from_keys([*(keys for keys in held for _ in range(4)), ""])[0]
    path = CameraTrajectory.from_arrays(poses, fps=fps, rate="latent").to_video()
    return dataclasses.replace(path, actions=actions)


def _check_length(frames: int) -> None:
    if frames > MAX_POSES:
        raise CameraError(f"the keys last {frames} video frames; at most {MAX_POSES} are accepted")
