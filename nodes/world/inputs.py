"""Inputs that several nodes share, and what is made of them."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ...lingbot_core.engine.noise import SEED_LIMIT
from ...lingbot_core.engine.start import FIRST_DELTAS, NOISES
from ...lingbot_core.presets import PRESETS
from ..host.begin import AUTO, StartWish
from ..host.run import OUTPUTS
from ..host.start_image import FITS, SIZES
from ..host.steering import ENTRIES, LENGTHS
from ..sockets import Camera, Controls

CATEGORY = "LingBot World"
UNCHANGED = -1
_ON_OFF = (AUTO, "on", "off")


def picture_inputs() -> list[io.Input]:
    """How a start image is brought to size."""
    return [
        io.Combo.Input(
            "fit",
            options=list(FITS),
            default="area",
            tooltip="area keeps the picture's shape at about the size's number of pixels; crop and pad keep its aspect "
            "in exactly that size; stretch does not.",
        ),
        io.Combo.Input(
            "size",
            options=list(SIZES),
            default="480p",
            tooltip="480p (832x480) or 720p (1280x720), upright for upright pictures; model: the model's own size "
            "(needs model); custom: width x height below.",
        ),
        io.Int.Input(
            "width",
            default=832,
            min=16,
            max=4096,
            step=16,
            tooltip="Width in pixels for size 'custom', in steps of 16.",
        ),
        io.Int.Input(
            "height",
            default=480,
            min=16,
            max=4096,
            step=16,
            tooltip="Height in pixels for size 'custom', in steps of 16.",
        ),
    ]


def seed_input() -> io.Input:
    """The noise's seed."""
    return io.Int.Input(
        "seed",
        default=0,
        min=0,
        max=SEED_LIMIT - 1,
        control_after_generate=False,
        tooltip="Seed of the noise. The same seed, image, prompt and controls give the same world.",
    )


def preset_input() -> io.Input:
    """The sampling recipe."""
    return io.Combo.Input(
        "preset",
        options=[AUTO, *PRESETS],
        default=AUTO,
        tooltip="The sampling recipe. auto takes the one that the model's files point to; the report names it.",
    )


def steering_sockets(where: str) -> list[io.Input]:
    """CONTROLS or CAMERA. where: how they are used."""
    return [
        Controls.Input("controls", optional=True, tooltip=f"From LingBotControls. {where}"),
        Camera.Input(
            "camera",
            optional=True,
            tooltip=f"A camera path, in place of controls: spread over whole chunks, or at its own speed with hold. "
            f"LingBotControls knows more ways. {where}",
        ),
    ]


def start_overrides() -> list[io.Input]:
    """Everything about a start that has a good default."""
    return [
        io.String.Input(
            "translation_unit",
            default=AUTO,
            optional=True,
            advanced=True,
            tooltip="Length of one unit of camera movement: auto (as the controls say), clip (the longest step), key "
            "(a held key), a percentile such as p95, or a number. Fixed for the whole world.",
        ),
        io.Combo.Input(
            "first_delta",
            options=[AUTO, *FIRST_DELTAS],
            default=AUTO,
            optional=True,
            advanced=True,
            tooltip="Whether the very first step stands still (identity) or moves from rest; auto as the controls say.",
        ),
        io.Combo.Input(
            "noise",
            options=list(NOISES),
            default=NOISES[0],
            optional=True,
            advanced=True,
            tooltip="seeded: each chunk has its own noise, so a world can go on for ever. reference: drawn in the "
            "order of the published code, which needs declared_chunks.",
        ),
        io.Int.Input(
            "declared_chunks",
            default=0,
            min=0,
            max=4096,
            optional=True,
            advanced=True,
            tooltip="Length of the whole world in chunks, for noise 'reference'; 0: not declared.",
        ),
        io.Float.Input(
            "fps",
            default=16.0,
            min=1.0,
            max=120.0,
            step=0.5,
            optional=True,
            advanced=True,
            tooltip="Frames per second of the video; the model's own is 16.",
        ),
        io.Int.Input(
            "rewind_depth",
            default=0,
            min=0,
            max=64,
            optional=True,
            advanced=True,
            tooltip="Chunks that stay in memory beyond the window, so that branching so far back is immediate. Costs "
            "memory for each.",
        ),
        io.Int.Input(
            "chunk",
            default=0,
            min=0,
            max=64,
            optional=True,
            advanced=True,
            tooltip="Latent frames per chunk, four video frames each; 0: the preset's.",
        ),
        io.Float.Input(
            "shift",
            default=0.0,
            min=0.0,
            max=1000.0,
            step=0.1,
            optional=True,
            advanced=True,
            tooltip="Shift of the noise schedule; 0: the preset's.",
        ),
        io.String.Input(
            "steps",
            default="",
            optional=True,
            advanced=True,
            tooltip="Denoising steps: a number for UniPC presets (40), table indices (0,179,358,679) or labels "
            "(1000,750,500,250) for the others. Empty: the preset's.",
        ),
        io.Int.Input(
            "window",
            default=UNCHANGED,
            min=UNCHANGED,
            max=4096,
            optional=True,
            advanced=True,
            tooltip="Latent frames that attention sees; bounds memory and time. 0: all of the past, -1: the preset's.",
        ),
        io.Int.Input(
            "sink",
            default=UNCHANGED,
            min=UNCHANGED,
            max=4096,
            optional=True,
            advanced=True,
            tooltip="First latent frames that are never forgotten within a window; -1: the preset's.",
        ),
        io.Int.Input(
            "still_window",
            default=0,
            min=0,
            max=4096,
            optional=True,
            advanced=True,
            tooltip="Latent frames that attention sees in chunks whose camera stands still: faster, another result. 0: "
            "as many as always.",
        ),
        io.Float.Input(
            "guidance_scale",
            default=0.0,
            min=0.0,
            max=1000.0,
            step=0.1,
            optional=True,
            advanced=True,
            tooltip="Strength of guidance, for presets that are not distilled; 1 is off, 0: the preset's.",
        ),
        io.Combo.Input(
            "reuse_last_step_kv",
            options=list(_ON_OFF),
            default=AUTO,
            optional=True,
            advanced=True,
            tooltip="Remember the last noisy step instead of a clean pass: a fifth faster, another result. auto: the "
            "preset's.",
        ),
    ]


def hold_input(tooltip: str) -> io.Input:
    """Whether the camera stands still at the end, and at which speed it follows a path."""
    return io.Boolean.Input("hold", default=False, optional=True, advanced=True, tooltip=tooltip)


def run_inputs() -> list[io.Input]:
    """How far a run goes and what comes out of it."""
    return [
        io.String.Input(
            "keys",
            default="",
            optional=True,
            multiline=False,
            tooltip="Keys instead of a camera: such as w-12, wj-8, none-4 (w a s d move, i j k l look; latent frames). "
            "Keys without numbers (w, or w w wj for the latent frames of a chunk) are held for all chunks. Other keys "
            "for each chunk, line by line, are written in LingBotControls.",
        ),
        io.String.Input(
            "prompt",
            default="",
            optional=True,
            multiline=True,
            tooltip="A new prompt from here on; needs clip where the world starts. Empty keeps the prompt.",
        ),
        io.Combo.Input(
            "length",
            options=list(LENGTHS),
            default=LENGTHS[0],
            optional=True,
            tooltip="What counts: chunks, seconds (rounded up to whole chunks), or as long as the controls are.",
        ),
        io.Float.Input(
            "seconds",
            default=3.0,
            min=0.0,
            max=3600.0,
            step=0.25,
            optional=True,
            tooltip="Seconds of video to add, for length 'seconds'.",
        ),
        io.Combo.Input(
            "output",
            options=list(OUTPUTS),
            default=OUTPUTS[0],
            optional=True,
            tooltip="new frames: what this run adds. all frames: the world from its beginning.",
        ),
        io.Boolean.Input(
            "all_images",
            default=True,
            optional=True,
            advanced=True,
            tooltip="Off: IMAGE holds the last frame only, and memory does not grow with the length; use VIDEO.",
        ),
        io.Combo.Input(
            "controls_from",
            options=list(ENTRIES),
            default=ENTRIES[0],
            optional=True,
            advanced=True,
            tooltip="Where controls begin in a world that has chunks. auto: a path that made all of it goes on, "
            "another one begins. continue: at the world's number of chunks. beginning: at their first chunk, from "
            "where the camera stands.",
        ),
        hold_input(
            "On: where the controls are shorter than the run, the camera stands still at their end. Off: that is an "
            "error. A camera path keeps its own speed with it and may be as short as you like; without it, it is "
            "spread over whole chunks."
        ),
    ]


def chunks_input() -> io.Input:
    """The length in chunks."""
    return io.Int.Input(
        "chunks",
        default=4,
        min=1,
        max=4096,
        tooltip="Chunks to add, for length 'chunks'. A chunk is 3 or 4 latent frames, four video frames each.",
    )


def start_wish(inputs: dict[str, Any]) -> StartWish:
    """From the values of preset_input, seed_input and start_overrides, with positive and negative."""
    preset = inputs.get("preset", AUTO)
    kv = inputs.get("reuse_last_step_kv", AUTO)
    overrides: dict[str, Any] = {
        "chunk": inputs.get("chunk") or None,
        "shift": inputs.get("shift") or None,
        "still_window": inputs.get("still_window") or None,
        "guidance_scale": inputs.get("guidance_scale") or None,
        "reuse_last_step_kv": None if kv == AUTO else kv == "on",
    }
    for field in ("window", "sink"):
        value = inputs.get(field, UNCHANGED)
        overrides[field] = None if value == UNCHANGED else value
    return StartWish(
        positive=inputs["positive"],
        negative=inputs.get("negative"),
        preset=preset,
        overrides=overrides,
        steps=str(inputs.get("steps") or ""),
        seed=inputs.get("seed", 0),
        noise=inputs.get("noise", NOISES[0]),
        chunks=inputs.get("declared_chunks") or None,
        translation_unit=str(inputs.get("translation_unit") or AUTO),
        first_delta=inputs.get("first_delta", AUTO),
        fps=inputs.get("fps", 16.0),
        rewind_depth=inputs.get("rewind_depth", 0),
    )
