"""Pinhole intrinsics [fx, fy, cx, cy] in pixels: checking, conversion from matrices, change of picture size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import CameraError
from .pose import Array, as_numbers

Size = tuple[float, float]

DEFAULT_FOCAL = 500.0


def default_intrinsics(width: int, height: int) -> Array:
    """What stands in for missing intrinsics, as in the realtime servers: 500 px and the picture's centre, [4]."""
    return np.array([DEFAULT_FOCAL, DEFAULT_FOCAL, width / 2, height / 2])


@dataclass(frozen=True)
class Lens:
    """Intrinsics in pixels, and the size of the picture they are for."""

    fx: float
    fy: float
    cx: float
    cy: float
    width: int
    height: int

    @classmethod
    def from_mapping(cls, values: Any) -> Lens:
        """Reads the fields by name; raises CameraError unless all of them are there and are positive numbers."""
        names = [field.name for field in fields(cls)]
        if not isinstance(values, Mapping) or set(values) != set(names):
            raise CameraError(f"a lens must have the fields {', '.join(names)}, not {values!r}")
        for name in names:
            value = values[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise CameraError(f"a lens: {name} is {value!r} and must be a number above 0, in pixels")
        return cls(**{name: values[name] for name in names})

    def at(self, width: int, height: int) -> tuple[float, float, float, float]:
        """fx, fy, cx, cy for a picture of width x height.

        Both focal lengths change by the square root of the areas' ratio, so that pixels keep their shape.
        """
        scale = math.sqrt(width * height / (self.width * self.height))
        return self.fx * scale, self.fy * scale, self.cx * width / self.width, self.cy * height / self.height


def intrinsics_for(lens: Lens | None, width: int, height: int) -> tuple[float, float, float, float]:
    """fx, fy, cx, cy of a picture whose camera nobody names: the model's own, or the servers' default."""
    if lens is not None:
        return lens.at(width, height)
    fx, fy, cx, cy = default_intrinsics(width, height).tolist()
    return fx, fy, cx, cy


def check_intrinsics(intrinsics: Any, *, rows: int, name: str = "intrinsics") -> Array:
    """Returns float64 [rows, 4] in pixels.

    intrinsics: [4], [1, 4], [rows, 4], [3, 3] or [rows, 3, 3]; a matrix gives fx = K[0,0], fy = K[1,1], cx = K[0,2] and
    cy = K[1,2]. Raises CameraError for any other number of rows, for skew, for numbers that are not finite or not
    positive focal lengths, and for values that look normalised by the picture size.
    """
    array = as_numbers(intrinsics, name)
    if array.ndim >= 2 and array.shape[-2:] == (3, 3):
        array = _from_matrices(array.reshape(-1, 3, 3), name) if array.ndim <= 3 else array
    elif array.shape == (4,):
        array = array[None]
    if array.ndim != 2 or array.shape[1] != 4:
        raise CameraError(
            f"{name} has shape {list(np.shape(intrinsics))}; use fx, fy, cx, cy in pixels as [4] or [N, 4], or "
            "3x3 matrices as [3, 3] or [N, 3, 3]"
        )
    if len(array) not in (1, rows):
        raise CameraError(f"{name} has {len(array)} rows for {rows} poses; give one row for all poses, or {rows}")
    bad = ~np.isfinite(array).all(axis=1)
    if bad.any():
        raise CameraError(f"{name}: row {int(np.argmax(bad))} holds NaN or infinity; give finite pixels")
    bad = (array[:, :2] <= 0).any(axis=1)
    if bad.any():
        raise CameraError(f"{name}: row {int(np.argmax(bad))} has a focal length that is not positive; give pixels")
    bad = (np.abs(array) < 4).all(axis=1)
    if bad.any():
        raise CameraError(
            f"{name}: row {int(np.argmax(bad))} ({array[np.argmax(bad)].tolist()}) looks normalised by the picture "
            "size; multiply fx and cx by the width, fy and cy by the height"
        )
    return np.repeat(array, rows, axis=0) if len(array) == 1 else array


def check_pixels(intrinsics: Any, name: str = "intrinsics") -> tuple[float, float, float, float]:
    """One row fx, fy, cx, cy; raises CameraError unless it is four finite numbers with positive focal lengths."""
    row = as_numbers(intrinsics, name)
    if row.shape != (4,) or not np.isfinite(row).all() or (row[:2] <= 0).any():
        raise CameraError(f"{name} {row.tolist()} must be fx, fy, cx, cy in pixels with focal lengths above 0")
    fx, fy, cx, cy = row.tolist()
    return fx, fy, cx, cy


def _from_matrices(matrices: Array, name: str) -> Array:
    fixed = matrices[:, [0, 1, 2, 2, 2], [1, 0, 0, 1, 2]] - [0.0, 0.0, 0.0, 0.0, 1.0]
    # Skew in pixels of up to a thousandth is what calibration tools print for none. NaN is reported by the caller.
    bad = (np.abs(fixed) > 1e-3).any(axis=1)
    if bad.any():
        row = int(np.argmax(bad))
        raise CameraError(
            f"{name}: row {row} is not a pinhole matrix [[fx, 0, cx], [0, fy, cy], [0, 0, 1]]; remove skew, and "
            "transpose it if cx and cy are in its last row"
        )
    return matrices[:, [0, 1, 0, 1], [0, 1, 2, 2]]


def scale_intrinsics(intrinsics: ArrayLike, from_size: Size, to_size: Size) -> Array:
    """Intrinsics [..., 4] of a picture resized from (width, height) to (width, height); both sides independently."""
    x, y = to_size[0] / from_size[0], to_size[1] / from_size[1]
    return np.asarray(intrinsics, dtype=np.float64) * [x, y, x, y]


def transform_intrinsics(intrinsics: ArrayLike, original: Size, resized: Size, final: Size) -> Array:
    """Intrinsics [..., 4] of a picture resized and then cropped around its centre; sizes are (width, height)."""
    offset = [0.0, 0.0, (resized[0] - final[0]) / 2, (resized[1] - final[1]) / 2]
    return scale_intrinsics(intrinsics, original, resized) - offset
