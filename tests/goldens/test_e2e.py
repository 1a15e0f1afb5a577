"""From an 8-bit picture and poses to 8-bit frames: the whole engine as a user drives it, against the reference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from lingbot_core.camera import CameraTrajectory, camera_rays, translation_unit
from lingbot_core.camera.controls import clip_controls
from lingbot_core.engine.image import fit_size, frames_to_uint8, prepare_image
from lingbot_core.engine.noise import InjectedNoise
from lingbot_core.engine.session import WorldSession
from lingbot_core.engine.world import World
from lingbot_core.models.dit import CausalWanDiT, DiTConfig
from lingbot_core.models.vae import VAEConfig, WanVAE
from lingbot_core.presets import Preset, TableSteps

FILES = ("e2e_tiny.safetensors",)


class Golden:
    """The file's tensors and a World with its weights."""

    def __init__(self, path: Path) -> None:
        self.file = safe_open(path, "pt")
        self.meta = self.file.metadata()
        sizes = json.loads(self.meta["dit_config"])
        weights = self._weights("dit.")
        shapes = {k: tuple(v.shape) for k, v in weights.items()}
        dit = CausalWanDiT(DiTConfig.from_shapes(shapes, num_heads=sizes["num_heads"], text_len=sizes["text_len"]))
        dit.load_state_dict(weights)
        weights = self._weights("vae.")
        vae = WanVAE(VAEConfig.from_state_dict(weights))
        vae.load_state_dict(weights)
        selection = TableSteps(tuple(json.loads(self.meta["timesteps_index"])))
        self.world = World(
            dit=dit.eval().requires_grad_(False),
            vae=vae.eval().requires_grad_(False),
            text=None,
            preset=Preset("golden", chunk=3, selection=selection, shift=float(self.meta["shift"])),
            device=torch.device("cpu"),
            cache_dtype=torch.float32,
        )

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.file.get_tensor(key)

    def _weights(self, prefix: str) -> dict[str, torch.Tensor]:
        marker = f"{prefix}state_dict."
        return {k.removeprefix(marker): self[k].float() for k in self.file.keys() if k.startswith(marker)}  # noqa: SIM118


@pytest.fixture(scope="module")
def golden(golden_dir: Path) -> Golden:
    return Golden(golden_dir / FILES[0])


def worst(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape
    return (got.double() - expected.double()).abs().max().item()


def test_a_session_from_picture_and_poses_gives_the_reference_frames(golden: Golden) -> None:
    source = golden["in.image_uint8_hwc"].numpy()
    image = prepare_image(source, area=int(golden.meta["max_area"]))
    height, width = fit_size(*source.shape[:2], area=int(golden.meta["max_area"]))
    assert (height, width) == (image.height, image.width) == tuple(golden["mid.image_resized"].shape[1:])
    errors = {"resized picture": worst(image.pixels, golden["mid.image_resized"])}

    path = CameraTrajectory.from_arrays(
        golden["in.poses"].double().numpy(), golden["in.intrinsics"].double().numpy(), width=832, height=480
    )
    latent = path.to_latent(3)
    unit = translation_unit("clip", latent_poses=latent.poses)
    every = clip_controls(latent, chunk=3, unit=unit, first_delta="identity", width=width, height=height)
    rays = camera_rays(every[0].relative, every[0].intrinsics, height, width)
    errors["rays"] = worst(rays, golden["mid.plucker_chunk0"])

    condition = golden.world.condition(image)
    errors["condition"] = worst(condition.latents(0, latent.poses.shape[0]), golden["mid.y"])
    session = WorldSession.start(
        golden.world, condition, "golden", translation_unit=unit, prompt_states=golden["in.context"]
    )
    chunks = []
    for i, controls in enumerate(every):
        noise = InjectedNoise(golden["in.noise"][:, 3 * i : 3 * i + 3], tuple(golden["in.renoise"][i]))
        chunks.append(session.advance(controls, noise=noise))
    frames = torch.cat([c.frames for c in chunks], dim=1)
    errors["latents"] = worst(torch.cat([c.latents for c in chunks], dim=1), golden["out.latents"])
    errors["frames"] = worst((frames.permute(1, 2, 3, 0) + 1) / 2, golden["out.frames_01_thwc"])
    bytes_off = (torch.from_numpy(frames_to_uint8(frames)).int() - golden["out.frames_uint8_thwc"].int()).abs().max()
    print("\nachieved", {what: f"{error:.1e}" for what, error in errors.items()}, "bytes off by", int(bytes_off))
    assert errors["resized picture"] <= 1e-5
    assert errors["rays"] <= 1e-5
    assert errors["condition"] <= 1e-4
    assert errors["latents"] <= 1e-4
    assert errors["frames"] <= 2e-4
    assert bytes_off <= 1
