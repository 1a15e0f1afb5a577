"""Camera paths cut for a server, and its fragments put together again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from video_file import read_video

from lingbot_core.camera import CameraCarry, CameraTrajectory, clip_controls, to_controls
from lingbot_core.engine.fragments import FragmentWriter
from lingbot_core.errors import LengthError, VideoError
from lingbot_core.realtime.client import clip_maximum, slices, write_mp4

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def example(name: str) -> np.ndarray:
    return np.load(EXAMPLES / name / "poses.npy")


def test_a_path_of_533_poses_is_44_slices_and_8_poses_left_over():
    poses = example("04")
    parts, left_over = slices(poses, 3)
    assert [len(part) for part in parts] == [9] + [12] * 43
    assert len(left_over) == 8
    assert np.array_equal(np.concatenate([*parts, left_over]), poses)


@pytest.mark.parametrize(
    ("rows", "chunk", "lengths", "left_over"),
    [
        (9, 3, [9], 0),
        (20, 3, [9], 11),
        (21, 3, [9, 12], 0),
        (13, 4, [13], 0),
        (45, 4, [13, 16, 16], 0),
        (6, 1, [1, 4], 1),
    ],
)
def test_slices_of_other_lengths(rows, chunk, lengths, left_over):
    lens = np.arange(rows * 4.0).reshape(rows, 4)
    parts, rest = slices(lens, chunk)
    assert [len(part) for part in parts] == lengths
    assert len(rest) == left_over
    assert np.array_equal(np.concatenate([*parts, rest]), lens)


@pytest.mark.parametrize(("rows", "chunk"), [(8, 3), (0, 3), (9, 0)])
def test_a_path_that_is_too_short_is_refused(rows, chunk):
    with pytest.raises(LengthError, match="at least"):
        slices(np.zeros((rows, 4, 4)), chunk)


@pytest.mark.parametrize("infers", [2, 7, 9, 27])
def test_slices_steer_as_the_whole_path_does(infers):
    poses = example("04")[: 9 + 12 * (infers - 1)]
    parts, left_over = slices(poses, 3)
    assert (len(parts), len(left_over)) == (infers, 0)

    unit, carry = clip_maximum(poses), CameraCarry.start()
    whole = CameraTrajectory.from_arrays(poses).to_latent(3)
    expected = clip_controls(whole, chunk=3, unit=unit, first_delta="identity", width=832, height=480)
    for part, controls in zip(parts, expected, strict=True):
        got, carry = to_controls(part, latents=3, unit=unit, first_delta="identity", carry=carry)
        np.testing.assert_allclose(got.relative, controls.relative, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["03", "04"])
def test_the_unit_is_the_longest_step_between_every_fourth_pose(name):
    positions = example(name)[::4, :3, 3].astype(np.float64)
    assert clip_maximum(example(name)) == pytest.approx(np.linalg.norm(np.diff(positions, axis=0), axis=1).max())


def test_the_unit_of_a_path_at_rest_is_one():
    assert clip_maximum(np.tile(np.eye(4), (9, 1, 1))) == 1.0


def stream(*chunks: int) -> list[bytes]:
    writer = FragmentWriter(width=32, height=16, fps=16)
    return [writer.push(np.full((frames, 16, 32, 3), 40 * index, np.uint8)) for index, frames in enumerate(chunks)]


def test_fragments_become_a_file_that_plays(tmp_path):
    fragments = stream(9, 12, 12)
    info = write_mp4(iter(fragments), tmp_path / "world.mp4")
    assert (info.frames, info.width, info.height, info.fps) == (33, 32, 16, 16)
    assert (tmp_path / "world.mp4").read_bytes() == b"".join(fragments)
    video = read_video(tmp_path / "world.mp4")
    assert len(video.frames) == 33
    assert [int(video.frames[at].mean().round(-1)) for at in (0, 9, 21)] == [0, 40, 80]
    assert [file.name for file in tmp_path.iterdir()] == ["world.mp4"]


def test_fragments_that_came_before_an_error_stay(tmp_path):
    def broken():
        yield from stream(9, 12)
        raise ConnectionError("the server is gone")

    with pytest.raises(ConnectionError, match="the server is gone"):
        write_mp4(broken(), tmp_path / "world.mp4")
    assert len(read_video(tmp_path / "world.mp4").frames) == 21


@pytest.mark.parametrize(
    ("fragments", "message"),
    [
        ([], "no fragments"),
        (stream(9, 12)[1:], "the first fragment has no init segment"),
        ([*stream(9), *stream(9)], "fragment 1 begins another stream"),
        ([b"\0\0\0\x08ftypgarbage"], "was not written"),
        ([FragmentWriter(width=32, height=16, fps=16).init_segment], "was not written"),
    ],
)
def test_fragments_that_are_no_video_leave_what_was_there(fragments, message, tmp_path):
    file = tmp_path / "world.mp4"
    file.write_bytes(b"earlier")
    with pytest.raises(VideoError, match=message):
        write_mp4(fragments, file)
    assert file.read_bytes() == b"earlier"
    assert [path.name for path in tmp_path.iterdir()] == ["world.mp4"]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(VideoError, match="create it first"):
        write_mp4(stream(9), tmp_path / "nowhere" / "world.mp4")
