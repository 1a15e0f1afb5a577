"""The camera's rays for many clips at once, on the device; the same numbers as lingbot_core.camera.rays."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 8


def ray_tokens(relative: Tensor, intrinsics: Tensor, height: int, width: int, patch: tuple[int, int, int]) -> Tensor:
    """Folded rays, float32 [B, L * tokens, 384 * patch area], in the order of `CausalWanDiT.encode_camera`.

    relative: [B, L, 4, 4], translations divided by the unit. intrinsics: fx, fy, cx, cy in pixels, [B, 4].
    """
    batch, latents = relative.shape[:2]
    device = relative.device
    fx, fy, cx, cy = intrinsics.double().unbind(1)
    x = (torch.arange(width, device=device).double() + 0.5 - cx[:, None]) / fx[:, None]
    y = (torch.arange(height, device=device).double() + 0.5 - cy[:, None]) / fy[:, None]
    rays = torch.ones(batch, height, width, 3, device=device, dtype=torch.float64)
    rays[..., 0], rays[..., 1] = x[:, None], y[:, :, None]
    rays = (rays / rays.norm(dim=-1, keepdim=True)).float()
    _, ph, pw = patch
    rows, columns = height // (BLOCK * ph), width // (BLOCK * pw)
    # [B, rows, ph, 8, columns, pw, 8, 3] -> [B, rows * columns, 8, 8, ph, pw, 3]
    grid = rays.view(batch, rows, ph, BLOCK, columns, pw, BLOCK, 3).permute(0, 1, 4, 3, 6, 2, 5, 7)
    flat = grid.reshape(batch, 1, -1, 3)
    rotation = relative[:, :, :3, :3].float()
    turned = (flat @ rotation.transpose(-1, -2)).view(batch, latents, rows * columns, BLOCK**2 * ph * pw, 3)
    origin = relative[:, :, None, None, :3, 3].float().expand_as(turned)
    both = torch.cat([origin, turned], dim=-1)  # six channels last
    return both.transpose(-1, -2).reshape(batch, latents * rows * columns, -1)
