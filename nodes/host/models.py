"""The transformer as ComfyUI's MODEL: a ModelPatcher around something shaped like its BaseModel.

That shape is what LoRA loaders, torch.compile nodes, low-VRAM streaming and DynamicVRAM need. What samples it is not
KSampler but the nodes of this pack, so whatever a sampler would call says so instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import comfy.latent_formats
import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.supported_models_base
import comfy.utils
import torch

from ...lingbot_core.engine.image import RESOLUTIONS
from ...lingbot_core.errors import LingBotError
from ...lingbot_core.models.dit import CausalWanDiT
from ...lingbot_core.presets import Preset, get_preset
from ...lingbot_core.weights.layout import TINY, Layout, find_layout
from ...lingbot_core.weights.load import Progress, dit_config
from .attention import chosen_attention
from .precision import AS_STORED, SUPPORTED, Precision, choose_precision
from .weights import fill_transformer

AUTO = "auto"


class WorldModelConfig(comfy.supported_models_base.BASE):
    """What ComfyUI asks a model's configuration for."""

    unet_extra_config: ClassVar[dict[str, Any]] = {}
    sampling_settings: ClassVar[dict[str, Any]] = {"shift": 10.0}
    latent_format = comfy.latent_formats.Wan21
    supported_inference_dtypes = SUPPORTED

    def __init__(self, precision: Precision) -> None:
        super().__init__({"image_model": "lingbot_world", "disable_unet_model_creation": True})
        cast = None if precision.compute == precision.storage else precision.compute
        self.set_inference_dtype(precision.storage, cast)
        if precision.scaled:
            self.quant_config = {"mixed_ops": True}
            self.manual_cast_dtype = precision.compute


class WorldModel(comfy.model_base.BaseModel):
    """BaseModel-shaped: ``diffusion_model`` is our transformer. Made by `load_world_model`.

    layout: where it comes from. preset, preset_reason: the recipe of these weights. marks: of all weights as they were
    loaded, for fingerprints, which patches in place must not change.
    """

    def __init__(
        self,
        dit: CausalWanDiT,
        config: WorldModelConfig,
        layout: Layout,
        preset: Preset,
        preset_reason: str,
        marks: Mapping[str, bytes],
    ) -> None:
        super().__init__(config, comfy.model_base.ModelType.FLOW)
        self.diffusion_model = dit
        self.layout = layout
        self.preset, self.preset_reason = preset, preset_reason
        self.marks = marks

    @property
    def world_name(self) -> str:
        """The model's name, for reports."""
        return self.layout.name

    @property
    def area(self) -> int:
        """Pixels of a picture at the model's own size."""
        return self.layout.native_area or RESOLUTIONS["480p"]

    @property
    def manual_cast_dtype(self) -> torch.dtype | None:
        """What the layers compute in, where it is not the dtype of the weights. Nodes may set it."""
        return self.__dict__.get("_manual_cast_dtype")

    @manual_cast_dtype.setter
    def manual_cast_dtype(self, dtype: torch.dtype | None) -> None:
        self.__dict__["_manual_cast_dtype"] = dtype
        dit = self._modules.get("diffusion_model")
        if dit is not None:
            for part in (dit, *dit.blocks):
                part.compute_dtype = dtype or self.get_dtype()

    def get_dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.model_config.unet_config["dtype"]

    # What a sampler calls. memory_required is the first of them, before anything is moved to the GPU.

    def memory_required(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse_sampler()

    def extra_conds(self, **_: Any) -> NoReturn:
        self._refuse_sampler()

    def extra_conds_shapes(self, **_: Any) -> NoReturn:
        self._refuse_sampler()

    def apply_model(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse_sampler()

    def _refuse_sampler(self) -> NoReturn:
        raise LingBotError(
            f"{self.world_name} is a LingBot World model, which makes a world chunk by chunk; a sampler such as "
            "KSampler cannot run it. Connect it to LingBotStartWorld or LingBotWorldSession instead"
        )


def load_world_model(
    source: str | Path | None, *, weight_dtype: str = AS_STORED, preset: str = AUTO
) -> comfy.model_patcher.ModelPatcher:
    """A native MODEL, in main memory.

    source: a folder or a single file; None for the embedded model. weight_dtype: see precision.choose_precision.
    preset: a name, or 'auto' for the one that the files point to. Raises InputFileError, WeightsError, PresetError.
    """
    return _load(source, weight_dtype, preset)


def is_world_model(model: Any) -> bool:
    """Whether a MODEL is one of ours."""
    return isinstance(getattr(model, "model", None), WorldModel)


def _load(
    source: str | Path | None, weight_dtype: str, preset: str, disable_dynamic: bool = False
) -> comfy.model_patcher.ModelPatcher:
    """ComfyUI calls it again, by position, when it needs the model twice (multi-GPU, clones without DynamicVRAM)."""
    layout = find_layout(TINY if source is None else source)
    # What the user has to decide, before anything large is read.
    if preset == AUTO:
        recipe, reason = layout.require_preset(), layout.preset_reason
    else:
        recipe, reason = get_preset(preset), "chosen by the user"
    device = comfy.model_management.get_torch_device()
    offload = comfy.model_management.unet_offload_device()
    checkpoint = layout.transformer.open()
    sizes = dit_config(checkpoint, layout.transformer.config)
    precision = choose_precision(checkpoint, weight_dtype, device)
    config = WorldModelConfig(precision)
    operations = comfy.ops.pick_operations(
        precision.storage, config.manual_cast_dtype, load_device=device, model_config=config
    )
    dit = CausalWanDiT(
        sizes,
        operations=operations,
        # Layers for scaled weights put them where they were made; all others take what they are given.
        device=offload if precision.scaled else "meta",
        dtype=precision.storage,
        compute_dtype=precision.compute,
        attention=chosen_attention(),
    )
    bar = comfy.utils.ProgressBar(checkpoint.nbytes)
    progress = Progress(lambda done, total: bar.update_absolute(done, total), checkpoint.nbytes)
    marks = fill_transformer(dit, checkpoint, precision, device=offload, progress=progress)
    for layer in (dit.time_embedding[0], dit.time_embedding[2], dit.time_projection[1], dit.head.head):
        # They run in float32 whatever their weights are in; ComfyUI's layers then cast for themselves.
        layer.comfy_cast_weights = True
    comfy.model_management.archive_model_dtypes(dit)
    model = WorldModel(dit, config, layout, recipe, reason, marks)
    # Looked up now: ComfyUI replaces the class when DynamicVRAM is on.
    patcher = comfy.model_patcher.ModelPatcher if disable_dynamic else comfy.model_patcher.CoreModelPatcher
    loaded = patcher(model, load_device=device, offload_device=offload)
    loaded.cached_patcher_init = (_load, (source, weight_dtype, preset))
    return loaded
