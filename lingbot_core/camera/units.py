"""The unit that a session divides translations by, and the statistics of steps that tell whether it suits a path."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ..errors import CameraError
from .keys import KeySteps
from .pose import Array, step_lengths

# A jump stands far above the faster half of a path. The median would also flag a path that rests for most of its time.
OUTLIER_FACTOR = 10.0


@dataclass(frozen=True)
class StepStatistics:
    """How far a path moves from latent frame to latent frame.

    count: steps, one less than latent frames. median, p95, maximum: of the steps that move. zero_steps: steps that do
    not. outliers: latent frames whose step is more than 10 times the upper quartile of the moving steps. warning: what
    is wrong in one sentence, or "".
    """

    count: int
    median: float
    p95: float
    maximum: float
    zero_steps: int
    outliers: tuple[int, ...]
    warning: str


def step_statistics(latent_poses: ArrayLike) -> StepStatistics:
    """Statistics of the step lengths of latent poses [F, 4, 4], in the path's own units."""
    lengths = step_lengths(latent_poses)
    moving = lengths[lengths > 0]
    if not moving.size:
        warning = "the camera path does not move; only its rotation steers" if lengths.size else ""
        return StepStatistics(len(lengths), 0.0, 0.0, 0.0, len(lengths), (), warning)
    threshold = OUTLIER_FACTOR * _percentile(moving, 75)
    outliers = tuple((np.flatnonzero(lengths > threshold) + 1).tolist())
    median, maximum = float(np.median(moving)), float(moving.max())
    warning = ""
    if outliers:
        warning = (
            f"the step into latent frame {outliers[0]} is {lengths[outliers[0] - 1] / median:.0f} times the median "
            "step: with the unit 'clip' all other steps shrink by as much; repair that pose, or use the unit 'p95' or "
            "a number"
        )
    return StepStatistics(
        len(lengths), median, _percentile(moving, 95), maximum, len(lengths) - len(moving), outliers, warning
    )


def translation_unit(
    value: str | float, *, latent_poses: ArrayLike | None = None, steps: KeySteps | None = None
) -> float:
    """Resolves a translation unit to a number.

    value: a number above 0 (or text of one); ``clip``, the longest step of the latent poses, as in the reference;
    ``p95`` and the like, a percentile of the steps that move, which one bad pose cannot spoil; ``key``, one held key
    over one latent frame. A path that does not move gives 1. Raises CameraError for anything else, and for a missing
    path or missing key steps.
    """
    text = str(value).strip().lower()
    if text == "key":
        if steps is None:
            raise CameraError("translation unit 'key' needs key steps; choose some, or give the unit as a number")
        if steps.move_per_latent <= 0:
            raise CameraError(
                f"translation unit 'key': the key steps {steps.name} do not move; give the unit as a number"
            )
        return steps.move_per_latent
    percent = 100.0 if text == "clip" else _percent(text)
    if percent is not None:
        if latent_poses is None:
            raise CameraError(
                f"translation unit {text!r} needs a camera path at the start; give a path, 'key' or a number"
            )
        lengths = step_lengths(latent_poses)
        moving = lengths[lengths > 0]
        return _percentile(moving, percent) if moving.size else 1.0
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise CameraError(
                f"translation unit {value!r} is unknown; use clip, key, a percentile such as p95, or a number above 0"
            ) from None
    return check_unit(value)


def check_unit(unit: float) -> float:
    """Returns a unit as a float; CameraError unless it is a finite number above 0."""
    if isinstance(unit, bool) or not isinstance(unit, int | float) or not (math.isfinite(unit) and unit > 0):
        raise CameraError(f"translation unit {unit!r} must be a number above 0")
    return float(unit)


def _percent(text: str) -> float | None:
    match = re.fullmatch(r"p(\d{1,3}(?:\.\d{1,6})?)", text)
    if match is None:
        return None
    percent = float(match[1])
    if not 0 < percent <= 100:
        raise CameraError(f"translation unit {text!r}: a percentile lies above 0 and at most at 100, such as p95")
    return percent


def _percentile(values: Array, percent: float) -> float:
    # A step of the path rather than a value between two: one outlier among few steps must not leak into it.
    return float(np.percentile(values, percent, method="lower"))
