"""Inputs that several camera nodes have, and what becomes of their values."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ...lingbot_core.camera.key_text import MAX_SPEED, scaled_steps
from ...lingbot_core.camera.keys import KEY_STEPS, KeySteps
from ...lingbot_core.engine.plan import SNAPS
from ...lingbot_core.engine.route import Route
from ...lingbot_core.presets import PRESETS, Preset, get_preset
from ..sockets import Controls

AUTO = "auto"
MAX_CHUNKS = 10_000
CATEGORY = "LingBot World/camera"


def key_inputs(default: str) -> list[io.Input]:
    """Key steps, speed and turn."""
    return [
        io.Combo.Input(
            "key_steps",
            options=list(KEY_STEPS),
            default=default,
            optional=True,
            tooltip="What a held key does. per-latent: 0.05 units, pitch 4 and yaw 6 degrees per latent frame (4 video "
            "frames), as realtime servers step. per-video: 0.05 units and 2 degrees per video frame, as upstream's "
            "action strings step. Counts such as w-12 count the same kind of frames.",
        ),
        io.Float.Input(
            "speed",
            default=1.0,
            min=0.0,
            max=MAX_SPEED,
            step=0.05,
            optional=True,
            tooltip="How many times as far a key moves the camera.",
        ),
        io.Float.Input(
            "turn",
            default=1.0,
            min=0.0,
            max=MAX_SPEED,
            step=0.05,
            optional=True,
            tooltip="How many times as far a key turns the camera.",
        ),
    ]


def preset_inputs() -> list[io.Input]:
    """The preset, of which the chunk size counts."""
    return [
        io.Combo.Input(
            "preset",
            options=list(PRESETS),
            default="v1-fast",
            tooltip="The preset of the world that these controls are for; its latent frames per chunk count.",
        ),
    ]


def chunk_input() -> io.Input:
    """An override of the preset's chunk size."""
    return io.Int.Input(
        "chunk",
        default=0,
        min=0,
        max=64,
        optional=True,
        advanced=True,
        tooltip="Latent frames per chunk where the world overrides its preset's; 0 takes the preset's.",
    )


def chunks_input() -> io.Input:
    """The wish in chunks."""
    return io.Int.Input(
        "chunks",
        default=0,
        min=0,
        max=MAX_CHUNKS,
        optional=True,
        tooltip="How many chunks to make of it; 0 takes all there is.",
    )


def snap_input() -> io.Input:
    """Which way a wish in frames goes."""
    return io.Combo.Input(
        "snap",
        options=[AUTO, *SNAPS],
        default=AUTO,
        optional=True,
        advanced=True,
        tooltip="Which way a number of frames that is no whole number of chunks is rounded. auto: down, and up where "
        "the last pose is held and all frames are taken.",
    )


def rule_inputs() -> list[io.Input]:
    """Translation unit and first delta."""
    return [
        io.String.Input(
            "translation_unit",
            default=AUTO,
            optional=True,
            advanced=True,
            tooltip="What a world that starts with these controls divides translations by. clip: the longest step of "
            "the path; key: one held key over one latent frame (for keys as key_steps and speed say, for a camera path "
            "0.2); p95 and the like: a percentile of the steps, which one bad pose cannot spoil; or a number. auto: "
            "clip for paths, key for keys.",
        ),
        io.Combo.Input(
            "first_delta",
            options=[AUTO, "identity", "from_rest"],
            default=AUTO,
            optional=True,
            advanced=True,
            tooltip="The very first step of a world that starts with these controls. identity: the first pose is where "
            "the image was taken; from_rest: the first key press is visible at once. auto: identity for paths, "
            "from_rest for keys.",
        ),
    ]


def preset_of(name: str, chunk: int = 0) -> Preset:
    """The preset, with another chunk size if one is given."""
    return get_preset(name).with_overrides(chunk=chunk or None)


def steps_of(key_steps: str, speed: float, turn: float) -> KeySteps:
    """The key steps that the inputs describe."""
    return scaled_steps(KEY_STEPS[key_steps], speed=speed, turn=turn)


def given(value: Any) -> Any:
    """None for ``auto``, 0 and empty text; other values as they are."""
    text = value.strip() if isinstance(value, str) else value
    return None if text in (AUTO, "", 0) else text


def route_outputs() -> list[io.Output]:
    """CONTROLS, chunks, frames, text: see :func:`route_values`."""
    return [
        Controls.Output("controls", display_name="controls", tooltip="What steers the world, one entry per chunk."),
        io.Int.Output("chunks", display_name="chunks", tooltip="How many chunks these controls last."),
        io.Int.Output("frames", display_name="frames", tooltip="Video frames of a world that starts with them."),
        io.String.Output("text", display_name="text", tooltip="What they are made of, and warnings."),
    ]


def route_values(route: Route, preset: Preset) -> tuple[Route, int, int, str]:
    """The values of :func:`route_outputs`."""
    unit, rule = route.translation_unit()
    lines = [
        f"{route.chunks} chunks, {preset.frames(route.chunks)} frames: {route.describe()}",
        f"translation unit {unit:.6g} ({rule}), first delta {route.first_delta}",
        *(f"warning: {warning}" for warning in route.warnings()),
    ]
    return route, route.chunks, preset.frames(route.chunks), "\n".join(lines)
