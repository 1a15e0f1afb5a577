"""Rigid camera poses: checking, inverse, steps, interpolation.

A pose is a camera-to-world matrix [4, 4] in float64 with OpenCV axes (+X right, +Y down, +Z forward). Arrays of poses
are [N, 4, 4]; every function here returns new arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.spatial.transform import Rotation, Slerp

from ..errors import CameraError

Array = NDArray[np.float64]

# An hour and three quarters of video at 16 frames a second; more is a wrong file rather than a path.
MAX_POSES = 100_000
MAX_DISTANCE = 1e9

# Rounding a rotation to float32 leaves |R R^T - I| below 4e-7. Such files are taken as they are, so that their numbers
# do not move; errors up to the second limit (a file printed with three digits) are repaired, larger ones refused.
ROUNDING_ERROR = 2e-6
REPAIRABLE_ERROR = 2e-3

# Steps below this part of the path's distance from the origin are the rounding of float64, not motion.
_REST = 1e-12


def as_numbers(values: Any, name: str) -> Array:
    """Converts to float64; raises CameraError for anything but real numbers (objects, strings, complex, ragged)."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise CameraError(f"{name} is not an array of numbers ({error}); pass a numpy array") from None
    if array.dtype.kind not in "fiu":
        raise CameraError(f"{name} has dtype {array.dtype}; real numbers (float32 or float64) are needed")
    return array.astype(np.float64)


def read_only(array: ArrayLike) -> Array:
    """Returns a contiguous float64 copy that cannot be written to."""
    copy = np.array(array, dtype=np.float64, order="C")
    copy.setflags(write=False)
    return copy


def check_poses(poses: Any, *, name: str = "poses", max_rows: int = MAX_POSES) -> Array:
    """Checks camera-to-world poses and returns them as float64 [N, 4, 4].

    poses: [N, 4, 4] or [N, 3, 4]. name: what messages call the array, a file name for instance. Rotations that are off
    by rounding are kept, slightly wrong ones are replaced by the nearest rotation. Raises CameraError naming the row
    for wrong shapes, too many rows, numbers that are not finite, a wrong bottom row, and matrices that are not rigid.
    """
    array = as_numbers(poses, name)
    if array.ndim != 3 or array.shape[1:] not in ((4, 4), (3, 4)):
        hint = "; add a leading axis for a single pose" if array.shape in ((4, 4), (3, 4)) else ""
        raise CameraError(f"{name} has shape {list(array.shape)}; camera-to-world poses are [N, 4, 4]{hint}")
    count = len(array)
    if not 1 <= count <= max_rows:
        raise CameraError(f"{name} has {count} poses; between 1 and {max_rows} are accepted")

    _refuse_first(~np.isfinite(array).all(axis=(1, 2)), name, "holds NaN or infinity; remove or repair that pose")
    out = np.tile(np.eye(4), (count, 1, 1))
    out[:, :3] = array[:, :3]
    if array.shape[1] == 4:
        wrong = (np.abs(array[:, 3] - [0.0, 0.0, 0.0, 1.0]) > 1e-6).any(axis=1)
        advice = "has a bottom row other than 0 0 0 1; if its translation is stored there, transpose the matrices"
        _refuse_first(wrong, name, advice)
    far = (np.abs(out[:, :3, 3]) > MAX_DISTANCE).any(axis=1)
    _refuse_first(far, name, f"is farther than {MAX_DISTANCE:g} units from the origin; scale the path down")
    out[:, :3, :3] = _check_rotations(out[:, :3, :3], name)
    return out


def _check_rotations(rotations: Array, name: str) -> Array:
    # Enormous entries would overflow in the product; they are no rotations either way.
    _refuse_first((np.abs(rotations) > 1e3).any(axis=(1, 2)), name, "is not rigid; a rotation has entries within -1..1")
    gram = rotations @ rotations.transpose(0, 2, 1)
    error = np.abs(gram - np.eye(3)).max(axis=(1, 2))
    rigid = error <= REPAIRABLE_ERROR
    left_handed = rigid & (np.linalg.det(rotations) < 0)
    advice = "is left-handed (determinant -1); flip one axis so that the camera is +X right, +Y down, +Z forward"
    _refuse_first(left_handed, name, advice)
    if not rigid.all():
        row = int(np.argmin(rigid))
        scale = np.sqrt(np.trace(gram[row]) / 3)
        scaled = scale > 0 and np.abs(gram[row] / scale**2 - np.eye(3)).max() <= REPAIRABLE_ERROR
        fix = (
            f"divide its rotation by its scale {scale:.6g}"
            if scaled
            else "export it without scale, shear or perspective"
        )
        raise CameraError(f"{name}: row {row} is not rigid (|R R^T - I| = {error[row]:.3g}); {fix}")
    noisy = error > ROUNDING_ERROR
    if noisy.any():
        u, _, vt = np.linalg.svd(rotations[noisy])
        rotations = rotations.copy()
        rotations[noisy] = u @ vt
    return rotations


def _refuse_first(bad: NDArray[np.bool_] | np.bool_, name: str, what: str) -> None:
    if bad.any():
        raise CameraError(f"{name}: row {int(np.argmax(bad))} {what}")


def inverse(poses: ArrayLike) -> Array:
    """World-to-camera matrices of rigid poses [..., 4, 4]: R^T and -R^T t."""
    array = np.asarray(poses, dtype=np.float64)
    out = np.zeros_like(array)
    out[..., :3, :3] = np.swapaxes(array[..., :3, :3], -1, -2)
    out[..., :3, 3] = -np.einsum("...ji,...j->...i", array[..., :3, :3], array[..., :3, 3])
    out[..., 3, 3] = 1.0
    return out


def steps_from(previous: ArrayLike, poses: ArrayLike) -> Array:
    """``inv(previous) @ poses`` for rigid poses [N, 4, 4].

    Positions are subtracted before they are rotated: paths may lie thousands of units from the origin, and a camera
    that stands still then gives exactly zero.
    """
    before, after = np.asarray(previous, dtype=np.float64), np.asarray(poses, dtype=np.float64)
    out = np.zeros_like(after)
    out[..., :3, :3] = np.swapaxes(before[..., :3, :3], -1, -2) @ after[..., :3, :3]
    out[..., :3, 3] = np.einsum("...ji,...j->...i", before[..., :3, :3], after[..., :3, 3] - before[..., :3, 3])
    out[..., 3, 3] = 1.0
    return out


def relative_steps(poses: ArrayLike) -> Array:
    """Steps between neighbours [N, 4, 4]: the identity first, then ``inv(P[i-1]) @ P[i]``."""
    array = np.asarray(poses, dtype=np.float64)
    out = np.empty_like(array)
    out[0] = np.eye(4)
    out[1:] = steps_from(array[:-1], array[1:])
    return out


def interpolate(poses: ArrayLike, at: ArrayLike) -> Array:
    """Poses at the fractional indices ``at`` [M]: linear translation, SLERP of the rotation along the shorter way.

    Raises CameraError for an index outside 0..N-1.
    """
    array, where = np.asarray(poses, dtype=np.float64), np.asarray(at, dtype=np.float64)
    last = len(array) - 1
    if where.size and not (where.min() >= 0 and where.max() <= last):
        raise CameraError(f"poses can be interpolated between index 0 and {last}, not at {where.min()}..{where.max()}")
    if last == 0:
        return np.repeat(array, len(where), axis=0)
    index = np.arange(last + 1)
    out = np.zeros((len(where), 4, 4))
    out[:, :3, :3] = Slerp(index, Rotation.from_matrix(array[:, :3, :3]))(where).as_matrix()
    for axis in range(3):
        out[:, axis, 3] = np.interp(where, index, array[:, axis, 3])
    out[:, 3, 3] = 1.0
    return out


def step_lengths(poses: ArrayLike) -> Array:
    """Distances [N-1] between neighbours; those that are only float64 rounding are exactly 0."""
    positions = np.asarray(poses, dtype=np.float64)[:, :3, 3]
    lengths = np.linalg.norm(np.diff(positions, axis=0), axis=1)
    lengths[lengths <= _REST * max(1.0, float(np.abs(positions).max()))] = 0.0
    return lengths
