"""Routes: the same controls however a run is cut into parts, and joints that neither jump nor stand still."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from lingbot_core.camera import PER_LATENT, PER_VIDEO, CameraTrajectory, Controls, clip_controls, step_pose
from lingbot_core.camera.controls import CameraCarry
from lingbot_core.camera.key_text import scaled_steps
from lingbot_core.camera.keys import action_string_poses
from lingbot_core.camera.pose import inverse
from lingbot_core.engine.history import ChunkRecord, History, StartRecord
from lingbot_core.engine.image import PreparedImage, prepare_image
from lingbot_core.engine.route import Route, route_from_camera, route_from_events, route_from_keys
from lingbot_core.errors import CameraError, InputFileError, LengthError, PresetError
from lingbot_core.presets import get_preset

CHUNK3, CHUNK4 = get_preset("v1-fast"), get_preset("v2-causal-fast")
IMAGE = prepare_image(np.zeros((240, 416, 3), np.uint8), size=(48, 80), mode="stretch")


class FakeSession:
    """What a route sees of a session: its history, its rules, and where the camera stands."""

    def __init__(self, preset=CHUNK3, unit: float = 0.7, first_delta="identity") -> None:
        start = StartRecord(
            preset, "", "", 0, "seeded", "", 48, 80, (50.0, 50.0, 40.0, 24.0), unit, "number", first_delta, 16, None, ""
        )  # fmt: skip
        self.history = History(start)

    @property
    def carry(self) -> CameraCarry:
        return self.history.carry

    def advance(self, controls: Controls) -> None:
        record = ChunkRecord(len(self.history), controls, "", "seeded", torch.zeros(1), None, {})
        self.history = self.history.append(record)


def drive(session: FakeSession, route: Route, begin: int = 0, chunks: int | None = None, act: bool = False) -> list:
    """Advances a session along a route, asking for each controls when the chunk before is made."""
    out = []
    for controls in route.controls(session, IMAGE, act=act, begin=begin, chunks=chunks):
        session.advance(controls)
        out.append(controls)
    return out


def wander(poses: int, seed: int = 3) -> CameraTrajectory:
    """A path that moves and turns about all axes, far from the origin, with intrinsics of its own."""
    rng = np.random.default_rng(seed)
    matrices = np.tile(np.eye(4), (poses, 1, 1))
    matrices[:, :3, :3] = Rotation.from_rotvec(np.cumsum(rng.normal(0, 0.03, (poses, 3)), axis=0)).as_matrix()
    matrices[:, :3, 3] = [40.0, -3.0, 200.0] + np.cumsum(rng.normal(0.1, 0.05, (poses, 3)), axis=0)
    return CameraTrajectory.from_arrays(matrices, [600, 610, 410, 250])


def script() -> str:
    poses = wander(36).poses
    lines = [
        {"frames": [["w"], [], ["j"]]},
        {"prompt": "Night falls", "poses": poses[:12].tolist(), "intrinsics": [300, 300, 416, 240]},
        {"frames": [["i"], ["w", "l"], ["d"]]},
        {},
        {"poses": poses[12:36].tolist()},
        {"prompt": "Day breaks"},
        {"frames": [["s"], ["s"], ["s"]]},
        {"frames": [["k"], ["k"], ["a"]]},
    ]
    return "\n".join(json.dumps({"event_id": i, **line}) for i, line in enumerate(lines))


ROUTES = {
    "path compressed": lambda: route_from_camera(wander(100), CHUNK3),
    "path cut": lambda: route_from_camera(wander(95), CHUNK3, length="cut"),
    "path held": lambda: route_from_camera(wander(60), CHUNK3, chunks=8, length="hold"),
    "keys per latent": lambda: route_from_keys("w-5, wj-9, none-2, il-8", CHUNK3),
    "keys per video": lambda: route_from_keys("w-23, wj-31, none-2, il-33", CHUNK3, steps=PER_VIDEO),
    "keys per chunk": lambda: route_from_keys("w\nw wj j\nnone\ni\nd\nl\ns\nk", CHUNK3),
    "script": lambda: route_from_events(script(), CHUNK3),
}


@pytest.mark.parametrize("first_delta", ["identity", "from_rest"])
@pytest.mark.parametrize("made_before", [0, 2])
@pytest.mark.parametrize("name", ROUTES)
def test_a_run_cut_into_parts_has_the_controls_of_one_long_run_bit_for_bit(name, made_before, first_delta):
    route = ROUTES[name]()
    assert route.chunks == 8
    runs = []
    for parts in ([8], [4, 4], [1] * 8, [3, 5]):
        session = FakeSession(first_delta=first_delta)
        if made_before:
            drive(session, route_from_keys("wi-4, dj-2", CHUNK3))
        run, begin = [], 0
        for chunks in parts:
            run += drive(session, ROUTES[name](), begin=begin, chunks=chunks)
            begin += chunks
        runs.append(run)
    assert [len(run) for run in runs] == [8] * 4
    for run in runs[1:]:
        assert run == runs[0]
        for mine, theirs in zip(run, runs[0], strict=True):
            assert mine.relative.tobytes() == theirs.relative.tobytes()
            assert mine.pose_after.tobytes() == theirs.pose_after.tobytes()


@pytest.mark.parametrize("name", ROUTES)
def test_controls_do_not_depend_on_when_the_session_is_advanced(name):
    session, waiting = FakeSession(), FakeSession()
    assert drive(session, ROUTES[name]()) == list(ROUTES[name]().controls(waiting, IMAGE, act=False))


def test_a_path_at_the_start_is_the_references_whole_path_rule():
    path = wander(100)
    made = drive(FakeSession(), route_from_camera(path, CHUNK3))
    latent = path.to_latent(3)
    expected = clip_controls(latent, chunk=3, unit=0.7, first_delta="identity", width=80, height=48)
    assert [controls.relative.tobytes() for controls in made] == [controls.relative.tobytes() for controls in expected]
    assert made[0].intrinsics == (50.0, 50.0, 40.0, 24.0)  # those that the session was started with


def absolute(run: list[Controls], begin: np.ndarray, unit: float = 0.7) -> np.ndarray:
    """Poses of all latent frames, from their steps alone."""
    pose, out = begin, []
    for step in np.concatenate([controls.relative for controls in run]):
        scaled = step.copy()
        scaled[:3, 3] *= unit
        pose = pose @ scaled
        out.append(pose)
    return np.array(out)


@pytest.mark.parametrize(("length", "poses"), [("compress", 81), ("cut", 85), ("hold", 85)])
def test_a_joined_path_is_laid_rigidly_where_the_camera_stands_and_moves_at_once(length, poses):
    path = wander(poses)
    session = FakeSession()
    drive(session, route_from_keys("wi-4, dj-2", CHUNK3))
    before = session.carry.pose
    run = drive(session, route_from_camera(path, CHUNK3, length=length), chunks=7)
    made = absolute(run, before)
    at = np.linspace(0, poses - 1, 22)[1:] if length == "compress" else np.arange(4, 85, 4)
    placed = before @ inverse(path.poses[:1]) @ path.poses
    positions = np.stack([np.interp(at, np.arange(poses), placed[:, axis, 3]) for axis in range(3)], axis=1)
    np.testing.assert_allclose(made[:, :3, 3], positions, atol=1e-9)
    np.testing.assert_allclose(made[-1], placed[-1], atol=1e-9)
    np.testing.assert_allclose(run[-1].pose_after, placed[-1], atol=1e-9)
    assert np.linalg.norm(run[0].relative[0][:3, 3]) > 0.1
    assert run[0].intrinsics == pytest.approx((600 * 80 / 832, 610 * 48 / 480, 410 * 80 / 832, 250 * 48 / 480))


def test_keys_go_on_in_the_ground_plane_from_where_the_camera_stands():
    for steps in (PER_LATENT, PER_VIDEO):
        session = FakeSession()
        drive(session, route_from_keys("i-6", CHUNK3))  # looks up by 24 degrees
        height = session.carry.pose[1, 3]
        begin = pose = session.carry.pose
        drive(session, route_from_keys("w-12", CHUNK3, steps=steps, chunks=1))
        for _ in range(3 * steps.steps_per_latent):
            pose = step_pose(pose, "w", steps)
        np.testing.assert_allclose(session.carry.pose, pose, atol=1e-12)
        assert session.carry.pose[1, 3] == height
        assert not np.allclose(session.carry.pose, begin)


def test_keys_per_video_frame_are_upstreams_action_string():
    text = "w-10,iw-15,none-6,jd-13"
    poses = action_string_poses(text)
    route = route_from_keys(text, CHUNK3, steps=PER_VIDEO)
    assert (route.chunks, route.first_delta, route.translation_unit()) == (4, "identity", (0.2, "key"))
    made = absolute(drive(FakeSession(), route), np.eye(4))
    np.testing.assert_allclose(made, poses[:45:4], atol=1e-12)


def test_a_route_entered_elsewhere_lies_its_own_earlier_pose_onto_the_camera():
    path = wander(93)
    part = drive(FakeSession(), route_from_camera(path, CHUNK3), begin=3, chunks=2)
    whole = drive(FakeSession(), route_from_camera(path, CHUNK3))
    np.testing.assert_allclose(part[0].relative[1:], whole[3].relative[1:], atol=1e-9)
    np.testing.assert_array_equal(part[0].relative[0], np.eye(4))  # the session's very first step
    np.testing.assert_allclose(part[1].relative, whole[4].relative, atol=1e-9)
    session = FakeSession()
    drive(session, route_from_keys("wi-9", CHUNK3))
    other = drive(session, route_from_camera(path, CHUNK3), begin=3, chunks=2)  # as many chunks, but another way here
    np.testing.assert_allclose([c.relative for c in other], [c.relative for c in whole[3:5]], atol=1e-9)


def test_lines_that_are_skipped_still_say_what_the_world_is():
    (controls,) = drive(FakeSession(), route_from_events(script(), CHUNK3), begin=3, chunks=1)
    assert controls.prompt == "Night falls"
    assert controls.intrinsics == pytest.approx((300 * 80 / 832, 30, 40, 24))
    whole = drive(FakeSession(), route_from_events(script(), CHUNK3))
    assert [c.prompt for c in whole] == [None, "Night falls", None, None, None, "Day breaks", None, None]
    assert [c.intrinsics is None for c in whole] == [True] + [False] * 7


def test_beyond_the_end_is_refused_with_both_numbers_unless_one_chose_to_stand_still():
    for make, still in (
        (lambda **more: route_from_camera(wander(21), CHUNK3, **more), {"length": "hold"}),
        (lambda **more: route_from_keys("w-6", CHUNK3, **more), {"stands_still": True}),
        (lambda **more: route_from_keys("w-20", CHUNK3, steps=PER_VIDEO, **more), {"stands_still": True}),
        (
            lambda **more: route_from_events('{"event_id":0}\n{"event_id":1,"frames":[["w"],[],[]]}', CHUNK3, **more),
            {"stands_still": True},
        ),
    ):
        route = make()
        assert (route.chunks, route.span(), route.span(1)) == (2, 2, 1)
        with pytest.raises(LengthError, match=r"8 chunks were asked .* have 2 in all: ask for 2 or less.*still"):
            route.controls(FakeSession(), IMAGE, act=False, chunks=8)
        with pytest.raises(LengthError, match=r"1 chunks were asked for after the first 2, but .* have 2 in all: "):
            route.span(2)
        session = FakeSession()
        run = drive(session, make(**still), chunks=5)
        assert len(run) == 5
        for controls in run[2:]:
            np.testing.assert_allclose(controls.relative, np.tile(np.eye(4), (3, 1, 1)), atol=1e-12)
        with pytest.raises(LengthError, match="at most 8333 can be made"):
            make(**still).span(0, 10**9)
    with pytest.raises(LengthError, match="chunks=0 must be a whole number of at least 1"):
        route.span(0, 0)
    with pytest.raises(LengthError, match="begin=-1 must be"):
        route.span(-1)


def test_keys_of_a_single_line_are_held_for_as_long_as_one_likes():
    route = route_from_keys("w wj w", CHUNK3)
    assert (route.chunks, route.span(), route.span(0, 4)) == (1, 1, 4)
    held = drive(FakeSession(), route, chunks=4)
    assert held == drive(FakeSession(), route_from_keys("w wj w", CHUNK3, chunks=4))
    assert [controls.keys for controls in held] == [("w", "jw", "w")] * 4
    session = FakeSession()
    assert drive(session, route, chunks=1) + drive(session, route, begin=1, chunks=3) == held
    with pytest.raises(LengthError, match="at most 8333"):
        route.span(0, 10**9)


def test_lengths_of_texts_follow_the_wish():
    assert route_from_keys("w", CHUNK3, chunks=5).chunks == 5
    assert route_from_keys("w-12, none-1", CHUNK4).chunks == 4
    assert route_from_keys("w-12", CHUNK3, chunks=2).chunks == 2
    assert route_from_keys("w-3", CHUNK3, chunks=4, stands_still=True).chunks == 4
    assert route_from_keys("w-12", CHUNK3, num_frames=30).chunks == 2
    assert route_from_keys("w-12", CHUNK3, num_frames=30, snap="up").chunks == 3
    with pytest.raises(LengthError, match=r"4 chunks were asked for, but .* have 1: ask for 1 or less"):
        route_from_keys("w-3", CHUNK3, chunks=4)
    with pytest.raises(LengthError, match="399993 frames were asked for; at most 100000"):
        route_from_keys("w-99999", CHUNK3)
    with pytest.raises(LengthError, match="give one of them"):
        route_from_keys("w-3", CHUNK3, chunks=4, num_frames=9)
    with pytest.raises(LengthError, match="at most 100000 can be made"):
        route_from_keys("w-3", CHUNK3, chunks=10**9, stands_still=True)
    with pytest.raises(LengthError, match="50 poses for 93 frames: ask for 49 frames or less"):
        route_from_camera(wander(50), CHUNK3, chunks=8)


def test_a_path_with_a_pose_per_latent_frame_is_taken_as_it_is():
    path = wander(93)
    latent = path.to_latent(3, mode="cut")
    a = drive(FakeSession(), route_from_camera(path, CHUNK3))
    b = drive(FakeSession(), route_from_camera(latent, CHUNK3))
    np.testing.assert_allclose([c.relative for c in b], [c.relative for c in a], atol=1e-9)


def test_actions_are_those_of_the_shown_frames():
    rows = np.zeros((93, 4))
    rows[:, 0] = np.arange(93) % 8 == 4
    path = route_from_camera(wander(93), CHUNK3, actions=lambda: rows)
    assert [c.actions[:, 0].tolist() for c in drive(FakeSession(), path, act=True, chunks=2)] == [[0, 1, 0], [1, 0, 1]]
    session = FakeSession()
    drive(session, route_from_keys("w-3", CHUNK3))
    cut = route_from_camera(wander(93), CHUNK3, length="cut", actions=lambda: rows)
    joined = drive(session, cut, act=True)
    assert np.concatenate([c.actions[:, 0] for c in joined]).tolist() == [1, 0] * 11 + [1, 0]
    keys = drive(FakeSession(), route_from_keys("w-5, a-4", CHUNK3), act=True)
    assert [c.actions.tolist() for c in keys][1] == [[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0]]
    video = drive(FakeSession(), route_from_keys("w-9, a-30", CHUNK3, steps=PER_VIDEO), act=True)
    assert np.concatenate([c.actions for c in video])[:4].tolist() == [[1, 0, 0, 0]] * 3 + [[0, 1, 0, 0]]
    with pytest.raises(CameraError, match="poses alone do not hold any"):
        drive(FakeSession(), route_from_camera(wander(93), CHUNK3), act=True)


def test_chunks_of_another_size_are_refused_by_name():
    with pytest.raises(PresetError, match=r"chunks of 3 latent frames, but the world's preset v2-causal-fast has 4"):
        route_from_keys("w-3", CHUNK3).controls(FakeSession(CHUNK4), IMAGE, act=False)


def test_choices_make_a_copy():
    route = route_from_keys("w-3", CHUNK3)
    other = route.with_choices(unit="0.5", first_delta="identity", stands_still=True)
    assert (route.unit, route.first_delta, route.stands_still) == ("key", "from_rest", False)
    assert (other.translation_unit(), other.first_delta, other.span(0, 9)) == ((0.5, "number"), "identity", 9)
    assert route.translation_unit("p95") == (pytest.approx(0.05), "p95")
    with pytest.raises(CameraError, match="'mile' is unknown"):
        route.with_choices(unit="mile")
    with pytest.raises(CameraError, match="'later' is unknown"):
        route.with_choices(first_delta="later")


def test_speed_and_turn_change_what_a_key_does():
    fast = scaled_steps(PER_LATENT, speed=2, turn=0.5)
    run = drive(FakeSession(first_delta="from_rest"), route_from_keys("wj-3", CHUNK3, steps=fast))
    slow = drive(FakeSession(first_delta="from_rest"), route_from_keys("wj-3", CHUNK3))
    assert np.linalg.norm(run[0].relative[0][:3, 3]) == pytest.approx(2 * np.linalg.norm(slow[0].relative[0][:3, 3]))
    assert Rotation.from_matrix(run[0].relative[0][:3, :3]).magnitude() == pytest.approx(np.radians(3))
    assert route_from_keys("w-3", CHUNK3, steps=scaled_steps(PER_LATENT, speed=0)).translation_unit() == (1.0, "clip")
    for bad in (-1, float("nan"), 10**9, True):
        with pytest.raises(CameraError, match="speed"):
            scaled_steps(PER_LATENT, speed=bad)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there are no keys"),
        (" \n,\n", "there are no keys"),
        ("# nothing", "there are no keys"),
        ("w-3, q-2", r"segment 2 \('q-2'\): .*'q' is not a key"),
        ("w-3, j", r"segment 2 \('j'\): there is no number of frames"),
        ("w-1000000000", "not a number of frames"),
        ("w-2.5", "'2.5' is not a number of frames"),
        ("w-6 wj-3", "a comma is missing"),
        ("w-999999999", "fewer than 100000 are accepted"),
        ("w\n\nw x j", "keys, line 3: .*'x' is not a key"),
        ("w w", "keys, line 1: 2 entries for one chunk; write one for the whole chunk, or 3"),
        ("w" * (1 << 21), "at most 1048576 are accepted"),
    ],
)  # fmt: skip
def test_bad_keys_are_refused_by_place(text, message):
    with pytest.raises(CameraError, match=message):
        route_from_keys(text, CHUNK3)


def test_line_breaks_and_full_width_commas_separate_segments():
    same = [drive(FakeSession(), route_from_keys(t, CHUNK3)) for t in ("w-6, wj-3", "W - 6\nwj-3\n", "w-6，jw-3,")]
    assert same[0] == same[1] == same[2]


def test_a_text_of_events_is_never_taken_for_a_file(tmp_path: Path):
    file = tmp_path / "script.jsonl"
    file.write_text(script())
    assert route_from_events(file, CHUNK3).chunks == 8
    with pytest.raises(InputFileError, match="event script, line 1 is not valid JSON"):
        route_from_events(str(file), CHUNK3)


def test_the_image_decides_the_pixels_of_intrinsics():
    route = route_from_camera(wander(93), CHUNK3)
    image: PreparedImage = replace(IMAGE, height=96, width=160)
    assert route.intrinsics(image) == pytest.approx((600 * 160 / 832, 610 * 96 / 480, 410 * 160 / 832, 250 * 96 / 480))
    assert route_from_keys("w-3", CHUNK3).intrinsics(image) is None
