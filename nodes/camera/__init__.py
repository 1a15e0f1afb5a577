"""Nodes: camera and controls."""

from __future__ import annotations

from comfy_api.latest import io

from .controls import LingBotControls
from .events import LingBotWorldEvents
from .keys import LingBotCameraKeys
from .load import LingBotCameraLoad
from .record import LingBotControlsRecord

NODES: list[type[io.ComfyNode]] = [
    LingBotCameraKeys,
    LingBotCameraLoad,
    LingBotControls,
    LingBotWorldEvents,
    LingBotControlsRecord,
]
