"""What every route has in common: its length, its rules, and where in a session it is entered."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Protocol, Self, get_args

import numpy as np

from ...camera.controls import CameraCarry, Controls, FirstDelta, Intrinsics
from ...camera.keys import KeySteps
from ...camera.pose import MAX_POSES, Array, steps_from
from ...camera.trajectory import UPSTREAM_HEIGHT, UPSTREAM_WIDTH
from ...camera.units import step_statistics, translation_unit
from ...errors import CameraError, LengthError, PresetError
from ..history import History
from ..image import PreparedImage

# A session's carried pose lies on a path when it is off by no more than what carrying it in float64 may cost.
_ROUNDING = 1e-9


class Steered(Protocol):
    """What a route asks of a session, or of whatever stands at a place in a history."""

    @property
    def history(self) -> History:
        """All chunks so far."""
        ...

    @property
    def carry(self) -> CameraCarry:
        """Where the camera stands after them."""
        ...


class Route(ABC):
    """The camera of a run, checked before any model is loaded; a frozen thing, shared freely.

    source: what it was read from. chunk: latent frames of a chunk. chunks: its length. latent_poses: float64
    [F, 4, 4], one per latent frame, up to one rigid change of the world. steps: what the unit 'key' means.
    unit, first_delta: what a session that begins with this route takes unless its user says otherwise.
    prompts: those it switches to. stands_still: chunks beyond its end are not refused: the camera stands still, and a
    key that is held for good stays down.
    """

    source: str
    chunk: int
    chunks: int
    latent_poses: Array
    steps: KeySteps
    unit: str | float
    first_delta: FirstDelta
    prompts: tuple[str, ...] = ()
    stands_still: bool = False

    @abstractmethod
    def intrinsics(self, image: PreparedImage) -> Intrinsics | None:
        """The session's fx, fy, cx, cy in pixels of the prepared image; None for the default of sessions."""

    def controls(
        self, session: Steered, image: PreparedImage, *, act: bool, begin: int = 0, chunks: int | None = None
    ) -> Iterator[Controls]:
        """The controls of the session's next chunks, in order.

        act: the model is steered by actions. begin: the route's own chunk to start with. chunks: how many; None takes
        all that are left. Entered at the session's number of chunks, a route goes on as if it had driven the session
        all along, bit for bit. Entered elsewhere it goes on from where the camera stands: a path is laid rigidly onto
        the carried pose, keys move from it. The controls are those of consecutive chunks whether the session is
        advanced in between or not. Raises LengthError beyond the route's end, PresetError for a session with chunks of
        another size, CameraError where the route cannot steer this model.
        """
        count = self.span(begin, chunks)
        preset = session.history.start.preset
        if preset.chunk != self.chunk:
            raise PresetError(
                f"these controls are made for chunks of {self.chunk} latent frames, but the world's preset "
                f"{preset.name} has {preset.chunk}; make them with that preset"
            )
        return self._controls(session, image, act=act, begin=begin, count=count)

    @abstractmethod
    def _controls(
        self, session: Steered, image: PreparedImage, *, act: bool, begin: int, count: int
    ) -> Iterator[Controls]:
        """What :meth:`controls` gives, once its arguments are known to be right."""

    def span(self, begin: int = 0, chunks: int | None = None) -> int:
        """How many chunks :meth:`controls` gives for these arguments; raises LengthError where it would."""
        for name, value, least in (("begin", begin, 0), ("chunks", 1 if chunks is None else chunks, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise LengthError(f"{name}={value!r} must be a whole number of at least {least}")
        left = max(0, self.chunks - begin)
        if chunks is None and left:
            return left
        asked = begin + (chunks or 1)
        if asked * self.chunk * 4 > MAX_POSES:
            raise LengthError(
                f"{asked} chunks of {self.chunk} latent frames were asked for; at most {MAX_POSES // (4 * self.chunk)} "
                "can be made in one run"
            )
        if asked > self.chunks and not self.stands_still:
            fewer = f"ask for {left} or less, " if left else ""
            after = f" after the first {begin}" if begin else ""
            raise LengthError(
                f"{chunks or 1} chunks were asked for{after}, but the controls ({self.source}) have {self.chunks} in "
                f"all: {fewer}{self._ways_out}"
            )
        return chunks or 1

    _ways_out = "make them longer, or choose to stand still at the end (hold)"

    def with_choices(
        self,
        *,
        unit: str | float | None = None,
        first_delta: FirstDelta | None = None,
        stands_still: bool | None = None,
    ) -> Self:
        """A copy with other rules; None keeps one. Raises CameraError for those that do not exist."""
        other = copy.copy(self)
        if unit is not None:
            translation_unit(unit, latent_poses=self.latent_poses, steps=self.steps)
            other.unit = unit
        if first_delta is not None:
            if first_delta not in get_args(FirstDelta):
                raise CameraError(
                    f"first_delta={first_delta!r} is unknown; use one of {', '.join(get_args(FirstDelta))}"
                )
            other.first_delta = first_delta
        if stands_still is not None:
            other.stands_still = stands_still
        return other

    def translation_unit(self, rule: str | float | None = None) -> tuple[float, str]:
        """The unit of a session that begins with this route, as a number, and the name of the rule that gave it.

        rule: 'clip', 'key', a percentile such as 'p95', or a number; None takes the route's own. Raises CameraError.
        """
        rule = self.unit if rule is None else rule
        return translation_unit(rule, latent_poses=self.latent_poses, steps=self.steps), unit_rule(rule)

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


def unit_rule(rule: str | float) -> str:
    """The name of a rule for the translation unit: ``clip``, ``key``, a percentile, or ``number``."""
    text = str(rule).strip().lower()
    return text if text in ("clip", "key") or text.startswith("p") else "number"


def for_image(
    row: Array, image: PreparedImage, *, width: int = UPSTREAM_WIDTH, height: int = UPSTREAM_HEIGHT
) -> Intrinsics:
    """fx, fy, cx, cy in pixels of a width x height view of the start image, in pixels of the prepared image."""
    fx, fy, cx, cy = image.intrinsics_for(row, height, width).tolist()
    return fx, fy, cx, cy


def lies_at(carried: Array, pose: Array) -> bool:
    """Whether a carried pose [4, 4] is this one but for rounding."""
    slack = _ROUNDING * max(1.0, float(np.abs(pose[:3, 3]).max()))
    return bool(np.abs(carried - pose).max() <= slack)


def lay(poses: Array, before: Array, carried: Array) -> Array:
    """Poses [N, 4, 4] moved rigidly so that the pose ``before`` them comes to lie on the carried one."""
    laid: Array = carried @ steps_from(before[None], poses)
    return laid
