"""Camera folders of .npy files: what is read, and what is refused before anything is read."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from lingbot_core.camera import CameraTrajectory, load_actions, load_camera, save_camera
from lingbot_core.camera.formats.npy import load_camera_set
from lingbot_core.errors import CameraError, InputFileError


def line(count: int) -> np.ndarray:
    poses = np.tile(np.eye(4, dtype=np.float32), (count, 1, 1))
    poses[:, 2, 3] = np.arange(count)
    return poses


ROW = np.array([400, 410, 416, 240], dtype=np.float32)


@pytest.fixture
def folder(tmp_path):
    np.save(tmp_path / "poses.npy", line(5))
    np.save(tmp_path / "intrinsics.npy", np.tile(ROW, (5, 1)))
    return tmp_path


@pytest.mark.parametrize("rows", [129, 533])
def test_all_rows_are_read(tmp_path, rows):
    np.save(tmp_path / "poses.npy", line(rows))
    np.save(tmp_path / "intrinsics.npy", np.tile(ROW, (rows, 1)))
    trajectory = load_camera(tmp_path)
    np.testing.assert_array_equal(trajectory.poses, line(rows))
    np.testing.assert_array_equal(trajectory.intrinsics, np.tile(ROW, (rows, 1)))
    assert (trajectory.width, trajectory.height, trajectory.rate) == (832, 480, "video")


def test_a_file_of_poses_takes_only_the_intrinsics_it_is_given(folder):
    alone = load_camera(folder / "poses.npy")
    assert alone.intrinsics_are_default
    both = load_camera(folder / "poses.npy", folder / "intrinsics.npy")
    assert both == load_camera(folder)
    assert not both.intrinsics_are_default


def test_a_folder_without_intrinsics_has_default_ones_and_says_so(folder):
    (folder / "intrinsics.npy").unlink()
    trajectory = load_camera(folder)
    assert trajectory.intrinsics_are_default
    assert trajectory.intrinsics_at(832, 480) == (500, 500, 416, 240)


def test_three_by_three_intrinsics_are_converted(folder):
    matrix = np.array([[400, 0, 416], [0, 410, 240], [0, 0, 1]], dtype=np.float32)
    for value in (matrix, np.tile(matrix, (5, 1, 1))):
        np.save(folder / "intrinsics.npy", value)
        np.testing.assert_array_equal(load_camera(folder).intrinsics, np.tile(ROW, (5, 1)))


def test_what_is_wrong_inside_is_said_with_file_and_row(folder):
    poses = line(5)
    poses[2, 0, 0] = np.nan
    np.save(folder / "poses.npy", poses)
    with pytest.raises(CameraError, match=r"poses\.npy: row 2 holds NaN"):
        load_camera(folder)
    np.save(folder / "poses.npy", line(5))
    np.save(folder / "intrinsics.npy", np.tile(ROW, (4, 1)))
    with pytest.raises(CameraError, match=r"intrinsics\.npy has 4 rows for 5 poses"):
        load_camera(folder)


def test_missing_files_and_folders(folder):
    for missing in (folder / "nowhere", folder / "nowhere" / "poses.npy"):
        with pytest.raises(InputFileError, match="does not exist"):
            load_camera(missing)
    with pytest.raises(InputFileError, match=r"K\.npy does not exist"):
        load_camera(folder, folder / "K.npy")
    with pytest.raises(InputFileError, match="is not a file"):
        load_camera(folder / "poses.npy", folder)


def test_pickles_are_never_loaded(folder):
    class Trap:
        def __reduce__(self):
            return (folder.joinpath("trapped").touch, ())

    trap = np.empty((5, 4, 4), dtype=object)
    trap[:] = Trap()
    np.save(folder / "poses.npy", trap, allow_pickle=True)
    with pytest.raises(InputFileError, match=r"poses\.npy holds pickled objects"):
        load_camera(folder)
    (folder / "poses.npy").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(InputFileError, match=r"not a \.npy file"):
        load_camera(folder)
    assert not (folder / "trapped").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1 0 0 0",
        b"PK\x03\x04archive",
        b"\x93NUMPY\x01\x00\xff\xff{",
        b"\x93NUMPY\x09\x00",
        b"\x93NUMPY\x01\x00\x08\x00{'a': (\n",
    ],
)
def test_files_that_are_not_npy(folder, content):
    (folder / "poses.npy").write_bytes(content)
    with pytest.raises(InputFileError, match=r"poses\.npy is not a \.npy file"):
        load_camera(folder)


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_truncated_files(folder, version):
    with (folder / "poses.npy").open("wb") as stream:
        np.lib.format.write_array(stream, line(5), version=version)
    whole = (folder / "poses.npy").read_bytes()
    assert len(load_camera(folder)) == 5
    (folder / "poses.npy").write_bytes(whole[:-1])
    with pytest.raises(InputFileError, match="truncated"):
        load_camera(folder)


def header(shape: tuple[int, ...], path) -> None:
    with path.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": shape})


def test_a_header_that_promises_too_much_is_refused_before_reading(folder):
    header((10**12, 4, 4), folder / "poses.npy")
    with pytest.raises(CameraError, match="at most 100000 rows"):
        load_camera(folder)
    header((5, 10**12), folder / "poses.npy")
    with pytest.raises(CameraError, match="at most 100000 rows of 16"):
        load_camera(folder)
    header((-1, 4, 4), folder / "poses.npy")
    with pytest.raises(InputFileError, match=r"not a \.npy file"):
        load_camera(folder)


@pytest.mark.parametrize("array", [np.array(["a", "b"]), np.zeros((5, 4, 4), complex), np.zeros(5, "datetime64[s]")])
def test_files_of_other_kinds_of_values(folder, array):
    np.save(folder / "poses.npy", array)
    with pytest.raises(InputFileError, match="dtype"):
        load_camera(folder)


@pytest.mark.parametrize("array", [np.float32(3), np.zeros((5, 4)), np.eye(4)])
def test_arrays_of_the_wrong_shape(folder, array):
    np.save(folder / "poses.npy", array)
    with pytest.raises(CameraError, match=r"poses\.npy has shape"):
        load_camera(folder)


def test_a_saved_path_comes_back_in_upstream_pixels(tmp_path):
    trajectory = CameraTrajectory.from_arrays(line(5), [200, 205, 208, 120], width=416, height=240)
    where = save_camera(trajectory, tmp_path / "new" / "folder")
    back = load_camera(where)
    np.testing.assert_array_equal(back.poses, trajectory.poses)
    np.testing.assert_allclose(back.intrinsics, np.tile(ROW, (5, 1)))
    assert back.intrinsics_at(416, 240) == trajectory.intrinsics_at(416, 240)


def test_latent_paths_are_not_written_as_video_poses(tmp_path):
    with pytest.raises(CameraError, match="one pose per video frame"):
        save_camera(CameraTrajectory.from_arrays(line(9)).to_latent(3), tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputFileError, match="cannot be written"):
        save_camera(CameraTrajectory.from_arrays(line(9)), tmp_path / "file" / "folder")


def test_key_states_of_a_folder(tmp_path):
    wasd, ijkl, action = np.eye(4, dtype=np.int32), np.eye(4, dtype=np.float32)[::-1], np.ones((7, 4), np.int32)
    np.save(tmp_path / "action.npy", action)
    moves, looks = load_actions(tmp_path)
    np.testing.assert_array_equal(moves, action)
    assert looks is None
    np.save(tmp_path / "ijkl_action.npy", ijkl)
    moves, looks = load_actions(tmp_path)
    assert not moves.any()
    np.testing.assert_array_equal(looks, ijkl)
    np.save(tmp_path / "wasd_action.npy", wasd)
    moves, looks = load_actions(tmp_path)
    np.testing.assert_array_equal(moves, wasd)
    np.testing.assert_array_equal(looks, ijkl)
    np.testing.assert_array_equal(load_actions(tmp_path, act=True)[0], action)


def test_bad_key_states_of_a_folder(tmp_path):
    with pytest.raises(InputFileError, match=r"wasd_action\.npy does not exist"):
        load_actions(tmp_path)
    with pytest.raises(InputFileError, match=r"[/\\]action\.npy does not exist"):
        load_actions(tmp_path, act=True)
    np.save(tmp_path / "wasd_action.npy", np.zeros((5, 4)))
    np.save(tmp_path / "ijkl_action.npy", np.zeros((4, 4)))
    with pytest.raises(CameraError, match=r"has 4 rows but .* has 5"):
        load_actions(tmp_path)
    np.save(tmp_path / "wasd_action.npy", np.full((5, 4), 3))
    with pytest.raises(CameraError, match=r"wasd_action\.npy: row 0"):
        load_actions(tmp_path)


# A path with what lies beside it


def test_what_lies_beside_poses_is_read_with_them(folder):
    np.save(folder / "action.npy", np.eye(4)[[0, 1, 2, 3, 0, 1]].astype(np.int32))
    for source in (folder, folder / "poses.npy"):
        path = load_camera_set(source)
        assert path.intrinsics[0].tolist() == ROW.tolist()
        np.testing.assert_array_equal(path.actions, np.eye(4)[[0, 1, 2, 3, 0]])
    bare = load_camera_set(folder, intrinsics="default", actions=False)
    assert bare.intrinsics_are_default
    assert bare.actions is None
    np.save(folder / "lens.npy", ROW * 2)
    assert load_camera_set(folder, intrinsics=folder / "lens.npy", width=1664).intrinsics[0, 0] == 800


def test_a_file_of_another_name_takes_nothing_from_beside_it(folder):
    np.save(folder / "walk.npy", line(7))
    np.save(folder / "action.npy", np.zeros((3, 4)))
    path = load_camera_set(folder / "walk.npy")
    assert (len(path), path.intrinsics_are_default, path.actions) == (7, True, None)
    with pytest.raises(CameraError, match="3 rows of actions for 5 poses"):
        load_camera_set(folder)


def test_a_path_that_cannot_be_looked_at_is_named(tmp_path):
    for bad, reason in (("x" * 5000, "cannot be read: File name too long"), ("a\0b", "null byte")):
        with pytest.raises(InputFileError, match=reason):
            load_camera_set(tmp_path / bad)
