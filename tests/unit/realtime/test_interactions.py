"""What interactions make of the chunks that follow them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from lingbot_core.camera.keys import PER_LATENT, step_pose
from lingbot_core.realtime.deltas import approach_poses, velocity_poses
from lingbot_core.realtime.errors import MessageError
from lingbot_core.realtime.interactions import WAITING, Interactions
from lingbot_core.realtime.video_messages import CameraMove, Interaction

LATENTS = 3


def pose(translation=(0, 0, 0), degrees=(0, 0, 0)) -> np.ndarray:
    out = np.eye(4)
    out[:3, :3] = Rotation.from_euler("xyz", degrees, degrees=True).as_matrix()
    out[:3, 3] = translation
    return out


def velocity(event_id: str, *args, **fields) -> Interaction:
    return Interaction(event_id, camera=CameraMove("velocity", pose(*args)), **fields)


def target(event_id: str, *args, **fields) -> Interaction:
    return Interaction(event_id, camera=CameraMove("target", pose(*args)), **fields)


class Ride:
    """Chunks one after the other, the camera going where the interactions send it."""

    def __init__(self, **options) -> None:
        self.interactions = Interactions(LATENTS, **options)
        self.pose = np.eye(4)

    def chunk(self, *interactions: Interaction):
        for one in interactions:
            self.interactions.queue(one)
        turn = self.interactions.turn(self.pose)
        self.interactions.made(turn)
        if turn.poses is not None:
            self.pose = turn.poses[-1]
        return turn


def ids(turn) -> tuple:
    return turn.started, turn.active, turn.completed


def test_without_interactions_nothing_is_wanted():
    turn = Ride().chunk()
    assert (turn.prompt, turn.poses, *ids(turn)) == (None, None, (), (), ())


def test_a_velocity_is_seen_from_the_latent_frame_before_and_held_until_it_is_replaced():
    ride = Ride()
    first = ride.chunk(velocity("a", (0, 0, 1), (0, 90, 0)))
    # Forward and a quarter turn to the right, three times: round a square's corners.
    assert first.poses[:, :3, 3] == pytest.approx(np.array([[0, 0, 1], [1, 0, 1], [1, 0, 0]]), abs=1e-12)
    second = ride.chunk()
    assert second.poses[0] == pytest.approx(np.eye(4), abs=1e-12)
    assert (ids(first), ids(second)) == ((("a",), ("a",), ("a",)), ((), ("a",), ()))
    third = ride.chunk(velocity("b"))
    assert np.array_equal(third.poses, np.repeat(second.poses[-1:], 3, axis=0))
    assert ids(third) == (("b",), ("b",), ("b",))


@pytest.mark.parametrize("key", "wasdijkl")
def test_a_held_key_is_the_velocity_that_one_step_of_it_makes(key):
    delta, expected = step_pose(np.eye(4), key, PER_LATENT), [np.eye(4)]
    for _ in range(6):
        expected.append(step_pose(expected[-1], key, PER_LATENT))
    assert velocity_poses(np.eye(4), delta, 6) == pytest.approx(np.array(expected[1:]), abs=1e-6)


def test_a_target_is_reached_evenly_and_exactly():
    ride, goal = Ride(), pose((6, 0, -3), (0, 60, 0))
    turns = [ride.chunk(target("t", (6, 0, -3), (0, 60, 0), transition_chunks=2)), ride.chunk(), ride.chunk()]
    poses = np.concatenate([turn.poses for turn in turns])
    assert poses[:6, :3, 3] == pytest.approx(np.outer(np.arange(1, 7), [1, 0, -0.5]))
    turned = Rotation.from_matrix(poses[:6, :3, :3]).as_euler("yxz", degrees=True)[:, 0]
    assert turned == pytest.approx(np.arange(1, 7) * 10.0)
    assert all(np.array_equal(one, goal) for one in poses[5:])
    assert [ids(turn) for turn in turns] == [(("t",), ("t",), ()), ((), ("t",), ("t",)), ((), (), ())]


@pytest.mark.parametrize(("chunks", "first"), [(None, 1 / 3), (1, 1 / 3), (0, 1.0)])
def test_a_target_without_a_transition_takes_a_chunk_and_with_none_it_is_a_jump(chunks, first):
    turn = Ride().chunk(target("t", (3, 0, 0), transition_chunks=chunks))
    assert turn.poses[0, 0, 3] == pytest.approx(3 * first)
    assert np.array_equal(turn.poses[-1], pose((3, 0, 0)))
    assert turn.completed == ("t",)


def test_targets_are_relative_to_the_start_of_the_session():
    ride = Ride()
    ride.interactions.start = ride.pose = pose((10, 0, 0), (0, 90, 0))
    turn = ride.chunk(target("t", (0, 0, 2)))
    assert turn.poses[-1] == pytest.approx(pose((12, 0, 0), (0, 90, 0)), abs=1e-12)


def test_another_camera_takes_over_where_the_last_one_was():
    ride = Ride()
    ride.chunk(target("t", (6, 0, 0), transition_chunks=2))
    turn = ride.chunk(velocity("v", (0, 0, 1)))
    assert turn.poses[0, :3, 3].tolist() == [3, 0, 1]
    assert ids(turn) == (("v",), ("v",), ("v",))
    turn = ride.chunk(target("u", (0, 0, 0)))
    assert turn.poses[0, :3, 3] == pytest.approx([2, 0, 2])


@pytest.mark.parametrize(("chunks", "index"), [(None, 0), (0, 0), (1, 0), (2, 1), (3, 2)])
def test_a_prompt_changes_as_a_whole_in_the_chunk_that_its_transition_ends_in(chunks, index):
    ride = Ride()
    turns = [ride.chunk(Interaction("p", "snow", transition_chunks=chunks)), *(ride.chunk() for _ in range(3))]
    assert [turn.prompt for turn in turns] == [("snow" if i == index else None) for i in range(4)]
    assert [turn.active for turn in turns] == [(("p",) if i <= index else ()) for i in range(4)]
    assert [turn.started for turn in turns] == [("p",), (), (), ()]
    assert [turn.completed for turn in turns] == [(("p",) if i == index else ()) for i in range(4)]


def test_prompt_and_camera_of_one_interaction_arrive_together():
    ride = Ride()
    both = Interaction("b", "snow", CameraMove("target", pose((6, 0, 0))), transition_chunks=2)
    first, second, third = ride.chunk(both), ride.chunk(), ride.chunk()
    assert (first.prompt, second.prompt) == (None, "snow")
    assert second.poses[-1, 0, 3] == 6
    assert [ids(turn) for turn in (first, second, third)] == [(("b",), ("b",), ()), ((), ("b",), ("b",)), ((), (), ())]


def test_an_interaction_is_complete_once_although_its_velocity_goes_on():
    ride = Ride()
    both = Interaction("b", "snow", CameraMove("velocity", pose((1, 0, 0))), transition_chunks=2)
    turns = [ride.chunk(both), ride.chunk(), ride.chunk()]
    assert [turn.completed for turn in turns] == [(), ("b",), ()]
    assert [turn.active for turn in turns] == [("b",)] * 3


def test_of_those_that_wait_the_last_prompt_and_the_last_camera_count():
    ride = Ride()
    turn = ride.chunk(
        velocity("v", (1, 0, 0)), Interaction("p", "snow"), velocity("w", (0, 1, 0)), Interaction("q", "rain")
    )
    assert turn.prompt == "rain"
    assert turn.poses[0, :3, 3].tolist() == [0, 1, 0]
    assert ids(turn) == (("q", "w"), ("q", "w"), ("q", "w"))
    late = Ride()
    late.chunk(Interaction("p", "snow", transition_chunks=3))
    assert [late.chunk(Interaction("q", "rain")).prompt, late.chunk().prompt, late.chunk().prompt] == [
        "rain",
        None,
        None,
    ]


def test_an_id_is_used_once():
    ride = Ride()
    ride.chunk(velocity("a"))
    with pytest.raises(MessageError, match="'a' was used before") as caught:
        ride.chunk(velocity("a"))
    assert caught.value.code == "event_id_conflict"


def test_a_bounded_number_waits():
    interactions = Interactions(LATENTS)
    for index in range(WAITING):
        interactions.queue(velocity(str(index)))
    with pytest.raises(MessageError, match="64 interactions wait") as caught:
        interactions.queue(velocity("more"))
    assert caught.value.code == "session_busy"
    interactions.made(interactions.turn(np.eye(4)))
    interactions.queue(velocity("more"))


def test_a_camera_that_cannot_be_is_rejected_whole_and_the_one_before_goes_on():
    ride = Ride()
    ride.chunk(velocity("a", (1, 0, 0)))
    turn = ride.chunk(Interaction("b", "snow", CameraMove("velocity", pose((0, 0, 9e8)))))
    ((event_id, why),) = turn.rejected
    assert event_id == "b"
    assert "farther than 1e+09 units" in why
    assert (turn.prompt, turn.active) == (None, ("a",))
    assert turn.poses[0, :3, 3].tolist() == [4, 0, 0]
    assert ride.chunk(velocity("b", (0, 1, 0))).started == ("b",)


def test_a_velocity_that_is_held_for_too_long_ends_and_the_camera_stands_still():
    ride = Ride()
    ride.chunk(velocity("a", (3e8, 0, 0)))
    turn = ride.chunk()
    assert [event_id for event_id, _ in turn.rejected] == ["a"]
    assert np.array_equal(turn.poses, np.repeat(pose((9e8, 0, 0))[None], 3, axis=0))
    assert turn.active == ()
    assert ride.chunk().rejected == ()


def test_a_model_that_follows_no_poses_says_so_and_still_takes_prompts():
    ride = Ride(steerable=False)
    turn = ride.chunk(velocity("a"), Interaction("p", "snow"))
    assert [event_id for event_id, _ in turn.rejected] == ["a"]
    assert (turn.poses, turn.prompt, turn.active) == (None, "snow", ("p",))


def test_a_turn_can_be_asked_for_again_without_a_prompt_that_failed():
    interactions = Interactions(LATENTS)
    interactions.queue(velocity("v", (1, 0, 0)))
    interactions.made(interactions.turn(np.eye(4)))
    here = pose((3, 0, 0))
    interactions.queue(Interaction("b", "snow", CameraMove("velocity", pose((0, 1, 0)))))
    assert interactions.turn(here).prompt_id == "b"
    interactions.reject("b")
    again = interactions.turn(here)
    assert (again.prompt, again.active, again.started) == (None, ("v",), ())
    assert again.poses[0, :3, 3].tolist() == [4, 0, 0]
    interactions.queue(Interaction("b", "rain"))
    assert interactions.turn(here).prompt == "rain"


def test_a_camera_that_has_begun_goes_on_when_its_prompt_fails():
    ride = Ride()
    ride.chunk(Interaction("b", "snow", CameraMove("velocity", pose((1, 0, 0))), transition_chunks=2))
    ride.interactions.reject("b")
    turn = ride.chunk()
    assert (turn.prompt, turn.poses[0, 0, 3]) == (None, 4)


def test_an_approach_takes_the_shorter_way_round():
    poses = approach_poses(pose(degrees=(0, 170, 0)), pose(degrees=(0, -170, 0)), first=0, total=4, latents=4)
    headings = np.degrees(np.arctan2(poses[:, 0, 2], poses[:, 2, 2]))
    assert headings == pytest.approx([175, 180, -175, -170]) or headings == pytest.approx([175, -180, -175, -170])
