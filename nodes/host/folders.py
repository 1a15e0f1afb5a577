"""All parts of a model's folder at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import comfy.model_patcher
import comfy.sd

from ...lingbot_core.errors import WeightsError
from ...lingbot_core.weights.layout import TINY, Layout, find_layout, searched_folders
from .clip import native_clip
from .models import load_world_model
from .paths import Choice
from .vae import native_vae

_PLACES = {
    "VAE": "Wan2.1_VAE.pth or a folder vae",
    "text encoder": "models_t5_umt5-xxl-enc-bf16.pth or a folder text_encoder",
    "tokenizer": "google/umt5-xxl or a folder tokenizer",
}


class WorldParts(NamedTuple):
    """What LingBotLoadWorldFolder gives out."""

    model: comfy.model_patcher.ModelPatcher
    clip: comfy.sd.CLIP
    vae: comfy.sd.VAE


def load_world_folder(choice: Choice, *, weight_dtype: str, preset: str) -> WorldParts:
    """MODEL, CLIP and VAE of a folder. Raises WeightsError, before anything is read, when parts are absent."""
    source: Any = TINY if choice.path is None else choice.path
    layout = find_layout(source)
    _require_all(layout)
    # The small ones first: what is wrong with them is found before the large one is read.
    vae = native_vae(layout)
    model = load_world_model(choice.path, weight_dtype=weight_dtype, preset=preset)
    max_tokens = model.model.diffusion_model.config.text_len
    clip = native_clip(layout, max_tokens=max_tokens)
    vae.patcher.cached_patcher_init = (_vae_patcher, (source,))
    clip.patcher.cached_patcher_init = (_clip_patcher, (source, max_tokens))
    return WorldParts(model, clip, vae)


def _vae_patcher(source: Any, disable_dynamic: bool = False) -> comfy.model_patcher.ModelPatcher:
    """For ComfyUI, when it needs the VAE once more. Its VAE class takes no notice of disable_dynamic."""
    return native_vae(find_layout(source)).patcher


def _clip_patcher(source: Any, max_tokens: int, disable_dynamic: bool = False) -> comfy.model_patcher.ModelPatcher:
    """For ComfyUI, when it needs the text encoder once more."""
    return native_clip(find_layout(source), max_tokens=max_tokens, disable_dynamic=disable_dynamic).patcher


def _require_all(layout: Layout) -> None:
    missing = [part for part in _PLACES if part in layout.missing]
    if not missing:
        return
    _, places = searched_folders(layout)
    wanted = "; ".join(f"{part}: {_PLACES[part]}" for part in missing)
    raise WeightsError(
        f"{layout.name} has no {' and no '.join(missing)}. Searched {', '.join(dict.fromkeys(map(str, places)))} for "
        f"{wanted}. Put them there, or load the transformer alone with LingBotLoadWorldModel and the other parts with "
        "CLIPLoader (type wan, umt5_xxl) and VAELoader (wan_2.1_vae)"
    )
