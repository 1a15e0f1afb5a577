"""A world of lingbot_core made of what ComfyUI's sockets carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import comfy.model_base

from ...lingbot_core.engine.world import World, lens_of
from ...lingbot_core.errors import WeightsError
from ...lingbot_core.weights.load import fingerprint_of
from .models import WorldModel, is_world_model
from .patched import patches_mark, transformer_for
from .text import ClipText
from .vae import vae_marks, world_vae

_ADVICE = "connect the MODEL output of LingBotLoadWorldModel or LingBotLoadWorldFolder"


@dataclass(frozen=True, eq=False)
class PatchedWorld(World):
    """A World that keeps the patchers of its models: while a session runs on it, ComfyUI can count and move them, even
    when nothing else is left of the nodes that loaded them.
    """

    patchers: tuple[Any, ...] = ()

    @property
    def overlaps(self) -> bool:
        """Not while ComfyUI streams weights to the device: it does so for one stream."""
        return super().overlaps and all(_resident(patcher) for patcher in self.patchers)


def _resident(patcher: Any) -> bool:
    """Whether all of a model is on the device for as long as it is in use."""
    return not patcher.is_dynamic() and patcher.loaded_size() >= patcher.model_size()


@dataclass(frozen=True)
class HostWorld:
    """world: what sessions run on. patchers: to be loaded by load_models_gpu before the engine does anything."""

    world: World
    patchers: list[Any]


def host_world(model: Any, vae: Any, clip: Any = None) -> HostWorld:
    """A world on the modules inside MODEL, VAE and, if prompts are to be text, CLIP; nothing is loaded or moved.

    The world's fingerprint is that of lingbot_core for the same weights, and another one with LoRA patches.
    Raises WeightsError for a model or a VAE that is none of a world. A CLIP of another model is refused when it is
    asked to encode.
    """
    inside = require_world_model(model)
    streaming, vae_patcher = world_vae(vae)
    patchers = [model, vae_patcher]
    dim = inside.diffusion_model.config.text_dim
    text = None if clip is None else ClipText(clip, dim=dim, resident=patchers)
    compute = model.get_model_object("manual_cast_dtype") or inside.get_dtype()
    world = PatchedWorld(
        dit=transformer_for(model),
        vae=streaming,
        text=text,
        preset=inside.preset,
        device=model.load_device,
        cache_dtype=compute,
        name=inside.world_name,
        area=inside.area,
        lens=lens_of(inside.layout),
        preset_reason=inside.preset_reason,
        fingerprint=_fingerprint(model, inside, streaming),
        patchers=tuple(patchers),
    )
    return HostWorld(world, patchers)


def require_world_model(model: Any) -> WorldModel:
    """What is inside one of our MODELs. Raises WeightsError naming what was connected instead."""
    if is_world_model(model):
        return model.model
    inside = getattr(model, "model", model)
    if isinstance(inside, comfy.model_base.WAN21):
        raise WeightsError(
            f"the MODEL is a plain Wan model ({type(inside).__name__}): it has no camera layers, or was loaded without "
            f"them, so no camera can steer it; {_ADVICE}"
        )
    raise WeightsError(f"the MODEL is {type(inside).__name__}, not a LingBot World model; {_ADVICE}")


def _fingerprint(model: Any, inside: WorldModel, vae: Any) -> str:
    parts: dict[str, dict[str, Any]] = {"dit": dict(inside.marks), "vae": dict(vae_marks(vae))}
    if mark := patches_mark(model):
        parts["patches"] = {"": mark}
    return fingerprint_of(parts)
