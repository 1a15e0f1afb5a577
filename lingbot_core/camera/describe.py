"""A camera path in a few lines for people."""

from __future__ import annotations

from .trajectory import CameraTrajectory
from .units import step_statistics


def describe_path(path: CameraTrajectory) -> str:
    """How long a path is, how far it moves from latent frame to latent frame, its intrinsics, and what is odd."""
    frames = len(path) if path.rate == "video" else 4 * len(path) - 3
    steps = step_statistics(path.poses[::4] if path.rate == "video" else path.poses)
    fx, fy, cx, cy = path.intrinsics[0].tolist()
    lens = (
        "intrinsics: 500 px, the default"
        if path.intrinsics_are_default
        else f"intrinsics: fx {fx:g}, fy {fy:g}, cx {cx:g}, cy {cy:g} of {path.width}x{path.height}"
    )
    lines = [
        f"{frames} frames, {frames / path.fps:.2f} s at {path.fps:g} fps",
        f"steps of a latent frame: median {steps.median:.4g}, longest {steps.maximum:.4g}, {steps.zero_steps} at rest",
        lens,
        "with actions" if path.actions is not None else "without actions",
    ]
    return "\n".join([*lines, *([f"warning: {steps.warning}"] if steps.warning else [])])
