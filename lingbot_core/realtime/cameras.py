"""The cameras of an infer message, checked as the camera files are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..camera.intrinsics import check_intrinsics
from ..camera.pose import Array, check_poses, read_only
from ..errors import CameraError
from .errors import MessageError
from .limits import DEFAULT_LIMITS, Limits

_NAMES = ("cameras", "camera")


@dataclass(frozen=True, eq=False)
class Cameras:
    """poses: camera-to-world, OpenCV axes, read-only float64 [N, 4, 4]. intrinsics: fx, fy, cx, cy in pixels of
    whatever size the client meant, read-only float64 [N, 4].
    """

    poses: Array
    intrinsics: Array

    def __len__(self) -> int:
        return len(self.poses)


def read_cameras(message: Mapping[str, Any], limits: Limits = DEFAULT_LIMITS) -> Cameras:
    """Reads ``cameras`` (or ``camera``) of a message: a map of ``poses`` and ``intrinsics``.

    poses: [N, 4, 4] or [N, 3, 4]. intrinsics: [N, 4] or [4], or 3x3 matrices. Both are arrays or plain lists of real
    numbers. Rotations that are slightly off are replaced by the nearest ones, as in files. Raises
    MessageError("missing_field") for what is not there or null, and MessageError("bad_camera") naming the field and
    the row for what is there and cannot be used, such as more than ``limits.camera_rows`` poses.
    """
    given = [name for name in _NAMES if message.get(name) is not None]
    if not given:
        raise MessageError("the message has no cameras; send cameras: {intrinsics, poses}", code="missing_field")
    if len(given) > 1:
        raise MessageError("the message has both cameras and camera; send one of them", code="bad_camera")
    name, fields = given[0], message[given[0]]
    if not isinstance(fields, Mapping):
        raise MessageError(f"{name} is {_kind(fields)}; send a map of intrinsics and poses", code="bad_camera")
    for field in ("poses", "intrinsics"):
        if fields.get(field) is None:
            raise MessageError(
                f"{name} has no {field}; send intrinsics [N, 4] and poses [N, 4, 4]", code="missing_field"
            )
    rows = limits.camera_rows
    poses_name, intrinsics_name = f"{name}.poses", f"{name}.intrinsics"
    given_poses = _numbers(fields["poses"], poses_name, rows * 16, f"at most {rows} poses are accepted")
    given_intrinsics = _numbers(fields["intrinsics"], intrinsics_name, rows * 9, f"at most {rows} rows are accepted")
    try:
        poses = check_poses(given_poses, name=poses_name, max_rows=rows)
        intrinsics = check_intrinsics(given_intrinsics, rows=len(poses), name=intrinsics_name)
    except CameraError as error:
        raise MessageError(error, code="bad_camera") from error
    return Cameras(read_only(poses), read_only(intrinsics))


def _numbers(values: Any, name: str, most: int, advice: str) -> Any:
    """``values``, once it is clear that an array of them is small: one long string among numbers would make numpy take
    that much room for every one of them.
    """
    if not isinstance(values, np.ndarray | list | tuple):
        raise MessageError(f"{name} is {_kind(values)}; send an array, or lists of numbers", code="bad_camera")
    count = 0
    for part in _parts(values):
        if isinstance(part, np.ndarray):
            count += part.size
        elif isinstance(part, bool) or not isinstance(part, int | float | np.integer | np.floating):
            raise MessageError(f"{name} holds a value {_kind(part)}; send real numbers", code="bad_camera")
        else:
            count += 1
        if count > most:
            raise MessageError(f"{name} holds more than {most} numbers; {advice}", code="bad_camera")
    return values


def _parts(values: Any) -> Iterator[Any]:
    """The arrays and single values in lists of lists."""
    if isinstance(values, list | tuple):
        for value in values:
            yield from _parts(value)
    else:
        yield values


def _kind(value: Any) -> str:
    return "null" if value is None else f"of the type {type(value).__name__}"
