"""Poses, rays, intrinsics and action strings against the reference's numbers (camera.json, camera.safetensors)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from lingbot_core.camera import (
    CameraTrajectory,
    action_rays,
    action_string_poses,
    arrays_from_keys,
    camera_rays,
    clip_controls,
    frames_of,
    inverse,
    normalize_action_string,
    pad_to_4k1,
    parse_action_string,
    relative_steps,
    scale_intrinsics,
    transform_intrinsics,
    translation_unit,
)
from lingbot_core.errors import CameraError

FILES = ("camera.safetensors", "camera.json")

WIDTH, HEIGHT, CHUNK = 832, 480, 3
# Rotations, intrinsics (relative) and ray directions.
ATOL = 1e-5


class Worst:
    """Keeps the worst error of each kind as a part of its tolerance and fails beyond it."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.kinds: dict[str, list[tuple[float, float, str]]] = defaultdict(list)

    def check(self, kind: str, case: str, ours: Any, golden: Any, atol: float | np.ndarray) -> None:
        ours, golden = np.asarray(ours, dtype=np.float64), np.asarray(golden, dtype=np.float64)
        assert ours.shape == golden.shape, f"{case}: {kind} has shape {ours.shape}, not {golden.shape}"
        error = np.abs(ours - golden)
        part = float((error / atol).max())
        assert part <= 1, f"{case}: {kind} is off by {error.max():.3g}, {part:.2f} times the tolerance"
        self.kinds[kind].append((part, float(error.max()), case))

    def show(self) -> None:
        print(f"\n{self.title}")
        for kind, errors in self.kinds.items():
            part, error, case = max(errors)
            print(f"  {kind:<28} {len(errors):>3} cases, worst {error:.2e} = {part:.4f} of its tolerance ({case})")


@pytest.fixture
def worst(request: pytest.FixtureRequest) -> Iterator[Worst]:
    record = Worst(request.node.name)
    yield record
    record.show()


@pytest.fixture
def facts(golden_dir: Path) -> dict[str, Any]:
    return json.loads((golden_dir / "camera.json").read_text(encoding="utf-8"))


@pytest.fixture
def numbers(golden_dir: Path) -> dict[str, np.ndarray]:
    return load_file(golden_dir / "camera.safetensors")


def trajectory_of(numbers: dict[str, np.ndarray], name: str) -> CameraTrajectory:
    return CameraTrajectory.from_arrays(numbers[f"{name}.src_poses"], numbers[f"{name}.intrinsics"])


def steps_of(trajectory: CameraTrajectory) -> tuple[np.ndarray, np.ndarray]:
    """The clip's relative poses, raw and in units of its longest step."""
    latent = trajectory.to_latent(CHUNK)
    raw = relative_steps(latent.poses)
    unit = translation_unit("clip", latent_poses=latent.poses)
    controls = clip_controls(latent, chunk=CHUNK, unit=unit, first_delta="identity", width=WIDTH, height=HEIGHT)
    return raw, np.concatenate([part.relative for part in controls])


def unpacked(packed: np.ndarray) -> np.ndarray:
    """[1, C * 64, f, h, w] to [f, 8 h, 8 w, C]."""
    _, channels, frames, h, w = packed.shape
    blocks = packed.reshape(channels // 64, 8, 8, frames, h, w)
    return blocks.transpose(3, 4, 1, 5, 2, 0).reshape(frames, 8 * h, 8 * w, channels // 64)


def test_paths_are_resampled_and_made_relative_as_the_reference_does(facts, numbers, worst):
    assert facts["trajectories"]
    for name, fact in facts["trajectories"].items():
        trajectory = trajectory_of(numbers, name)
        assert len(trajectory) == fact["src_frames"]
        assert trajectory.snap(CHUNK).latent_frames == fact["latent_frames"]
        translation = fact["recommended_translation_atol"]
        rotation = fact["recommended_rotation_atol"]

        latent = trajectory.latent_poses(CHUNK)
        golden = numbers[f"{name}.interp"]
        # The reference rounds absolute positions to float32.
        rounding = 1e-7 * max(1.0, float(np.abs(golden[:, :3, 3]).max()))
        worst.check("interp rotation", name, latent[:, :3, :3], golden[:, :3, :3], rotation)
        worst.check("interp position / magnitude", name, latent[:, :3, 3], golden[:, :3, 3], rounding)

        raw, steps = steps_of(trajectory)
        unit = float(numbers[f"{name}.max_trans_norm"][0])
        scale = unit if unit > 0 else 1.0
        to_first = inverse(latent[0]) @ latent
        to_first[0] = np.eye(4)
        longest = np.linalg.norm(to_first[:, :3, 3], axis=1).max()
        to_first[:, :3, 3] /= longest if fact["max_frame_step"] > 0 else 1.0
        for kind, ours, tolerance in (
            ("rel_framewise_norm", steps, translation),
            ("rel_framewise_raw", raw, translation * scale),
            ("rel_to_first_norm", to_first, translation),
        ):
            golden = numbers[f"{name}.{kind}"]
            worst.check(f"{kind} rotation", name, ours[:, :3, :3], golden[:, :3, :3], rotation)
            worst.check(f"{kind} translation", name, ours[:, :3, 3], golden[:, :3, 3], max(tolerance, 1e-6))
            np.testing.assert_array_equal(ours[:, 3], golden[:, 3])
        # The tolerance is four times what float32 costs the reference itself; without that, hardly anything is left.
        error = np.abs(steps[:, :3, 3] - numbers[f"{name}.rel_framewise_norm"][:, :3, 3]).max()
        beyond = max(0.0, error - fact.get("fp64_vs_reference_fp32_translation_diff", translation))
        worst.check("translation beyond float32", name, beyond, 0.0, translation)
        np.testing.assert_allclose(np.linalg.norm(raw[:, :3, 3], axis=1).max(), unit, atol=translation * scale)


def ray_cases(numbers: dict[str, np.ndarray], kind: str) -> list[tuple[str, str, int, int]]:
    """(key, trajectory, height, width) of every tensor called ``TRAJECTORY.KIND_HxW...``."""
    out = []
    for key in sorted(numbers):
        name, _, rest = key.partition(".")
        if rest.startswith(f"{kind}_"):
            height, width = map(int, rest.removeprefix(f"{kind}_").partition(".")[0].split("x"))
            out.append((key, name, height, width))
    return out


def rays_for(numbers: dict[str, np.ndarray], name: str, height: int, width: int) -> np.ndarray:
    trajectory = trajectory_of(numbers, name)
    _, steps = steps_of(trajectory)
    return camera_rays(steps, trajectory.intrinsics_at(width, height), height, width).numpy()


def ray_tolerance(facts: dict[str, Any], name: str) -> np.ndarray:
    """Per channel: origin, direction."""
    return np.repeat([facts["trajectories"][name]["recommended_translation_atol"], ATOL], 3)


def test_rays_have_the_reference_values_and_order(facts, numbers, worst):
    for key, name, height, width in ray_cases(numbers, "plucker"):
        ours = unpacked(rays_for(numbers, name, height, width))
        worst.check("per pixel", key, ours, numbers[key], ray_tolerance(facts, name))
    for key, name, height, width in ray_cases(numbers, "packed"):
        tolerance = np.repeat(ray_tolerance(facts, name), 64)[:, None, None, None]
        worst.check("packed", key, rays_for(numbers, name, height, width), numbers[key], tolerance)
    assert worst.kinds


def test_rays_of_full_size_pictures(facts, numbers, worst):
    cases = ray_cases(numbers, "big")
    for name, height, width in sorted({case[1:] for case in cases}):
        trajectory = trajectory_of(numbers, name)
        intrinsics = trajectory.intrinsics_at(width, height)
        samples, packed_samples, stats = [], [], []
        # One frame at a time: a whole clip of this size is several hundred MB.
        for step in steps_of(trajectory)[1]:
            packed = camera_rays(step[None], intrinsics, height, width).numpy()
            samples.append(unpacked(packed)[:, ::61, ::67])
            packed_samples.append(packed[..., ::19, ::23])
            channels = packed.reshape(6, -1)
            spread = (channels.mean(1, dtype=np.float64), channels.std(1, dtype=np.float64))
            stats.append(np.stack([*spread, channels.min(1), channels.max(1)]))
        big, tolerance = f"{name}.big_{height}x{width}", ray_tolerance(facts, name)
        packed_tolerance = np.repeat(tolerance, 64)[:, None, None, None]
        golden = numbers[f"{big}.packed_sample_stride19x23"]
        worst.check("samples", big, np.concatenate(samples), numbers[f"{big}.sample_stride61x67"], tolerance)
        worst.check("packed samples", big, np.concatenate(packed_samples, axis=2), golden, packed_tolerance)
        worst.check(
            "mean, std, min, max", big, np.stack(stats, axis=1), numbers[f"{big}.stats_mean_std_min_max"], tolerance
        )


def test_action_rays_are_rotated_directions_and_key_planes(numbers, worst):
    for key, name, height, width in ray_cases(numbers, "act_packed"):
        trajectory = trajectory_of(numbers, name)
        _, steps = steps_of(trajectory)
        actions = numbers[f"{name}.act_action"][::4]
        ours = action_rays(steps, trajectory.intrinsics_at(width, height), actions, height, width).numpy()
        worst.check("packed directions and keys", key, ours, numbers[key], ATOL)
        np.testing.assert_array_equal(ours[:, 192:], numbers[key][:, 192:])


def test_intrinsics_follow_resize_and_centre_crop(numbers, worst):
    keys = [key for key in numbers if key.startswith("Ks.org")]
    assert keys
    for key in keys:
        sizes = [part.lstrip("orgesizfnal").split("x") for part in key.removeprefix("Ks.").split("_")]
        original, resized, final = ((int(width), int(height)) for height, width in sizes)
        ours = transform_intrinsics(numbers["Ks.in"], original, resized, final)
        worst.check("Ks, relative", key, ours, numbers[key], ATOL * np.abs(numbers[key]))
        if resized == final:
            np.testing.assert_array_equal(ours, scale_intrinsics(numbers["Ks.in"], original, final))


def test_action_strings_are_read_and_walked_as_upstream_does(facts, numbers, worst):
    assert facts["strings"]
    for text, fact in facts["strings"].items():
        name = f"action{fact['index']}"
        segments = parse_action_string(text)
        assert [["".join(sorted(keys)) or "none", count] for keys, count in segments] == fact["segments"]
        assert normalize_action_string(text) == fact["normalized"]
        frames = frames_of(segments)
        assert len(frames) == fact["total_frames"]
        assert len(pad_to_4k1(frames)) == fact["padded_frames"]
        for ours, kind in zip(arrays_from_keys(frames), ("wasd", "ijkl"), strict=True):
            np.testing.assert_array_equal(ours, numbers[f"{name}.{kind}"])

        poses = action_string_poses(text)
        assert len(poses) == fact["n_poses"]
        worst.check("c2ws_padded", text, poses, numbers[f"{name}.c2ws_padded"], 1e-9)

        trajectory = CameraTrajectory.from_arrays(poses)
        report = trajectory.snap(CHUNK)
        golden = numbers[f"{name}.fast_tgt_indices"]
        at = np.linspace(0, report.poses_used - 1, report.latent_frames)
        worst.check("source indices", text, at, golden, 1e-9)
        _, steps = steps_of(trajectory)
        worst.check("fast_rel_framewise_norm", text, steps, numbers[f"{name}.fast_rel_framewise_norm"], ATOL)


def test_malformed_action_strings_are_refused(facts):
    assert facts["errors"]
    for text, error in facts["errors"].items():
        if error is None:
            assert parse_action_string(text)
        else:
            with pytest.raises(CameraError):
                parse_action_string(text)
