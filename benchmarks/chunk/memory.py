"""Peak memory by the length of a video, all of the past attended: the transformer alone, and with the decode."""

from __future__ import annotations

from typing import Any

from lingbot_core.engine.world import World
from lingbot_core.models.dit import CausalWanDiT
from lingbot_core.presets import Preset

from ..parity import Inputs
from . import big, transformer

ASKED_GIB = {21: 50.0, 33: 50.0, 81: 70.0}
"""Below which 25 frames (no whole number of chunks: 21 or 33) and 81 frames are to stay, in bf16."""


def alone(dit: CausalWanDiT, preset: Preset, height: int, width: int, chunks: int) -> dict[str, Any]:
    """A walk of the transformer; nothing else may be on the card."""
    inputs = Inputs(dit.config, chunks, height, width, next(dit.parameters()).device)
    found = transformer.ours(dit, inputs, preset)
    return {"chunks": chunks, "peak_gib": found.get("peak_gib"), "sum_ms": found["sum_ms"]}


def with_decode(world: World, preset: Preset, height: int, width: int, chunks: int) -> dict[str, Any]:
    """A session, its start image's encoding included; only its last chunk is denoised."""
    found = big.session(world, preset, height, width, chunks, made=chunks - 1)
    return {"chunks": chunks, "peak_gib": found["peak_gib"]}


def row(preset: Preset, chunks: int, transformer_alone: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """Both peaks beside what is asked."""
    frames = preset.frames(chunks)
    return {
        "frames": frames,
        "transformer_gib": transformer_alone["peak_gib"],
        "with_decode_gib": whole["peak_gib"],
        "asked_below_gib": ASKED_GIB.get(frames),
    }
