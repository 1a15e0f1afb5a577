"""The VAE against recorded numbers of the reference implementation (float32, CPU)."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from lingbot_core.models.vae import LATENT_MEAN, LATENT_STD, DecoderState, EncoderState, VAEConfig, WanVAE

FILES = ("vae.safetensors", "vae_constants.json")
TOLERANCE = 1e-4  # the format's own limit


@pytest.fixture(scope="module")
def golden(golden_dir):
    return load_file(golden_dir / "vae.safetensors")


@pytest.fixture(scope="module")
def constants(golden_dir):
    return json.loads((golden_dir / "vae_constants.json").read_text())


@pytest.fixture(scope="module")
def vae(golden) -> WanVAE:
    prefix = "state_dict."
    weights = {name.removeprefix(prefix): t.float() for name, t in golden.items() if name.startswith(prefix)}
    vae = WanVAE(VAEConfig.from_state_dict(weights), device="meta")
    vae.load_state_dict(weights, assign=True)
    return vae


def check(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    error = (got - want).abs().max().item()
    print(f"vae.safetensors {what}: max abs error {error:.2e} (limit {TOLERANCE:.0e})")
    assert error <= TOLERANCE


def test_the_configuration_is_that_of_the_file(vae, constants):
    assert vae.config == VAEConfig(dim=8)
    assert list(LATENT_MEAN) == constants["latents_mean"]
    assert list(LATENT_STD) == constants["latents_std"]
    real = VAEConfig()
    assert real.dim == constants["real_dim"]
    assert list(real.dim_mult) == constants["real_dim_mult"]
    assert real.num_res_blocks == constants["real_num_res_blocks"]
    assert list(real.temporal_downsample) == constants["real_temporal_downsample"]


def test_an_image_followed_by_grey_encodes_chunk_by_chunk(golden, vae):
    video = torch.zeros(3, 33, 32, 48)
    video[:, 0] = golden["image"]
    state = EncoderState()
    latents = torch.cat([vae.encode(piece, state) for piece in video.split([9, 12, 12], dim=1)], dim=1)
    for frames in (9, 21, 33):
        check(
            f"encode.image_zeros_{frames}", latents[:, : 1 + frames // 4], golden[f"encode.image_zeros_{frames}.latent"]
        )


def test_a_moving_clip_encodes_at_once(golden, vae):
    check("encode.random_33", vae.encode(golden["encode.random_33.video"]), golden["encode.random_33.latent"])


def test_a_clip_decodes_at_once(golden, vae):
    for latents in (3, 6):
        got = vae.decode(golden[f"decode.{latents}.latent"])
        check(f"decode.{latents}", got, golden[f"decode.{latents}.video"])


def test_a_clip_decodes_chunk_by_chunk(golden, vae):
    state = DecoderState()
    pieces = [vae.decode(piece, state) for piece in golden["decode.9.latent"].split(1, dim=1)]
    assert [piece.shape[1] for piece in pieces] == golden["decode.streaming_9.frames_per_latent"].tolist()
    check("decode.9", torch.cat(pieces, dim=1), golden["decode.9.video"])


def test_the_decoder_state_holds_what_the_reference_caches(golden, vae):
    state = DecoderState()
    vae.decode(golden["decode.9.latent"][:, :3], state)
    shapes = [list(slot.shape) for slot in state.slots]
    recorded = golden["decode.streaming.cache_after_chunk0.shapes"].tolist()
    # The reference reserves a slot for each shortcut too; those stay unused, at the end.
    assert shapes == recorded[: len(shapes)]
    assert not any(any(shape) for shape in recorded[len(shapes) :])
    sums = torch.stack([slot.double().abs().sum() for slot in state.slots])
    relative = (sums / golden["decode.streaming.cache_after_chunk0.sum_abs"][: len(shapes)] - 1).abs().max().item()
    print(f"vae.safetensors decoder cache sums: max relative error {relative:.2e} (limit 1e-05)")
    assert relative <= 1e-5
