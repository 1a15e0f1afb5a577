"""The procedural world: what a picture of it must show, whatever draws it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from training.clips import poses, sample_clips
from training.scene import (
    EYE,
    INTRINSICS,
    PERIOD,
    PRIMITIVES,
    clear_path,
    random_scenes,
    render,
    uniform,
    view,
    wrapped,
)
from training.styles import STYLES

H, W = 24, 40


def cameras(*states: tuple[float, float, float, float]) -> torch.Tensor:
    return torch.from_numpy(poses(np.array(states)))[None]


def test_random_numbers_are_those_of_the_seed_and_spread_evenly():
    numbers = uniform(torch.arange(200), 100, 1)
    assert abs(float(numbers.mean()) - 0.5) < 0.01
    assert abs(float(numbers.std()) - 12**-0.5) < 0.01
    assert torch.equal(uniform(torch.tensor([7]), 100, 1)[0], numbers[7])
    assert not torch.equal(uniform(torch.tensor([7]), 100, 2)[0], numbers[7])


def test_the_world_repeats_and_cannot_be_told_from_itself_a_period_away():
    scenes = random_scenes([1, 2])
    here = cameras((1.0, 2.0, 0.3, 0.0)).expand(2, 1, 4, 4)
    there = cameras((1.0 + PERIOD, 2.0 - 3 * PERIOD, 0.3, 0.0)).expand(2, 1, 4, 4)
    a, b = (render(scenes, c, torch.tensor([0, 3]), H, W) for c in (here, there))
    assert (a.int() - b.int()).abs().float().mean() < 0.02


def test_parts_of_the_picture_that_a_thing_can_touch_hold_all_of_it():
    """With every part set to the whole picture the same picture comes out."""
    from training.render_numpy import render_view

    clips = sample_clips(4, 6, latents=3)
    scenes = clear_path(random_scenes(range(6)), clips.c2w)
    seen = view(scenes, clips.c2w[:, ::4], clips.palette()[:, ::4], H, W, INTRINSICS)
    quick = render_view(scenes, seen, H, W)
    gone = seen.box[..., 0] > 1e5
    touched = seen.box.clone()
    seen.box[:] = torch.tensor([0.0, W, 0.0, H])
    # Things beyond the fog stay out: they cannot be seen, and vanished ones have no size.
    seen.box[gone & (scenes.reach[seen.scene] <= 0)] = torch.tensor([1e6, -1e6, 1e6, -1e6])
    slow = render_view(scenes, seen, H, W)
    assert (quick.int() - slow.int()).abs().max() <= 1
    assert ((touched[..., 1] > touched[..., 0]) & (touched[..., 1] < W)).any()


def test_a_path_is_cleared():
    clips = sample_clips(9, 16, latents=9)
    before = random_scenes(range(16))
    after = clear_path(before, clips.c2w)
    path = clips.c2w[:, :, :3, 3].float()
    x = wrapped(after.centre[:, None, :, 0] - path[..., None, 0])
    z = wrapped(after.centre[:, None, :, 2] - path[..., None, 2])
    gap = torch.hypot(x, z).amin(dim=1) - after.reach
    assert gap[after.reach > 0].min() > 0.1
    assert (after.reach == 0).any()
    assert (after.reach == before.reach).float().mean() > 0.6


def test_turning_right_moves_the_picture_to_the_left():
    scenes = random_scenes([3])
    pictures = render(scenes, cameras((0, 0, 0, 0), (0, 0, np.radians(8), 0)), torch.tensor([0]), 48, 80).float()[0]
    shift = round(80 / 832 * 502.9 * np.tan(np.radians(8)))
    right = (pictures[1, :, 10:38, 20 : 60 - shift] - pictures[0, :, 10:38, 20 + shift : 60]).abs().mean()
    wrong = (pictures[1, :, 10:38, 20 + shift : 60] - pictures[0, :, 10:38, 20 : 60 - shift]).abs().mean()
    assert right < 0.5 * wrong


def test_the_camera_stands_on_the_ground_and_sees_it_below_the_horizon():
    scenes = random_scenes([3])
    assert float(cameras((0, 0, 0, 0))[0, 0, 1, 3]) == pytest.approx(-EYE)
    down, up = render(scenes, cameras((0, 0, 0, -1.4), (0, 0, 0, 1.4)), torch.tensor([0]), H, W)[0].float()
    assert down[1].mean() > down[2].mean() + 30  # the meadow is green
    assert up[2].mean() > up[0].mean() + 30  # the sky is blue


def test_every_style_has_its_own_colours_and_none_is_dark():
    scenes = random_scenes([5] * len(STYLES))
    c = cameras((0, 0, 0, 0)).expand(len(STYLES), 1, 4, 4)
    mean = render(scenes, c, torch.arange(len(STYLES)), H, W).float().mean(dim=(1, 3, 4)) / 255
    apart = (mean[:, None] - mean[None]).norm(dim=-1) + torch.eye(len(STYLES))
    assert apart.min() > 0.08
    assert mean.mean(dim=1).min() > 0.25


def test_pictures_of_a_scene_do_not_depend_on_what_is_drawn_beside_it():
    scenes = random_scenes(range(4))
    c = cameras((1, 1, 1, 0), (1, 1.5, 1, 0)).expand(4, 2, 4, 4)
    style = torch.tensor([[0, 1], [2, 3], [4, 5], [0, 0]])
    together = render(scenes, c, style, H, W)
    alone = render(scenes[2:3], c[2:3], style[2:3], H, W)
    assert torch.equal(together[2:3], alone)
    assert scenes.centre.shape == (4, PRIMITIVES, 3)
