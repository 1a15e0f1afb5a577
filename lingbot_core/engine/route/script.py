"""An event script: one line for each chunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...camera.controls import CameraCarry, Controls, FirstDelta, Intrinsics, KeyMotion, to_controls
from ...camera.intrinsics import check_pixels
from ...camera.keys import KeySteps, arrays_from_keys
from ...camera.pose import Array
from ...camera.units import step_statistics
from ...errors import CameraError
from ..events import ChunkEvent
from ..image import PreparedImage
from .base import Route, Steered, for_image, lay, lies_at


class ScriptRoute(Route):
    """An event script; chunks beyond its end keep still, lines beyond the chunks are left over.

    Held keys start from rest and are measured in the unit 'key'; a script with poses has the unit 'clip', and one that
    begins with poses the first delta 'identity'. intrinsics: fx, fy, cx, cy at 832 x 480, None for the default.
    held: keys per latent frame that stay down in all chunks beyond the end, which then are never refused.
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
        held: tuple[str, ...] | None = None,
    ) -> None:
        self.source, self.chunks, self.chunk, self.steps = source, chunks, chunk, steps
        self._lines, self._intrinsics = len(events), intrinsics
        self._events = events[:chunks]
        self._still = KeyMotion(("",) * chunk, steps)
        self._beyond = self._still if held is None else KeyMotion(held, steps)
        self.stands_still = held is not None
        self.first_delta: FirstDelta = "from_rest" if isinstance(self._motion(0), KeyMotion) else "identity"
        has_poses = any(isinstance(event.motion, np.ndarray) for event in self._events)
        self.unit: str | float = "clip" if has_poses or not steps.move else "key"
        self.prompts = tuple(event.prompt for event in self._events if event.prompt is not None)
        self._carried, self.latent_poses = self._walk()

    def _motion(self, index: int) -> KeyMotion | Array:
        if index >= len(self._events):
            return self._beyond
        motion = self._events[index].motion
        return self._still if motion is None else motion

    def _walk(self) -> tuple[list[Array], Array]:
        """The pose before each chunk in the script's own world; the poses of all latent frames, the first at 0."""
        carry, carried, steps = CameraCarry.start(), [], []
        for index in range(self.chunks):
            carried.append(carry.pose)
            controls, carry = to_controls(
                self._motion(index), latents=self.chunk, unit=1.0, first_delta="identity", carry=carry
            )
            steps.append(controls.relative)
        poses: Array = np.concatenate(steps)
        for i in range(1, len(poses)):
            poses[i] = poses[i - 1] @ poses[i]
        return [*carried, carry.pose], poses

    def intrinsics(self, image: PreparedImage) -> Intrinsics | None:
        """See Route; a line with intrinsics of its own replaces them from its chunk on."""
        return None if self._intrinsics is None else for_image(np.array(self._intrinsics), image)

    def _controls(
        self, session: Steered, image: PreparedImage, *, act: bool, begin: int, count: int
    ) -> Iterator[Controls]:
        start, carry = session.history.start, session.carry
        begun_here = begin == len(session.history)
        on_path = begun_here and (begin == 0 or lies_at(carry.pose, self._before(begin)))
        intrinsics = None if begun_here else self.intrinsics(image)
        prompt: str | None = None
        for event in self._events[:begin]:
            if event.intrinsics is not None:
                intrinsics = for_image(np.array(event.intrinsics), image)
            if begin > len(session.history):  # the line is skipped, but what it said of the world holds
                prompt = prompt if event.prompt is None else event.prompt
        for index in range(begin, begin + count):
            here = self._events[index] if index < len(self._events) else ChunkEvent(0)
            if here.intrinsics is not None:
                intrinsics = for_image(np.array(here.intrinsics), image)
            motion = self._motion(index)
            actions = self._actions(motion, index) if act else None
            if isinstance(motion, np.ndarray) and not on_path:
                motion = self._laid(motion, index, carry)
            controls, carry = to_controls(
                motion,
                latents=self.chunk,
                unit=start.translation_unit,
                first_delta=start.first_delta,
                carry=carry,
                prompt=prompt if here.prompt is None else here.prompt,
                intrinsics=None if intrinsics is None else check_pixels(intrinsics),
                actions=actions,
            )
            prompt = None
            yield controls

    def _before(self, index: int) -> Array:
        return self._carried[min(index, self.chunks)]

    def _laid(self, poses: Array, index: int, carry: CameraCarry) -> Array:
        """A line's absolute poses where the camera stands. The first pose of a script that begins with poses is
        where its world begins, so it comes to lie there and is not shown again."""
        if index == 0 and carry.latents:
            return lay(poses[1:] if len(poses) > 1 else poses, poses[0], carry.pose)
        return lay(poses, self._before(index), carry.pose)

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
