"""The camera as the model sees it: packed per-pixel rays.

Each pixel of a latent frame gives the ray's origin and its unit direction, in the frame's relative pose. The papers
call it a Pluecker embedding, but there is no cross product. An 8x8 block of pixels becomes channels of one latent
position: index = channel * 64 + row * 8 + column.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from ..errors import CameraError
from .intrinsics import check_pixels, scale_intrinsics, transform_intrinsics
from .keys import check_key_array
from .pose import Array

__all__ = ["action_rays", "camera_rays", "scale_intrinsics", "transform_intrinsics"]

# Side of the pixel block that one latent position stands for.
BLOCK = 8


def camera_rays(
    relative: ArrayLike, intrinsics: Any, height: int, width: int, *, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Rays for the ``cam`` control, float32 [1, 384, c, height // 8, width // 8]: 3 x 64 origin, 3 x 64 direction.

    relative: steps [c, 4, 4] of Controls. intrinsics: fx, fy, cx, cy in pixels of height x width. Computed in float64,
    where they are wanted. Raises CameraError when a side is not a multiple of 8.
    """
    steps = np.asarray(relative, dtype=np.float64)
    directions = _rotated_directions(steps, intrinsics, height, width, torch.device(device))
    rays = torch.empty((2, *directions.shape), dtype=torch.float32, device=device)
    rays[0] = _small(steps[:, :3, 3].T, directions)[:, None, :, None, None]
    rays[1] = directions
    return rays.view(1, 6 * BLOCK**2, *directions.shape[2:])


def action_rays(
    relative: ArrayLike,
    intrinsics: Any,
    actions: Any,
    height: int,
    width: int,
    *,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Rays for the ``act`` control, float32 [1, 448, c, height // 8, width // 8]: 3 x 64 direction, 4 x 64 w a s d.

    actions: key states [c, 4] in the order w a s d, one row per latent frame. The translations of ``relative`` have no
    influence: movement comes from the keys alone. Otherwise as :func:`camera_rays`.
    """
    steps = np.asarray(relative, dtype=np.float64)
    keys = check_key_array(actions, "actions")
    if len(keys) != len(steps):
        raise CameraError(f"{len(keys)} rows of actions for {len(steps)} latent frames; give one each")
    directions = _rotated_directions(steps, intrinsics, height, width, torch.device(device))
    rays = torch.empty((7, *directions.shape[1:]), dtype=torch.float32, device=device)
    rays[:3] = directions
    rays[3:] = _small(keys.T, directions)[:, None, :, None, None]
    return rays.view(1, 7 * BLOCK**2, *directions.shape[2:])


def _small(array: Array, like: torch.Tensor) -> torch.Tensor:
    """A few numbers as float64 where ``like`` is; the host does not wait for the device."""
    return torch.from_numpy(np.array(array, dtype=np.float64)).to(like.device, non_blocking=True)


def _rotated_directions(steps: Array, intrinsics: Any, height: int, width: int, device: torch.device) -> torch.Tensor:
    """Directions in each frame's relative rotation, float64 [3, 64, c, height // 8, width // 8]."""
    if steps.ndim != 3 or steps.shape[1:] != (4, 4) or not len(steps):
        raise CameraError(f"relative poses have shape {list(steps.shape)}; [c, 4, 4] is needed")
    if height < BLOCK or width < BLOCK or height % BLOCK or width % BLOCK:
        raise CameraError(f"a picture of {width} x {height} pixels has no latent grid; use multiples of {BLOCK}")
    fx, fy, cx, cy = check_pixels(intrinsics)
    flat = _directions(fx, fy, cx, cy, height, width, device)
    rotated = _small(steps[:, :3, :3].transpose(1, 0, 2).reshape(-1, 3), flat) @ flat
    grid = rotated.view(3, len(steps), BLOCK**2, height // BLOCK, width // BLOCK)
    return grid.transpose(1, 2)


# A session keeps its intrinsics and size, so that one entry per living session saves half of the work of a chunk.
@lru_cache(maxsize=4)
def _directions(
    fx: float, fy: float, cx: float, cy: float, height: int, width: int, device: torch.device
) -> torch.Tensor:
    """Unit directions through the pixel centres in the camera's own axes, float64 [3, 64 * height / 8 * width / 8]."""
    x = (np.arange(width) + 0.5 - cx) / fx
    y = (np.arange(height) + 0.5 - cy) / fy
    rays = np.stack(
        [np.broadcast_to(x, (height, width)), np.broadcast_to(y[:, None], (height, width)), np.ones((height, width))]
    )
    rays /= np.linalg.norm(rays, axis=0)
    blocks = rays.reshape(3, height // BLOCK, BLOCK, width // BLOCK, BLOCK).transpose(0, 2, 4, 1, 3)
    # Outside of inference mode, in which a tensor would be bound to the mode that it was first made in.
    with torch.inference_mode(False):
        return torch.from_numpy(np.ascontiguousarray(blocks.reshape(3, -1))).to(device)
