"""Rays against plain pinhole geometry, packed with torch's own pixel_unshuffle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation
from torch.nn.functional import pixel_unshuffle

from lingbot_core.camera import action_rays, camera_rays
from lingbot_core.errors import CameraError

K = (37.0, 41.0, 20.5, 13.25)
HEIGHT, WIDTH = 24, 40


def steps() -> np.ndarray:
    out = np.tile(np.eye(4), (3, 1, 1))
    out[1:, :3, :3] = Rotation.from_euler("yxz", [[20, 5, 0], [-70, 10, 33]], degrees=True).as_matrix()
    out[1:, :3, 3] = [[0.1, -0.2, 0.9], [-3.0, 2.0, 0.5]]
    return out


def pinhole(relative: np.ndarray) -> torch.Tensor:
    """Origins and directions [c, 6, H, W], pixel by pixel, through the inverse of the camera matrix."""
    matrix = np.array([[K[0], 0, K[2]], [0, K[1], K[3]], [0, 0, 1]])
    out = np.empty((len(relative), 6, HEIGHT, WIDTH))
    for frame, pose in enumerate(relative):
        for v in range(HEIGHT):
            for u in range(WIDTH):
                ray = np.linalg.solve(matrix, [u + 0.5, v + 0.5, 1])
                out[frame, :3, v, u] = pose[:3, 3]
                out[frame, 3:, v, u] = pose[:3, :3] @ (ray / np.linalg.norm(ray))
    return torch.from_numpy(out)


def test_camera_rays_are_pinhole_rays_in_pixel_unshuffle_order():
    rays = camera_rays(steps(), K, HEIGHT, WIDTH)
    assert rays.shape == (1, 384, 3, HEIGHT // 8, WIDTH // 8)
    assert rays.dtype == torch.float32
    expected = pixel_unshuffle(pinhole(steps()), 8).transpose(0, 1)[None]
    torch.testing.assert_close(rays, expected.float(), atol=1e-7, rtol=1e-6)


def test_action_rays_are_directions_and_constant_key_planes():
    actions = np.array([[1, 0, 0, 0], [0, 1, 0, 1], [0, 0, 1, 1]])
    rays = action_rays(steps(), K, actions, HEIGHT, WIDTH)
    assert rays.shape == (1, 448, 3, HEIGHT // 8, WIDTH // 8)
    torch.testing.assert_close(rays[:, :192], camera_rays(steps(), K, HEIGHT, WIDTH)[:, 192:], atol=0, rtol=0)
    planes = rays[0, 192:].reshape(4, 64, 3, -1)
    expected = torch.from_numpy(actions.T).float()[:, None, :, None].expand_as(planes)
    torch.testing.assert_close(planes, expected, atol=0, rtol=0)


def test_translations_do_not_reach_the_act_model():
    moved = steps()
    moved[:, :3, 3] = 0
    torch.testing.assert_close(
        action_rays(moved, K, np.zeros((3, 4)), HEIGHT, WIDTH),
        action_rays(steps(), K, np.zeros((3, 4)), HEIGHT, WIDTH),
        atol=0,
        rtol=0,
    )


def test_frames_do_not_depend_on_each_other():
    whole = camera_rays(steps(), K, HEIGHT, WIDTH)
    for frame in range(3):
        alone = camera_rays(steps()[frame : frame + 1], K, HEIGHT, WIDTH)
        torch.testing.assert_close(alone[:, :, 0], whole[:, :, frame], atol=1e-7, rtol=0)


def test_writing_into_rays_does_not_change_the_next_ones():
    first = camera_rays(steps(), K, HEIGHT, WIDTH)
    kept = first.clone()
    first.zero_()
    torch.testing.assert_close(camera_rays(steps(), K, HEIGHT, WIDTH), kept, atol=0, rtol=0)


@pytest.mark.parametrize(("height", "width"), [(0, 40), (24, 44), (20, 40), (-8, 40)])
def test_sizes_without_a_latent_grid_are_refused(height, width):
    with pytest.raises(CameraError, match="multiples of 8"):
        camera_rays(steps(), K, height, width)


@pytest.mark.parametrize(
    ("relative", "intrinsics", "words"),
    [
        (np.eye(4), K, r"\[c, 4, 4\] is needed"),
        (np.zeros((0, 4, 4)), K, r"\[c, 4, 4\] is needed"),
        (steps(), (0.0, 1, 1, 1), "focal lengths"),
        (steps(), (np.nan, 1, 1, 1), "focal lengths"),
        (steps(), [K], "must be fx, fy, cx, cy"),
    ],
)
def test_malformed_cameras_are_refused(relative, intrinsics, words):
    with pytest.raises(CameraError, match=words):
        camera_rays(relative, intrinsics, HEIGHT, WIDTH)


def test_actions_must_match_the_frames():
    with pytest.raises(CameraError, match="2 rows of actions for 3"):
        action_rays(steps(), K, np.zeros((2, 4)), HEIGHT, WIDTH)
