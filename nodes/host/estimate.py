"""What a world will take, from a MODEL's sizes alone: before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import comfy.model_management
import torch

from ...lingbot_core.engine.memory import GIB, MemoryEstimate, estimate
from ...lingbot_core.errors import ImageError
from ...lingbot_core.models.dit import CausalWanDiT
from ...lingbot_core.models.vae import VAEConfig
from ...lingbot_core.presets import Preset, get_preset
from ...lingbot_core.weights.quantise import is_large
from .models import WorldModel
from .precision import BF16, FP8
from .vae import require_wan21

OWN_PRESET, AS_LOADED = "the model's own", "as loaded"
FPS = 16
STEP = 16  # pixels: a patch of the transformer
LARGEST = 8192


@dataclass(frozen=True)
class Forecast:
    """needed: bytes by purpose. free, total: of the device; what this model takes of it already counts as free."""

    needed: MemoryEstimate
    free: int
    total: int
    text: str


def forecast(
    model: Any,
    *,
    width: int,
    height: int,
    preset: str = OWN_PRESET,
    chunks: int,
    window: int = -1,
    sink: int = -1,
    weight_dtype: str = AS_LOADED,
    vae: Any = None,
) -> Forecast:
    """model: one of ours. window, sink: latent frames; -1 keeps the preset's, window 0 is no window.

    Raises ImageError for a size that no world can have, PresetError for values that do not go together, WeightsError
    for a VAE of another model.
    """
    if width % STEP or height % STEP or not STEP <= width <= LARGEST or not STEP <= height <= LARGEST:
        raise ImageError(
            f"{width}x{height} is no size of a world: sides are multiples of {STEP} from {STEP} to {LARGEST} pixels"
        )
    inside: WorldModel = model.model
    recipe = inside.preset if preset == OWN_PRESET else get_preset(preset)
    recipe = recipe.with_overrides(window=None if window < 0 else window, sink=None if sink < 0 else sink)
    compute = model.get_model_object("manual_cast_dtype") or inside.get_dtype()
    needed = estimate(
        inside.diffusion_model.config,
        _vae_config(vae),
        recipe,
        height=height,
        width=width,
        chunks=chunks,
        dtype=compute,
        cache_dtype=compute,
        vae_dtype=getattr(vae, "vae_dtype", torch.float32),
    )
    needed = replace(needed, transformer=_weights(model, inside, weight_dtype, compute.itemsize))
    device = model.load_device
    free = int(comfy.model_management.get_free_memory(device)) + model.loaded_size()
    total = int(comfy.model_management.get_total_memory(device))
    text = _report(inside, recipe, needed, width, height, chunks, free, total, str(device))
    return Forecast(needed, free, total, text)


def _vae_config(vae: Any) -> VAEConfig:
    if vae is None:
        return VAEConfig()
    require_wan21(vae)
    return VAEConfig.from_state_dict(vae.first_stage_model.state_dict())


def _weights(model: Any, inside: WorldModel, weight_dtype: str, compute_bytes: int) -> int:
    if weight_dtype == AS_LOADED:
        return int(model.model_size())
    plain = CausalWanDiT(inside.diffusion_model.config, device="meta")
    counts = [(p.numel(), is_large(name, p.ndim)) for name, p in plain.named_parameters()]
    if weight_dtype == FP8:
        return sum(count * (1 if large else compute_bytes) for count, large in counts)
    assert weight_dtype == BF16
    return 2 * sum(count for count, _ in counts)


def _report(
    inside: WorldModel,
    preset: Preset,
    needed: MemoryEstimate,
    width: int,
    height: int,
    chunks: int,
    free: int,
    total: int,
    device: str,
) -> str:
    frames = preset.frames(chunks)
    seen = "all of the past" if preset.window is None else f"a window of {preset.window} latent frames"
    rows = {
        "transformer": needed.transformer,
        "VAE": needed.vae,
        f"K/V cache ({seen})": needed.kv_cache,
        "prompt": needed.cross,
        "camera": needed.camera,
        "VAE states": needed.vae_states,
        "workspace": needed.workspace,
    }
    lines = [
        f"{inside.world_name} at {width}x{height}, preset {preset.label}",
        f"{chunks} chunks: {frames} frames, {frames / FPS:.1f} s at {FPS} fps",
        *(f"{name}: {_shown(count)}" for name, count in rows.items()),
        f"in all {_shown(needed.total)}, of it {_shown(needed.session)} for one world beside the weights",
        f"{device} has {_shown(free)} free of {_shown(total)}",
        _verdict(preset, needed, free, total),
    ]
    return "\n".join(lines)


def _verdict(preset: Preset, needed: MemoryEstimate, free: int, total: int) -> str:
    if needed.total <= free:
        return "It fits."
    if needed.total <= total:
        return "It fits once ComfyUI has unloaded other models; what other programs hold stays taken."
    if needed.session <= total:
        return "The weights do not fit beside the world: ComfyUI streams them from main memory, which is slower."
    ways = "a window" if preset.window is None else "a smaller window"
    return f"It does not fit. Use {ways}, a smaller picture or fewer chunks."


def _shown(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 100 else f"{count / 2**20:.1f} MiB"
