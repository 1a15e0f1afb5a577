"""The command line: what is asked, what is made of it, and that nothing made is lost."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import lingbot_core
from lingbot_core.camera import PER_LATENT, CameraTrajectory, KeyMotion, clip_controls, controls, load_camera
from lingbot_core.camera.trajectory import SnapMode
from lingbot_core.cli import build_parser, generate, main
from lingbot_core.cli.prepare import Job, prepare
from lingbot_core.cli.progress import Progress, clock
from lingbot_core.cli.report import ReservedFile
from lingbot_core.cli.threads import limit_threads, usable_cores
from lingbot_core.engine import image as images
from lingbot_core.engine import start
from lingbot_core.engine import world as worlds
from lingbot_core.engine.history import History, StartRecord
from lingbot_core.engine.image import prepare_image
from lingbot_core.engine.plan import fit_actions, fit_path, plan_length, plan_script
from lingbot_core.engine.probe import probe
from lingbot_core.engine.route import PathRoute
from lingbot_core.engine.session import WorldSession
from lingbot_core.engine.world import World
from lingbot_core.errors import CameraError, LengthError
from lingbot_core.presets import get_preset
from lingbot_core.weights.layout import EMBEDDED_TINY

ROOT = Path(__file__).resolve().parents[2]
IMAGE = ROOT / "examples" / "03" / "image.jpg"
FOLDER = ROOT / "examples" / "03"
LONG = ROOT / "examples" / "04"
CHUNK3, CHUNK4 = get_preset("v1-fast"), get_preset("v2-causal-fast")


@pytest.fixture(scope="module")
def tiny() -> World:
    return World.load("tiny")


@pytest.fixture
def loaded(tiny, monkeypatch) -> World:
    """The tiny model is loaded once for all runs of this file."""
    monkeypatch.setattr(World, "load", classmethod(lambda cls, model, **options: tiny))
    return tiny


@pytest.fixture
def noisy(untrained, monkeypatch) -> None:
    """Whatever is loaded makes noise, whose video fills any small disk."""
    world = World.load(untrained)
    monkeypatch.setattr(World, "load", classmethod(lambda cls, model, **options: world))


@pytest.fixture
def unloaded(monkeypatch) -> None:
    """Whatever is tested must be known before any weights are read."""

    def load(*args: object, **options: object) -> World:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(World, "load", load)


def words(output: Path, *more: object, camera: tuple[object, ...] = ("--action-string", "w-20")) -> list[str]:
    given = ("generate", "--model", "tiny", "--image", IMAGE, "--prompt", "A trail", "--size", "48x80")
    return [str(word) for word in (*given, *camera, "--output", output, *more)]


def job(*more: object, camera: tuple[object, ...] = ("--action-string", "w-20")) -> Job:
    return prepare(build_parser().parse_args(words(Path("out.mp4"), *more, camera=camera)))


def report_of(output: Path) -> dict:
    return json.loads(output.with_suffix(".json").read_text(encoding="utf-8"))


def line_path(count: int) -> CameraTrajectory:
    """Pose i stands at x = i."""
    poses = np.tile(np.eye(4), (count, 1, 1))
    poses[:, 0, 3] = np.arange(count)
    return CameraTrajectory.from_arrays(poses)


def save(path: Path, array: object) -> Path:
    np.save(path, np.asarray(array))
    return path


# How long a video becomes


@pytest.mark.parametrize(
    ("poses", "wish", "preset", "frames", "used"),
    [
        (269, 129, CHUNK3, 129, 129),
        (269, 133, CHUNK3, 129, 133),  # all 133 poses, spread over 33 latent frames
        (269, None, CHUNK3, 261, 269),
        (129, None, CHUNK3, 129, 129),
        (533, None, CHUNK3, 525, 533),
        (533, None, CHUNK4, 525, 533),
        (50, 50, CHUNK3, 45, 49),
        (9, 9, CHUNK3, 9, 9),
    ],
)
def test_without_a_wish_every_pose_counts_and_a_wish_is_snapped_down(poses, wish, preset, frames, used):
    plan = plan_length(poses, preset, num_frames=wish)
    assert (plan.frames, plan.used, plan.left_over, plan.held) == (frames, used, poses - used, 0)
    assert plan.frames == preset.frames(plan.chunks)


@pytest.mark.parametrize("wish", [5, 9])
def test_less_than_one_chunk_is_refused_with_the_valid_totals(wish):
    for poses in (wish, 81):
        with pytest.raises(LengthError, match=f"{wish} frames are less than one chunk of 13 .*13 \\+ 16k"):
            plan_length(poses, CHUNK4, num_frames=wish)
    with pytest.raises(LengthError, match=rf"path of {wish} poses is shorter than one chunk of 13 frames.*\(hold\)"):
        plan_length(wish, CHUNK4)


def test_more_frames_than_poses_is_refused_with_both_numbers_and_the_fix():
    with pytest.raises(LengthError, match=r"50 poses for 81 frames.*ask for 49 frames or less.*\(hold\)"):
        plan_length(50, CHUNK3, num_frames=81)
    with pytest.raises(LengthError, match=r"135 poses for 141 frames \(133 snapped up.*snap down"):
        plan_length(135, CHUNK3, num_frames=133, snap="up")
    with pytest.raises(LengthError, match="at most 100000"):
        plan_length(50, CHUNK3, num_frames=10**9, length="hold")


def test_a_path_is_compressed_cut_or_held():
    def at(poses: int, **wish: object) -> list[float]:
        plan = plan_length(poses, CHUNK3, **wish)
        latent = fit_path(line_path(poses), plan, 3)
        assert len(latent) == 3 * plan.chunks
        return latent.poses[:, 0, 3].tolist()

    # The reference: the first 17 poses, resampled at linspace(0, 16, 3).
    assert at(40, num_frames=20) == [0, 8, 16]
    assert at(40, num_frames=20, length="cut") == [0, 4, 8]
    assert at(40, num_frames=20, snap="up") == [0, 4, 8, 12, 16, 20]
    assert at(10, num_frames=21, length="hold") == [0, 4, 8, 9, 9, 9]
    # Without a wish the held path is shown to its end.
    assert at(10, length="hold") == [0, 4, 8, 9, 9, 9]
    assert plan_length(10, CHUNK3, length="hold").held == 11


@given(
    poses=st.integers(1, 700),
    wish=st.none() | st.integers(1, 700),
    snap=st.sampled_from(["down", "up"]),
    length=st.sampled_from(["compress", "cut", "hold"]),
    preset=st.sampled_from([CHUNK3, CHUNK4]),
)
def test_every_plan_is_whole_chunks_on_its_side_of_the_wish(poses, wish, snap, length, preset):
    try:
        plan = plan_length(poses, preset, num_frames=wish, snap=snap, length=length)
    except LengthError:
        first = preset.frames(1)
        target = wish or poses
        too_short = target < first and snap == "down"
        next_total = -(-(target + 3) // (4 * preset.chunk)) * 4 * preset.chunk - 3
        too_few = length != "hold" and poses < (next_total if snap == "up" else target)
        assert too_short or too_few
        return
    step = 4 * preset.chunk
    assert (plan.frames + 3) % step == 0
    assert plan.frames <= (wish or poses) < plan.frames + step if snap == "down" else True
    assert plan.frames - step < (wish or poses) <= plan.frames if snap == "up" else True
    assert len(fit_path(line_path(poses), plan, preset.chunk)) == preset.chunk * plan.chunks


def test_a_script_has_one_chunk_per_line_or_as_many_as_the_wish():
    assert plan_script(4, CHUNK3) == 4
    assert plan_script(4, CHUNK3, num_frames=30) == 2
    assert plan_script(4, CHUNK3, num_frames=30, snap="up") == 3
    with pytest.raises(LengthError):
        plan_script(4, CHUNK4, num_frames=9)


def test_actions_follow_the_poses_they_belong_to():
    rows = np.zeros((40, 4))
    rows[[0, 8, 16], [0, 1, 2]] = 1
    compressed = plan_length(40, CHUNK3, num_frames=20)
    np.testing.assert_array_equal(fit_actions(rows, compressed, 3), rows[[0, 8, 16]])
    exact = plan_length(40, CHUNK3, num_frames=21)
    np.testing.assert_array_equal(fit_actions(rows, exact, 3), rows[:21:4])
    held = plan_length(10, CHUNK3, length="hold")
    ones = np.ones((10, 4))
    np.testing.assert_array_equal(fit_actions(ones, held, 3).sum(axis=1), [4, 4, 4, 0, 0, 0])
    with pytest.raises(CameraError, match="16 rows of actions for 17 poses"):
        fit_actions(rows[:16], compressed, 3)


# What a run is made of


def test_the_session_of_a_folder_follows_the_reference(unloaded):
    planned = job("--num-frames", 129, "--size", "480x832", camera=("--action-path", FOLDER))
    path = load_camera(FOLDER)
    steps = np.linalg.norm(np.diff(path.poses[:129:4, :3, 3], axis=0), axis=1)
    assert planned.frames == 129
    assert planned.unit == pytest.approx(steps.max(), rel=1e-9)
    assert (planned.unit_rule, planned.first_delta) == ("clip", "identity")
    assert (planned.image.height, planned.image.width) == (480, 832)
    assert planned.intrinsics == pytest.approx(path.intrinsics[0])


def test_an_action_string_is_cut_to_4k1_poses(unloaded):
    planned = job(camera=("--action-string", "w-16"))
    assert (planned.route.report()["poses"], planned.frames) == (17, 9)
    # 17 poses of 0.05 each over three latent frames: 8 steps between neighbours.
    assert planned.unit == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("unit", "value", "rule"), [("key", 0.2, "key"), ("p50", 0.2, "p50"), ("2.5", 2.5, "number"), ("CLIP", 0.2, "clip")]
)
def test_the_translation_unit_can_be_chosen(unloaded, unit, value, rule):
    planned = job("--translation-unit", unit, "--first-delta", "from_rest", camera=("--action-string", "w-21"))
    assert planned.unit == pytest.approx(value)
    assert (planned.unit_rule, planned.first_delta) == (rule, "from_rest")


def script(tmp_path: Path, *lines: dict) -> Path:
    file = tmp_path / "script.jsonl"
    file.write_text("".join(json.dumps({"event_id": i, **line}) + "\n" for i, line in enumerate(lines)))
    return file


def test_a_script_of_keys_starts_from_rest_and_one_of_poses_does_not(tmp_path, unloaded):
    keys = {"frames": [["w"], [], ["w"]]}
    poses = {"poses": line_path(9).poses.tolist()}
    planned = job(camera=("--events", script(tmp_path, keys, {})))
    assert (planned.unit, planned.unit_rule, planned.first_delta) == (0.05, "key", "from_rest")
    assert (planned.route.chunks, planned.warnings) == (2, ())
    planned = job("--key-steps", "per-video", camera=("--events", script(tmp_path, keys)))
    assert planned.unit == pytest.approx(0.2)
    planned = job("--num-frames", 33, camera=("--events", script(tmp_path, poses, keys)))
    assert (planned.unit, planned.unit_rule, planned.first_delta) == (4.0, "clip", "identity")
    assert planned.route.report()["chunks_standing_still"] == 1
    planned = job("--num-frames", 9, camera=("--events", script(tmp_path, keys, keys)))
    assert planned.route.report()["lines_left_over"] == 1


def test_a_tap_in_the_first_latent_frame_is_motion_enough(tmp_path, unloaded):
    assert job(camera=("--events", script(tmp_path, {"frames": [["w"], [], []]}))).warnings == ()
    (warning,) = job(camera=("--events", script(tmp_path, {"frames": [["j"], [], []]}))).warnings
    assert "does not move" in warning


def test_a_path_without_motion_is_allowed_and_reported(tmp_path, unloaded):
    still = save(tmp_path / "still.npy", np.tile(np.eye(4), (21, 1, 1)))
    planned = job(camera=("--poses", still))
    assert planned.unit == 1.0
    assert "does not move" in planned.warnings[0]


def test_one_jump_in_a_path_is_reported(tmp_path, unloaded):
    poses = line_path(81).poses.copy()
    poses[40:, 0, 3] += 500
    planned = job(camera=("--poses", save(tmp_path / "jump.npy", poses)))
    assert "latent frame 10 is 126 times the median" in planned.warnings[0]


def test_intrinsics_may_be_matrices_and_follow_the_picture(tmp_path, unloaded):
    matrix = save(tmp_path / "k.npy", [[400, 0, 416], [0, 300, 240], [0, 0, 1]])
    poses = save(tmp_path / "poses.npy", line_path(9).poses)
    stretched = (400 * 80 / 832, 300 * 48 / 480, 40, 24)
    for camera in (("--poses", poses), ("--action-string", "w-8")):
        assert job("--intrinsics", matrix, camera=camera).intrinsics == pytest.approx(stretched)
    # 832x480 covers 96x48 at scale 0.11538, 8 columns wide of 80 x 46.15: 1 row is cut off above.
    cropped = job("--intrinsics", matrix, "--size", "48x96", "--fit", "crop", camera=("--poses", poses))
    assert cropped.intrinsics == pytest.approx((400 * 96 / 832, 300 * 55 / 480, 48, 240 * 55 / 480 - 3))
    padded = job("--intrinsics", matrix, "--size", "64x80", "--fit", "pad", camera=("--poses", poses))
    assert padded.intrinsics == pytest.approx((400 * 80 / 832, 300 * 46 / 480, 40, 240 * 46 / 480 + 9))


def test_without_intrinsics_the_lens_of_the_model_counts_and_then_the_servers_default(tmp_path, unloaded, untrained):
    lens = json.loads((EMBEDDED_TINY / "world.json").read_text(encoding="utf-8"))["lens"]
    side = 80 / lens["width"]
    of_tiny = (lens["fx"] * side, lens["fy"] * side, lens["cx"] * side, lens["cy"] * side)
    for camera in (("--poses", save(tmp_path / "poses.npy", line_path(9).poses)), ("--action-string", "w-8")):
        assert job(camera=camera).intrinsics == pytest.approx(of_tiny)
        # 500 px at the size that is generated.
        assert job("--model", untrained, camera=camera).intrinsics == (500, 500, 40, 24)


def test_a_portrait_picture_keeps_its_shape(tmp_path, unloaded):
    cv2.imwrite(str(tmp_path / "portrait.png"), np.zeros((160, 90, 3), np.uint8))
    args = build_parser().parse_args(words(Path("out.mp4"), "--image", tmp_path / "portrait.png", "--size", "480p"))
    image = prepare(args).image
    assert (image.height, image.width) == images.fit_size(160, 90)
    assert image.height > image.width


def test_overrides_are_spelled_out_in_the_preset(unloaded):
    planned = job("--indices", "0,500", "--shift", 3, "--window", "none", "--reuse-last-step-kv")
    assert planned.preset.steps == 2
    assert planned.preset.window is None
    assert planned.preset.label == (
        "tiny (reuse_last_step_kv=True, selection=indices [0, 500], shift=3.0, window=none)"
    )


# What is refused, before a model is loaded, in one line


def test_the_poses_of_a_bad_file_are_named_by_row(tmp_path, unloaded, capsys):
    for bad, message in ((np.nan, "row 5 holds NaN"), (2.0, "row 5 is not rigid")):
        poses = line_path(21).poses.copy()
        poses[5, 0, 0] = bad
        assert main(words(tmp_path / "out.mp4", camera=("--poses", save(tmp_path / "bad.npy", poses)))) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert f"bad.npy: {message}" in error
        assert error.count("\n") == 1
    assert not (tmp_path / "out.mp4").exists()


REFUSED = [
    (("--num-frames", 9), "less than one chunk of 13", ("--chunk", 4, "--window", 12)),
    (("--num-frames", 81), "21 poses for 81 frames", ()),
    (("--guidance-scale", 3), "guidance_scale=3.0 cannot be honoured", ()),
    (("--negative-prompt", "blur"), "a negative prompt has no effect at guidance 1", ()),
    (("--steps", 10), "cannot honour steps=10: its steps are set by 'indices'", ()),
    (("--labels", "1000,500"), "cannot honour labels=", ()),
    (("--window", 2), "window=2 cannot hold", ()),
    (("--preset", "v1-fast", "--sink", 3), "sink=3 has no effect without a window", ()),
    (("--key-steps", "per-latent"), "--key-steps is for the held keys of --events", ()),
    (("--translation-unit", "furlong"), "translation unit 'furlong' is unknown", ()),
    (("--translation-unit", "-1"), "must be a number above 0", ()),
    (("--image", "missing.jpg"), "missing.jpg does not exist", ()),
    (("--image", "tiny.png"), "tiny.png has 1x1 pixels; both sides must have at least 16", ()),
    (("--image", "."), "is a folder; name a picture file", ()),
    (("--intrinsics", "missing.npy"), "missing.npy does not exist", ()),
    (("--model", "missing"), "model 'missing' does not exist", ()),
    (("--size", "50x80"), "height=50 must be a positive multiple of 16", ()),
    (("--crf", 60), "crf=60.0 must be between 1", ()),
    (("--output", "."), "is a folder", ()),
    (("--report", "tiny.png", "--image", "tiny.png"), "is the input --image and would be overwritten", ()),
    (
        ("--output", "out.gif"),
        "--output out.gif must end in .mp4, the only kind of video made here; name it out.mp4",
        (),
    ),
    (("--output", "noext"), "name it noext.mp4", ()),
    (("--output", "x" * 300 + ".mp4"), "cannot be written: File name too long", ()),
    (("--report", "x" * 300), "cannot be written: File name too long", ()),
    (("--image", "x" * 300), "cannot be read: File name too long", ()),
    (("--save-latents", "x" * 300), "cannot be saved to " + "x" * 300 + ": File name too long", ()),
    (("--report", "out.mp4"), "video and report cannot be one file", ()),
    (("--report", "folder"), "folder is a folder; name a file in it, such as folder/report.json", ()),
    (("--report", "out.mp4.part"), "video and report cannot be one file", ()),
    (("--report", "/dev/null"), "/dev/null is not a regular file", ()),
    (("--output", "tiny.png/out.mp4"), "the folder tiny.png cannot be made", ()),
    (("--save-latents", "tiny.png"), "latents cannot be saved to tiny.png", ()),
    (("--prompt", "caf\udce9"), "--prompt is not valid text", ()),
]


@pytest.mark.parametrize(("options", "message", "more"), REFUSED, ids=[str(r[0]) for r in REFUSED])
def test_a_bad_option_is_refused_by_name(tmp_path, monkeypatch, unloaded, capsys, options, message, more):
    monkeypatch.chdir(tmp_path)
    cv2.imwrite("tiny.png", np.zeros((1, 1, 3), np.uint8))
    Path("folder").mkdir()
    assert main(words(Path("out.mp4"), *options, *more)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert sorted(os.listdir()) == ["folder", "tiny.png"]


@pytest.mark.parametrize(
    ("camera", "message"),
    [
        (("--action-string", "w-3,q-2"), "segment 2 ('q-2')"),
        (("--action-string", ""), "action string is empty"),
        (("--action-path", "missing"), "missing does not exist; give a folder"),
        (("--action-path", IMAGE), "is a file; give a folder"),
        (("--action-path", "."), "poses.npy does not exist"),
        (("--poses", IMAGE), "is not a .npy file"),
        (("--events", "missing.jsonl"), "missing.jsonl does not exist"),
        (("--events", "script.jsonl", "--length", "hold"), "--length fits paths to chunks"),
        (("--events", "script.jsonl", "--snap", "up"), "--snap rounds --num-frames"),
        (("--events", "script.jsonl", "--report", "script.jsonl"), "is the input --events and would be overwritten"),
        (("--action-path", "x" * 300), "cannot be read: File name too long"),
        (("--poses", "x" * 300), "File name too long"),
        (("--action-string", "w-99999"), "99999 frames, 100001 as whole latent frames; fewer than 100000 are accepted"),
    ],
)
def test_a_bad_camera_is_refused_by_name(tmp_path, monkeypatch, unloaded, capsys, camera, message):
    monkeypatch.chdir(tmp_path)
    Path("script.jsonl").write_text('{"event_id": 1}')
    assert main(words(Path("out.mp4"), camera=camera)) == 2
    assert message in capsys.readouterr().err
    assert os.listdir() == ["script.jsonl"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "one of the arguments --action-string --action-path --poses --events is required"),
        (("--action-string", "w-3", "--poses", "x.npy"), "not allowed with"),
        (("--action-string", "w-8", "--seed", "-1"), "'-1' must be a whole number of at least 0"),
        (("--action-string", "w-8", "--size", "big"), "must be 480p, 720p or HEIGHTxWIDTH"),
        (("--action-string", "w-8", "--indices", "0;5"), "whole numbers separated by commas"),
        (("--action-string", "w-8", "--fps", "nan"), "must be a number above 0"),
        (("--action-string", "w-8", "--device", "abacus"), "is no device"),
        (("--action-string", "w-8", "--num-frames", "many"), "whole number"),
        (("--action-string", "w-8", "--num", "9"), "unrecognized arguments: --num"),
        (("--action-string", "w-8", "--save-latents", ""), "--save-latents: the path is empty"),
        (("--action-string", "w-8", "--output", "new/"), "'new/' is a folder; name a file in it"),
        (("--action-string", "w-8", "--report", "new/"), "'new/' is a folder; name a file in it"),
    ],
)
def test_arguments_that_make_no_sense_end_with_2(capsys, options, message):
    assert main(words(Path("out.mp4"), camera=options)) == 2
    assert message in capsys.readouterr().err


def test_without_a_verb_the_help_is_printed(capsys):
    assert main([]) == 0
    assert "generate" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert lingbot_core.__version__ in capsys.readouterr().out
    assert main(["generate", "--help"]) == 0
    assert "--save-latents" in capsys.readouterr().out


def test_the_choices_are_those_of_the_library():
    assert get_args(SnapMode) == generate.LENGTHS
    assert images.MODES == generate.FITS
    assert start.NOISES == generate.NOISES
    assert get_args(controls.FirstDelta) == generate.FIRST_DELTAS
    assert generate.DTYPE_NAMES == worlds.DTYPE_NAMES


def test_an_unexpected_error_is_one_line_unless_asked_for_more(tmp_path, monkeypatch, capsys):
    def broken(*args: object, **options: object) -> World:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(World, "load", broken)
    assert main(words(tmp_path / "out.mp4")) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: RuntimeError: two lines (--verbose shows where)"
    assert main(words(tmp_path / "out.mp4", "--verbose")) == 1
    assert "Traceback" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


# What is read is never written


@pytest.mark.parametrize("way", ["itself", "by a symbolic link", "by a hard link"])
@pytest.mark.parametrize("place", ["out.mp4", "out.mp4.part", "out.json", "out.json.part"])
def test_an_input_is_not_written_by_any_name(tmp_path, unloaded, capsys, way, place):
    image, target = tmp_path / "picture", tmp_path / place
    shutil.copy(IMAGE, image)
    {"itself": image.rename, "by a symbolic link": target.symlink_to, "by a hard link": target.hardlink_to}[way](
        target if way == "itself" else image
    )
    given = target if way == "itself" else image
    before = given.read_bytes()
    assert main(words(tmp_path / "out.mp4", "--image", given)) == 2
    assert f"{place} is the input --image and would be overwritten" in capsys.readouterr().err
    assert given.read_bytes() == before


@pytest.mark.parametrize("option", ["--action-path", "--poses"])
@pytest.mark.parametrize("name", ["poses.npy", "intrinsics.npy", "action.npy"])
def test_the_files_in_a_folder_of_poses_are_not_written(tmp_path, unloaded, capsys, option, name):
    folder = tmp_path / "camera"
    shutil.copytree(FOLDER, folder)
    (folder / "action.npy").touch()
    assert main(words(tmp_path / "out.mp4", "--report", folder / name, camera=(option, folder))) == 2
    assert f"{name} is the input {option} and would be overwritten; name another --report" in capsys.readouterr().err


def test_nothing_is_written_into_the_folder_of_a_model(tmp_path, unloaded, capsys):
    model = tmp_path / "model"
    shutil.copytree(EMBEDDED_TINY, model)
    for option, name in (("--report", "world.json"), ("--output", "vae/new.mp4"), ("--save-latents", "latents")):
        assert main(words(tmp_path / "out.mp4", "--model", model, option, model / name)) == 2
        assert f"lies in the folder of --model ({model})" in capsys.readouterr().err
    (weights,) = (model / "vae").glob("*.safetensors")
    alone = tmp_path / "vae.safetensors"
    alone.hardlink_to(weights)
    assert main(words(tmp_path / "out.mp4", "--vae", weights, "--report", alone)) == 2
    assert "is the input --vae and would be overwritten" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["model", "vae.safetensors"]


def test_a_folder_with_files_of_others_gets_no_latents(tmp_path, unloaded, capsys):
    foreign = tmp_path / "chunk_0000.safetensors"
    save_file({"weights": torch.zeros(1)}, foreign, metadata={"format": "pt"})
    before = foreign.read_bytes()
    assert main(words(tmp_path / "out.mp4", "--save-latents", tmp_path)) == 2
    assert "chunk_0000.safetensors is no chunk that --save-latents wrote" in capsys.readouterr().err
    assert foreign.read_bytes() == before
    assert os.listdir(tmp_path) == ["chunk_0000.safetensors"]


@pytest.mark.parametrize("option", ["--image", "--output", "--report", "--save-latents", "--events", "--action-path"])
def test_a_loop_of_links_is_named(tmp_path, unloaded, capsys, option):
    loop = tmp_path / "loop.mp4"
    loop.symlink_to(loop)
    camera = (option, loop) if option in ("--events", "--action-path") else ("--action-string", "w-8")
    more = () if option in ("--events", "--action-path") else (option, loop)
    assert main(words(tmp_path / "out.mp4", *more, camera=camera)) == 2
    error = capsys.readouterr().err
    assert "loop.mp4" in error
    assert "symbolic links" in error or "File exists" in error
    assert os.listdir(tmp_path) == ["loop.mp4"]


@pytest.mark.parametrize("option", ["--action-path", "--poses"])
def test_a_folder_that_may_not_be_read_is_named(tmp_path, unloaded, monkeypatch, capsys, option):
    exists = Path.exists

    def denied(self: Path) -> bool:
        if self.name == "intrinsics.npy":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return exists(self)

    monkeypatch.setattr(Path, "exists", denied)
    assert main(words(tmp_path / "out.mp4", camera=(option, FOLDER))) == 2
    assert f"{FOLDER / 'intrinsics.npy'} cannot be read: Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
@pytest.mark.parametrize("place", ["out.json.part", "out.mp4.part"])
def test_a_part_file_that_is_not_ours_is_refused(tmp_path, unloaded, capsys, kind, place):
    part, other = tmp_path / place, tmp_path / "other"
    other.write_text("precious")
    {"pipe": lambda: os.mkfifo(part), "link": lambda: part.symlink_to(other), "folder": part.mkdir}[kind]()
    assert main(words(tmp_path / "out.mp4")) == 2
    assert f"{place} is in the way" in capsys.readouterr().err
    assert other.read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["other", place]


# What is missing, broken or interrupted


@pytest.mark.parametrize(
    ("module", "package"), [("cv2", "opencv-python"), ("av", "av"), ("safetensors", "safetensors")]
)
def test_a_missing_package_is_named_as_pip_knows_it(tmp_path, loaded, monkeypatch, capsys, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    if module == "safetensors":  # it is loaded already, and what imports it
        monkeypatch.setattr(generate, "run", lambda args: __import__("safetensors"))
    assert main(words(tmp_path / "out.mp4")) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"error: the package {package} is not installed; run: pip install {package}"
    assert os.listdir(tmp_path) == []


def test_an_interrupt_while_something_is_imported_is_an_interrupt(tmp_path, monkeypatch, capsys):
    def run(args: object) -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("bad install or environment on your machine") from None
        return 0

    monkeypatch.setattr(generate, "run", run)
    assert main(words(tmp_path / "out.mp4")) == 130
    assert capsys.readouterr().err == "interrupted before the first chunk; nothing was written\n"


class Broken(io.StringIO):
    """A stream that fails after so many writes."""

    def __init__(self, writes: int, error: Exception) -> None:
        super().__init__()
        self.left, self.error = writes, error

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return len(text)


@pytest.mark.parametrize("which", ["stdout", "stderr"])
@pytest.mark.parametrize(
    "stream", [None, Broken(0, OSError(errno.ENOSPC, "No space left")), Broken(4, BrokenPipeError(errno.EPIPE, "pipe"))]
)
def test_a_broken_output_stops_nothing(loaded, tmp_path, monkeypatch, which, stream):
    monkeypatch.setattr(sys, which, stream)
    output = tmp_path / "out.mp4"
    assert main(words(output)) == 0
    assert report_of(output)["stopped"] is None
    assert probe(output).frames == 21


def test_closed_files_do_not_get_into_the_video(tmp_path):
    output = tmp_path / "out.mp4"
    shown = " ".join(f"'{word}'" for word in words(output, camera=("--action-string", "w-8")))
    done = subprocess.run(
        f"'{sys.executable}' -m lingbot_core {shown} >/dev/full 2>&-", shell=True, cwd=ROOT, timeout=100, check=False
    )
    assert done.returncode == 0
    assert report_of(output)["length"]["made"] == probe(output).frames == 9


def test_output_that_is_lost_is_an_error_where_it_is_all_there_is(monkeypatch, capsys):
    for error, code in ((OSError(errno.ENOSPC, "No space left"), 1), (BrokenPipeError(errno.EPIPE, "pipe"), 0)):
        monkeypatch.setattr(sys, "stdout", Broken(0, error))
        assert main(["inspect", "tiny"]) == code
    assert "the output could not be written: [Errno 28] No space left" in capsys.readouterr().err


# Runs


def test_a_run_writes_what_the_library_makes_and_says_how(loaded, tmp_path, capsys):
    output = tmp_path / "new" / "folder" / "out.mp4"
    latents = tmp_path / "latents"
    latents.mkdir()
    earlier = dict.fromkeys(("chunk", "preset", "seed", "noise", "model"), "x")
    save_file({"latents": torch.zeros(1)}, latents / "chunk_0007.safetensors", metadata=earlier)
    camera = ("--action-path", FOLDER)
    assert main(words(output, "--num-frames", 25, "--seed", 7, "--save-latents", latents, camera=camera)) == 0

    path = load_camera(FOLDER).first(25)
    latent = path.to_latent(3)
    unit = float(np.linalg.norm(np.diff(latent.poses[:, :3, 3], axis=0), axis=1).max())
    session = WorldSession.start(
        loaded,
        prepare_image(IMAGE, size=(48, 80)),
        "A trail",
        seed=7,
        translation_unit=unit,
        unit_rule="clip",
        intrinsics=path.intrinsics_at(80, 48),
    )
    steps = clip_controls(latent, chunk=3, unit=unit, first_delta="identity", width=80, height=48)
    made = [session.advance(step) for step in steps]
    files = sorted(latents.iterdir())
    assert [file.name for file in files] == ["chunk_0000.safetensors", "chunk_0001.safetensors"]
    for file, chunk in zip(files, made, strict=True):
        with safe_open(file, "pt") as saved:
            assert torch.equal(saved.get_tensor("latents"), chunk.latents)
            assert (saved.metadata()["chunk"], saved.metadata()["seed"]) == (str(chunk.index), "7")

    info = probe(output)
    assert (info.frames, info.width, info.height, info.fps) == (21, 80, 48, 16)
    assert info.metadata["prompt"] == "A trail"
    assert info.metadata["preset"] == "tiny"
    assert info.metadata["seed"] == "7"
    assert float(info.metadata["translation_unit"]) == pytest.approx(unit)
    assert (info.metadata["translation_unit_rule"], info.metadata["first_delta"]) == ("clip", "identity")
    assert json.loads(info.metadata["versions"])["lingbot_world"] == lingbot_core.__version__

    report = report_of(output)
    assert report["stopped"] is None
    assert report["length"] == {"asked": 25, "planned": 21, "made": 21, "text": "25 asked, 21 made"}
    assert {**report, **session.history.summary()} == report
    assert (report["camera"]["poses"], report["camera"]["poses_used"]) == (269, 25)
    assert report["camera"]["poses_left_over"] == 244
    assert report["camera"]["step_statistics"]["maximum"] == pytest.approx(unit)
    assert report["model"]["name"] == "tiny"
    assert (report["model"]["trained"], report["warnings"]) == (True, [])
    assert report["prompts"] == [{"prompt": "A trail", "tokens": 8, "truncated": False}]
    assert report["image"]["source_size"] == [480, 832]
    assert report["image"]["fit"] == "stretch"
    assert set(report["seconds"]["by_stage"]) == {"prepare", "denoise", "decode", "commit", "write"}
    assert [set(chunk) for chunk in report["seconds"]["by_chunk"]] == [set(report["seconds"]["by_stage"])] * 2
    assert report["peak_memory"]["host"] > 50_000_000
    assert report["video"]["bytes"] == output.stat().st_size
    assert report["video"]["duration"] == 21 / 16
    printed = capsys.readouterr()
    assert "25 asked, 21 made" in printed.out
    assert [line.split(",")[0] for line in printed.err.splitlines()[-2:]] == [
        "chunk 1/2: 9/21 frames",
        "chunk 2/2: 21/21 frames",
    ]


def test_a_model_that_is_not_trained_is_reported(untrained, tmp_path, capsys):
    output = tmp_path / "out.mp4"
    assert main(words(output, "--model", untrained, camera=("--action-string", "w-8"))) == 0
    report = report_of(output)
    assert report["model"]["trained"] is False
    assert "random weights" in report["warnings"][0]
    assert "random weights" in capsys.readouterr().err


def test_a_script_drives_the_session_chunk_by_chunk(loaded, tmp_path):
    poses = line_path(12).poses
    events = script(
        tmp_path,
        {"frames": [["w"], [], ["j"]]},
        {"prompt": "Night falls", "poses": poses.tolist(), "intrinsics": [300, 300, 416, 240]},
    )
    output, latents = tmp_path / "out.mp4", tmp_path / "latents"
    options = ("--num-frames", 33, "--translation-unit", 2, "--save-latents", latents)
    assert main(words(output, *options, camera=("--events", events))) == 0

    session = WorldSession.start(
        loaded, prepare_image(IMAGE, size=(48, 80)), "A trail", translation_unit=2.0, first_delta="from_rest"
    )
    zoomed = (300 * 80 / 832, 300 * 48 / 480, 40, 24)
    session.advance(session.controls(KeyMotion(("w", "", "j"), PER_LATENT)))
    session.advance(session.controls(poses, prompt="Night falls", intrinsics=zoomed))
    session.advance(session.controls(KeyMotion(("", "", ""), PER_LATENT), intrinsics=zoomed))
    for chunk in session.history.chunks:
        with safe_open(latents / f"chunk_{chunk.index:04d}.safetensors", "pt") as saved:
            torch.testing.assert_close(saved.get_tensor("latents"), chunk.latents, rtol=0, atol=1e-6)
    report = report_of(output)
    assert report["prompt_changes"] == [{"chunk": 1, "prompt": "Night falls"}]
    assert report["camera"]["event_ids"] == [0, 1]
    assert report["camera"]["chunks_standing_still"] == 1
    assert [p["prompt"] for p in report["prompts"]] == ["A trail", "Night falls"]
    assert probe(output).frames == 33


@pytest.mark.parametrize(("prompt", "truncated"), [("", False), ("word " * 600, True)])
def test_empty_and_long_prompts_run_and_what_was_cut_off_is_reported(loaded, tmp_path, prompt, truncated):
    output = tmp_path / "out.mp4"
    assert main(words(output, "--prompt", prompt, camera=("--action-string", "w-8"))) == 0
    report = report_of(output)
    (encoded,) = report["prompts"]
    assert encoded["truncated"] is truncated
    most = loaded.dit.config.text_len
    assert (encoded["tokens"] > most) is truncated
    said = f"has {encoded['tokens']} tokens; only the first {most}"
    assert any(said in warning for warning in report["warnings"]) is truncated
    assert probe(output).frames == 9


def test_an_interrupt_keeps_the_chunks_that_are_made(loaded, tmp_path, monkeypatch, capsys):
    finish = Progress.finish_chunk

    def finish_and_interrupt(self: Progress, frames: int) -> None:
        finish(self, frames)
        if self.done_chunks == 2:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Progress, "finish_chunk", finish_and_interrupt)
    before = signal.getsignal(signal.SIGTERM)
    output = tmp_path / "out.mp4"
    assert main(words(output, camera=("--action-string", "w-44"))) == 130
    report = report_of(output)
    assert (report["stopped"], report["length"]["made"], report["chunks"]) == ("interrupted", 21, 2)
    assert probe(output).frames == 21
    assert "interrupted" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before
    assert sorted(os.listdir(tmp_path)) == ["out.json", "out.mp4"]


def test_an_interrupt_while_a_chunk_is_decoded_loses_no_frame(loaded, tmp_path, monkeypatch):
    decode, calls = loaded.vae.decode, []

    def interrupted_twice(latents: torch.Tensor, state: object) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)  # the second one does not wait for a safe point
        return decode(latents, state)

    monkeypatch.setattr(loaded.vae, "decode", interrupted_twice)
    output = tmp_path / "out.mp4"
    assert main(words(output, camera=("--action-string", "w-44"))) == 130
    assert report_of(output)["length"]["made"] == probe(output).frames == 21


def test_names_that_are_no_text_are_escaped_in_the_report(loaded, tmp_path, capsys):
    image, output = tmp_path / "\udce9.jpg", tmp_path / "\udcfc.mp4"
    shutil.copy(IMAGE, image)
    assert main(words(output, "--image", image, camera=("--action-string", "w-8"))) == 0
    assert b"\\udce9.jpg" in output.with_suffix(".json").read_bytes()
    report = report_of(output)
    assert (report["image"]["path"], report["video"]["path"]) == (str(image), str(output))
    assert "udcfc.mp4: 9 planned, 9 made" in capsys.readouterr().out


def test_the_report_of_the_video_before_goes_with_it(loaded, tmp_path, monkeypatch):
    output = tmp_path / "out.mp4"
    output.write_bytes(b"an older video")
    output.with_suffix(".json").write_text("its report")
    seen = []
    finish = Progress.finish_chunk

    def look(self: Progress, frames: int) -> None:
        seen.append((output.with_suffix(".json").exists(), probe(output).frames))
        finish(self, frames)

    monkeypatch.setattr(Progress, "finish_chunk", look)
    assert main(words(output)) == 0
    assert seen == [(False, 8), (False, 20)]  # a file that is written lacks its newest frame
    assert report_of(output)["length"]["made"] == 21


def test_a_disk_that_is_full_from_the_start_costs_no_earlier_video(noisy, tmp_path, capsys):
    output = tmp_path / "out.mp4"
    assert main(words(output)) == 0
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, hard))
    try:
        assert main(words(output, "--seed", 2)) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "the video that was there is as it was" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("shared", ["video", "report"])
@pytest.mark.parametrize("chunks_before", [0, 1])
def test_a_second_run_into_the_same_files_is_refused(loaded, tmp_path, monkeypatch, capsys, shared, chunks_before):
    output, report = tmp_path / "out.mp4", tmp_path / "report.json"
    second = words(
        output if shared == "video" else tmp_path / "other.mp4",
        "--report",
        report if shared == "report" else tmp_path / "other.json",
    )
    codes = []
    step = Progress.step

    def run_another(self: Progress, index: int, total: int) -> None:
        step(self, index, total)
        if self.done_chunks == chunks_before and not codes:
            codes.append(-1)
            codes[0] = main(second)

    monkeypatch.setattr(Progress, "step", run_another)
    assert main(words(output, "--report", report)) == 0
    assert codes == [2]
    assert "is being written by another process" in capsys.readouterr().err
    assert json.loads(report.read_text())["length"]["made"] == probe(output).frames == 21
    assert sorted(os.listdir(tmp_path)) == ["out.mp4", "report.json"]


def test_a_kill_before_the_first_frame_leaves_no_video_and_the_next_run_is_not_in_its_way(loaded, tmp_path):
    output = tmp_path / "out.mp4"
    code = (
        "import os, signal, sys; from lingbot_core.cli import main, record; "
        "record._Recording.run = lambda self: os.kill(os.getpid(), signal.SIGKILL); main(sys.argv[1:])"
    )
    child = subprocess.run([sys.executable, "-c", code, *words(output)], cwd=ROOT, timeout=100, check=False)
    assert child.returncode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == ["out.json.part", "out.mp4.part"]
    assert main(words(output)) == 0
    assert sorted(os.listdir(tmp_path)) == ["out.json", "out.mp4"]
    assert probe(output).frames == 21


def test_an_interrupt_before_the_first_chunk_leaves_everything_as_it_was(loaded, tmp_path, monkeypatch, capsys):
    output = tmp_path / "out.mp4"
    output.write_bytes(b"an older video")
    output.with_suffix(".json").write_text("its report")
    monkeypatch.setattr(Progress, "step", lambda *args: signal.raise_signal(signal.SIGINT))
    assert main(words(output)) == 130
    assert "interrupted before the first chunk" in capsys.readouterr().err
    assert output.read_bytes() == b"an older video"
    assert output.with_suffix(".json").read_text() == "its report"
    assert len(os.listdir(tmp_path)) == 2


def test_a_failure_keeps_the_chunks_before_it(loaded, tmp_path, monkeypatch, capsys):
    decode, calls = loaded.vae.decode, []

    def broken(latents: torch.Tensor, state: object) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("the device fell off")
        return decode(latents, state)

    monkeypatch.setattr(loaded.vae, "decode", broken)
    output = tmp_path / "out.mp4"
    assert main(words(output)) == 1
    report = report_of(output)
    assert report["stopped"] == "error: RuntimeError: the device fell off"
    assert report["length"]["made"] == probe(output).frames == 9
    assert "error: RuntimeError: the device fell off" in capsys.readouterr().err


def test_a_full_disk_keeps_the_frames_that_fit(noisy, tmp_path, capsys):
    output = tmp_path / "out.mp4"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        assert main(words(output, camera=("--action-string", "w-32"))) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    report = report_of(output)
    assert "could not be written to the end" in report["stopped"]
    assert 0 < report["length"]["made"] == probe(output).frames < 33
    assert report["video"]["bytes"] == output.stat().st_size <= 40_000
    assert "error: " in capsys.readouterr().err


def test_latents_that_cannot_be_written_end_the_run_with_its_frames_kept(loaded, tmp_path, monkeypatch):
    output, latents = tmp_path / "out.mp4", tmp_path / "latents"
    finish = Progress.finish_chunk

    def finish_and_remove(self: Progress, frames: int) -> None:
        finish(self, frames)
        if self.done_chunks == 2:
            (latents / "chunk_0000.safetensors").rename(tmp_path / "kept.safetensors")
            latents.rmdir()

    monkeypatch.setattr(Progress, "finish_chunk", finish_and_remove)
    assert main(words(output, "--save-latents", latents, camera=("--action-string", "w-32"))) == 1
    assert "chunk_0001.safetensors could not be written" in report_of(output)["stopped"]
    assert probe(output).frames == 21


def test_ctrl_c_in_a_terminal_ends_with_a_whole_video_and_a_report(tmp_path):
    output = tmp_path / "out.mp4"
    command = [sys.executable, "-m", "lingbot_core", *words(output, camera=("--action-path", LONG))]
    child = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    for line in child.stderr:
        if line.startswith("chunk 1/"):
            child.send_signal(signal.SIGINT)
            break
    rest = child.stderr.read()
    assert child.wait(timeout=60) == 130, rest
    assert "interrupted" in rest
    assert "Traceback" not in rest
    report = report_of(output)
    assert report["stopped"] == "interrupted"
    assert 9 <= report["length"]["made"] == probe(output).frames < report["length"]["planned"]


# Parts


@pytest.mark.parametrize("actions", [True, False])
def test_a_model_with_actions_gets_the_keys_of_an_action_string(actions):
    path = line_path(9)
    rows = np.tile([1.0, 0, 0, 0], (9, 1))
    route = PathRoute("a path", path, plan_length(9, CHUNK3), 3, (lambda: rows) if actions else None)
    start = StartRecord(
        CHUNK3, "", "", 0, "seeded", "", 48, 80, (50.0, 50.0, 40.0, 24.0), 1.0, "number", "identity", 16.0, None, ""
    )
    session = SimpleNamespace(history=History(start), carry=History(start).carry)
    if not actions:
        with pytest.raises(CameraError, match=r"steered by actions.*folder that has action.npy"):
            next(route.controls(session, None, act=True))
        return
    (only,) = route.controls(session, None, act=True)
    np.testing.assert_array_equal(only.actions, rows[:3])
    assert only.intrinsics == start.intrinsics


def test_the_room_of_a_report_is_taken_before_it_is_needed(tmp_path):
    report = ReservedFile(tmp_path / "report.json", 10_000)
    (part,) = tmp_path.iterdir()
    assert part.stat().st_size == 10_000
    report.write('{"stopped": null}\n')
    report.discard()
    assert (tmp_path / "report.json").read_text() == '{"stopped": null}\n'
    assert os.listdir(tmp_path) == ["report.json"]


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        with Progress(2, 21, stream) as progress:
            progress.step(0, 4)
            progress.finish_chunk(9)
            progress.say("a line")
            progress.finish_chunk(12)
        assert (progress.done_frames, progress.fps > 0) == (21, True)
    assert "step 1/4" in terminal.getvalue()
    assert "chunk 2/2" in terminal.getvalue()
    assert "left]" in terminal.getvalue()
    lines = pipe.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == ["chunk 1/2: 9/21 frames", "a line", "chunk 2/2: 21/21 frames"]
    assert lines[-1].endswith("0:00 left")
    assert [clock(s) for s in (0, 61.4, 3723)] == ["0:00", "1:01", "1:02:03"]


def test_threads_are_the_physical_cores_within_the_quota(tmp_path):
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    quota = tmp_path / "cpu.max"
    assert usable_cores({0, 1, 2, 3}, cpu_folder=tmp_path, quota_file=quota) == 2
    assert usable_cores({0, 2}, cpu_folder=tmp_path, quota_file=quota) == 1
    assert usable_cores({8, 9, 10}, cpu_folder=tmp_path, quota_file=quota) == 3
    quota.write_text("max 100000\n")
    assert usable_cores({8, 9, 10}, cpu_folder=tmp_path, quota_file=quota) == 3
    quota.write_text("150000 100000\n")
    assert usable_cores({8, 9, 10}, cpu_folder=tmp_path, quota_file=quota) == 2


def test_threads_that_somebody_chose_are_left_alone():
    # tests/conftest.py chooses one.
    assert limit_threads() == torch.get_num_threads() == 1


def test_the_package_is_cheap_to_import_and_has_its_public_names():
    code = (
        "import sys, lingbot_core as l; assert not {'torch', 'numpy'} & set(sys.modules); "
        "import lingbot_core.cli as c; c.build_parser(); assert 'torch' not in sys.modules; "
        "print(*(getattr(l, name) for name in l.__all__))"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "CameraTrajectory" in shown
    assert "World" in shown
    assert lingbot_core.World is World
    assert lingbot_core.WorldSession is WorldSession
    assert set(lingbot_core.__all__) <= set(dir(lingbot_core))
    with pytest.raises(AttributeError, match="no attribute 'Earth'"):
        _ = lingbot_core.Earth


def test_a_run_in_float8_says_so(tmp_path):
    output = tmp_path / "out.mp4"
    assert main(words(output, "--dtype", "float8")) == 0
    assert report_of(output)["machine"]["dtype"] == "float8 (float32 around it)"
    assert probe(output).metadata["dtype"] == "float8"


@pytest.mark.parametrize(("file", "why"), [("none.safetensors", "does not exist"), ("", "is a folder; name the file")])
def test_a_draft_decoder_is_looked_for_before_the_model_is_read(tmp_path, monkeypatch, capsys, file, why):
    monkeypatch.setattr(worlds, "load_dit", lambda *args, **options: pytest.fail("the model was read"))
    assert main(words(tmp_path / "out.mp4", "--decoder", tmp_path / file)) == 2
    assert why in capsys.readouterr().err.splitlines()[-1]


def test_the_version_is_that_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == lingbot_core.__version__
