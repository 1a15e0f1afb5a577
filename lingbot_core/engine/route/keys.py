"""Keys held per video frame, as upstream's action strings count them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...camera.controls import Controls, FirstDelta, Intrinsics, to_controls
from ...camera.keys import Keys, KeySteps, arrays_from_keys, format_keys, walk
from ...camera.pose import Array
from ..image import PreparedImage
from .base import Route, Steered

STRIDE = 4
"""Video frames of a latent frame."""


class VideoKeysRoute(Route):
    """One set of keys per video frame, walked from where the camera stands.

    A session that begins with it shows the camera at rest in its first frame, and latent frame i after 4i frames of
    keys, as upstream does with an action string. Where it is joined to what a session has made, the first latent frame
    comes after 4 frames of keys already. No keys are held beyond its end.
    """

    _ways_out = "hold keys for longer, or choose to stand still at the end (hold)"

    def __init__(self, source: str, frames: Sequence[Keys], chunks: int, *, chunk: int, steps: KeySteps) -> None:
        self.source, self.chunks, self.chunk, self.steps = source, chunks, chunk, steps
        self.unit: str | float = "key" if steps.move else "clip"
        self.first_delta: FirstDelta = "identity"
        self._frames = list(frames)
        start = np.eye(4)
        rest = walk(start, self._held(0, STRIDE * (chunk * chunks - 1)), steps, per_latent=False)
        self.latent_poses = np.concatenate([start[None], rest[STRIDE - 1 :: STRIDE]])

    def _held(self, first: int, count: int) -> list[Keys]:
        """Keys of ``count`` video frames from ``first`` on."""
        held = self._frames[max(first, 0) : max(first + count, 0)]
        before = max(0, -first)
        return [frozenset[str]()] * before + held + [frozenset[str]()] * (count - before - len(held))

    def intrinsics(self, image: PreparedImage) -> Intrinsics | None:
        """See Route."""
        return None

    def _controls(
        self, session: Steered, image: PreparedImage, *, act: bool, begin: int, count: int
    ) -> Iterator[Controls]:
        start, carry = session.history.start, session.carry
        # The first frame of a session comes before any key.
        lead = 0 if begin < len(session.history) else -STRIDE
        for index in range(begin, begin + count):
            frames = self._held(STRIDE * index * self.chunk + lead, STRIDE * self.chunk)
            poses = walk(carry.pose, frames, self.steps, per_latent=False)[STRIDE - 1 :: STRIDE]
            held = [frames[i : i + STRIDE] for i in range(0, len(frames), STRIDE)]
            controls, carry = to_controls(
                poses,
                latents=self.chunk,
                unit=start.translation_unit,
                first_delta=start.first_delta,
                carry=carry,
                actions=self._actions(index) if act else None,
            )
            # What is written down are keys of whole latent frames; those that change within one are in the poses only.
            if all(len(set(keys)) == 1 for keys in held):
                controls = dataclasses.replace(controls, keys=tuple(format_keys(keys[0]) for keys in held))
            yield controls

    def _actions(self, index: int) -> Array:
        """Every 4th row, as in the reference."""
        rows = [self._held(STRIDE * (index * self.chunk + latent), 1)[0] for latent in range(self.chunk)]
        return arrays_from_keys(rows)[0]

    def describe(self) -> str:
        """See Route."""
        return f"{len(self._frames)} video frames of keys: {self.chunks} chunks ({self.steps.name})"

    def report(self) -> dict[str, Any]:
        """See Route."""
        return {
            "source": self.source,
            "key_frames": len(self._frames),
            "key_steps": self.steps.name,
            "intrinsics_are_default": True,
        }
