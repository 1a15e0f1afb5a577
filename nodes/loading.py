"""Nodes: loading."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from ..lingbot_core.presets import PRESETS
from .host.estimate import AS_LOADED, LARGEST, OWN_PRESET, STEP, forecast
from .host.file_state import state_of
from .host.folders import load_world_folder
from .host.models import AUTO, load_world_model
from .host.paths import (
    files_of_folder,
    files_of_model,
    register,
    resolve_folder,
    resolve_model,
    world_folders,
    world_models,
)
from .host.precision import AS_STORED, BF16, FP8, WEIGHT_DTYPES
from .host.worlds import require_world_model
from .widgets import widgets_checked

CATEGORY = "LingBot World"

register()


def _weight_dtype() -> io.Combo.Input:
    return io.Combo.Input(
        "weight_dtype",
        options=list(WEIGHT_DTYPES),
        default=AS_STORED,
        tooltip="How the transformer's weights are kept. 'as stored' treats the file as ComfyUI's own loader would: "
        "float32 becomes bfloat16 where the GPU computes in it, and scaled fp8 stays fp8. 'fp8_e4m3fn' scales each "
        "large matrix to fp8, which halves bfloat16.",
    )


def _preset() -> io.Combo.Input:
    return io.Combo.Input(
        "preset",
        options=[AUTO, *PRESETS],
        default=AUTO,
        tooltip="The sampling recipe that the weights were made for. 'auto' reads it from the file's metadata, the "
        "names of folder and file, or config.json; where these do not say, choose one. A wrong recipe gives a video "
        "that looks nearly right.",
    )


class LoadWorldModel(io.ComfyNode):
    """The transformer alone, as a native MODEL."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LingBotLoadWorldModel",
            display_name="LingBot Load World Model",
            category=CATEGORY,
            description="Loads a LingBot-World transformer: a single file from diffusion_models, a folder from "
            "lingbot_world, or the embedded model 'tiny'. The MODEL takes LoRA and torch.compile nodes; connect it to "
            "the LingBot World nodes, not to KSampler.",
            search_aliases=["lingbot", "world model", "load diffusion model", "unet loader", "wan camera"],
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=[choice.name for choice in world_models()],
                    tooltip="Names with a slash at the end are folders below models/lingbot_world (or those that "
                    "extra_model_paths.yaml lists as lingbot_world); the others are files in models/diffusion_models. "
                    "What a file is shows when it is loaded.",
                ),
                _weight_dtype(),
                _preset(),
            ],
            outputs=[io.Model.Output("model", display_name="MODEL", tooltip="For the LingBot World nodes.")],
        )

    @classmethod
    def fingerprint_inputs(cls, model_name: Any = None, **_: Any) -> str:
        """Loaded again when a file was replaced under its name."""
        return state_of(files_of_model(model_name) if isinstance(model_name, str) else ())

    @classmethod
    @widgets_checked
    def execute(cls, model_name: str, weight_dtype: str, preset: str) -> io.NodeOutput:
        choice = resolve_model(model_name)
        return io.NodeOutput(load_world_model(choice.path, weight_dtype=weight_dtype, preset=preset))


class LoadWorldFolder(io.ComfyNode):
    """All parts of a model's own folder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LingBotLoadWorldFolder",
            display_name="LingBot Load World Folder",
            category=CATEGORY,
            description="Loads transformer, text encoder and VAE of a LingBot-World download as it is (v1, v2, or in "
            "the manner of diffusers), or the embedded model 'tiny', which needs no download and no GPU.",
            search_aliases=["lingbot", "world model", "load checkpoint", "diffusers loader", "tiny", "umt5", "wan vae"],
            inputs=[
                io.Combo.Input(
                    "folder",
                    options=[choice.name for choice in world_folders()],
                    tooltip="A folder below models/lingbot_world, or one that extra_model_paths.yaml lists as "
                    "lingbot_world. 'tiny' is embedded in this pack.",
                ),
                _weight_dtype(),
                _preset(),
            ],
            outputs=[
                io.Model.Output("model", display_name="MODEL", tooltip="The transformer, for the LingBot World nodes."),
                io.Clip.Output("clip", display_name="CLIP", tooltip="The text encoder, for CLIPTextEncode."),
                io.Vae.Output("vae", display_name="VAE", tooltip="The VAE, for the LingBot World nodes and VAEDecode."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, folder: Any = None, **_: Any) -> str:
        """Loaded again when a file was replaced under its name, was added or taken away."""
        return state_of(files_of_folder(folder) if isinstance(folder, str) else ())

    @classmethod
    @widgets_checked
    def execute(cls, folder: str, weight_dtype: str, preset: str) -> io.NodeOutput:
        parts = load_world_folder(resolve_folder(folder), weight_dtype=weight_dtype, preset=preset)
        return io.NodeOutput(parts.model, parts.clip, parts.vae)


class EstimateMemory(io.ComfyNode):
    """Bytes, before anything is allocated."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LingBotMemoryEstimate",
            display_name="LingBot World Memory Estimate",
            category=CATEGORY,
            description="Says how much memory a world of a size and length will take, part by part, and whether it "
            "fits this device. Nothing is loaded or allocated for it.",
            search_aliases=["lingbot", "vram", "memory", "out of memory", "oom", "kv cache"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="From LingBotLoadWorldModel or LingBotLoadWorldFolder."),
                io.Int.Input(
                    "width", default=832, min=STEP, max=LARGEST, step=STEP, tooltip="Of the picture, in pixels."
                ),
                io.Int.Input(
                    "height", default=480, min=STEP, max=LARGEST, step=STEP, tooltip="Of the picture, in pixels."
                ),
                io.Int.Input(
                    "chunks",
                    default=8,
                    min=1,
                    max=100000,
                    tooltip="How many chunks the world shall have. Without a window the cache grows with each.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=[AS_LOADED, BF16, FP8],
                    default=AS_LOADED,
                    optional=True,
                    tooltip="What the weights would take if they were loaded in another way.",
                ),
                io.Combo.Input(
                    "preset",
                    options=[OWN_PRESET, *PRESETS],
                    default=OWN_PRESET,
                    optional=True,
                    advanced=True,
                    tooltip="The sampling recipe, which sets chunk length, window and guidance.",
                ),
                io.Int.Input(
                    "window",
                    default=-1,
                    min=-1,
                    max=100000,
                    optional=True,
                    advanced=True,
                    tooltip="Latent frames that are remembered; -1: as the preset says, 0: all of them.",
                ),
                io.Int.Input(
                    "sink",
                    default=-1,
                    min=-1,
                    max=100000,
                    optional=True,
                    advanced=True,
                    tooltip="First latent frames that are never forgotten; -1: as the preset says.",
                ),
                io.Vae.Input(
                    "vae",
                    optional=True,
                    tooltip="The VAE that will be used; without one, the published Wan 2.1 VAE is counted.",
                ),
            ],
            outputs=[
                io.String.Output("report", display_name="report", tooltip="Part by part, for people."),
                io.Int.Output("bytes", display_name="bytes", tooltip="Weights and one world, at its peak."),
                io.Int.Output("world_bytes", display_name="world_bytes", tooltip="One world beside the weights."),
            ],
        )

    @classmethod
    @widgets_checked
    def execute(
        cls,
        model: Any,
        width: int,
        height: int,
        chunks: int,
        weight_dtype: str = AS_LOADED,
        preset: str = OWN_PRESET,
        window: int = -1,
        sink: int = -1,
        vae: Any = None,
    ) -> io.NodeOutput:
        require_world_model(model)
        found = forecast(
            model,
            width=width,
            height=height,
            preset=preset,
            chunks=chunks,
            window=window,
            sink=sink,
            weight_dtype=weight_dtype,
            vae=vae,
        )
        return io.NodeOutput(found.text, found.needed.total, found.needed.session, ui=ui.PreviewText(found.text))


NODES: list[type[io.ComfyNode]] = [LoadWorldModel, LoadWorldFolder, EstimateMemory]
