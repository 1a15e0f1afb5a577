"""The VAE for training: whole clips, batched, with gradients, on the parameters of a `WanVAE`.

Activations are [B, T, H, W, C], contiguous: to a convolution that is channels-last without a copy, and norms run over
rows of C numbers. The parameters stay float32; everything is computed in the dtype of the input. What comes out is
what `WanVAE.encode` and `WanVAE.decode` give frame by frame.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lingbot_core.models.vae import VAEConfig, WanVAE
from lingbot_core.models.vae_blocks import AttentionBlock, Downsample, ResidualBlock, RMSNorm, Upsample


def norm_rows(x: Tensor, gamma: Tensor, silu: bool) -> Tensor:
    """RMS norm over the last axis with float32 statistics, then SiLU; fused into one kernel where it is compiled."""
    wide = x.float()
    length = wide.square().sum(dim=-1, keepdim=True).sqrt().clamp_min(1e-12)
    out = wide * (x.shape[-1] ** 0.5 / length) * gamma
    return (F.silu(out) if silu else out).to(x.dtype)


@dataclass(frozen=True)
class Ways:
    """How things are computed, not what. stacked: a convolution over time as a 2D one over frames stacked into
    channels, instead of the library's 3D one. norm: `norm_rows`, or a compiled version of it."""

    stacked: bool = True
    norm: Callable[[Tensor, Tensor, bool], Tensor] = norm_rows


def compiled_norm(device: torch.device) -> Callable[[Tensor, Tensor, bool], Tensor]:
    """`norm_rows` in fused kernels where a GPU and a compiler are there, else as it is."""
    if device.type != "cuda":
        return norm_rows
    compiled = torch.compile(norm_rows)
    try:
        x = torch.ones(64, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
        compiled(x, torch.ones(16, device=device), True).sum().backward()
    except Exception as error:  # whatever a compiler may raise
        print(f"the norm is not compiled: {str(error)[-300:]}", flush=True)
        return norm_rows
    return compiled


def fast_ways(device: torch.device) -> Ways:
    """What needs no measuring."""
    return Ways(True, compiled_norm(device))


def encode_moments(vae: WanVAE, video: Tensor, ways: Ways) -> Tensor:
    """video: [B, 1 + 4k, H, W, 3] in [-1, 1]. Returns [B, 1 + k, h, w, 32]: raw means and log-variances."""
    e = vae.encoder
    x = _through(e.conv1, (*e.downsamples, *e.middle), e.head, video, ways)
    return _pointwise(vae.conv1, x)


def decode_raw(vae: WanVAE, latents: Tensor, ways: Ways) -> Tensor:
    """latents: raw [B, 1 + k, h, w, 16]. Returns [B, 1 + 4k, H, W, 3], not clamped."""
    d = vae.decoder
    return _through(d.conv1, (*d.middle, *d.upsamples), d.head, _pointwise(vae.conv2, latents), ways)


def encoder_span(config: VAEConfig) -> int:
    """Latents until an encoder whose input has been constant since frame 1 gives a constant latent.

    Counted from the head back: steps of each level's frame rate, in video frames.
    """
    rate, frames = 1, 1 + 2  # the start image itself, and conv1
    for level in range(len(config.dim_mult)):
        frames += 2 * 2 * config.num_res_blocks * rate
        if level < len(config.temporal_downsample) and config.temporal_downsample[level]:
            frames += 2 * rate
            rate *= 2
    frames += (4 + 1) * 2 * rate  # the middle's two blocks, and the head
    return -(-frames // rate) + 1


def _through(conv1: nn.Module, blocks: tuple[nn.Module, ...], head: nn.Module, x: Tensor, ways: Ways) -> Tensor:
    x = _causal(conv1, x, ways)
    for block in blocks:
        x = _block(block, x, ways)
    norm, _, conv = head
    return _causal(conv, _norm(norm, x, True, ways), ways)


def _block(block: nn.Module, x: Tensor, ways: Ways) -> Tensor:
    match block:
        case ResidualBlock():
            norm1, _, conv1, norm2, _, _, conv2 = block.residual
            h = _causal(conv1, _norm(norm1, x, True, ways), ways)
            h = _causal(conv2, _norm(norm2, h, True, ways), ways)
            return h + (x if isinstance(block.shortcut, nn.Identity) else _pointwise(block.shortcut, x))
        case AttentionBlock():
            batch, frames, height, width, channels = x.shape
            qkv = _pointwise(block.to_qkv, _norm(block.norm, x, False, ways))
            q, k, v = qkv.view(batch * frames, 1, height * width, 3 * channels).chunk(3, dim=-1)
            out = F.scaled_dot_product_attention(q, k, v)
            return x + _pointwise(block.proj, out.reshape(x.shape))
        case Downsample():
            x = _framewise(block.resample[1], F.pad(x, (0, 0, 0, 1, 0, 1)), stride=2, padding=0)
            if block.time_conv is None or x.shape[1] == 1:
                return x
            return torch.cat([x[:, :1], _taps(block.time_conv, x, stride=2)], dim=1)
        case Upsample():
            if block.time_conv is not None and x.shape[1] > 1:
                later = _taps(block.time_conv, F.pad(x[:, 1:], (0, 0, 0, 0, 0, 0, 2, 0)), stride=1)
                batch, frames, height, width, _ = later.shape
                # The first half of the channels is the earlier frame of each pair.
                pairs = later.view(batch, frames, height, width, 2, -1).permute(0, 1, 4, 2, 3, 5)
                x = torch.cat([x[:, :1], pairs.reshape(batch, 2 * frames, height, width, -1)], dim=1)
            x = x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
            return _framewise(block.resample[1], x, stride=1, padding=1)
    raise TypeError(f"{type(block).__name__} is no part of a VAE")


def _norm(norm: RMSNorm, x: Tensor, silu: bool, ways: Ways) -> Tensor:
    return ways.norm(x.view(-1, x.shape[-1]), norm.gamma.flatten(), silu).view(x.shape)


def _causal(conv: nn.Module, x: Tensor, ways: Ways) -> Tensor:
    """Three taps in time, preceded by two frames of zeros."""
    weight = conv.weight.to(x.dtype)
    if x.shape[1] == 1:  # a picture: the other two taps see zeros
        return _conv2d(x, weight[:, :, 2], conv.bias, 1, 1)
    padded = F.pad(x, (0, 0, 0, 0, 0, 0, 2, 0))
    if not ways.stacked:
        out = F.conv3d(padded.permute(0, 4, 1, 2, 3), weight, conv.bias.to(x.dtype), padding=(0, 1, 1))
        return out.permute(0, 2, 3, 4, 1).contiguous()
    frames = x.shape[1]
    stacked = torch.cat([padded[:, tap : tap + frames] for tap in range(3)], dim=-1)
    return _conv2d(stacked, weight.transpose(1, 2).flatten(1, 2), conv.bias, 1, 1)


def _taps(conv: nn.Module, x: Tensor, stride: int) -> Tensor:
    """A (3, 1, 1) convolution without padding: a Linear over three frames stacked into channels."""
    count = (x.shape[1] - 3) // stride + 1
    last = stride * (count - 1) + 1
    stacked = torch.cat([x[:, tap : tap + last : stride] for tap in range(3)], dim=-1)
    weight = conv.weight.flatten(2).transpose(1, 2).flatten(1)
    return F.linear(stacked, weight.to(x.dtype), conv.bias.to(x.dtype))


def _framewise(conv: nn.Module, x: Tensor, *, stride: int, padding: int) -> Tensor:
    return _conv2d(x, conv.weight.to(x.dtype), conv.bias, stride, padding)


def _conv2d(x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int) -> Tensor:
    frames = x.flatten(0, 1).permute(0, 3, 1, 2)
    out = F.conv2d(frames, weight.contiguous(memory_format=torch.channels_last), bias.to(x.dtype), stride, padding)
    return out.permute(0, 2, 3, 1).contiguous().unflatten(0, x.shape[:2])


def _pointwise(conv: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, conv.weight.flatten(1).to(x.dtype), conv.bias.to(x.dtype))
