"""Nodes: world."""

from __future__ import annotations

from comfy_api.latest import io

from .advance import LingBotAdvanceWorld
from .care import LingBotCloseWorld, LingBotWorldInfo, LingBotWorldLatents
from .session import LingBotWorldSession
from .start import LingBotStartImage, LingBotStartWorld

NODES: list[type[io.ComfyNode]] = [
    LingBotStartImage,
    LingBotStartWorld,
    LingBotAdvanceWorld,
    LingBotWorldSession,
    LingBotWorldInfo,
    LingBotWorldLatents,
    LingBotCloseWorld,
]
