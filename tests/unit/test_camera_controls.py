"""to_controls: one rule for poses and keys, chunk by chunk; records come back bit for bit."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.spatial.transform import Rotation

from lingbot_core.camera import (
    PER_LATENT,
    PER_VIDEO,
    CameraCarry,
    CameraTrajectory,
    Controls,
    KeyMotion,
    clip_controls,
    latent_actions,
    relative_steps,
    to_controls,
)
from lingbot_core.errors import CameraError

SETTINGS = {"unit": 0.5, "first_delta": "identity"}


def line(*z: float) -> np.ndarray:
    poses = np.tile(np.eye(4), (len(z), 1, 1))
    poses[:, 2, 3] = z
    return poses


def steps(controls: Controls) -> list[float]:
    return controls.relative[:, 2, 3].tolist()


def test_slices_of_a_path_in_real_speed_are_every_fourth_pose():
    path = line(*range(33))
    first, carry = to_controls(path[:9], latents=3, carry=CameraCarry.start(), **SETTINGS)
    assert steps(first) == [0, 8, 8]
    second, carry = to_controls(path[9:21], latents=3, carry=carry, **SETTINGS)
    assert steps(second) == [8, 8, 8]
    assert carry == CameraCarry(line(20)[0], 6)


@pytest.mark.parametrize(
    ("latents", "poses", "first", "later"),
    [
        (3, [6.0], [6, 6, 6], [2, 4, 6]),
        (3, [3.0, 9.0], [3, 6, 9], [2, 5, 9]),
        (2, [1.0, 2, 3, 4], [1, 4], [2, 4]),
        (1, [1.0, 2, 3], [1], [3]),
        (4, [4.0, 8.0], [4, 16 / 3, 20 / 3, 8], [2, 4, 6, 8]),
    ],
)
def test_any_number_of_poses_fills_a_chunk(latents, poses, first, later):
    settings = {"latents": latents, "unit": 1.0, "first_delta": "from_rest"}
    controls, _ = to_controls(line(*poses), carry=CameraCarry.start(), **settings)
    np.testing.assert_allclose(np.cumsum(steps(controls)), first, atol=1e-12)
    controls, carry = to_controls(line(*poses), carry=CameraCarry(np.eye(4), 3), **settings)
    np.testing.assert_allclose(np.cumsum(steps(controls)), later, atol=1e-12)
    np.testing.assert_allclose(carry.pose, line(poses[-1])[0], atol=1e-12)


def test_the_first_delta_of_a_session_follows_its_setting_and_later_ones_do_not():
    poses = line(3, 4, 5)
    for setting, expected in (("identity", [0, 1, 1]), ("from_rest", [3, 1, 1])):
        chosen = {"latents": 3, "unit": 1.0, "first_delta": setting}
        controls, carry = to_controls(poses, carry=CameraCarry.start(), **chosen)
        assert steps(controls) == expected
        controls, _ = to_controls(line(7, 8, 9), carry=carry, **chosen)
        assert steps(controls) == [2, 1, 1]


def test_a_key_tapped_in_the_very_first_latent_shows_only_from_rest():
    motion = KeyMotion(("w", "", ""), PER_LATENT)
    for setting, visible in (("identity", False), ("from_rest", True)):
        controls, carry = to_controls(motion, latents=3, unit=0.05, first_delta=setting, carry=CameraCarry.start())
        assert bool(controls.relative[0, 2, 3] > 0.9) is visible
        assert not controls.relative[1:, :3, 3].any()
        assert carry.pose[2, 3] == pytest.approx(0.05, abs=1e-6)


def test_held_keys_go_on_from_the_carried_pose():
    turned = np.eye(4)
    turned[:3, :3] = Rotation.from_euler("y", 90, degrees=True).as_matrix()
    turned[:3, 3] = (7, 8, 9)
    motion = KeyMotion((frozenset("w"), "none", "W"), PER_VIDEO)
    controls, carry = to_controls(motion, latents=3, unit=0.2, first_delta="identity", carry=CameraCarry(turned, 12))
    np.testing.assert_allclose(controls.relative[:, :3, 3], [[0, 0, 1], [0, 0, 0], [0, 0, 1]], atol=1e-5)
    np.testing.assert_allclose(carry.pose[:3, 3], [7.4, 8, 9], atol=1e-5)
    assert carry.latents == 15
    assert controls.keys == ("w", "", "w")


def test_a_camera_that_does_not_move_gives_identities():
    still = np.tile(line(12345.678), (9, 1, 1))
    controls, carry = to_controls(still, latents=3, carry=CameraCarry.start(), **SETTINGS)
    np.testing.assert_array_equal(controls.relative, np.tile(np.eye(4), (3, 1, 1)))
    controls, _ = to_controls(still, latents=3, carry=carry, **SETTINGS)
    np.testing.assert_array_equal(controls.relative, np.tile(np.eye(4), (3, 1, 1)))


def test_prompt_intrinsics_and_actions_ride_along():
    controls, _ = to_controls(
        line(0, 1, 2),
        latents=3,
        carry=CameraCarry.start(),
        prompt="a storm",
        intrinsics=(500, 501, 416, 240),
        actions=np.eye(4)[:3],
        **SETTINGS,
    )
    assert controls.prompt == "a storm"
    assert controls.intrinsics == (500.0, 501.0, 416.0, 240.0)
    np.testing.assert_array_equal(controls.actions, np.eye(4)[:3])
    assert controls.keys is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"unit": 0.0}, "unit"),
        ({"unit": float("nan")}, "unit"),
        ({"unit": "clip"}, "unit"),
        ({"first_delta": "rest"}, "first_delta"),
        ({"latents": 0}, "0 latent frames"),
        ({"motion": np.zeros((3, 3, 3))}, "shape"),
        ({"motion": np.full((3, 4, 4), np.nan)}, "row 0"),
        ({"motion": line(0, 1, 2) * 3}, "row 0"),
        ({"motion": KeyMotion(("w",), PER_LATENT)}, "1 key states for 3"),
        ({"motion": KeyMotion(("w", "q", ""), PER_LATENT)}, "'q'"),
        ({"intrinsics": (0, 1, 2, 3)}, "intrinsics"),
        ({"actions": np.zeros((2, 4))}, "2 rows of actions for 3"),
        ({"actions": np.full((3, 4), 7)}, "actions: row 0"),
        ({"prompt": 5}, "prompt"),
        ({"unit": 1e-320}, "NaN or infinity"),
    ],
)
def test_bad_controls_are_refused(change, words):
    arguments = {"motion": line(0, 1, 2), "latents": 3, "carry": CameraCarry.start(), **SETTINGS, **change}
    with pytest.raises(CameraError, match=words), np.errstate(over="ignore"):
        to_controls(arguments.pop("motion"), **arguments)


# --- records -------------------------------------------------------------------------------------------------------

numbers = st.floats(-1e6, 1e6)


@st.composite
def any_controls(draw) -> Controls:
    count = draw(st.integers(1, 4))
    pixels = st.floats(1e-3, 1e4)
    return Controls(
        draw(arrays(np.float64, (count, 4, 4), elements=numbers)),
        draw(arrays(np.float64, (4, 4), elements=numbers)),
        draw(st.none() | st.text(max_size=20)),
        draw(st.none() | st.tuples(pixels, pixels, numbers, numbers)),
        draw(st.none() | arrays(np.float64, (count, 4), elements=st.floats(0, 1))),
        draw(st.none() | st.just(("w",) * count)),
    )


@settings(max_examples=60, deadline=None)
@given(any_controls())
def test_controls_come_back_from_json_bit_for_bit(controls):
    text = json.dumps(controls.to_json())
    for back in (Controls.from_json(text), Controls.from_json(json.loads(text))):
        assert back == controls
        assert hash(back) == hash(controls)
        assert back.relative.tobytes() == controls.relative.tobytes()
        assert back.pose_after.tobytes() == controls.pose_after.tobytes()


@settings(max_examples=20, deadline=None)
@given(any_controls(), st.integers(0, 15))
def test_controls_that_differ_in_one_bit_are_not_equal(controls, at):
    relative = controls.relative.copy()
    relative[0].flat[at] = np.nextafter(relative[0].flat[at], np.inf)
    changed = Controls(
        relative, controls.pose_after, controls.prompt, controls.intrinsics, controls.actions, controls.keys
    )
    assert changed != controls


def test_controls_cannot_be_written_to():
    controls = Controls(line(0, 1), np.eye(4))
    with pytest.raises(ValueError, match="read-only"):
        controls.relative[0] = 0
    assert controls != "controls"
    assert controls.latents == 2


GOOD = Controls(line(0), np.eye(4)).to_json()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("{", "not valid JSON"),
        pytest.param("[" * 100_000, "not valid JSON", id="deep"),
        ("[]", "JSON object, not list"),
        ({"pose_after": GOOD["pose_after"]}, "lack the field 'relative'"),
        ({**GOOD, "speed": 1}, "no field 'speed'"),
        ({**GOOD, "relative": [[1]]}, "relative has shape"),
        ({**GOOD, "relative": []}, "relative has shape"),
        ({**GOOD, "relative": "x"}, "relative has dtype"),
        ({**GOOD, "pose_after": [[float("nan")] * 4] * 4}, "pose_after holds NaN"),
        ({**GOOD, "keys": "wasd"}, "keys must be a list"),
        ({**GOOD, "keys": [1]}, "keys must be a list"),
        ({**GOOD, "intrinsics": [1, 2]}, "intrinsics"),
    ],
)
def test_bad_records_are_refused(data, words):
    with pytest.raises(CameraError, match=words):
        Controls.from_json(data)


@pytest.mark.parametrize("latents", [-1, 1.5, True])
def test_the_carry_is_checked(latents):
    with pytest.raises(CameraError, match="latents"):
        CameraCarry(np.eye(4), latents)


# --- whole clips ---------------------------------------------------------------------------------------------------


def curve(count: int) -> np.ndarray:
    poses = np.tile(np.eye(4), (count, 1, 1))
    angle = np.linspace(0, 2, count)
    poses[:, :3, :3] = Rotation.from_euler("yx", np.stack([angle, 0.3 * np.sin(angle)], axis=1)).as_matrix()
    poses[:, :3, 3] = np.stack([np.sin(angle), 0 * angle, angle**2], axis=1)
    return poses


def test_a_whole_clip_equals_the_steps_of_its_latent_poses():
    latent = CameraTrajectory.from_arrays(curve(33)).to_latent(3)
    parts = clip_controls(
        latent, chunk=3, unit=2.0, first_delta="identity", width=480, height=272, prompt="go", actions=np.ones((9, 4))
    )
    expected = relative_steps(latent.poses)
    expected[:, :3, 3] /= 2.0
    np.testing.assert_allclose(np.concatenate([part.relative for part in parts]), expected, atol=1e-14)
    np.testing.assert_allclose(parts[-1].pose_after, latent.poses[-1], atol=1e-14)
    assert [part.prompt for part in parts] == ["go", None, None]
    assert [part.intrinsics for part in parts] == [(500.0, 500.0, 240.0, 136.0)] * 3
    assert all(part.actions.shape == (3, 4) for part in parts)


def test_slices_of_the_right_size_give_the_same_controls_as_the_whole_path():
    path = CameraTrajectory.from_arrays(curve(33))
    whole = clip_controls(path.to_latent(3), chunk=3, unit=1.0, first_delta="identity", width=832, height=480)
    carry = CameraCarry.start()
    for part, (begin, end) in zip(whole, ((0, 9), (9, 21), (21, 33)), strict=True):
        controls, carry = to_controls(path.poses[begin:end], latents=3, unit=1.0, first_delta="identity", carry=carry)
        np.testing.assert_allclose(controls.relative, part.relative, atol=1e-12)


def test_clips_must_be_whole_chunks_of_latent_poses():
    video = CameraTrajectory.from_arrays(curve(33))
    options = {"unit": 1.0, "first_delta": "identity", "width": 832, "height": 480}
    for trajectory, chunk in ((video, 3), (video.to_latent(3), 4)):
        with pytest.raises(CameraError, match="to_latent first"):
            clip_controls(trajectory, chunk=chunk, **options)
    with pytest.raises(CameraError, match="8 rows of actions for 9"):
        clip_controls(video.to_latent(3), chunk=3, actions=np.zeros((8, 4)), **options)


def test_the_act_model_sees_every_fourth_row_of_actions():
    rows = np.zeros((33, 4))
    rows[::8, 0] = 1
    rows[1::4, 3] = 1
    got = latent_actions(rows, 9)
    np.testing.assert_array_equal(got, [[1, 0, 0, 0], [0, 0, 0, 0]] * 4 + [[1, 0, 0, 0]])
    with pytest.raises(CameraError, match=r"33 rows .* 37 are needed"):
        latent_actions(rows, 10)
