"""The cameras of an infer message: what is read, and how everything else is answered."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from lingbot_core.realtime.cameras import read_cameras
from lingbot_core.realtime.codec import Limits, pack, unpack
from lingbot_core.realtime.errors import MessageError


def path(count: int = 9) -> np.ndarray:
    """Poses [count, 4, 4] that turn and move."""
    poses = np.tile(np.eye(4), (count, 1, 1))
    poses[:, :3, :3] = Rotation.from_rotvec(np.linspace(0, 1, count)[:, None] * [0.2, 0.5, -0.1]).as_matrix()
    poses[:, :3, 3] = np.arange(count)[:, None] * [0.1, -0.2, 1.0]
    return poses


ROW = [500.0, 510.0, 416.0, 240.0]


def message(poses: object = None, intrinsics: object = None, name: str = "cameras") -> dict:
    poses = path() if poses is None else poses
    return {name: {"poses": poses, "intrinsics": np.tile(ROW, (len(path()), 1)) if intrinsics is None else intrinsics}}


def refusal(content: dict, code: str = "bad_camera", **limits: int) -> str:
    with pytest.raises(MessageError) as caught:
        read_cameras(content, Limits(**limits))
    assert caught.value.code == code
    return str(caught.value)


@pytest.mark.parametrize("name", ["cameras", "camera"])
@pytest.mark.parametrize("form", ["arrays", "lists", "rows of arrays", "3x4", "one row", "matrices"])
def test_arrays_and_lists_become_float64(name, form):
    poses, intrinsics = path(), np.tile(ROW, (9, 1))
    matrix = np.array([[500.0, 0, 416], [0, 510, 240], [0, 0, 1]])
    sent = {
        "arrays": (poses, intrinsics),
        "lists": (poses.tolist(), intrinsics.tolist()),
        "rows of arrays": (list(poses), list(intrinsics)),
        "3x4": (poses[:, :3], intrinsics),
        "one row": (poses, ROW),
        "matrices": (poses, np.tile(matrix, (9, 1, 1))),
    }[form]
    cameras = read_cameras(unpack(pack(message(*sent, name))))
    assert len(cameras) == 9
    assert cameras.poses.dtype == cameras.intrinsics.dtype == np.float64
    assert not cameras.poses.flags.writeable
    assert not cameras.intrinsics.flags.writeable
    np.testing.assert_allclose(cameras.poses, poses, rtol=0, atol=1e-15)
    np.testing.assert_array_equal(cameras.intrinsics, intrinsics)


@pytest.mark.parametrize("dtype", ["<f4", ">f4", ">f8"])
def test_other_floats_keep_their_values(dtype):
    poses = path().astype(dtype)
    np.testing.assert_array_equal(read_cameras(unpack(pack(message(poses)))).poses, poses.astype(np.float64))


def test_whole_numbers_are_numbers():
    cameras = read_cameras(unpack(pack(message(np.tile(np.eye(4, dtype=np.int64), (9, 1, 1)), [500, 500, 416, 240]))))
    np.testing.assert_array_equal(cameras.poses, np.tile(np.eye(4), (9, 1, 1)))


def test_rotations_printed_with_few_digits_are_made_orthonormal():
    poses = path()
    poses[:, :3, :3] = poses[:, :3, :3].round(4)
    repaired = read_cameras(message(poses)).poses[:, :3, :3]
    np.testing.assert_allclose(repaired @ repaired.transpose(0, 2, 1), np.tile(np.eye(3), (9, 1, 1)), atol=1e-14)
    np.testing.assert_allclose(repaired, path()[:, :3, :3], atol=2e-4)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({}, "the message has no cameras; send cameras: {intrinsics, poses}"),
        ({"cameras": None}, "the message has no cameras"),
        ({"cameras": {}}, "cameras has no poses"),
        ({"camera": {"poses": path()}}, "camera has no intrinsics; send intrinsics [N, 4] and poses [N, 4, 4]"),
        ({"cameras": {"intrinsics": ROW, "poses": None}}, "cameras has no poses"),
    ],
)
def test_what_is_not_there_is_a_missing_field(content, reason):
    assert reason in refusal(content, "missing_field")


def changed(row: int, place: tuple[int, int] | slice, value: float) -> np.ndarray:
    poses = path()
    poses[(row, *place) if isinstance(place, tuple) else row] = value
    return poses


BAD = {
    "both names": ({**message(), **message(name="camera")}, "both cameras and camera; send one of them"),
    "a list": ({"cameras": [1]}, "cameras is of the type list; send a map"),
    "NaN": (message(changed(4, (1, 3), np.nan)), "cameras.poses: row 4 holds NaN or infinity"),
    "infinity": (message(changed(0, (0, 0), np.inf)), "cameras.poses: row 0 holds NaN or infinity"),
    "NaN in a list": (message(changed(2, (0, 0), np.nan).tolist()), "cameras.poses: row 2 holds NaN"),
    "far away": (message(changed(3, (0, 3), 1e10)), "row 3 is farther than"),
    "scaled": (message(path() * [[[2], [2], [2], [1]]]), "row 0 is not rigid"),
    "mirrored": (message(path() * [[[-1], [1], [1], [1]]]), "row 0 is left-handed"),
    "transposed": (message(path().transpose(0, 2, 1)), "row 1 has a bottom row other than 0 0 0 1"),
    "one pose": (message(path()[0]), "has shape [4, 4]; camera-to-world poses are [N, 4, 4]; add a leading axis"),
    "no pose": (message(path()[:0]), "cameras.poses has 0 poses"),
    "an empty list": (message([]), "cameras.poses"),
    "ragged": (message([[[1.0, 0, 0, 0]], [[1.0]]]), "cameras.poses is not an array of numbers"),
    "text": (message([["x"]]), "cameras.poses holds a value of the type str; send real numbers"),
    "null": (message([[None]]), "cameras.poses holds a value null"),
    "booleans": (message([[True]]), "cameras.poses holds a value of the type bool"),
    "an array of booleans": (message(np.ones((9, 4, 4), bool)), "cameras.poses has dtype bool"),
    "a map inside": (message([{"x": 1}]), "cameras.poses holds a value of the type dict"),
    "bytes": (message(path().tobytes()), "cameras.poses is of the type bytes; send an array"),
    "a number": (message(intrinsics=500.0), "cameras.intrinsics is of the type float"),
    "too few rows": (message(intrinsics=np.tile(ROW, (8, 1))), "cameras.intrinsics has 8 rows for 9 poses"),
    "no focal length": (message(intrinsics=[0, 500, 1, 1]), "has a focal length that is not positive"),
    "NaN pixels": (message(intrinsics=[500, np.nan, 1, 1]), "cameras.intrinsics: row 0 holds NaN"),
    "normalised": (message(intrinsics=[0.6, 1.0, 0.5, 0.5]), "looks normalised"),
    "three numbers": (message(intrinsics=[1.0, 2.0, 3.0]), "cameras.intrinsics has shape [3]"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_camera_is_refused_by_name_and_row(name):
    content, reason = BAD[name]
    assert reason in refusal(content)


def test_the_number_of_poses_is_bounded():
    still = np.tile(np.eye(4), (4097, 1, 1))
    assert len(read_cameras(message(still[:4096], ROW))) == 4096
    for poses in (still, still.tolist(), still[:, :3]):
        assert "4096" in refusal(message(poses, ROW))
    assert len(read_cameras(message(path(3), ROW), Limits(camera_rows=3))) == 3
    assert "more than 32 numbers; at most 2 poses" in refusal(message(path(3), ROW), camera_rows=2)
    assert "holds more than 18 numbers; at most 2 rows" in refusal(
        message(path(2), np.tile(ROW, (5, 1))), camera_rows=2
    )


HUGE = {
    "numbers that would take eight times the room": lambda: message(np.zeros(8 << 20, np.uint8)),
    "an array in a list": lambda: message([np.zeros(8 << 20, np.uint8)]),
    "a long word among numbers": lambda: message([1.0] * 60_000 + ["x" * 100_000]),
    "many numbers in lists": lambda: message([[0.0] * 250_000]),
}


@pytest.mark.parametrize("name", HUGE)
def test_what_is_too_large_costs_no_memory(name):
    content = HUGE[name]()
    tracemalloc.start()
    try:
        assert "cameras.poses holds" in refusal(content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
