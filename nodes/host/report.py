"""What nodes report of a world, as text for people and scripts."""

from __future__ import annotations

import json
from typing import Any

from ...lingbot_core.encodable import as_text
from ...lingbot_core.engine.registry import WorldHandle
from .source import WorldSource


def as_json(report: dict[str, Any]) -> str:
    """A report as text for people."""
    return as_text(json.dumps(report, ensure_ascii=False, indent=2))


def about_world(handle: WorldHandle, source: WorldSource) -> dict[str, Any]:
    """What every report says of a world: recipe, unit, size, model; JSON types only."""
    world, picture = source.host.world, source.picture
    return {
        **handle.history.summary(),
        "seconds": handle.history.frames / handle.history.start.fps,
        "preset_reason": world.preset_reason,
        "model": world.name,
        "control": world.dit.config.control,
        "device": str(world.device),
        "picture": {
            "size": [picture.image.height, picture.image.width],
            "source_size": [picture.image.source_height, picture.image.source_width],
            "fit": picture.image.mode,
            "notes": list(picture.notes),
        },
    }
