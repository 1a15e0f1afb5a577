"""A run that was written down, made again exactly."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from ...camera.controls import CameraCarry, Controls, Intrinsics, KeyMotion, to_controls
from ...camera.keys import PER_LATENT, arrays_from_keys
from ...errors import HistoryError
from ..controls_file import ControlsRecord
from ..image import PreparedImage
from .base import Route, Steered


class RecordedRoute(Route):
    """Controls as they were, for a session that is started as it was; anything else is refused by name.

    With ``stands_still`` the camera stays where the record left it for as long as one likes.
    """

    steps = PER_LATENT
    _ways_out = "steer the world anew after its end, or choose to stand still there (hold)"

    def __init__(self, record: ControlsRecord, *, source: str = "recorded controls") -> None:
        self.record, self.source = record, source
        start = record.start
        self.chunk, self.chunks = start.preset.chunk, len(record.controls)
        self.unit: str | float = start.translation_unit
        self.first_delta = start.first_delta
        self.prompts = tuple(controls.prompt for controls in record.controls if controls.prompt is not None)
        poses = np.concatenate([controls.relative for controls in record.controls])
        poses[:, :3, 3] *= start.translation_unit
        poses[0] = np.eye(4)
        for i in range(1, len(poses)):
            poses[i] = poses[i - 1] @ poses[i]
        self.latent_poses = poses

    def translation_unit(self, rule: str | float | None = None) -> tuple[float, str]:
        """See Route; the record's own rule keeps its name."""
        unit, name = super().translation_unit(rule)
        return unit, self.record.start.unit_rule if unit == self.record.start.translation_unit else name

    def intrinsics(self, image: PreparedImage) -> Intrinsics | None:
        """See Route."""
        return self.record.start.intrinsics

    def controls(
        self, session: Steered, image: PreparedImage, *, act: bool, begin: int = 0, chunks: int | None = None
    ) -> Iterator[Controls]:
        """See Route. Raises HistoryError naming what differs from the session that was recorded."""
        self.record.require_same(session.history.start)
        return super().controls(session, image, act=act, begin=begin, chunks=chunks)

    def _controls(
        self, session: Steered, image: PreparedImage, *, act: bool, begin: int, count: int
    ) -> Iterator[Controls]:
        made = session.history.chunks
        if begin != len(made):
            raise HistoryError(
                f"recorded controls are replayed where they were made: the world has {len(made)} chunks, but the "
                f"record was entered at its chunk {begin}; start a new world with the same settings"
            )
        prompt = self.record.start.prompt
        for index, (chunk, recorded) in enumerate(zip(made, self.record.controls, strict=False)):
            prompt = prompt if recorded.prompt is None else recorded.prompt
            same = np.array_equal(chunk.controls.relative, recorded.relative) and chunk.prompt == prompt
            if not same or not np.array_equal(chunk.controls.pose_after, recorded.pose_after):
                raise HistoryError(
                    f"chunk {index} of this world is not the recorded one; replay the record from a new world"
                )
        rest = self.record.controls[begin : begin + count]
        return chain(rest, self._standing_still(session, act=act, count=count - len(rest)))

    def _standing_still(self, session: Steered, *, act: bool, count: int) -> Iterator[Controls]:
        """Chunks after the end of the record, with the lens and the pose that it ended with."""
        start, last = session.history.start, self.record.controls[-1]
        nothing = ("",) * self.chunk
        carry = CameraCarry(last.pose_after, self.chunks * self.chunk)
        for _ in range(count):
            controls, carry = to_controls(
                KeyMotion(nothing, self.steps),
                latents=self.chunk,
                unit=start.translation_unit,
                first_delta=start.first_delta,
                carry=carry,
                intrinsics=last.intrinsics,
                actions=arrays_from_keys(nothing)[0] if act else None,
            )
            yield controls

    def describe(self) -> str:
        """See Route."""
        start = self.record.start
        return f"{self.chunks} recorded chunks (preset {start.preset.label}, seed {start.seed})"

    def report(self) -> dict[str, Any]:
        """See Route."""
        return {"source": self.source, "recorded_chunks": self.chunks, "intrinsics_are_default": False}
