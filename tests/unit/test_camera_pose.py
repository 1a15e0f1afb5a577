"""Poses: what is accepted, repaired and refused, and the maths of rigid motions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.spatial.transform import Rotation

from lingbot_core.camera import check_poses, interpolate, inverse, relative_steps
from lingbot_core.camera.pose import step_lengths
from lingbot_core.errors import CameraError

finite = st.floats(-100, 100, allow_nan=False, width=32)


@st.composite
def rigid_paths(draw):
    count = draw(st.integers(2, 6))
    poses = np.tile(np.eye(4), (count, 1, 1))
    poses[:, :3, :3] = Rotation.from_rotvec(draw(arrays(np.float64, (count, 3), elements=st.floats(-3, 3)))).as_matrix()
    poses[:, :3, 3] = draw(arrays(np.float64, (count, 3), elements=finite))
    return poses


def pose(rotation: Rotation | None = None, position=(0.0, 0.0, 0.0)) -> np.ndarray:
    out = np.eye(4)
    out[:3, :3] = np.eye(3) if rotation is None else rotation.as_matrix()
    out[:3, 3] = position
    return out


def turn(degrees: float, axis: str = "y") -> Rotation:
    return Rotation.from_euler(axis, degrees, degrees=True)


def test_float32_rounding_is_left_alone():
    poses = np.stack([pose(turn(angle, "xyz"[angle % 3]), (0, 0, angle)) for angle in range(1, 80)])
    rounded = poses.astype(np.float32)
    checked = check_poses(rounded)
    assert checked.dtype == np.float64
    np.testing.assert_array_equal(checked, rounded.astype(np.float64))


def test_three_by_four_matrices_get_their_bottom_row():
    poses = np.stack([pose(turn(20), (1, 2, 3))] * 2)
    np.testing.assert_array_equal(check_poses(poses[:, :3]), poses)


def test_torch_poses_are_accepted():
    np.testing.assert_array_equal(check_poses(torch.eye(4)[None]), np.eye(4)[None])


def test_small_errors_are_repaired_to_the_nearest_rotation_and_other_rows_stay():
    good, printed = pose(turn(33, "z")), pose(turn(33, "x"))
    printed[:3, :3] = printed[:3, :3].round(3)
    checked = check_poses(np.stack([good, printed]))
    np.testing.assert_array_equal(checked[0], good)
    np.testing.assert_allclose(checked[1, :3, :3] @ checked[1, :3, :3].T, np.eye(3), atol=1e-14)
    # scipy's own orthonormalisation finds the same nearest rotation.
    np.testing.assert_allclose(checked[1, :3, :3], Rotation.from_matrix(printed[:3, :3]).as_matrix(), atol=1e-12)


def broken(change) -> np.ndarray:
    poses = np.tile(np.eye(4), (5, 1, 1))
    change(poses[3])
    return poses


def nan(matrix):
    matrix[0, 3] = np.nan


def infinite(matrix):
    matrix[1, 1] = np.inf


def scaled(matrix):
    matrix[:3, :3] *= 2.5


def sheared(matrix):
    matrix[0, 1] = 0.5


def zero(matrix):
    matrix[:3, :3] = 0


def enormous(matrix):
    matrix[:3, :3] = 1e200


def mirrored(matrix):
    matrix[:3, 1] *= -1


def transposed(matrix):
    matrix[3, :3] = (1, 2, 3)


def far(matrix):
    matrix[2, 3] = 1e12


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (nan, "NaN or infinity"),
        (infinite, "NaN or infinity"),
        (scaled, "not rigid .* scale 2.5"),
        (sheared, "not rigid"),
        (zero, "not rigid"),
        (enormous, "not rigid"),
        (mirrored, "left-handed"),
        (transposed, "bottom row .* transpose"),
        (far, "farther than"),
    ],
)
def test_bad_matrices_are_refused_with_file_and_row(change, words):
    with pytest.raises(CameraError, match=rf"path/poses.npy: row 3 .*{words}"):
        check_poses(broken(change), name="path/poses.npy")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.eye(4), r"shape \[4, 4\].*leading axis"),
        (np.zeros((5, 3, 3)), r"shape \[5, 3, 3\]"),
        (np.zeros((5, 4)), r"shape \[5, 4\]"),
        (np.zeros((0, 4, 4)), "0 poses"),
        (np.array([["a"]]), "dtype"),
        (np.array([None]), "dtype object"),
        (np.eye(4, dtype=complex)[None], "complex"),
        ([[1, 2], [3]], "not an array"),
    ],
)
def test_arrays_that_are_no_poses_are_refused(value, words):
    with pytest.raises(CameraError, match=words):
        check_poses(value)


def test_the_number_of_rows_is_bounded():
    with pytest.raises(CameraError, match="4 poses; between 1 and 3"):
        check_poses(np.tile(np.eye(4), (4, 1, 1)), max_rows=3)


@settings(max_examples=50, deadline=None)
@given(rigid_paths())
def test_inverse_and_steps_agree_with_general_matrix_inversion(poses):
    np.testing.assert_allclose(inverse(poses), np.linalg.inv(poses), atol=1e-10)
    steps = relative_steps(poses)
    np.testing.assert_array_equal(steps[0], np.eye(4))
    np.testing.assert_allclose(steps[1:], np.linalg.inv(poses[:-1]) @ poses[1:], atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(rigid_paths())
def test_steps_do_not_depend_on_the_choice_of_world(poses):
    world = pose(turn(70, "x"), (5, -6, 7))
    np.testing.assert_allclose(relative_steps(world @ poses), relative_steps(poses), atol=1e-10)


def test_a_camera_that_stands_still_far_from_the_origin_takes_steps_of_exactly_zero():
    poses = np.stack([pose(turn(angle), (5680.1, 0.3, 1e5)) for angle in (0, 10, 20)]).astype(np.float32)
    assert not relative_steps(poses)[:, :3, 3].any()
    assert not step_lengths(poses).any()


def test_interpolation_is_linear_in_position_and_constant_in_angular_speed():
    ends = np.stack([pose(), pose(turn(90), (4, 0, -8))])
    middle = interpolate(ends, [0, 0.25, 0.5, 1])
    for got, part in zip(middle, (0, 0.25, 0.5, 1), strict=True):
        np.testing.assert_allclose(got, pose(turn(90 * part), (4 * part, 0, -8 * part)), atol=1e-12)


def test_interpolation_turns_the_shorter_way():
    ends = np.stack([pose(turn(170)), pose(turn(-170))])
    np.testing.assert_allclose(interpolate(ends, [0.5])[0], pose(turn(180)), atol=1e-12)


def test_interpolation_of_one_pose_repeats_it():
    only = pose(turn(10), (1, 2, 3))[None]
    np.testing.assert_array_equal(interpolate(only, [0, 0]), np.repeat(only, 2, axis=0))


@pytest.mark.parametrize("at", [-0.1, 1.1, np.nan])
def test_interpolation_never_extrapolates(at):
    with pytest.raises(CameraError, match="between index 0 and 1"):
        interpolate(np.tile(np.eye(4), (2, 1, 1)), [at])


def test_step_lengths_are_distances():
    poses = np.stack([pose(turn(90), (0, 0, 0)), pose(turn(45), (3, 4, 0)), pose(None, (3, 4, 2))])
    np.testing.assert_allclose(step_lengths(poses), [5, 2])
