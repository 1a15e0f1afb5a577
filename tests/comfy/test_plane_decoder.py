"""The VAE's decoder over planes with ComfyUI's convolutions: their weights are got as a call of theirs gets them."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import comfy.model_management
import pytest
import torch

PACK = "lingbot_world_pack"


def part(name: str) -> ModuleType:
    return importlib.import_module(f"{PACK}.{name}")


@pytest.fixture
def vae(pack: ModuleType) -> Any:
    models = part("lingbot_core.models.vae")
    torch.manual_seed(1)
    config = models.VAEConfig(dim=16, dim_mult=(1, 2, 2, 2), num_res_blocks=1)
    made = models.WanVAE(config, operations=part("nodes.host.vae")._Operations).requires_grad_(False)
    for name, parameter in made.named_parameters():  # ComfyUI's layers are made without values
        torch.nn.init.constant_(parameter, 1.0) if "gamma" in name else torch.nn.init.normal_(parameter, std=0.05)
    return made


def frames(vae: Any, latents: torch.Tensor, *, planes: bool) -> torch.Tensor:
    vae.pieces = part("lingbot_core.models.vae_planes").PlanePieces() if planes else None
    return vae.decode(latents)


@pytest.mark.parametrize("how", ["as they are", "cast", "patched"])
def test_weights_arrive_as_in_a_call(vae, how):
    latents = torch.randn(16, 3, 2, 3)
    plain = frames(vae, latents, planes=False)
    for module in vae.decoder.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d):
            module.comfy_cast_weights = how == "cast"
            module.weight_function = [lambda weight: 1.1 * weight] if how == "patched" else []
    expected = frames(vae, latents, planes=False)
    assert torch.equal(plain, expected) is (how != "patched")
    torch.testing.assert_close(frames(vae, latents, planes=True), expected, rtol=0, atol=1e-4)


def test_a_cancelled_run_ends_between_convolutions(vae):
    comfy.model_management.interrupt_current_processing()
    try:
        with pytest.raises(comfy.model_management.InterruptProcessingException):
            frames(vae, torch.randn(16, 1, 2, 3), planes=True)
    finally:
        comfy.model_management.interrupt_current_processing(False)


def test_our_kernels_take_what_comfyui_moves_or_patches(vae):
    decoder = part("lingbot_core.models.vae_plane_decoder")
    modules = [vae.conv2, *vae.decoder.modules()]
    vae.decoder.bfloat16()
    vae.conv2.bfloat16()
    vae.decoder.conv1.comfy_cast_weights = True
    assert not decoder.usable(modules, torch.device("cpu"))
    assert decoder.usable(modules, torch.device("cpu"), vae._weights)
