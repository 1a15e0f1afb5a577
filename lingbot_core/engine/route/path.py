"""A path that is known as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np

from ...camera.controls import Controls, FirstDelta, Intrinsics, to_controls
from ...camera.keys import PER_VIDEO
from ...camera.pose import Array
from ...camera.trajectory import CameraTrajectory
from ...errors import CameraError
from ..image import PreparedImage
from ..plan import LengthPlan, fit_actions, fit_onward, fit_path
from .base import Route, Steered, for_image, lay, lies_at


class PathRoute(Route):
    """A whole path, one pose per video frame. actions: reads w a s d rows per video frame; None: there are none.

    A session that begins with the path shows its first pose in the first latent frame. A path that is joined to what
    a session has made has its first pose where the camera stands, and moves on from there in the first latent frame.
    """

    steps = PER_VIDEO
    _ways_out = "use a longer path, or choose to stand still at its last pose (hold)"

    def __init__(
        self,
        source: str,
        path: CameraTrajectory,
        plan: LengthPlan,
        chunk: int,
        actions: Callable[[], Array] | None = None,
    ) -> None:
        self.source, self.plan, self.chunk = source, plan, chunk
        self.unit: str | float = "clip"
        self.first_delta: FirstDelta = "identity"
        self.stands_still = plan.length == "hold"
        self._path, self._actions = path, actions
        self.chunks, self.latent_poses = plan.chunks, fit_path(path, plan, chunk).poses

    def intrinsics(self, image: PreparedImage) -> Intrinsics | None:
        """See Route; the first row of the file, as in the reference."""
        path = self._path
        if path.intrinsics_are_default:
            return None
        return for_image(path.intrinsics[0], image, width=path.width, height=path.height)

    @cached_property
    def _onward_poses(self) -> Array:
        return fit_onward(self._path, self.plan, self.chunk)

    def _controls(
        self, session: Steered, image: PreparedImage, *, act: bool, begin: int, count: int
    ) -> Iterator[Controls]:
        start, carry = session.history.start, session.carry
        joined = begin < len(session.history)  # chunk 0 of the path is not chunk 0 of the session
        poses = self._onward_poses if joined else self.latent_poses
        on_path = begin == len(session.history) and (
            begin == 0 or lies_at(carry.pose, _rows(poses, begin * self.chunk - 1, 1)[0])
        )
        intrinsics = start.intrinsics if on_path else self.intrinsics(image) or start.intrinsics
        actions = self._latent_actions(onward=joined) if act else None
        for index in range(begin, begin + count):
            first = index * self.chunk
            part = _rows(poses, first, self.chunk)
            if not on_path:
                before = _rows(poses, first - 1, 1)[0] if first else self._path.poses[0]
                part = lay(part, before, carry.pose)
            controls, carry = to_controls(
                part,
                latents=self.chunk,
                unit=start.translation_unit,
                first_delta=start.first_delta,
                carry=carry,
                intrinsics=intrinsics,
                actions=None if actions is None else _rows(actions, first, self.chunk, beyond=np.zeros(4)),
            )
            yield controls

    def _latent_actions(self, *, onward: bool) -> Array:
        if self._actions is None:
            raise CameraError(
                "this model is steered by actions (control 'act') and poses alone do not hold any; use a folder that "
                "has action.npy, an action string, or an event script"
            )
        return fit_actions(self._actions(), self.plan, self.chunk, onward=onward)

    def describe(self) -> str:
        """See Route."""
        return self.plan.describe()

    def report(self) -> dict[str, Any]:
        """See Route."""
        plan = self.plan
        return {
            "source": self.source,
            "poses": plan.poses,
            "poses_used": plan.used,
            "poses_left_over": plan.left_over,
            "frames_held": plan.held,
            "length": plan.length,
            "snap": plan.snap,
            "intrinsics_are_default": self._path.intrinsics_are_default,
        }


def _rows(rows: Array, first: int, count: int, *, beyond: Array | None = None) -> Array:
    """``count`` rows from ``first`` on; those beyond the end are the last row, or ``beyond``."""
    index = np.arange(first, first + count)
    out = rows[np.minimum(index, len(rows) - 1)]
    if beyond is not None:
        out[index >= len(rows)] = beyond
    return out
