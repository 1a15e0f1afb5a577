"""Keys: action strings, arrays, single steps and held keys."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from lingbot_core.camera import (
    KEY_STEPS,
    PER_LATENT,
    PER_VIDEO,
    HeldKeys,
    KeySteps,
    action_string_poses,
    arrays_from_keys,
    frames_of,
    keys_from_arrays,
    normalize_action_string,
    pad_to_4k1,
    parse_action_string,
    parse_keys,
    step_pose,
    walk,
)
from lingbot_core.camera.keys import format_keys, pitch_of
from lingbot_core.errors import CameraError

NONE = frozenset()
key_sets = st.frozensets(st.sampled_from("wasdijkl"))


def looking(yaw: float = 0.0, pitch: float = 0.0, position=(0.0, 0.0, 0.0)) -> np.ndarray:
    pose = np.eye(4)
    pose[:3, :3] = Rotation.from_euler("YX", [yaw, pitch], degrees=True).as_matrix()
    pose[:3, 3] = position
    return pose


# --- strings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "keys"),
    [("w", "w"), ("WD", "wd"), ("", ""), ("none", ""), (" None ", ""), ("ww", "w"), (["A", "s"], "as")],
)
def test_keys_are_read_in_any_case(text, keys):
    assert parse_keys(text) == frozenset(keys)


@pytest.mark.parametrize(("text", "key"), [("x", "x"), ("wq", "q"), ("w d", " "), ("nonew", "e"), (["up"], "up")])
def test_other_keys_are_refused_by_name(text, key):
    with pytest.raises(CameraError, match=f"'{key}' is not a key"):
        parse_keys(text)


@given(key_sets)
def test_keys_come_back_from_their_text(keys):
    assert parse_keys(format_keys(keys)) == keys


@given(st.lists(st.tuples(key_sets, st.integers(1, 500)), min_size=1, max_size=8), st.data())
def test_action_strings_come_back_however_they_are_written(segments, data):
    parts = []
    for keys, count in segments:
        letters = data.draw(st.permutations(sorted(keys)))
        text = "".join(key.upper() if data.draw(st.booleans()) else key for key in letters)
        text = text or data.draw(st.sampled_from(["none", "NONE", ""]))
        parts.append(data.draw(st.sampled_from(["", " ", "\t"])).join([text, f"-{count}"]))
    text = parts[0]
    for part in parts[1:]:
        text += data.draw(st.sampled_from([",", " , ", "\uff0c", "\uff0c\n"])) + part
    assert parse_action_string(text) == tuple(segments)
    assert parse_action_string(normalize_action_string(text)) == tuple(segments)


@given(st.text(alphabet="wasdijklnoe-,0123456789. x+_\uff0c", max_size=14))
def test_any_text_is_read_or_refused_with_a_camera_error(text):
    try:
        segments = parse_action_string(text)
    except CameraError:
        return
    assert segments
    assert all(count >= 1 and keys <= set("wasdijkl") for keys, count in segments)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        ("w-3,", "segment 2 is empty"),
        (",w-3", "segment 1 is empty"),
        ("w-3,w", r"segment 2 \('w'\).*no number"),
        ("w-3,x-2", "segment 2 .*'x' is not a key"),
        ("w-0", "'0' is not a number"),
        ("w-12 wj-8", "a comma is missing"),
        ("w--3,", "'-' is not a key"),
        ("w-1.5", "'1.5'"),
        ("w-+3", r"'\+3'"),
        ("w-1_0", "'1_0'"),
        ("w-\u0663", "is not a number of frames"),
        ("w-" + "9" * 5000, "is not a number of frames"),
        ("w-99999999", "lasts 99999999 frames"),
        ("w-60000,s-60000", "lasts 120000 frames"),
    ],
)
def test_a_bad_action_string_is_refused_naming_the_segment(text, words):
    with pytest.raises(CameraError, match=words) as caught:
        parse_action_string(text)
    assert len(str(caught.value)) < 300


@given(st.lists(key_sets, min_size=1, max_size=30))
def test_padding_adds_the_fewest_idle_frames(frames):
    padded = pad_to_4k1(frames)
    assert len(padded) % 4 == 1
    assert padded[: len(frames)] == frames
    assert 0 <= len(padded) - len(frames) <= 3
    assert all(keys == NONE for keys in padded[len(frames) :])


def test_sixteen_frames_forward_give_eighteen_poses():
    poses = action_string_poses("w-16")
    assert poses.shape == (18, 4, 4)
    np.testing.assert_array_equal(poses[0], np.eye(4))
    np.testing.assert_allclose(poses[:, 2, 3], [0.05 * min(i, 16) for i in range(18)], atol=1e-5)


# --- arrays --------------------------------------------------------------------------------------------------------


@given(st.lists(key_sets, min_size=1, max_size=12))
def test_key_arrays_and_sets_are_the_same_thing(frames):
    wasd, ijkl = arrays_from_keys(frames)
    assert wasd.shape == ijkl.shape == (len(frames), 4)
    assert keys_from_arrays(wasd, ijkl) == frames
    assert keys_from_arrays(wasd) == [keys & set("wasd") for keys in frames]


def test_columns_are_w_a_s_d_and_i_j_k_l():
    wasd, ijkl = arrays_from_keys([*"wasd", *"ijkl"])
    np.testing.assert_array_equal(wasd[:4], np.eye(4))
    np.testing.assert_array_equal(ijkl[4:], np.eye(4))
    assert not wasd[4:].any()
    assert not ijkl[:4].any()


@pytest.mark.parametrize(
    ("wasd", "ijkl", "words"),
    [
        (np.zeros((3, 3)), None, r"wasd has shape \[3, 3\]"),
        (np.zeros(4), None, r"wasd has shape \[4\]"),
        (np.zeros((0, 4)), None, "1 to"),
        (np.zeros((3, 4)), np.zeros((2, 4)), "ijkl has 2 rows but wasd has 3"),
        ([[0, 0, 0, 0], [0, 2, 0, 0]], None, "row 1 "),
        ([[0, np.nan, 0, 0]], None, "row 0 "),
    ],
)
def test_bad_key_arrays_are_refused(wasd, ijkl, words):
    with pytest.raises(CameraError, match=words):
        keys_from_arrays(wasd, ijkl)


# --- steps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "direction"),
    [("w", (0, 0, 1)), ("s", (0, 0, -1)), ("d", (1, 0, 0)), ("a", (-1, 0, 0)), ("wd", (1, 0, 1)), ("as", (-1, 0, -1))],
)
def test_moves_follow_the_look_direction_in_the_ground_plane(keys, direction):
    for yaw, pitch in ((0, 0), (90, 0), (30, 60), (-120, -80)):
        start = looking(yaw, pitch, (3, 4, 5))
        moved = step_pose(start, keys, PER_LATENT)
        ground = Rotation.from_euler("y", yaw, degrees=True).apply(direction)
        # Upstream's guard shortens each move by a millionth of the flattened axis.
        np.testing.assert_allclose(moved[:3, 3], [3, 4, 5] + 0.05 * ground, atol=1e-6)
        np.testing.assert_array_equal(moved[:3, :3], start[:3, :3])


def test_looking_right_turns_clockwise_seen_from_above_and_looking_up_raises_the_view():
    right = step_pose(np.eye(4), "l", PER_LATENT)[:3, 2]
    np.testing.assert_allclose(right, [math.sin(math.radians(6)), 0, math.cos(math.radians(6))], atol=1e-12)
    up = step_pose(np.eye(4), "i", PER_LATENT)[:3, 2]
    np.testing.assert_allclose(up, [0, -math.sin(math.radians(4)), math.cos(math.radians(4))], atol=1e-12)


@pytest.mark.parametrize("keys", ["ws", "ad", "jl", "ik", "wasdijkl", "", "none"])
def test_opposite_keys_cancel_exactly(keys):
    start = looking(33, 12, (1, 2, 3))
    np.testing.assert_array_equal(step_pose(start, keys, PER_VIDEO), start)


def test_a_pitch_that_would_pass_the_limit_is_dropped_but_not_its_yaw_and_move():
    start = looking(0, 84)
    moved = step_pose(start, "ilw", PER_LATENT)
    assert pitch_of(moved) == pytest.approx(84)
    np.testing.assert_allclose(moved, step_pose(start, "lw", PER_LATENT))
    assert pitch_of(step_pose(start, "k", PER_LATENT)) == pytest.approx(80)


@pytest.mark.parametrize("sign", ["i", "k"])
@pytest.mark.parametrize("degrees", [5.0, 8.5, 17.0])
def test_the_limit_itself_is_reached_in_spite_of_rounding(sign, degrees):
    steps = KeySteps("test", 0.0, degrees, 0.0, 1)
    pitches = [pitch_of(pose) for pose in walk(looking(57), [sign] * 40, steps, per_latent=True)]
    assert abs(pitches[-1]) == pytest.approx(85, abs=1e-9)


@pytest.mark.parametrize("pitch", [88.0, -88.0])
def test_a_pose_beyond_the_limit_may_come_back_and_not_go_on(pitch):
    start = looking(10, pitch)
    away, back = ("i", "k") if pitch > 0 else ("k", "i")
    np.testing.assert_array_equal(step_pose(start, away, PER_VIDEO), start)
    assert abs(pitch_of(step_pose(start, back, PER_VIDEO))) == pytest.approx(86)


def test_large_steps_do_not_jump_over_the_pole():
    steps = KeySteps("test", 0.0, 30.0, 0.0, 1)
    assert pitch_of(step_pose(looking(0, 80), "i", steps)) == pytest.approx(80)
    assert pitch_of(step_pose(looking(0, 100), "k", steps)) == pytest.approx(80)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(key_sets, min_size=1, max_size=40),
    st.floats(-180, 180),
    st.floats(-85, 85),
    st.sampled_from(list(KEY_STEPS.values())),
)
def test_walks_stay_rigid_upright_and_within_the_limit(frames, yaw, pitch, steps):
    poses = walk(looking(yaw, pitch, (1, 0, 2)), frames, steps, per_latent=True)
    rotations = poses[:, :3, :3]
    np.testing.assert_allclose(
        rotations @ rotations.transpose(0, 2, 1), np.tile(np.eye(3), (len(poses), 1, 1)), atol=1e-12
    )
    np.testing.assert_allclose(rotations[:, 1, 0], 0, atol=1e-12)
    assert max(abs(pitch_of(pose)) for pose in poses) <= 85 + 1e-6
    np.testing.assert_allclose(poses[:, 1, 3], 0, atol=1e-12)


def test_steps_per_latent_frame():
    start = looking(20, -10, (1, 2, 3))
    np.testing.assert_array_equal(
        walk(start, ["wl", "i"], PER_VIDEO, per_latent=True),
        walk(start, ["wl"] * 4 + ["i"] * 4, PER_VIDEO, per_latent=False)[3::4],
    )
    assert PER_LATENT.move_per_latent == pytest.approx(0.05)
    assert PER_VIDEO.move_per_latent == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("move", -1.0),
        ("pitch_deg", math.nan),
        ("yaw_deg", math.inf),
        ("steps_per_latent", 0),
        ("steps_per_latent", 1.5),
        ("pitch_limit_deg", 90.0),
        ("pitch_limit_deg", 0.0),
    ],
)
def test_key_steps_are_checked(field, value):
    values = {"move": 0.05, "pitch_deg": 4.0, "yaw_deg": 6.0, "steps_per_latent": 1, field: value}
    with pytest.raises(CameraError, match=field):
        KeySteps("mine", **values)


# --- held keys -----------------------------------------------------------------------------------------------------


def test_a_held_key_is_taken_until_it_is_released():
    held = HeldKeys()
    held.down("w")
    assert [held.take() for _ in range(3)] == [frozenset("w")] * 3
    held.up("w")
    assert held.take() == NONE


def test_a_tap_between_two_takes_moves_exactly_one_step():
    held = HeldKeys()
    held.down("w")
    held.up("w")
    assert [held.take() for _ in range(3)] == [frozenset("w"), NONE, NONE]


def test_taps_and_held_keys_add_up():
    held = HeldKeys()
    held.down("wl")
    held.down("I")
    held.up("i")
    assert held.take() == frozenset("wli")
    assert held.take() == frozenset("wl")


def test_opposite_keys_are_both_reported_and_cancel_when_stepping():
    held = HeldKeys()
    held.down("w")
    held.down("s")
    keys = held.take()
    assert keys == frozenset("ws")
    np.testing.assert_array_equal(step_pose(np.eye(4), keys, PER_LATENT), np.eye(4))


def test_release_all_forgets_held_keys_and_taps():
    held = HeldKeys()
    held.down("w")
    held.down("a")
    held.up("a")
    held.release_all()
    assert held.take() == NONE


def test_releasing_a_key_that_is_not_down_does_nothing():
    held = HeldKeys()
    held.up("w")
    assert held.take() == NONE


def test_unknown_keys_leave_the_state_alone():
    held = HeldKeys()
    held.down("w")
    with pytest.raises(CameraError):
        held.down("q")
    assert held.take() == frozenset("w")


def test_frames_of_repeats_each_segment():
    assert frames_of(parse_action_string("w-2,none-1")) == [frozenset("w"), frozenset("w"), NONE]
