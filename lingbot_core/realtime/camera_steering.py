"""What an infer says of the camera, chunk by chunk, as controls."""

from __future__ import annotations

import numpy as np

from ..camera.controls import CameraCarry, Controls, KeyMotion, latents_of_slice
from ..camera.keys import PER_LATENT, arrays_from_keys
from ..camera.pose import Array
from ..engine.drive import Drive
from ..engine.history import History
from ..engine.route.base import for_image
from ..models.vae import TEMPORAL_STRIDE
from .infer import Infer
from .residents import Resident

FIRST_MOVE = "first-move"
"""The rule for the translation unit where nobody names one: the longest step of the first chunk that moves."""


def chunks_of(request: Infer, chunk: int) -> int:
    """Chunks that a message asks for. chunk: latent frames of one."""
    if request.num_frames is None:
        return 1
    return max(1, ((request.num_frames - 1) // TEMPORAL_STRIDE + 1) // chunk)


def planned(request: Infer, chunk: int) -> Array | None:
    """The latent frames' absolute poses of a message that begins a world, where it is about poses."""
    poses = _poses(request)
    return None if poses is None else latents_of_slice(poses, chunks_of(request, chunk) * chunk, CameraCarry.start())


def motions(request: Infer, history: History) -> list[Array | KeyMotion]:
    """What moves the camera after ``history``, chunk by chunk: keys, or the latent frames' absolute poses."""
    chunk = history.start.preset.chunk
    count = chunks_of(request, chunk)
    poses = _poses(request)
    if poses is not None:
        latents = latents_of_slice(poses, count * chunk, history.carry)
        return [latents[i * chunk : (i + 1) * chunk] for i in range(count)]
    held = None if request.event is None else request.event.motion
    assert not isinstance(held, np.ndarray)
    still = KeyMotion(("",) * chunk, PER_LATENT)
    return [held or still, *[still] * (count - 1)]


def intrinsics_of(request: Infer) -> Array | None:
    """fx, fy, cx, cy in pixels of 832 x 480, if the message says."""
    if request.event is None:
        return request.intrinsics
    return None if request.event.intrinsics is None else np.array(request.event.intrinsics)


def _poses(request: Infer) -> Array | None:
    """Absolute poses that a message brings, in either way."""
    if request.event is None:
        return request.poses
    return request.event.motion if isinstance(request.event.motion, np.ndarray) else None


class Steering:
    """Motion of one chunk as its controls. unit: the translation unit they are in. moves: whether a unit that waited
    for the first move was settled here.
    """

    def __init__(self, resident: Resident, motion: Array | KeyMotion, intrinsics: Array | None, *, act: bool) -> None:
        self._resident, self._motion, self._intrinsics = resident, motion, intrinsics
        self._actions = arrays_from_keys(motion.keys_per_latent)[0] if act and isinstance(motion, KeyMotion) else None
        self.unit, self.moves = 1.0, False

    def controls(self, drive: Drive) -> Controls:
        """Called by the worker."""
        assert self._resident.picture is not None
        if not self._resident.settled:
            self._settle(drive)
        start = drive.history.start
        self.unit = start.translation_unit
        own = None if self._intrinsics is None else for_image(self._intrinsics, self._resident.picture)
        return drive.controls(self._motion, actions=self._actions, intrinsics=None if own == start.intrinsics else own)

    def _settle(self, drive: Drive) -> None:
        longest = float(np.linalg.norm(drive.controls(self._motion).relative[:, :3, 3], axis=1).max())
        self.moves = longest > 0
        if self.moves:
            drive.settle_unit(longest * drive.history.start.translation_unit, FIRST_MOVE)
