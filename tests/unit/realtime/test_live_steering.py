"""What a driver holds, taps and turns, as the chunks that take it see it."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from lingbot_core.camera.controls import CameraCarry, KeyMotion, to_controls
from lingbot_core.camera.keys import PER_LATENT, pitch_of, walk
from lingbot_core.realtime.live_steering import HOLD_SECONDS, LOOK_PER_LATENT, Control, Speeds, Steering


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def steering(clock) -> Steering:
    return Steering(clock)


def held(keys: str, seq: int = 0, press: str | None = None) -> Control:
    return Control(seq, press=keys if press is None else press, held=frozenset(keys))


def shown(taken) -> list[str]:
    return ["".join(sorted(keys)) for keys in taken.keys]


def test_a_held_key_is_held_in_every_latent_frame_until_it_is_let_go(steering):
    steering.add(held("w"))
    assert shown(steering.take(3)) == ["w", "w", "w"]
    assert shown(steering.take(3)) == ["w", "w", "w"]
    steering.add(Control(1))
    assert shown(steering.take(3)) == ["", "", ""]


@pytest.mark.parametrize(("taps", "moved"), [(1, ["w", "", ""]), (2, ["w", "w", ""]), (9, ["w", "w", "w"])])
def test_taps_between_two_chunks_move_a_latent_frame_each(steering, taps, moved):
    for number in range(taps):
        steering.add(Control(2 * number, press="w", held=frozenset("w")))
        steering.add(Control(2 * number + 1))
    assert shown(steering.take(3)) == moved
    assert shown(steering.take(3)) == ["", "", ""]


def test_a_key_that_was_held_over_a_boundary_does_not_move_again_when_it_is_let_go(steering):
    steering.add(held("d"))
    steering.take(3)
    steering.add(Control(1))
    assert shown(steering.take(3)) == ["", "", ""]


def test_messages_that_come_late_mean_nothing(steering):
    assert steering.add(held("w", seq=5))
    assert not steering.add(Control(5))
    assert not steering.add(Control(4))
    assert steering.held == "w"
    assert steering.take(3).seq == 5


def test_keys_alone_are_bitwise_the_models_own_recipe(steering):
    steering.add(held("wl"))
    taken = steering.take(3)
    assert taken.only_keys
    carry = CameraCarry(walk(np.eye(4), ["wj"] * 5, PER_LATENT, per_latent=True)[-1], 5)
    settings = {"latents": 3, "unit": 0.05, "first_delta": "from_rest", "carry": carry}
    mine, _ = to_controls(KeyMotion(("lw",) * 3, taken.speeds.steps), **settings)
    other, _ = to_controls(KeyMotion(("wl",) * 3, PER_LATENT), **settings)
    assert np.array_equal(mine.relative, other.relative)
    np.testing.assert_allclose(taken.poses(carry.pose), walk(carry.pose, ["wl"] * 3, PER_LATENT, per_latent=True))


@pytest.mark.parametrize(("key", "y"), [("e", -0.15), ("q", 0.15)])
def test_e_goes_up_and_q_down_in_a_world_whose_y_points_down(steering, key, y):
    steering.add(held(key))
    taken = steering.take(3)
    assert not taken.only_keys
    poses = taken.poses(np.eye(4))
    np.testing.assert_allclose(poses[-1, :3, 3], [0, y, 0], atol=1e-12)
    np.testing.assert_allclose(poses[-1, :3, :3], np.eye(3))


def test_speeds_are_factors_of_a_held_keys_step(steering):
    steering.speeds = Speeds(move=0.5, turn=2.0)
    steering.add(held("wl"))
    pose = steering.take(1).poses(np.eye(4))[0]
    np.testing.assert_allclose(np.linalg.norm(pose[:3, 3]), 0.025, rtol=1e-5)
    np.testing.assert_allclose(Rotation.from_matrix(pose[:3, :3]).as_euler("yxz", degrees=True), [12, 0, 0], atol=1e-9)


def test_a_stick_that_is_pushed_half_way_moves_half_as_far_and_with_a_key_no_further_than_the_key(steering):
    steering.add(Control(0, axes=(0.5, 0, 0, 0, 0)))
    half = steering.take(1).poses(np.eye(4))[0]
    np.testing.assert_allclose(half[:3, 3], [0, 0, 0.025], atol=1e-6)
    steering.add(Control(1, held=frozenset("w"), axes=(0.5, 0, 0, 0, 0)))
    np.testing.assert_allclose(steering.take(1).poses(np.eye(4))[0, :3, 3], [0, 0, 0.05], atol=1e-6)


def test_what_a_mouse_turns_further_than_a_chunk_may_is_left_for_the_next(steering):
    yaw, _ = LOOK_PER_LATENT
    steering.add(Control(0, look=(3 * yaw + 6.0, 0.0)))
    first, second, third = (steering.take(3) for _ in range(3))
    assert first.look == (yaw, 0.0)
    assert second.look == pytest.approx((2.0, 0.0))
    assert third.look == (0.0, 0.0)
    turned = Rotation.from_matrix(second.poses(first.poses(np.eye(4))[-1])[-1, :3, :3])
    np.testing.assert_allclose(turned.as_euler("yxz", degrees=True), [3 * yaw + 6.0, 0, 0], atol=1e-9)


def test_a_mouse_looks_up_to_the_limit_and_not_over_it(steering):
    pose = np.eye(4)
    for number in range(30):
        steering.add(Control(number, look=(0.0, 20.0)))
        pose = steering.take(3).poses(pose)[-1]
    assert pitch_of(pose) == pytest.approx(85.0)
    steering.add(Control(99, look=(0.0, -180.0)))
    assert pitch_of(steering.take(3).poses(pose)[-1]) < 85.0


def test_a_chunk_that_failed_gives_back_taps_and_turns(steering):
    steering.add(Control(0, press="wj", look=(6.0, 0.0)))
    taken = steering.take(3)
    assert steering.take(3).look == (0.0, 0.0)
    steering.give_back(taken)
    again = steering.take(3)
    assert (shown(again), again.look, again.at) == (shown(taken), taken.look, taken.at)


def test_keys_of_a_driver_who_says_nothing_any_more_are_up(steering, clock):
    steering.add(Control(0, held=frozenset("w"), axes=(1.0, 0, 0, 0, 0)))
    clock.now += HOLD_SECONDS
    assert steering.held == "w"
    clock.now += 0.1
    assert steering.held == ""
    taken = steering.take(3)
    assert (shown(taken), taken.axes) == (["", "", ""], (0.0,) * 5)


def test_the_time_of_a_chunk_is_that_of_the_first_thing_that_is_new_in_it(steering, clock):
    steering.add(held("w"))
    clock.now += 1
    steering.add(held("w", seq=1, press=""))  # repeated, because nothing changed
    assert steering.take(3).at == 100.0
    steering.add(held("w", seq=2, press=""))
    assert steering.take(3).at is None
    clock.now += 1
    steering.add(Control(3))
    assert steering.take(3).at == 102.0


def test_after_a_change_of_drivers_nothing_of_the_first_counts(steering):
    steering.add(Control(9, press="w", held=frozenset("w"), axes=(1.0,) * 5, look=(5.0, 5.0)))
    steering.clear()
    taken = steering.take(3)
    assert (shown(taken), taken.axes, taken.look, taken.at) == (["", "", ""], (0.0,) * 5, (0.0, 0.0), None)
    assert steering.add(Control(0))
