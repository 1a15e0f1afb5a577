"""Videos: files that survive what kills their writer, and fragments that hold whole chunks."""

from __future__ import annotations

import errno
import io
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import psutil
import pytest

from lingbot_core.engine import part_file, video
from lingbot_core.engine.fragments import FragmentWriter
from lingbot_core.engine.probe import probe, read_metadata
from lingbot_core.engine.video import VideoWriter
from lingbot_core.errors import InputFileError, VideoError

HEIGHT, WIDTH = 48, 64
TAGS = {
    "prompt": "a lake \N{SNOWFLAKE} 世界\nsecond line",
    "seed": "42",
    "translation_unit": "clip",
    "Lib Versions": '{"torch": "2"}',
}


def noise(frames: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (frames, HEIGHT, WIDTH, 3), dtype=np.uint8)


def flat(*levels: int) -> np.ndarray:
    return np.broadcast_to(np.array(levels, np.uint8)[:, None, None, None], (len(levels), HEIGHT, WIDTH, 3)).copy()


def writer(path: Path, **options) -> VideoWriter:
    return VideoWriter(path, **{"width": WIDTH, "height": HEIGHT, "fps": 16, **options})


def fragments(**options) -> FragmentWriter:
    return FragmentWriter(**{"width": WIDTH, "height": HEIGHT, "fps": 16, **options})


def decoded(source: Path | bytes) -> list[av.VideoFrame]:
    with av.open(io.BytesIO(source) if isinstance(source, bytes) else str(source)) as container:
        return list(container.decode(video=0))


def box_types(data: bytes) -> list[str]:
    """Types of the top-level boxes; sizes are 32-bit in files this small."""
    types, offset = [], 0
    while offset < len(data):
        types.append(data[offset + 4 : offset + 8].decode())
        offset += int.from_bytes(data[offset : offset + 4])
    return types


@contextmanager
def file_size_limit(size: int):
    """The kernel refuses to let any file of this process grow beyond ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("fps", [16, 12.5, Fraction(30000, 1001)])
def test_a_file_holds_what_was_written(tmp_path, fps):
    path = tmp_path / "world.mp4"
    with writer(path, fps=fps, metadata=TAGS) as file:
        for frames in (9, 12, 1):
            file.write(noise(frames))
    info = probe(path)
    assert (info.frames, info.width, info.height) == (22, WIDTH, HEIGHT)
    assert info.fps == pytest.approx(float(fps))
    assert info.duration == pytest.approx(22 / float(fps))
    assert dict(info.metadata) == TAGS == read_metadata(path)


def test_frames_keep_their_order(tmp_path):
    levels = np.linspace(20, 230, 30).astype(np.uint8)
    with writer(tmp_path / "world.mp4") as file:
        file.write(flat(*levels[:13]))
        file.write(flat(*levels[13:]))
    means = [frame.to_ndarray(format="gray").mean() for frame in decoded(tmp_path / "world.mp4")]
    np.testing.assert_allclose(means, levels, atol=3)


def test_a_closed_file_is_a_regular_mp4_in_one_piece(tmp_path):
    with writer(tmp_path / "world.mp4") as file:
        file.write(noise(5))
    types = box_types((tmp_path / "world.mp4").read_bytes())
    assert types[0] == "ftyp"
    assert types[-1] == "moov"
    assert "moof" not in types


COLOURS = [
    (255, 0, 0),
    (0, 255, 0),
    (0, 0, 255),
    (255, 255, 255),
    (0, 0, 0),
    (128, 128, 128),
    (200, 120, 40),
    (20, 90, 180),
]


def rgb_of_bt709_limited(frame: av.VideoFrame) -> np.ndarray:
    """Mean RGB by the formulas of ITU-R BT.709, from the planes."""
    y, cb, cr = (
        np.frombuffer(bytes(plane), np.uint8).reshape(plane.height, -1)[:, : plane.width].mean()
        for plane in frame.planes
    )
    luma, blue, red = (y - 16) / 219, (cb - 128) / 224, (cr - 128) / 224
    r, b = luma + 1.5748 * red, luma + 1.8556 * blue
    return 255 * np.array([r, (luma - 0.2126 * r - 0.0722 * b) / 0.7152, b])


def test_colours_are_bt709_and_say_so(tmp_path):
    frames = np.broadcast_to(np.array(COLOURS, np.uint8)[:, None, None], (len(COLOURS), HEIGHT, WIDTH, 3))
    with writer(tmp_path / "world.mp4") as file:
        file.write(frames)
    chunks = fragments()
    streamed = chunks.push(frames)
    for source in (tmp_path / "world.mp4", streamed):
        pictures = decoded(source)
        for picture, colour in zip(pictures, COLOURS, strict=True):
            np.testing.assert_allclose(rgb_of_bt709_limited(picture), colour, atol=3)
        with av.open(io.BytesIO(source) if isinstance(source, bytes) else str(source)) as container:
            context = container.streams.video[0].codec_context
            assert (context.color_primaries, context.color_trc, context.colorspace, context.color_range) == (1, 1, 1, 1)
            assert context.pix_fmt == "yuv420p"


def test_a_file_plays_while_it_is_written(tmp_path):
    path = tmp_path / "world.mp4"
    with writer(path, metadata=TAGS) as file:
        written = 0
        for frames in (9, 12, 12):
            file.write(noise(frames))
            written += frames
            assert len(decoded(path)) == written - 1
            assert read_metadata(path) == TAGS


@pytest.mark.parametrize("flags", [video.RECORDING_FLAGS, ("no_such_flag", video.RECORDING_FLAGS[1])])
def test_a_killed_writer_leaves_all_frames_but_the_newest(tmp_path, flags):
    path = tmp_path / "world.mp4"
    script = f"""
        import os, signal
        import numpy as np
        from lingbot_core.engine import video
        video.RECORDING_FLAGS = {flags!r}
        writer = video.VideoWriter({str(path)!r}, width={WIDTH}, height={HEIGHT}, fps=16, metadata={{"seed": "7"}})
        for _ in range(3):
            writer.write(np.random.default_rng(0).integers(0, 256, (12, {HEIGHT}, {WIDTH}, 3), dtype=np.uint8))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=root, check=False)
    assert result.returncode == -signal.SIGKILL
    info = probe(path)
    assert info.frames == 35
    assert info.metadata == {"seed": "7"}


def test_an_older_ffmpeg_leaves_a_fragmented_file(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "RECORDING_FLAGS", ("no_such_flag", video.RECORDING_FLAGS[1]))
    with writer(tmp_path / "world.mp4", metadata=TAGS) as file:
        file.write(noise(7))
    assert "moof" in box_types((tmp_path / "world.mp4").read_bytes())
    assert probe(tmp_path / "world.mp4").frames == 7
    assert read_metadata(tmp_path / "world.mp4") == TAGS


def test_a_file_that_cannot_grow_keeps_the_frames_the_error_counts(tmp_path):
    path = tmp_path / "world.mp4"
    file = writer(path)
    with file_size_limit(200_000), pytest.raises(VideoError, match="largest file size") as caught:
        file.write(noise(100))
    assert str(path) in str(caught.value)
    kept = int(re.search(r"the (\d+) frames written before are in the file and play", str(caught.value))[1])
    assert 5 < kept < 100
    assert file.closed
    assert file.close() == file.abort() == kept == len(decoded(path)) == probe(path).frames
    with pytest.raises(VideoError, match=f"is closed with {kept} frames"):
        file.write(noise(1))


@pytest.mark.parametrize("room", [0, 3_000])
def test_a_failure_while_finishing_keeps_the_frames_as_well(tmp_path, room):
    path = tmp_path / "world.mp4"
    file = writer(path)
    file.write(noise(12))
    with file_size_limit(path.stat().st_size + room), pytest.raises(VideoError, match="11 frames"):
        file.close()
    assert len(decoded(path)) == 11
    assert file.close() == 11


def test_no_room_for_a_single_frame_leaves_no_file(tmp_path):
    path = tmp_path / "world.mp4"
    with file_size_limit(500), pytest.raises(VideoError, match="no frame was written and no file is left"):
        writer(path).write(noise(3))
    assert not path.exists()


def test_a_full_disk_is_called_a_full_disk(tmp_path, monkeypatch):
    class FullDisk(io.FileIO):
        def write(self, data):
            if self.tell() + len(data) > 40_000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data[: max(1, len(data) // 2)])  # a disk may also take less than it was given

    monkeypatch.setattr(part_file, "FileIO", FullDisk)
    with pytest.raises(VideoError, match="the disk is full; free some space"), writer(tmp_path / "world.mp4") as file:
        file.write(noise(60))
    assert len(decoded(tmp_path / "world.mp4")) == file.frames > 0


def test_a_failing_body_still_gives_a_finished_file(tmp_path):
    def body() -> None:
        with writer(tmp_path / "world.mp4") as file:
            file.write(noise(9))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        body()
    assert probe(tmp_path / "world.mp4").frames == 9
    assert "moof" not in box_types((tmp_path / "world.mp4").read_bytes())


def test_closing_twice_is_closing_once(tmp_path):
    file = writer(tmp_path / "world.mp4")
    file.write(noise(4))
    assert file.close() == 4
    data = (tmp_path / "world.mp4").read_bytes()
    assert file.close() == file.abort() == file.frames == 4
    assert (tmp_path / "world.mp4").read_bytes() == data


def test_without_frames_nothing_changes_on_the_disk(tmp_path):
    with writer(tmp_path / "new.mp4") as file:
        assert file.frames == 0
    assert list(tmp_path.iterdir()) == []
    old = tmp_path / "old.mp4"
    old.write_bytes(b"what was there before")
    assert writer(old).close() == 0
    assert old.read_bytes() == b"what was there before"
    with writer(old) as file:
        file.write(noise(2))
    assert probe(old).frames == 2


def test_an_earlier_file_stays_until_the_first_write_is_whole(tmp_path):
    path = tmp_path / "world.mp4"
    path.write_bytes(b"what was there before")
    file = writer(path)
    with file_size_limit(60_000), pytest.raises(VideoError, match="the video that was there is as it was"):
        file.write(noise(30))
    assert (file.frames, file.published, path.read_bytes()) == (0, False, b"what was there before")
    assert [entry.name for entry in tmp_path.iterdir()] == ["world.mp4"]
    file = writer(path)
    file.write(noise(1))  # the muxer holds it back
    assert (file.published, path.read_bytes()) == (False, b"what was there before")
    file.write(noise(8))
    assert (file.published, probe(path).frames) == (True, 8)
    with file_size_limit(60_000), pytest.raises(VideoError, match="frames written before are in the file and play"):
        file.write(noise(30))
    assert probe(path).frames == file.frames >= 8


def test_a_single_frame_is_a_video(tmp_path):
    with writer(tmp_path / "world.mp4") as file:
        file.write(noise(1))
    assert probe(tmp_path / "world.mp4").frames == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["world.mp4"]


def test_a_file_has_one_writer(tmp_path):
    path = tmp_path / "world.mp4"
    with writer(path) as file:
        for frames in (2, 2):
            with pytest.raises(VideoError, match=r"world.mp4 is being written by another process"):
                writer(path)
            file.write(noise(frames))
    assert [entry.name for entry in tmp_path.iterdir()] == ["world.mp4"]
    with writer(path) as file:
        file.write(noise(3))
    assert probe(path).frames == 3


def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path):
    real, link = tmp_path / "real.mp4", tmp_path / "link.mp4"
    link.symlink_to(real)
    with writer(link) as file:
        file.write(noise(2))
    assert link.is_symlink()
    assert probe(real).frames == 2


@pytest.mark.parametrize(("published", "older"), [(True, False), (False, False), (False, True)])
def test_a_file_that_was_removed_meanwhile_is_told(tmp_path, monkeypatch, published, older):
    if not published:  # as on Windows, where it gets its name at the end
        monkeypatch.setattr(
            part_file.PartFile, "publish", lambda part: os.rename(part.part, tmp_path / "no" / "folder")
        )
    world = writer(tmp_path / "world.mp4")
    world.write(noise(4))
    for file in tmp_path.iterdir():
        file.unlink()
    if older:
        (tmp_path / "world.mp4").write_bytes(b"of another run")
    with pytest.raises(VideoError, match=r"world\.mp4 was removed while it was written; generate again"):
        world.close()
    assert (world.frames, world.close()) == (0, 0)


def test_a_name_that_cannot_be_given_leaves_the_frames_in_the_part_file(tmp_path):
    path = tmp_path / "world.mp4"
    file = writer(path)
    path.mkdir()
    file.write(noise(4))
    with pytest.raises(VideoError, match=r"Is a directory; its 4 frames are in .*world.mp4.part"):
        file.close()
    assert probe(tmp_path / "world.mp4.part").frames == 4


def test_paths_that_cannot_be_written_are_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    for path, reason in [
        (tmp_path / "missing" / "world.mp4", "the folder .*missing does not exist; create it"),
        (tmp_path, "is a folder"),
        (tmp_path / "file" / "world.mp4", "is not a folder"),
        (tmp_path / ("n" * 300), "cannot be written"),
        ("nul\0.mp4", "cannot be written"),
        ("/dev/null", "not a regular file"),
    ]:
        with pytest.raises(VideoError, match=reason) as caught:
            writer(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"width": 65}, "width=65 must be even"),
        ({"height": 0}, "height=0 must be even"),
        ({"height": 48.0}, "whole number"),
        ({"fps": 0}, "fps=0 must be above 0"),
        ({"fps": float("nan")}, "fps=nan"),
        ({"fps": "16"}, "fps='16'"),
        ({"crf": 90}, "crf=90 must be between 1"),
        ({"metadata": {"seed": 7}}, "'seed': 7 must be text"),
        ({"metadata": {"encoder": "me"}}, "cannot hold 'encoder'"),
        ({"metadata": {"": "x"}}, "cannot hold ''"),
    ],
)
@pytest.mark.parametrize("kind", ["file", "fragments"])
def test_settings_that_cannot_be_used_are_refused(tmp_path, kind, options, reason):
    with pytest.raises(VideoError, match=re.escape(reason)):
        writer(tmp_path / "world.mp4", **options) if kind == "file" else fragments(**options)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_codec_is_refused(tmp_path):
    with pytest.raises(VideoError, match="'vp9'; use one of h264"):
        writer(tmp_path / "world.mp4", codec="vp9")


@pytest.mark.parametrize(
    "frames",
    [
        np.zeros((HEIGHT, WIDTH, 3), np.uint8),
        np.zeros((2, WIDTH, HEIGHT, 3), np.uint8),
        np.zeros((2, HEIGHT, WIDTH, 4), np.uint8),
        np.zeros((0, HEIGHT, WIDTH, 3), np.uint8),
        np.zeros((2, HEIGHT, WIDTH, 3), np.float32),
        [[0]],
    ],
)
def test_frames_of_another_shape_or_type_are_refused_and_the_writer_goes_on(tmp_path, frames):
    chunks = fragments()
    with writer(tmp_path / "world.mp4") as file:
        for take in (file.write, chunks.push):
            take(noise(2))
            with pytest.raises(VideoError, match="video frames"):
                take(frames)
            take(noise(2))
    assert probe(tmp_path / "world.mp4").frames == 4


def test_memory_does_not_grow_with_the_number_of_frames(tmp_path):
    process, frames = psutil.Process(), np.zeros((64, 240, 320, 3), np.uint8)
    with writer(tmp_path / "world.mp4", width=320, height=240) as file:
        file.write(frames)
        before = process.memory_info().rss
        for _ in range(8):
            file.write(frames)
        grown = process.memory_info().rss - before
    assert grown < frames.nbytes  # an eighth of what passed through


def test_a_stream_plays_after_each_push_with_all_frames_so_far():
    chunks = fragments(fps=Fraction(30000, 1001), metadata=TAGS)
    stream, starts, total = b"", [], 0
    for seed, frames in enumerate((9, 12, 1, 16)):
        fragment = chunks.push(noise(frames, seed))
        assert fragment.startswith(chunks.init_segment) == (seed == 0)
        assert box_types(fragment) == (["ftyp", "moov"] if seed == 0 else []) + ["moof", "mdat"]
        stream += fragment
        starts.append(total)
        total += frames
        pictures = decoded(stream)
        assert len(pictures) == total == chunks.frames
        assert all(pictures[start].key_frame for start in starts)
        np.testing.assert_allclose([picture.time for picture in pictures], np.arange(total) * 1001 / 30000, atol=1e-6)
    assert chunks.finish() == b"" == chunks.finish()
    info = probe(stream)
    assert (info.frames, info.fps) == (38, pytest.approx(29.97, abs=1e-3))
    assert info.metadata == TAGS
    with pytest.raises(VideoError, match="finished after 38 frames"):
        chunks.push(noise(1))


def test_a_later_fragment_plays_with_the_init_segment_alone():
    chunks = fragments()
    chunks.push(flat(50, 60, 70))
    late = chunks.push(flat(150, 160))
    means = [picture.to_ndarray(format="gray").mean() for picture in decoded(chunks.init_segment + late)]
    np.testing.assert_allclose(means, [150, 160], atol=3)


def test_streams_side_by_side_do_not_mix():
    first, second = fragments(), fragments()
    streams = [b"", b""]
    for level in (40, 120, 200):
        streams[0] += first.push(flat(level, level))
        streams[1] += second.push(flat(255 - level))
    alone = fragments()
    assert streams[0] == b"".join(alone.push(flat(level, level)) for level in (40, 120, 200))
    assert len(decoded(streams[1])) == 3


def test_a_cut_off_last_frame_does_not_count():
    chunks = fragments()
    data = chunks.push(noise(3)) + chunks.push(noise(1))
    assert probe(data[:-10]).frames == 3


def test_what_is_no_video_is_refused(tmp_path):
    (tmp_path / "text.mp4").write_text("not a video")
    for source, reason in [
        (tmp_path / "missing.mp4", "does not exist"),
        (tmp_path, "cannot be read as a video"),
        (tmp_path / "text.mp4", "cannot be read as a video"),
        (b"", "the video data cannot be read"),
    ]:
        for read in (probe, read_metadata):
            with pytest.raises(InputFileError, match=reason):
                read(source)
