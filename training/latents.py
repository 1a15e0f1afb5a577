"""Latents of many clips at once, their statistics, and folding those into the VAE's weights."""

from __future__ import annotations

import torch
from torch import Tensor

from lingbot_core.models.vae import LATENT_MEAN, LATENT_STD, WanVAE, frames_for

from .vae_forward import Ways, decode_raw, encode_moments, encoder_span


def pictures(video: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [B, T, 3, H, W] -> [B, T, H, W, 3] in [-1, 1]."""
    return video.permute(0, 1, 3, 4, 2).contiguous().to(dtype) / 127.5 - 1


def _normalised(moments: Tensor) -> Tensor:
    """[B, t, h, w, 32] -> float32 [B, 16, t, h, w], as `WanVAE.encode` returns it."""
    mean = torch.tensor(LATENT_MEAN, device=moments.device)
    std = torch.tensor(LATENT_STD, device=moments.device)
    return ((moments[..., : len(LATENT_MEAN)].float() - mean) / std).permute(0, 4, 1, 2, 3).contiguous()


@torch.no_grad()
def encode_clips(vae: WanVAE, video: Tensor, ways: Ways, dtype: torch.dtype) -> Tensor:
    """uint8 [B, 1 + 4k, 3, H, W] -> float32 [B, 16, 1 + k, h, w], normalised."""
    return _normalised(encode_moments(vae, pictures(video, dtype), ways))


@torch.no_grad()
def encode_conditions(vae: WanVAE, images: Tensor, latents: int, ways: Ways, dtype: torch.dtype) -> Tensor:
    """What `ImageCondition` gives for a start image: float32 [B, 16, latents, h, w], without the mask.

    images: uint8 [B, 3, H, W]. Only as many grey frames are encoded as can differ; the last latent stands for the rest.
    """
    count = min(latents, encoder_span(vae.config))
    first = pictures(images[:, None], dtype)
    grey = first.new_zeros(len(images), frames_for(count, first=True) - 1, *first.shape[2:])
    encoded = _normalised(encode_moments(vae, torch.cat([first, grey], dim=1), ways))
    tail = encoded[:, :, -1:].expand(-1, -1, latents - count, -1, -1)
    return torch.cat([encoded, tail], dim=2)


@torch.no_grad()
def decode_latents(vae: WanVAE, latents: Tensor, dtype: torch.dtype, at_once: int = 8) -> Tensor:
    """Normalised latents [B, 16, t, h, w] -> pictures float32 [B, T, H, W, 3], clamped to [-1, 1]."""
    mean = torch.tensor(LATENT_MEAN, device=latents.device)
    std = torch.tensor(LATENT_STD, device=latents.device)
    raw = latents.permute(0, 2, 3, 4, 1).float() * std + mean
    parts = [decode_raw(vae, part.to(dtype), Ways()).float().clamp(-1, 1) for part in raw.split(at_once)]
    return torch.cat(parts)


@torch.no_grad()
def fold_statistics(vae: WanVAE, mean: Tensor, std: Tensor) -> None:
    """Rewrites the two pointwise convolutions beside the latents so that latents of this mean and deviation become
    latents of mean 0 and deviation 1 under Wan's constants; pictures stay what they were.

    mean, std: [16] of the *normalised* latents of many clips.
    """
    published_mean = torch.tensor(LATENT_MEAN, dtype=torch.float64)
    published_std = torch.tensor(LATENT_STD, dtype=torch.float64)
    mean, std = mean.double().cpu(), std.double().cpu()
    # raw = published_std * z + published_mean with z of (mean, std); the new raw is scale * raw + offset.
    scale = 1 / std
    offset = published_mean - scale * (published_std * mean + published_mean)
    z = len(scale)
    after, before = vae.conv1, vae.conv2
    weight, bias = after.weight.double().cpu(), after.bias.double().cpu()
    weight[:z] *= scale.view(-1, 1, 1, 1, 1)
    bias[:z] = bias[:z] * scale + offset
    bias[z:] += 2 * scale.log()
    after.weight.copy_(weight)
    after.bias.copy_(bias)
    weight, bias = before.weight.double().cpu(), before.bias.double().cpu()
    matrix = weight.flatten(1) / scale
    before.bias.copy_(bias - matrix @ offset)
    before.weight.copy_(matrix.view_as(weight))
