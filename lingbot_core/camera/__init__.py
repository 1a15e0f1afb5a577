"""Cameras and controls: poses, paths, keys, and what the model is given of them."""

from __future__ import annotations

from .controls import CameraCarry, Controls, KeyMotion, clip_controls, latent_actions, to_controls
from .formats import load_actions, load_camera, save_camera
from .intrinsics import default_intrinsics, scale_intrinsics, transform_intrinsics
from .keys import (
    KEY_STEPS,
    PER_LATENT,
    PER_VIDEO,
    HeldKeys,
    KeySteps,
    action_string_poses,
    arrays_from_keys,
    frames_of,
    keys_from_arrays,
    normalize_action_string,
    pad_to_4k1,
    parse_action_string,
    parse_keys,
    step_pose,
    walk,
)
from .pose import MAX_POSES, check_poses, interpolate, inverse, relative_steps
from .rays import action_rays, camera_rays
from .trajectory import CameraTrajectory, SnapReport
from .units import StepStatistics, step_statistics, translation_unit

__all__ = [
    "KEY_STEPS",
    "MAX_POSES",
    "PER_LATENT",
    "PER_VIDEO",
    "CameraCarry",
    "CameraTrajectory",
    "Controls",
    "HeldKeys",
    "KeyMotion",
    "KeySteps",
    "SnapReport",
    "StepStatistics",
    "action_rays",
    "action_string_poses",
    "arrays_from_keys",
    "camera_rays",
    "check_poses",
    "clip_controls",
    "default_intrinsics",
    "frames_of",
    "interpolate",
    "inverse",
    "keys_from_arrays",
    "latent_actions",
    "load_actions",
    "load_camera",
    "normalize_action_string",
    "pad_to_4k1",
    "parse_action_string",
    "parse_keys",
    "relative_steps",
    "save_camera",
    "scale_intrinsics",
    "step_pose",
    "step_statistics",
    "to_controls",
    "transform_intrinsics",
    "translation_unit",
    "walk",
]
