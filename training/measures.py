"""What is measured on pictures: the dominant motion, likeness, sharpness, colour. Pure functions of tensors.

Frames are float32 [T, 3, H, W] in 0..1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

STRETCH = 8  # frames: half a second at 16 frames a second
LATENTS_PER_STRETCH = 2
LEVELS = (4, 2, 1)
ROUNDS = 4
# What the picture of a key does: which of (u, v, expansion) and its sign.
DIRECTION = {"w": (2, 1), "s": (2, -1), "a": (0, 1), "d": (0, -1), "j": (0, 1), "l": (0, -1), "i": (1, 1), "k": (1, -1)}
# Below this a stretch counts as still: pixels for u and v, and as much at the side of the picture for the expansion.
STILL_PIXELS = 0.16


def psnr(a: Tensor, b: Tensor) -> float:
    """Of two stacks of frames as a whole, in dB, at most 99."""
    error = (a - b).square().mean().double()
    return float(min(99.0, -10 * torch.log10(error + 1e-12)))


def gradient_energy(frames: Tensor) -> float:
    """Mean square of the differences between neighbouring pixels, across and down."""
    across, down = frames[..., 1:] - frames[..., :-1], frames[..., 1:, :] - frames[..., :-1, :]
    return float(across.square().mean() + down.square().mean())


def statistics(frames: Tensor) -> dict[str, float | list[float]]:
    """Deviation, gradient energy, and mean and deviation of each colour."""
    return {
        "std": float(frames.std()),
        "gradient_energy": gradient_energy(frames),
        "mean": frames.mean(dim=(0, 2, 3)).tolist(),
        "colour_std": frames.std(dim=(0, 2, 3)).tolist(),
    }


def global_motion(frames: Tensor) -> Tensor:
    """Least-squares motion from each frame to the next, float64 [T - 1, 3]: u, v in pixels and expansion.

    The model is: a point at (x, y) from the middle moves by (u + e x, v + e y). It is fitted to the brightness
    differences (Lucas and Kanade), coarse to fine, the second frame being drawn back by what was found so far.
    """
    grey = frames.float().mean(dim=1, keepdim=True)
    found = torch.zeros(len(grey) - 1, 3, dtype=torch.float64, device=grey.device)
    for level in LEVELS:
        small = _blur(F.avg_pool2d(grey, level) if level > 1 else grey)
        h, w = small.shape[-2:]
        first, second = small[:-1], small[1:]
        y, x = torch.meshgrid(
            torch.arange(h, device=grey.device) - (h - 1) / 2,
            torch.arange(w, device=grey.device) - (w - 1) / 2,
            indexing="ij",
        )
        scale = found.new_tensor([1 / level, 1 / level, 1.0])
        for _ in range(ROUNDS):
            u, v, e = (found * scale).float().T[..., None, None]
            at_x, at_y = x + u + e * x, y + v + e * y
            grid = torch.stack([at_x / (w / 2), at_y / (h / 2)], dim=-1)
            back = F.grid_sample(second, grid, mode="bilinear", padding_mode="border", align_corners=False)
            inside = ((at_x.abs() <= (w - 1) / 2) & (at_y.abs() <= (h - 1) / 2)).float()
            slope = (first + back) / 2
            gx = F.pad(slope[..., 2:] - slope[..., :-2], (1, 1)) / 2
            gy = F.pad(slope[..., 2:, :] - slope[..., :-2, :], (0, 0, 1, 1)) / 2
            gx, gy, gt = ((g[:, 0] * inside).flatten(1).double() for g in (gx, gy, back - first))
            basis = torch.stack([gx, gy, gx * x.flatten() + gy * y.flatten()], dim=1)
            # A little of the picture's own size keeps featureless pictures still.
            size = found.new_tensor([1.0, 1.0, (w / 4) ** 2]).diag() * (1e-6 * h * w)
            step = torch.linalg.solve(basis @ basis.transpose(1, 2) + size, -(basis @ gt[..., None])[..., 0])
            found = found + step / scale
    return found


def _blur(x: Tensor) -> Tensor:
    kernel = x.new_tensor([1.0, 4.0, 6.0, 4.0, 1.0]) / 16
    x = F.conv2d(F.pad(x, (2, 2, 0, 0), mode="replicate"), kernel.view(1, 1, 1, 5))
    return F.conv2d(F.pad(x, (0, 0, 2, 2), mode="replicate"), kernel.view(1, 1, 5, 1))


def stretches(keys: Sequence[str]) -> list[tuple[str, slice]]:
    """Half seconds through which one key is held: the key and which frame-to-frame motions they are.

    keys: one text per latent frame. Latent j shows frames 4 j - 3 to 4 j, so motion i, from frame i to i + 1, belongs
    to latent i // 4 + 1; the first latent has none.
    """
    out, j = [], 1
    while j + 1 < len(keys):
        if keys[j] == keys[j + 1] and keys[j] in DIRECTION:
            out.append((keys[j], slice(4 * (j - 1), 4 * (j + 1))))
            j += LATENTS_PER_STRETCH
        else:
            j += 1
    return out


def along_key(motion: Tensor, key: str, width: int) -> float:
    """How far motions [n, 3] go the key's way in all, in pixels (the expansion's at the side of the picture)."""
    axis, sign = DIRECTION[key]
    return float(motion[:, axis].sum()) * sign * (width / 2 if axis == 2 else 1)


def agrees(distance: float) -> bool:
    """Whether a stretch of this length along its key shows the key."""
    return distance > STILL_PIXELS
