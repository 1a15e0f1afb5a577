"""Camera paths: validation, intrinsics, and fitting to whole chunks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lingbot_core.camera import CameraTrajectory, transform_intrinsics
from lingbot_core.errors import CameraError, LengthError


def line(count: int) -> np.ndarray:
    """One unit forward per pose, so that z is the source index."""
    poses = np.tile(np.eye(4), (count, 1, 1))
    poses[:, 2, 3] = np.arange(count)
    return poses


def path(count: int, **kwargs) -> CameraTrajectory:
    return CameraTrajectory.from_arrays(line(count), **kwargs)


def indices(trajectory: CameraTrajectory) -> list[float]:
    return trajectory.poses[:, 2, 3].tolist()


MATRIX = np.array([[400.0, 0, 416], [0, 410, 240], [0, 0, 1]])
ROW = [400.0, 410, 416, 240]


@pytest.mark.parametrize("rows", [129, 533])
def test_no_row_is_ever_cut_off(rows):
    assert len(path(rows)) == rows
    assert path(rows).snap(3).poses_used == rows


def test_arrays_are_copies_that_cannot_be_written_to():
    source = line(5)
    trajectory = CameraTrajectory.from_arrays(source, ROW)
    source[:] = 0
    np.testing.assert_array_equal(trajectory.poses, line(5))
    for array in (trajectory.poses, trajectory.intrinsics):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        trajectory.fps = 1


def test_equality_is_by_value():
    assert path(5) == path(5)
    assert path(5) != path(9)
    assert path(5) != path(5, fps=24)
    assert path(5) != CameraTrajectory.from_arrays(line(5) + np.eye(4, k=3), None)
    assert path(5) != 5


@pytest.mark.parametrize(
    "intrinsics", [ROW, [ROW], [ROW] * 5, MATRIX, MATRIX[None], np.stack([MATRIX] * 5)], ids=lambda x: str(np.shape(x))
)
def test_every_shape_of_intrinsics_becomes_one_row_per_pose(intrinsics):
    trajectory = path(5, intrinsics=intrinsics)
    np.testing.assert_array_equal(trajectory.intrinsics, [ROW] * 5)
    assert not trajectory.intrinsics_are_default


@pytest.mark.parametrize(
    ("intrinsics", "words"),
    [
        ([ROW] * 4, "4 rows for 5 poses"),
        ([ROW] * 6, "6 rows for 5 poses"),
        (np.stack([MATRIX] * 3), "3 rows for 5 poses"),
        (MATRIX + np.eye(3, k=1) * 3, "not a pinhole matrix.*skew"),
        (MATRIX.T, "not a pinhole matrix.*transpose"),
        (np.stack([MATRIX] * 4 + [MATRIX * 2]), "row 4 is not a pinhole"),
        ([[np.nan, 1, 1, 1]], "row 0 holds NaN"),
        (np.full((3, 3), np.nan), "row 0 holds NaN"),
        ([ROW] * 4 + [[0, 410, 416, 240]], "row 4 has a focal length"),
        ([-400, 410, 416, 240], "row 0 has a focal length"),
        ([0.6, 1.1, 0.5, 0.5], "looks normalised.*multiply"),
        ([400, 410, 416], r"shape \[3\]"),
        (np.zeros((2, 2, 3, 3)), r"shape \[2, 2, 3, 3\]"),
        ("wide", "dtype"),
    ],
)
def test_bad_intrinsics_are_refused_by_name(intrinsics, words):
    with pytest.raises(CameraError, match=f"K.npy.*{words}"):
        path(5, intrinsics=intrinsics, intrinsics_name="K.npy")


@pytest.mark.parametrize(
    ("field", "value"),
    [("width", 0), ("height", 4.5), ("fps", 0.0), ("fps", float("nan")), ("rate", "frame"), ("width", True)],
)
def test_other_fields_are_checked(field, value):
    with pytest.raises(CameraError, match=field):
        path(5, **{field: value})


def test_missing_intrinsics_are_500_pixels_at_any_generated_size():
    trajectory = path(5)
    assert trajectory.intrinsics_are_default
    assert trajectory.intrinsics_at(832, 480) == (500, 500, 416, 240)
    assert trajectory.intrinsics_at(480, 272) == (500, 500, 240, 136)
    assert trajectory.first(2).intrinsics_at(480, 272) == (500, 500, 240, 136)


def test_the_first_intrinsics_row_is_scaled_by_each_side_on_its_own():
    rows = [ROW, [1.0, 2, 3, 9], *[ROW] * 3]
    assert path(5, intrinsics=rows).intrinsics_at(416, 480) == (200, 410, 208, 240)
    assert path(5, intrinsics=rows, width=416, height=240).intrinsics_at(832, 480) == (800, 820, 832, 480)


def test_a_centre_crop_moves_only_the_principal_point():
    # 832x480 doubled is 1664x960; 100 and 60 pixels are cut off in all.
    got = transform_intrinsics([ROW], (832, 480), (1664, 960), (1564, 900))
    np.testing.assert_allclose(got, [[800, 820, 832 - 50, 480 - 30]])


def test_first_keeps_the_first_poses_and_their_intrinsics():
    rows = np.array([ROW] * 5) + np.arange(5)[:, None]
    cut = path(5, intrinsics=rows).first(3)
    assert indices(cut) == [0, 1, 2]
    np.testing.assert_array_equal(cut.intrinsics, rows[:3])


@pytest.mark.parametrize("count", [81, 0, -1])
def test_first_never_pads(count):
    with pytest.raises(LengthError, match=rf"{count} video frames .* 50 poses; ask for 1 to 50"):
        path(50).first(count)


@pytest.mark.parametrize(
    ("poses", "chunk", "expected", "left_over"),
    [
        (9, 3, [0, 4, 8], 0),
        (33, 3, list(range(0, 33, 4)), 0),
        (36, 3, list(range(0, 33, 4)), 3),
        (17, 3, [0, 8, 16], 0),
        (81, 4, np.linspace(0, 80, 20).tolist(), 0),
    ],
)
def test_compress_spreads_the_whole_path_over_whole_chunks(poses, chunk, expected, left_over):
    trajectory = path(poses)
    latent = trajectory.to_latent(chunk)
    np.testing.assert_allclose(indices(latent), expected, atol=1e-12)
    np.testing.assert_array_equal(trajectory.latent_poses(chunk), latent.poses)
    assert latent.rate == "latent"
    report = trajectory.snap(chunk)
    assert (report.poses_in, report.poses_used, report.left_over) == (poses, poses - left_over, left_over)
    assert (report.latent_frames, report.mode) == (len(expected), "compress")


def test_cut_keeps_the_speed_and_reports_what_is_left_over():
    trajectory = path(17)
    assert indices(trajectory.to_latent(3, mode="cut")) == [0, 4, 8]
    report = trajectory.snap(3, mode="cut")
    assert (report.poses_used, report.left_over, report.latent_frames) == (9, 8, 3)


def test_hold_keeps_the_speed_and_repeats_the_last_pose():
    trajectory = path(12)
    assert indices(trajectory.to_latent(3, mode="hold")) == [0, 4, 8, 11, 11, 11]
    report = trajectory.snap(3, mode="hold")
    assert (report.poses_used, report.left_over, report.latent_frames, report.held) == (12, 0, 6, 9)
    assert indices(path(1).to_latent(3, mode="hold")) == [0, 0, 0]


def test_a_wished_number_of_chunks():
    trajectory = path(36)
    assert indices(trajectory.to_latent(3, 2, "cut")) == [0, 4, 8, 12, 16, 20]
    assert indices(trajectory.to_latent(3, 2, "compress")) == pytest.approx([0, 6.4, 12.8, 19.2, 25.6, 32])
    assert indices(trajectory.to_latent(3, 2, "hold")) == [0, 4, 8, 12, 16, 20]
    assert trajectory.snap(3, 2, "hold").left_over == 15
    assert indices(trajectory.to_latent(3, 4, "hold"))[-4:] == [32, 35, 35, 35]


def test_latent_paths_are_fitted_pose_by_pose():
    trajectory = path(8, rate="latent")
    assert indices(trajectory.to_latent(3, mode="cut")) == [0, 1, 2, 3, 4, 5]
    assert indices(trajectory.to_latent(3, mode="hold")) == [0, 1, 2, 3, 4, 5, 6, 7, 7]
    assert indices(trajectory.to_latent(3)) == pytest.approx([0, 1.4, 2.8, 4.2, 5.6, 7])
    assert indices(trajectory.to_latent(4)) == list(range(8))
    assert trajectory.snap(3, mode="cut").left_over == 2


@pytest.mark.parametrize("mode", ["compress", "cut"])
@pytest.mark.parametrize(("poses", "chunk", "chunks"), [(5, 4, None), (9, 4, None), (8, 3, None), (50, 3, 7)])
def test_a_path_that_is_too_short_is_refused_with_the_number_it_needs(poses, chunk, chunks, mode):
    needed = 4 * chunk * (chunks or 1) - 3
    with pytest.raises(LengthError, match=rf"{poses} poses.* need {needed};"):
        path(poses).to_latent(chunk, chunks, mode)


def test_fitting_arguments_are_checked():
    with pytest.raises(CameraError, match="'stretch'"):
        path(9).to_latent(3, mode="stretch")
    with pytest.raises(LengthError, match="chunk of 0"):
        path(9).to_latent(0)
    with pytest.raises(LengthError, match="0 chunks"):
        path(9).to_latent(3, 0)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(1, 5),
    st.none() | st.integers(1, 4),
    st.sampled_from(["compress", "cut", "hold"]),
    st.sampled_from(["video", "latent"]),
)
def test_a_fitted_path_is_whole_chunks_within_the_path_and_accounts_for_every_pose(poses, chunk, chunks, mode, rate):
    trajectory = path(poses, rate=rate)
    try:
        report = trajectory.snap(chunk, chunks, mode)
    except LengthError:
        assert mode != "hold"
        return
    latent = trajectory.to_latent(chunk, chunks, mode)
    z = np.array(indices(latent))
    assert len(z) == report.latent_frames
    assert len(z) % chunk == 0
    assert len(z) >= chunk
    assert chunks is None or len(z) == chunk * chunks
    assert report.poses_used + report.left_over == poses
    assert (np.diff(z) >= 0).all()
    assert z[0] == 0
    assert z[-1] <= poses - 1
    assert z[-1] == pytest.approx(report.poses_used - 1) or len(z) == 1
    assert (report.held > 0) <= (mode == "hold")


def test_varying_intrinsics_follow_their_poses():
    rows = np.array([ROW] * 17) + np.arange(17)[:, None]
    np.testing.assert_allclose(path(17, intrinsics=rows).to_latent(3).intrinsics, rows[[0, 8, 16]])


# Actions


def test_actions_belong_to_poses_and_go_with_them():
    rows = np.eye(4)[np.arange(12) % 4]
    acted = path(9).with_actions(rows)
    np.testing.assert_array_equal(acted.actions, rows[:9])
    np.testing.assert_array_equal(acted.first(5).actions, rows[:5])
    np.testing.assert_array_equal(acted.to_latent(3).actions, rows[[0, 4, 8]])
    assert acted != path(9)
    assert acted == path(9).with_actions(rows)
    assert path(9).to_latent(3).actions is None
    with pytest.raises(ValueError, match="read-only"):
        acted.actions[0] = 1
    with pytest.raises(CameraError, match="12 rows of actions for 13 poses"):
        path(13).with_actions(rows)
    with pytest.raises(CameraError, match="actions: row 0 "):
        path(9).with_actions(rows + 1)


def test_a_latent_path_becomes_one_with_the_frames_between():
    latent = path(4, rate="latent", intrinsics=np.array(ROW) + np.arange(4)[:, None]).with_actions(np.eye(4))
    video = latent.to_video()
    assert (len(video), video.rate) == (13, "video")
    np.testing.assert_allclose(indices(video), np.arange(13) / 4)
    np.testing.assert_allclose(video.intrinsics[::4], latent.intrinsics)
    np.testing.assert_array_equal(video.actions[::4], latent.actions)
    assert path(9).to_video() == path(9)
    assert len(path(1, rate="latent").to_video()) == 1
