"""Camera file formats, one module each; every reader returns a CameraTrajectory."""

from __future__ import annotations

from .npy import load_actions, load_camera, save_camera

__all__ = ["load_actions", "load_camera", "save_camera"]
