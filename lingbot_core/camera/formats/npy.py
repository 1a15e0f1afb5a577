"""Upstream's camera folders: poses.npy, intrinsics.npy, and key states per video frame.

poses.npy [N, 4, 4] is camera-to-world in OpenCV axes, one pose per video frame; intrinsics.npy [N, 4] is fx, fy, cx, cy
in pixels of 832 x 480. Nothing pickled is ever read, and a file's size is checked before its numbers are read.
"""

from __future__ import annotations

import math
from os import PathLike
from pathlib import Path
from tokenize import TokenError
from typing import BinaryIO, Literal

import numpy as np

from ...errors import CameraError, InputFileError
from ..intrinsics import scale_intrinsics
from ..keys import check_key_array
from ..pose import MAX_POSES, Array
from ..trajectory import UPSTREAM_HEIGHT, UPSTREAM_WIDTH, CameraTrajectory

StrPath = str | PathLike[str]


def load_camera(
    folder_or_poses: StrPath,
    intrinsics: StrPath | None = None,
    *,
    width: int = UPSTREAM_WIDTH,
    height: int = UPSTREAM_HEIGHT,
    fps: float = 16.0,
) -> CameraTrajectory:
    """Reads a camera path, all of its rows.

    folder_or_poses: a folder with poses.npy and perhaps intrinsics.npy, or a file of poses. intrinsics: a file of them.
    width, height: the size that the intrinsics refer to. Without a file of intrinsics they are 500 px at whatever size
    is generated, and the path says so (``intrinsics_are_default``). Raises InputFileError for files that are missing or
    not plain .npy, CameraError for what is in them.
    """
    source = Path(folder_or_poses)
    poses_file = source
    intrinsics_file = None if intrinsics is None else Path(intrinsics)
    if source.is_dir():
        poses_file = source / "poses.npy"
        beside = source / "intrinsics.npy"
        if intrinsics_file is None and beside.exists():
            intrinsics_file = beside
    poses = read_array(poses_file)
    rows = None if intrinsics_file is None else read_array(intrinsics_file)
    return CameraTrajectory.from_arrays(
        poses,
        rows,
        width=width,
        height=height,
        fps=fps,
        poses_name=str(poses_file),
        intrinsics_name=str(intrinsics_file),
    )


def load_camera_set(
    source: StrPath,
    *,
    intrinsics: StrPath | Literal["beside", "default"] = "beside",
    actions: bool = True,
    width: int = UPSTREAM_WIDTH,
    height: int = UPSTREAM_HEIGHT,
    fps: float = 16.0,
) -> CameraTrajectory:
    """Reads a path together with what lies beside it.

    source: a file of poses, or a folder with poses.npy. intrinsics: a file, the intrinsics.npy ``beside`` a poses.npy
    if there is one, or the ``default``. actions: also read an action.npy beside a poses.npy. Raises as
    :func:`load_camera`, and InputFileError for what may not be read.
    """
    given = Path(source)
    try:
        folder = given if given.is_dir() else given.parent
        poses = folder / "poses.npy" if given.is_dir() else given
        beside = poses.name == "poses.npy"
        rows = None if intrinsics == "default" else Path(intrinsics)
        if intrinsics == "beside":
            found = folder / "intrinsics.npy"
            rows = found if beside and found.exists() else None
        path = load_camera(poses, rows, width=width, height=height, fps=fps)
        if actions and beside and (folder / "action.npy").exists():
            path = path.with_actions(load_actions(folder, act=True)[0])
    except OSError as error:
        where = error.filename or given
        raise InputFileError(f"{where} cannot be read: {error.strerror or error}; check its permissions") from None
    return path


def load_actions(folder: StrPath, *, act: bool = False) -> tuple[Array, Array | None]:
    """Reads key states per video frame: w a s d [F, 4], and i j k l [F, 4] or None.

    act: read action.npy, what the act model is driven with. Otherwise wasd_action.npy and ijkl_action.npy, of which one
    may be missing, and action.npy only where neither is there.
    """
    where = Path(folder)
    action, wasd, ijkl = (where / f"{name}.npy" for name in ("action", "wasd_action", "ijkl_action"))
    if act or (action.exists() and not wasd.exists() and not ijkl.exists()):
        return check_key_array(read_array(action), str(action)), None
    looks = check_key_array(read_array(ijkl), str(ijkl)) if ijkl.exists() else None
    if looks is not None and not wasd.exists():
        return np.zeros_like(looks), looks
    moves = check_key_array(read_array(wasd), str(wasd))
    if looks is not None and len(looks) != len(moves):
        raise CameraError(
            f"{ijkl} has {len(looks)} rows but {wasd} has {len(moves)}; give both one row per video frame"
        )
    return moves, looks


def save_camera(trajectory: CameraTrajectory, folder: StrPath) -> Path:
    """Writes poses.npy and intrinsics.npy (float64) into a folder, which is made if need be, and returns it.

    Intrinsics are converted to 832 x 480, which is what readers of these files expect.
    """
    if trajectory.rate != "video":
        raise CameraError(
            "poses.npy holds one pose per video frame; save the path from before it was resampled to latents"
        )
    where = Path(folder)
    size = (trajectory.width, trajectory.height)
    rows = scale_intrinsics(trajectory.intrinsics, size, (UPSTREAM_WIDTH, UPSTREAM_HEIGHT))
    try:
        where.mkdir(parents=True, exist_ok=True)
        np.save(where / "poses.npy", trajectory.poses, allow_pickle=False)
        np.save(where / "intrinsics.npy", rows, allow_pickle=False)
    except OSError as error:
        raise InputFileError(f"the camera path cannot be written to {where}: {error.strerror or error}") from None
    return where


def read_array(path: StrPath) -> np.ndarray:
    """Reads one .npy file of at most ``MAX_POSES`` rows of at most 16 numbers; the header is judged first."""
    file = Path(path)
    if file.exists() and not file.is_file():
        raise InputFileError(f"{file} is not a file; give the path of a .npy file")
    try:
        with file.open("rb") as stream:
            shape, dtype = _read_header(stream)
            available = file.stat().st_size - stream.tell()
        rows, numbers = (shape[0] if shape else 0), math.prod(shape[1:])
        if dtype.hasobject or dtype.kind not in "fiu":
            kind = "pickled objects, which are never loaded" if dtype.hasobject else f"dtype {dtype}"
            raise InputFileError(
                f"{file} holds {kind}; save plain numbers with numpy.save(path, array.astype('float32'))"
            )
        if rows > MAX_POSES or numbers > 16:
            raise CameraError(f"{file} has shape {list(shape)}; at most {MAX_POSES} rows of 16 numbers are accepted")
        if available < math.prod(shape) * dtype.itemsize:
            raise InputFileError(
                f"{file} is truncated: {list(shape)} {dtype} needs more than the file has; copy it again"
            )
        return np.load(file, allow_pickle=False)
    except FileNotFoundError:
        raise InputFileError(
            f"{file} does not exist; give a folder with poses.npy, or the path of a .npy file"
        ) from None
    except OSError as error:
        raise InputFileError(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, TokenError) as error:  # numpy reads a header of its old format with Python's tokenizer
        raise InputFileError(f"{file} is not a .npy file ({error}); save it with numpy.save") from None


def _read_header(stream: BinaryIO) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    elif version == (2, 0):
        shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
    else:
        raise ValueError(f"version {version[0]}.{version[1]}")
    if any(side < 0 for side in shape):
        raise ValueError(f"shape {shape}")
    return shape, dtype
