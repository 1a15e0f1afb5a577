"""Bytes: how much a session will need, before anything is allocated, and how much is free.

Weights, keys and values, camera modulation and the VAE's states are counted exactly, from the same classes on the meta
device. Workspaces are a formula whose factors were fitted to measured peaks (benchmarks/RESULTS.md) and rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from ..errors import MemoryPlanError
from ..models.dit import CausalWanDiT, DiTConfig
from ..models.vae import SPATIAL_STRIDE, TEMPORAL_STRIDE, DecoderState, EncoderState, VAEConfig, WanVAE
from ..presets import Preset

GIB = 2**30

# Float32 copies of the residual, and tensors of the compute dtype, alive at once in a block's widest moment.
RESIDUAL_COPIES = 5
COMPUTE_COPIES = 6
# Activations of the VAE's widest level (base width, full resolution, four frames) alive at once, workspaces included:
# one latent through PyTorch's convolutions, which need more beside them than `vae.LATENTS_AT_ONCE` through our kernels.
DECODE_COPIES = 15
ENCODE_COPIES = 8


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by purpose. workspace: the largest that any stage needs beside everything else."""

    transformer: int
    vae: int
    kv_cache: int
    cross: int
    camera: int
    vae_states: int
    workspace: int
    text_encoder: int = 0
    noise: int = 0

    @property
    def weights(self) -> int:
        """What the loaded models take."""
        return self.transformer + self.vae + self.text_encoder

    @property
    def session(self) -> int:
        """What one session takes beside the weights, at its peak."""
        return self.kv_cache + self.cross + self.camera + self.vae_states + self.workspace + self.noise

    @property
    def total(self) -> int:
        """Weights and one session."""
        return self.weights + self.session

    def describe(self) -> str:
        """One line for people."""
        parts = {
            "transformer": self.transformer,
            "VAE": self.vae,
            "text encoder": self.text_encoder,
            "K/V cache": self.kv_cache,
            "prompt": self.cross,
            "camera": self.camera,
            "VAE states": self.vae_states,
            "workspace": self.workspace,
            "noise": self.noise,
        }
        listed = ", ".join(f"{name} {bytes_ / GIB:.1f}" for name, bytes_ in parts.items())
        return f"{self.total / GIB:.1f} GiB ({listed})"


def estimate(
    dit: DiTConfig,
    vae: VAEConfig,
    preset: Preset,
    *,
    height: int,
    width: int,
    chunks: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
    vae_dtype: torch.dtype = torch.float32,
    rewind_depth: int = 0,
    text_encoder: int = 0,
    whole_noise: bool = False,
    records: bool = False,
) -> MemoryEstimate:
    """Bytes for a picture of height x width and ``chunks`` chunks (which matter only without a window).

    dtype: of the transformer's weights and activations. vae_dtype: of the VAE's decoder; its encoder is float32.
    text_encoder: its bytes on the same device.
    whole_noise: the noise of all chunks is drawn at once (noise='reference'). records: CUDA graphs keep
    a workspace of their own.
    """
    cache_dtype = cache_dtype or dtype
    branches = 2 if preset.guided else 1
    model = _dit_on_meta(dit)
    shape = model.cache_shape(height // SPATIAL_STRIDE, width // SPATIAL_STRIDE)
    past = chunks * preset.chunk
    frames = past if preset.window is None else preset.window + rewind_depth * preset.chunk
    tokens = preset.chunk * shape.frame_tokens
    row = dit.dim * dtype.itemsize
    forward = tokens * (
        RESIDUAL_COPIES * dit.dim * 4 + max(COMPUTE_COPIES * row, 2 * dit.ffn_dim * dtype.itemsize + 2 * row)
    )
    encoder, decoder = _vae_states(vae, height, width)
    pixels = TEMPORAL_STRIDE * height * width * vae.dim
    decode, encode = DECODE_COPIES * pixels * vae_dtype.itemsize, ENCODE_COPIES * pixels * 4
    workspace = max(forward, decode, encode)
    meta = _vae_on_meta(vae)
    decoding = _parameters(meta.decoder) + _parameters(meta.conv2)
    return MemoryEstimate(
        transformer=_parameters(model) * dtype.itemsize,
        vae=decoding * vae_dtype.itemsize + (_parameters(meta) - decoding) * 4,
        kv_cache=branches * frames * shape.frame_bytes(cache_dtype),
        cross=branches * 2 * dit.num_layers * dit.text_len * row,
        camera=2 * dit.num_layers * tokens * row,
        # While it decodes, the state before the chunk is kept beside the new one.
        vae_states=encoder + decoder * (2 + rewind_depth) * vae_dtype.itemsize // 4,
        workspace=workspace + (forward if records else 0),
        text_encoder=text_encoder,
        noise=4 * dit.out_dim * past * (height // SPATIAL_STRIDE) * (width // SPATIAL_STRIDE) if whole_noise else 0,
    )


def encode_bytes(vae: VAEConfig, height: int, width: int) -> int:
    """Bytes beside the weights that encoding a start image takes at its peak, in float32."""
    encoder, _ = _vae_states(vae, height, width)
    # While it encodes, the state before the latent frame is kept beside the new one.
    return 2 * encoder + ENCODE_COPIES * TEMPORAL_STRIDE * height * width * vae.dim * 4


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device; None where that cannot be known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What PyTorch holds but does not use is free for us.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    # Not the free pages: the file cache gives way.
    if (meminfo := Path("/proc/meminfo")).is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def require_free(needed: MemoryEstimate, device: torch.device, held: int = 0) -> None:
    """Raises MemoryPlanError, naming sizes and ways out, when a session will not fit beside the loaded weights.

    held: bytes of the session that are allocated already.
    """
    free = free_bytes(device)
    # The workspace is never held.
    if free is None or max(needed.session - held, needed.workspace) <= free:
        return
    raise MemoryPlanError(
        f"this session needs {needed.session / GIB:.1f} GiB on {device} beside the weights, {free / GIB:.1f} GiB are "
        f"free (in all {needed.describe()}). Use a window (v1-fast keeps all of the past), a smaller picture, or fewer "
        "chunks"
    )


@lru_cache(maxsize=8)
def _dit_on_meta(config: DiTConfig) -> CausalWanDiT:
    return CausalWanDiT(config, device="meta")


@lru_cache(maxsize=8)
def _vae_on_meta(config: VAEConfig) -> WanVAE:
    return WanVAE(config, device="meta")


@lru_cache(maxsize=32)
def _vae_states(config: VAEConfig, height: int, width: int) -> tuple[int, int]:
    """Bytes of a running encoder's and decoder's state in float32: run on the meta device, nothing is computed."""
    vae = _vae_on_meta(config)
    encoder, decoder = EncoderState(), DecoderState()
    vae.encode(torch.zeros(3, 1 + TEMPORAL_STRIDE, height, width, device="meta"), encoder)
    latents = torch.zeros(config.z_dim, 2, height // SPATIAL_STRIDE, width // SPATIAL_STRIDE, device="meta")
    vae.decode(latents, decoder)
    return encoder.nbytes, decoder.nbytes


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
