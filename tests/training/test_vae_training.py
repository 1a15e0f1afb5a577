"""The batched training forward of the VAE is that of WanVAE; folding leaves pictures alone; training learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lingbot_core.engine.condition import ImageCondition
from lingbot_core.engine.image import prepare_image
from lingbot_core.models.vae import LATENT_MEAN, LATENT_STD, VAEConfig, WanVAE
from training.latents import encode_clips, encode_conditions, fold_statistics, pictures
from training.vae_forward import Ways, decode_raw, encoder_span
from training.vae_training import (
    Stage,
    VAETraining,
    initialise,
    latent_statistics,
    load_vae,
    train_vae,
    unsteadiness,
)

SMALL = VAEConfig(dim=8, num_res_blocks=1)


def make_vae(config: VAEConfig = SMALL) -> WanVAE:
    vae = WanVAE(config)
    initialise(vae, 3)
    generator = torch.Generator().manual_seed(4)
    for p in vae.parameters():  # biases and gammas of their own, so that none can be mixed up
        p.data += 0.1 * torch.randn(p.shape, generator=generator)
    return vae.requires_grad_(False)


def videos(count: int, frames: int, seed: int) -> Tensor:
    """Drifting stripes."""
    generator = torch.Generator().manual_seed(seed)
    phase = torch.rand(count, 1, 3, 1, 1, generator=generator) * 6
    speed = torch.rand(count, 1, 1, 1, 1, generator=generator)
    t = torch.arange(frames).view(1, -1, 1, 1, 1)
    x = torch.arange(16).view(1, 1, 1, 1, -1)
    y = torch.arange(16).view(1, 1, 1, -1, 1)
    return ((torch.sin(phase + speed * t + 0.5 * x + 0.3 * y) + 1) * 127).to(torch.uint8)


def test_encoding_whole_clips_equals_streaming() -> None:
    for blocks in (1, 2):
        vae = make_vae(VAEConfig(dim=8, num_res_blocks=blocks))
        clips = videos(2, 13, 1)
        for stacked in (True, False):
            got = encode_clips(vae, clips, Ways(stacked), torch.float32)
            for clip, latents in zip(clips, got, strict=True):
                want = vae.encode(clip.transpose(0, 1).float() / 127.5 - 1)
                torch.testing.assert_close(latents, want, atol=1e-4, rtol=1e-4)


def test_decoding_whole_clips_equals_streaming() -> None:
    for blocks in (1, 2):
        vae = make_vae(VAEConfig(dim=8, num_res_blocks=blocks))
        latents = torch.randn(2, 16, 4, 2, 3, generator=torch.Generator().manual_seed(5))
        mean, std = (torch.tensor(c).view(1, -1, 1, 1, 1) for c in (LATENT_MEAN, LATENT_STD))
        raw = (latents * std + mean).permute(0, 2, 3, 4, 1).contiguous()
        for stacked in (True, False):
            got = decode_raw(vae, raw, Ways(stacked)).clamp(-1, 1).permute(0, 4, 1, 2, 3)
            for one, frames in zip(latents, got, strict=True):
                torch.testing.assert_close(frames, vae.decode(one), atol=1e-4, rtol=1e-4)


def test_conditions_equal_those_of_a_session_up_to_and_beyond_the_steady_tail() -> None:
    vae = make_vae()
    span = encoder_span(vae.config)
    image = videos(1, 1, 9)[0, 0]
    prepared = prepare_image(image.permute(1, 2, 0).numpy(), size=(16, 16))
    session = ImageCondition(vae, prepared)
    want = session.latents(0, span + 6)[4:]
    got = encode_conditions(vae, image[None], span + 6, Ways(), torch.float32)[0]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_folding_standardises_latents_and_leaves_pictures_alone() -> None:
    vae = make_vae()
    clips = videos(6, 9, 2)
    before = vae.decode(encode_clips(vae, clips, Ways(), torch.float32)[0])
    fold_statistics(vae, *latent_statistics(vae, clips, torch.float32))
    latents = encode_clips(vae, clips, Ways(), torch.float32)
    flat = latents.transpose(0, 1).flatten(1)
    torch.testing.assert_close(flat.mean(1), torch.zeros(16), atol=1e-4, rtol=0)
    torch.testing.assert_close(flat.std(1), torch.ones(16), atol=1e-3, rtol=0)
    torch.testing.assert_close(vae.decode(latents[0]), before, atol=1e-3, rtol=0)


def test_training_improves_resumes_and_stands_in_small_files(tmp_path: Path) -> None:
    recipe = VAETraining(
        dim=8, lr=4e-3, warm_up=3, stages=(Stage(0.5, 1, 4), Stage(1.0, 5, 2)), pool=8 * 5, compiled=False, graphs=False
    )
    common = {"device": torch.device("cpu"), "seconds": 60.0, "statistics_clips": 8}
    train_vae(videos, tmp_path / "a", recipe, steps=20, **common)
    train_vae(videos, tmp_path / "b", recipe, steps=40, resume=tmp_path / "a", **common)
    lines = [(tmp_path / name / "vae.jsonl").read_text().splitlines() for name in "ab"]
    import json

    first, last = (json.loads(line[-1]) for line in lines)
    assert (first["step"], last["step"]) == (20, 40)
    assert last["psnr_unseen"] > first["psnr_unseen"]
    assert last["skipped"] == 0
    vae = load_vae(tmp_path / "b", torch.device("cpu"))
    assert vae.decode(vae.encode(pictures(videos(1, 5, 8), torch.float32)[0].permute(3, 0, 1, 2))).shape == (
        3,
        5,
        16,
        16,
    )
    assert max(p.stat().st_size for p in (tmp_path / "b").iterdir()) <= 15 * 2**20


def test_a_new_plan_begins_with_finished_weights(tmp_path: Path) -> None:
    recipe = VAETraining(dim=8, lr=0.0, stages=(Stage(1.0, 5, 2),), pool=8 * 5, compiled=False, graphs=False)
    common = {"device": torch.device("cpu"), "seconds": 60.0, "statistics_clips": 8}
    first = train_vae(videos, tmp_path / "a", recipe, steps=1, **common)
    other = train_vae(videos, tmp_path / "b", replace(recipe, seed=5), steps=1, begin=tmp_path / "a", **common)
    # Without a learning rate only the scale of the latents is measured anew.
    picture = videos(1, 5, 8)[0]
    a, b = (v.decode(v.encode(pictures(picture[None], torch.float32)[0].permute(3, 0, 1, 2))) for v in (first, other))
    torch.testing.assert_close(a, b, atol=0.02, rtol=0)


def test_latents_that_change_with_their_place_in_the_clip_are_unsteady() -> None:
    latents = torch.randn(4, 6, 8, 8, 16, generator=torch.Generator().manual_seed(1))
    growing = latents * torch.linspace(0.5, 1.5, 6).view(1, 6, 1, 1, 1)
    drifting = latents + torch.linspace(-1, 1, 6).view(1, 6, 1, 1, 1)
    assert unsteadiness(latents) < 0.02
    assert unsteadiness(growing) > 0.1
    assert unsteadiness(drifting) > 0.2
    assert unsteadiness(latents[:, :1]) == 0
