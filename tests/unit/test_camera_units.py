"""The translation unit and the statistics that tell whether it suits a path."""

from __future__ import annotations

import numpy as np
import pytest

from lingbot_core.camera import PER_LATENT, PER_VIDEO, KeySteps, step_statistics, translation_unit
from lingbot_core.errors import CameraError


def path(*lengths: float) -> np.ndarray:
    """A straight path whose steps have these lengths, off the origin."""
    poses = np.tile(np.eye(4), (len(lengths) + 1, 1, 1))
    poses[:, 0, 3] = 7 + np.concatenate([[0], np.cumsum(lengths)])
    return poses


def test_clip_is_the_longest_step():
    assert translation_unit("clip", latent_poses=path(1, 3, 2)) == pytest.approx(3)


@pytest.mark.parametrize("unit", ["clip", "p95"])
@pytest.mark.parametrize("poses", [path(0, 0), path()])
def test_a_path_that_does_not_move_has_unit_one(unit, poses):
    assert translation_unit(unit, latent_poses=poses) == 1.0


def test_rounding_is_not_taken_for_motion():
    # 0.1 + 0.2 and 0.3 differ in the last bit; as a unit that would blow noise up to full speed.
    poses = path(0)
    poses[:, 1, 3] = (0.1 + 0.2, 0.3)
    assert poses[0, 1, 3] != poses[1, 1, 3]
    assert translation_unit("clip", latent_poses=poses) == 1.0


def test_a_percentile_is_not_spoilt_by_one_outlier_among_few_steps():
    steps = path(1, 1.5, 2, 500, 1, 1, 1, 1)
    assert translation_unit("clip", latent_poses=steps) == pytest.approx(500)
    assert translation_unit("p95", latent_poses=steps) == pytest.approx(2)
    assert translation_unit(" P50 ", latent_poses=steps) == pytest.approx(1)
    assert translation_unit("p100", latent_poses=steps) == pytest.approx(500)


def test_a_percentile_leaves_out_rests():
    assert translation_unit("p50", latent_poses=path(*[0] * 20, 2, 2, 2)) == pytest.approx(2)


def test_key_is_one_held_key_over_one_latent_frame():
    assert translation_unit("key", steps=PER_LATENT) == pytest.approx(0.05)
    assert translation_unit("key", steps=PER_VIDEO) == pytest.approx(0.2)


@pytest.mark.parametrize(("value", "expected"), [(0.25, 0.25), (2, 2.0), ("0.25", 0.25)])
def test_a_number_is_taken_as_it_is(value, expected):
    assert translation_unit(value) == expected


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("metres", "unknown; use clip, key"),
        ("", "unknown"),
        ("p0", "percentile"),
        ("p101", "percentile"),
        ("0", "above 0"),
        (0, "above 0"),
        (-1.0, "above 0"),
        ("nan", "above 0"),
        (float("inf"), "above 0"),
        (True, "above 0"),
        (None, "above 0"),
        ("clip", "needs a camera path"),
        ("p95", "needs a camera path"),
        ("key", "needs key steps"),
    ],
)
def test_other_units_are_refused(value, words):
    with pytest.raises(CameraError, match=words):
        translation_unit(value)


def test_key_steps_that_do_not_move_give_no_unit():
    with pytest.raises(CameraError, match="do not move"):
        translation_unit("key", steps=KeySteps("turntable", 0.0, 4.0, 6.0, 1))


def test_statistics_of_steps():
    got = step_statistics(path(1, 0, 2, 3, 4))
    assert (got.count, got.zero_steps, got.outliers, got.warning) == (5, 1, (), "")
    assert got.median == pytest.approx(2.5)
    assert got.p95 == pytest.approx(3)
    assert got.maximum == pytest.approx(4)


@pytest.mark.parametrize("count", [8, 32])
def test_one_outlier_pose_is_named(count):
    lengths = np.ones(count)
    lengths[4] = 90
    got = step_statistics(path(*lengths))
    assert got.outliers == (5,)
    assert "latent frame 5 is 90 times the median" in got.warning
    assert "p95" in got.warning


def test_a_pose_that_jumps_away_and_back_is_two_outliers():
    poses = path(*[1] * 12)
    poses[6, 1, 3] = 400
    assert step_statistics(poses).outliers == (6, 7)


def test_slow_starts_and_rests_are_no_outliers():
    assert step_statistics(path(*[0.01] * 10, *[1] * 10)).outliers == ()
    assert step_statistics(path(*[0] * 30, 1, 1)).outliers == ()


def test_zero_motion_is_said():
    got = step_statistics(path(0, 0, 0))
    assert (got.zero_steps, got.maximum) == (3, 0.0)
    assert "does not move" in got.warning
    assert step_statistics(path()).warning == ""
