"""Controls made chunk by chunk against camera_online.json and camera_online.safetensors."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from lingbot_core.camera import (
    PER_LATENT,
    PER_VIDEO,
    CameraCarry,
    KeyMotion,
    KeySteps,
    camera_rays,
    scale_intrinsics,
    to_controls,
    translation_unit,
)

FILES = ("camera_online.safetensors", "camera_online.json")

UPSTREAM_SIZE = (832, 480)


@pytest.fixture
def facts(golden_dir: Path) -> dict[str, Any]:
    return json.loads((golden_dir / "camera_online.json").read_text(encoding="utf-8"))


@pytest.fixture
def numbers(golden_dir: Path) -> dict[str, np.ndarray]:
    return load_file(golden_dir / "camera_online.safetensors")


def motions(case: dict[str, Any], numbers: dict[str, np.ndarray]) -> list[Any]:
    """What a session is given for each of its chunks."""
    chunk = case["latents_per_chunk"]
    if case["control"] == "keys":
        keys = case["keys_per_latent"]
        steps = {"per_latent": PER_LATENT, "per_video": PER_VIDEO}[case["preset"]]
        return [KeyMotion(tuple(keys[i : i + chunk]), steps) for i in range(0, len(keys), chunk)]
    ends = np.cumsum(case["poses_per_chunk"])
    poses = numbers[f"src.{case['source']}.poses"]
    return [poses[end - count : end] for end, count in zip(ends, case["poses_per_chunk"], strict=True)]


def test_presets_of_held_keys(facts):
    for name, steps in {"per_latent": PER_LATENT, "per_video": PER_VIDEO}.items():
        golden = KeySteps(
            steps.name, move=facts["move_per_step"], pitch_limit_deg=facts["pitch_limit_deg"], **facts["presets"][name]
        )
        assert steps == golden


def test_controls_chunk_by_chunk(facts, numbers):
    assert facts["cases"]
    worst: dict[str, list[tuple[float, float, str]]] = defaultdict(list)

    def check(kind: str, case: str, ours: np.ndarray, golden: np.ndarray, atol: float | np.ndarray) -> None:
        assert ours.shape == golden.shape, f"{case}: {kind} has shape {ours.shape}, not {golden.shape}"
        error = np.abs(ours.astype(np.float64) - golden)
        part = float((error / atol).max())
        assert part <= 1, f"{case}: {kind} is off by {error.max():.3g}, {part:.2f} times the tolerance"
        worst[kind].append((part, float(error.max()), case))

    for name, case in facts["cases"].items():
        carry, relative, absolute = CameraCarry.start(), [], []
        for motion in motions(case, numbers):
            controls, carry = to_controls(
                motion,
                latents=case["latents_per_chunk"],
                unit=case["translation_unit"],
                first_delta=case["first_delta"],
                carry=carry,
            )
            relative.append(controls.relative)
            absolute.append(controls.pose_after)
            np.testing.assert_array_equal(carry.pose, controls.pose_after)
        steps = np.concatenate(relative)
        assert carry.latents == len(steps)

        golden = numbers[f"{name}.rel"]
        kind = case["control"]
        rotation, translation = case["recommended_rotation_atol"], case["recommended_translation_atol"]
        check(f"{kind}: rel rotation", name, steps[:, :3, :3], golden[:, :3, :3], rotation)
        check(f"{kind}: rel translation", name, steps[:, :3, 3], golden[:, :3, 3], translation)
        np.testing.assert_array_equal(steps[:, 3], golden[:, 3])

        latent = numbers[case["latent_poses"]]
        ends = latent[case["latents_per_chunk"] - 1 :: case["latents_per_chunk"]]
        check(f"{kind}: carried rotation", name, np.stack(absolute)[:, :3, :3], ends[:, :3, :3], rotation)
        check(f"{kind}: carried position", name, np.stack(absolute)[:, :3, 3], ends[:, :3, 3], 1e-6)
        if case["unit_is"] == "clip_maximum":
            ours = np.float64(translation_unit("clip", latent_poses=latent))
            unit = np.float64(case["translation_unit"])
            check(f"{kind}: clip unit, relative", name, ours / unit, np.float64(1), 1e-6)

        if "packed_latents" in case:
            size = (facts["width"], facts["height"])
            intrinsics = scale_intrinsics(numbers[case["intrinsics"]], UPSTREAM_SIZE, size)
            rays = camera_rays(steps[case["packed_latents"]], intrinsics, size[1], size[0]).numpy()
            packed = numbers[f"{name}.packed"]
            check(f"{kind}: packed rays", name, rays, packed, 1e-5 + 1e-6 * np.abs(packed))

    print()
    for kind, errors in worst.items():
        part, error, case = max(errors)
        print(f"  {kind:<28} {len(errors):>3} cases, worst {error:.2e} = {part:.4f} of its tolerance ({case})")


def test_a_session_may_be_cut_into_controls_and_resumed_anywhere(facts, numbers):
    """The carry holds all that the next chunk needs: a carry rebuilt from a record goes on with the same numbers."""
    for name, case in facts["cases"].items():
        settings = {
            "latents": case["latents_per_chunk"],
            "unit": case["translation_unit"],
            "first_delta": case["first_delta"],
        }
        first, *rest = motions(case, numbers)
        controls, carry = to_controls(first, **settings, carry=CameraCarry.start())
        rebuilt = CameraCarry(np.array(json.loads(json.dumps(controls.to_json()))["pose_after"]), controls.latents)
        assert rebuilt == carry, name
        for motion in rest[:1]:
            again, _ = to_controls(motion, **settings, carry=rebuilt)
            straight, _ = to_controls(motion, **settings, carry=dataclasses.replace(carry))
            assert again == straight, name
