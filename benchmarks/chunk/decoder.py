"""Milliseconds of the steady chunk's decode: plain modules in dtypes and layouts, our kernels, the reference."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lingbot_core.models.vae import DecoderState, VAEConfig, WanVAE
from lingbot_core.models.vae_plane_decoder import fused_planes

from ..random_weights import randomise
from ..reference import load_reference_vae
from .timing import host_milliseconds, milliseconds, synchronize

GIB = 2**30


@dataclass(frozen=True)
class Way:
    """One way to decode. kernels: ours, with ``together`` latents at once; else the plain modules, one by one."""

    dtype: torch.dtype
    layout: torch.memory_format = torch.contiguous_format
    kernels: bool = False
    together: int = 1

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "way": "kernels" if self.kernels else "plain modules",
            "dtype": str(self.dtype).removeprefix("torch."),
            "layout": str(self.layout).removeprefix("torch."),
            "latents_at_once": self.together,
        }


def ways(device: torch.device, latents: int) -> list[Way]:
    """The first is what the others are compared with."""
    last = torch.channels_last_3d
    found = [Way(torch.float32)]
    if device.type == "cuda":
        for dtype in (torch.bfloat16, torch.float16):
            found += [Way(dtype), Way(dtype, last)]
            found += [Way(dtype, last, kernels=True, together=count) for count in (1, latents)]
    return found


@torch.no_grad()
def measure(
    config: VAEConfig, height: int, width: int, device: torch.device, folder: Path | None, latents: int = 3
) -> Iterator[dict[str, Any]]:
    """A row for each way: ms of ``latents`` latent frames in the middle of a clip, peak memory, error to float32.

    folder: where the reference lies, which then runs in the same weights, bfloat16, latent by latent.
    """
    torch.manual_seed(0)
    vae = WanVAE(config, device=device, dtype=torch.float32).eval().requires_grad_(False)
    randomise(vae)
    weights = {name: parameter.clone() for name, parameter in vae.state_dict().items()}
    z = torch.randn(config.z_dim, 1 + latents, height // 8, width // 8, device=device)
    exact: Tensor | None = None
    for way in ways(device, latents):
        try:
            _prepare(vae, way, weights)
            state = DecoderState()
            vae.decode(z[:, :1], state)
            row, frames = _run(lambda s=state: vae.decode(z[:, 1:], s.copy()), device, exact)
            exact = frames if exact is None else exact
            yield way.facts | row
        except (RuntimeError, torch.OutOfMemoryError) as error:
            yield way.facts | {"error": str(error)[:200]}
    if device.type == "cuda":
        _prepare(vae, ways(device, latents)[4], weights)
        state = DecoderState()
        vae.decode(z[:, :1], state)
        yield {"profile": _profile(lambda: vae.decode(z[:, 1:], state.copy()), device)}
    if folder is not None:
        del vae
        yield {"way": "reference", "dtype": "bfloat16"} | _reference(folder, config, weights, z, exact, device)
    gc.collect()


def _prepare(vae: WanVAE, way: Way, weights: dict[str, Tensor]) -> None:
    for half in (vae.decoder, vae.conv2):
        half.to(way.dtype)
    for name, parameter in vae.named_parameters():
        if name.startswith(("decoder.", "conv2.")):
            value = weights[name].to(way.dtype)
            flat = torch.channels_last if way.layout == torch.channels_last_3d else way.layout
            layout = way.layout if value.ndim == 5 else flat if value.ndim == 4 and "gamma" not in name else None
            parameter.data = value if layout is None else value.contiguous(memory_format=layout)
    vae.pieces = fused_planes(weights["conv2.weight"].device) if way.kernels else None
    if way.kernels and vae.pieces is None:
        raise RuntimeError("our kernels cannot run here")
    vae.latents_at_once = way.together


def _run(
    decode: Callable[[], Tensor], device: torch.device, exact: Tensor | None
) -> tuple[dict[str, Any], Tensor]:  # fmt: skip
    cuda = device.type == "cuda"
    frames = decode()  # compiles
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if cuda else 0
    row: dict[str, Any] = {"ms": round(milliseconds(decode, device, runs=5, warm=2), 2)}
    synchronize(device)
    row["host_ms"] = round(host_milliseconds(decode), 2)
    if cuda:
        row["beside_gib"] = round((torch.cuda.max_memory_allocated() - held) / GIB, 2)
    if exact is not None:
        row["relative"] = float(f"{float((frames - exact).norm() / exact.norm()):.3e}")
    return row, frames


def _profile(decode: Callable[[], Any], device: torch.device, rows: int = 30) -> dict[str, Any]:
    """Milliseconds and calls of the costliest kernels of one call."""
    decode()
    synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        decode()
        synchronize(device)
    found = sorted(profiler.key_averages(), key=lambda event: event.self_device_time_total, reverse=True)
    table = {e.key[:110]: [round(e.self_device_time_total / 1000, 3), e.count] for e in found[:rows]}
    return {"busy_ms": round(sum(e.self_device_time_total for e in found) / 1000, 2), "kernels": table}


def _reference(
    folder: Path, config: VAEConfig, weights: dict[str, Tensor], z: Tensor, exact: Tensor | None, device: torch.device
) -> dict[str, Any]:
    """The reference's decoder with its own cache of features, as its decode runs it: one latent after the other."""
    model = load_reference_vae(folder, config, device).to(torch.bfloat16)
    model.load_state_dict(weights)
    probe = WanVAE(config, device="meta")
    mean, std = (table.to(device) for table in (probe._mean, probe._std))
    raw = model.conv2((z.unsqueeze(0) * std + mean).to(torch.bfloat16))
    model.clear_cache()
    cache = list(model._feat_map)

    def decode(latents: Tensor, features: list[Any]) -> Tensor:
        frames = [model.decoder(latent, feat_cache=features, feat_idx=[0]) for latent in latents.split(1, dim=2)]
        return torch.cat(frames, dim=2)[0].float().clamp(-1.0, 1.0)

    decode(raw[:, :, :1], cache)
    row, _ = _run(lambda: decode(raw[:, :, 1:], list(cache)), device, exact)
    return row
