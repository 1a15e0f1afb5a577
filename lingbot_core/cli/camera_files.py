"""Camera files and action strings of the command line, read and checked."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..camera.controls import Intrinsics
from ..camera.formats.npy import load_actions, load_camera, read_array
from ..camera.intrinsics import check_intrinsics
from ..camera.keys import action_string_poses, arrays_from_keys, frames_of, pad_to_4k1, parse_action_string
from ..camera.pose import MAX_POSES, Array
from ..camera.trajectory import CameraTrajectory
from ..errors import CameraError, InputFileError


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
