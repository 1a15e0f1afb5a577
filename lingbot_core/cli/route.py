"""Where a run's camera comes from: a path that is known as a whole, or an event script, one line per chunk."""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..camera.controls import CameraCarry, Controls, FirstDelta, Intrinsics, KeyMotion, clip_controls, to_controls
from ..camera.formats.npy import load_actions, load_camera, read_array
from ..camera.intrinsics import check_intrinsics
from ..camera.keys import (
    PER_VIDEO,
    KeySteps,
    action_string_poses,
    arrays_from_keys,
    frames_of,
    pad_to_4k1,
    parse_action_string,
)
from ..camera.pose import MAX_POSES, Array
from ..camera.trajectory import UPSTREAM_HEIGHT, UPSTREAM_WIDTH, CameraTrajectory
from ..camera.units import step_statistics
from ..engine.events import ChunkEvent
from ..engine.image import PreparedImage
from ..engine.session import WorldSession
from ..errors import CameraError, InputFileError
from .plan import LengthPlan, at_size, fit_actions, fit_path


class Route(ABC):
    """The camera of one run, checked before any model is loaded.

    latent_poses: float64 [F, 4, 4], one per latent frame, up to one rigid change of the world. steps: what the unit
    'key' means. unit, first_delta: what this source takes by default. prompts: those it switches to.
    """

    source: str
    chunks: int
    latent_poses: Array
    steps: KeySteps
    unit: str
    first_delta: FirstDelta
    prompts: tuple[str, ...] = ()

    @abstractmethod
    def intrinsics(self, image: PreparedImage) -> Intrinsics | None:
        """The session's fx, fy, cx, cy in pixels of the prepared image; None for the default of sessions."""

    @abstractmethod
    def controls(self, session: WorldSession, image: PreparedImage, *, act: bool) -> Iterator[Controls]:
        """The controls of each chunk; ask for the next ones when the chunk before is made."""

    @abstractmethod
    def describe(self) -> str:
        """One line for people: what is made of it."""

    @abstractmethod
    def report(self) -> dict[str, Any]:
        """What the report says of it; JSON types only."""

    def warnings(self) -> list[str]:
        """What is odd about the motion."""
        warning = step_statistics(self.latent_poses).warning
        return [warning] if warning else []


class PathRoute(Route):
    """A whole path, one pose per video frame. actions: reads w a s d rows per video frame; None: there are none."""

    steps = PER_VIDEO
    unit = "clip"
    first_delta: FirstDelta = "identity"

    def __init__(
        self,
        source: str,
        path: CameraTrajectory,
        plan: LengthPlan,
        chunk: int,
        actions: Callable[[], Array] | None = None,
    ) -> None:
        self.source, self.plan = source, plan
        self._path, self._chunk, self._actions = path, chunk, actions
        self._latent = fit_path(path, plan, chunk)
        self.chunks, self.latent_poses = plan.chunks, self._latent.poses

    def intrinsics(self, image: PreparedImage) -> Intrinsics | None:
        """See Route; the first row of the file, as in the reference."""
        return None if self._path.intrinsics_are_default else for_image(self._path.intrinsics[0], image)

    def controls(self, session: WorldSession, image: PreparedImage, *, act: bool) -> Iterator[Controls]:
        """See Route."""
        start = session.history.start
        latent = at_size(self._latent, np.array(start.intrinsics), start.width, start.height)
        yield from clip_controls(
            latent,
            chunk=self._chunk,
            unit=start.translation_unit,
            first_delta=start.first_delta,
            width=start.width,
            height=start.height,
            actions=self._latent_actions() if act else None,
        )

    def _latent_actions(self) -> Array:
        if self._actions is None:
            raise CameraError(
                "this model is steered by actions (control 'act') and poses alone do not hold any; use --action-path "
                "with a folder that has action.npy, --action-string or --events"
            )
        return fit_actions(self._actions(), self.plan, self._chunk)

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


class ScriptRoute(Route):
    """An event script; chunks beyond its end keep still, lines beyond the chunks are left over.

    Held keys start from rest and are measured in the unit 'key'; a script with poses has the unit 'clip', and one that
    begins with poses the first delta 'identity'. intrinsics: fx, fy, cx, cy at 832 x 480, None for the default.
    """

    def __init__(
        self,
        source: str,
        events: list[ChunkEvent],
        chunks: int,
        *,
        chunk: int,
        steps: KeySteps,
        intrinsics: Intrinsics | None = None,
    ) -> None:
        self.source, self.chunks, self.steps = source, chunks, steps
        self._lines, self._chunk, self._intrinsics = len(events), chunk, intrinsics
        self._events = events[:chunks]
        self._still = KeyMotion(("",) * chunk, steps)
        self.first_delta = "from_rest" if isinstance(self._motion(0), KeyMotion) else "identity"
        self.unit = "clip" if any(isinstance(event.motion, np.ndarray) for event in self._events) else "key"
        self.prompts = tuple(event.prompt for event in self._events if event.prompt is not None)
        self.latent_poses = self._walk()

    def _motion(self, index: int) -> KeyMotion | Array:
        motion = self._events[index].motion if index < len(self._events) else None
        return self._still if motion is None else motion

    def _walk(self) -> Array:
        """The poses of all latent frames, the first one at the origin."""
        carry, steps = CameraCarry.start(), []
        for index in range(self.chunks):
            controls, carry = to_controls(
                self._motion(index), latents=self._chunk, unit=1.0, first_delta="identity", carry=carry
            )
            steps.append(controls.relative)
        poses: Array = np.concatenate(steps)
        for i in range(1, len(poses)):
            poses[i] = poses[i - 1] @ poses[i]
        return poses

    def intrinsics(self, image: PreparedImage) -> Intrinsics | None:
        """See Route; a line with intrinsics of its own replaces them from its chunk on."""
        return None if self._intrinsics is None else for_image(np.array(self._intrinsics), image)

    def controls(self, session: WorldSession, image: PreparedImage, *, act: bool) -> Iterator[Controls]:
        """See Route."""
        intrinsics: Intrinsics | None = None
        for index in range(self.chunks):
            event = self._events[index] if index < len(self._events) else None
            if event is not None and event.intrinsics is not None:
                intrinsics = for_image(np.array(event.intrinsics), image)
            motion = self._motion(index)
            yield session.controls(
                motion,
                prompt=None if event is None else event.prompt,
                actions=self._actions(motion, index) if act else None,
                intrinsics=intrinsics,
            )

    def _actions(self, motion: KeyMotion | Array, index: int) -> Array:
        if not isinstance(motion, KeyMotion):
            raise CameraError(
                f"{self.source}, event {self._events[index].event_id}: this model is steered by actions (control "
                "'act') and poses do not hold any; give key lists ('frames') instead"
            )
        return arrays_from_keys(motion.keys_per_latent)[0]

    def describe(self) -> str:
        """See Route."""
        still, left = max(0, self.chunks - self._lines), max(0, self._lines - self.chunks)
        extra = f", then {still} standing still" if still else f", {left} lines are left over" if left else ""
        return f"{self.chunks - still} of {self._lines} script lines, one chunk each{extra}"

    def report(self) -> dict[str, Any]:
        """See Route."""
        return {
            "source": self.source,
            "lines": self._lines,
            "lines_left_over": max(0, self._lines - self.chunks),
            "chunks_standing_still": max(0, self.chunks - self._lines),
            "key_steps": self.steps.name,
            "event_ids": [event.event_id for event in self._events],
            "intrinsics_are_default": self._intrinsics is None,
        }

    def warnings(self) -> list[str]:
        """See Route; a move of the very first latent frame is one against the pose before it."""
        first = self._motion(0)
        tapped = isinstance(first, KeyMotion) and set(first.keys_per_latent[0]) & set("wasd")
        return [] if tapped and not step_statistics(self.latent_poses).maximum else super().warnings()


def for_image(row: Array, image: PreparedImage) -> Intrinsics:
    """fx, fy, cx, cy of upstream's 832 x 480 in pixels of the prepared image."""
    fx, fy, cx, cy = image.intrinsics_for(row, UPSTREAM_HEIGHT, UPSTREAM_WIDTH).tolist()
    return fx, fy, cx, cy


def read_intrinsics(file: Path) -> Intrinsics:
    """The first row of a file of intrinsics at 832 x 480, [4], [N, 4], [3, 3] or [N, 3, 3]."""
    with _unreadable_is_named(file):
        array = read_array(file)
    rows = 1 if array.ndim < 2 or array.shape == (3, 3) else len(array)
    fx, fy, cx, cy = check_intrinsics(array, rows=rows, name=str(file))[0].tolist()
    return fx, fy, cx, cy


def path_from_files(poses: Path, intrinsics: Path | None, *, fps: float) -> CameraTrajectory:
    """All rows of a file of poses, or of a folder with poses.npy and perhaps intrinsics.npy."""
    with _unreadable_is_named(poses):
        return load_camera(poses, intrinsics, fps=fps)


def actions_from_folder(folder: Path) -> Callable[[], Array]:
    """Reads a folder's action.npy when a model is steered by it."""
    return lambda: load_actions(folder, act=True)[0]


def path_from_action_string(
    text: str, intrinsics: Path | None, *, fps: float
) -> tuple[CameraTrajectory, Callable[[], Array]]:
    """Upstream's path of an action string, cut to 4k + 1 poses as its pipeline does, and its keys per video frame."""
    frames = frames_of(parse_action_string(text))
    held = pad_to_4k1(frames)
    if len(held) >= MAX_POSES:
        raise CameraError(
            f"the action string lasts {len(frames)} frames, {len(held)} as whole latent frames; fewer than {MAX_POSES} "
            "are accepted"
        )
    poses = action_string_poses(text)[: len(held)]
    row = None if intrinsics is None else read_intrinsics(intrinsics)
    return CameraTrajectory.from_arrays(poses, row, fps=fps), lambda: arrays_from_keys(held)[0]


@contextmanager
def _unreadable_is_named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise InputFileError(f"{where} cannot be read: {error.strerror or error}; check its permissions") from None


def require_folder(folder: Path) -> Path:
    """Raises InputFileError unless it is a folder."""
    try:
        if stat.S_ISDIR(os.stat(folder).st_mode):
            return folder
        what = "is a file"
    except (FileNotFoundError, NotADirectoryError):
        what = "does not exist"
    except OSError as error:
        raise InputFileError(f"{folder} cannot be read: {error.strerror or error}") from None
    raise InputFileError(f"{folder} {what}; give a folder with poses.npy and intrinsics.npy, or use --poses FILE")
