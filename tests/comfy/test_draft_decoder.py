"""Our streaming draft decoder against ComfyUI's own class for the same files, with random weights."""

from __future__ import annotations

import importlib
from types import ModuleType

import comfy.taesd.taehv
import pytest
import torch

PACK = "lingbot_world_pack"


def part(name: str) -> ModuleType:
    return importlib.import_module(f"{PACK}.lingbot_core.models.{name}")


@pytest.mark.parametrize("parallel", [True, False])
def test_frames_are_those_of_comfyuis_decoder(pack, parallel):
    tiny, models = part("tiny_decoder"), part("vae")
    torch.manual_seed(1)
    theirs = comfy.taesd.taehv.TAEHV(latent_channels=16, parallel=parallel, latent_format=None)
    ours = tiny.TinyDecoder("taew2_1", raw=False)
    ours.layers[-1].weight.data *= 10
    ours.layers[-1].bias.data.fill_(0.5)  # in the middle of what is not clamped
    theirs.decoder.load_state_dict(ours.layers.state_dict())  # strictly: the same names, all of them
    vae = models.WanVAE(models.VAEConfig(dim=4, num_res_blocks=1))
    vae.draft = ours
    latents = torch.randn(16, 4, 3, 2)
    with torch.no_grad():
        expected = (2 * theirs.decode(latents.unsqueeze(0))[0] - 1).clamp(-1, 1)
    state = models.DecoderState()
    got = torch.cat([vae.decode(part, state) for part in latents.split([1, 3], dim=1)], dim=1)
    assert got.shape == (3, 13, 24, 16)
    assert got.std() > 0.01
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)
