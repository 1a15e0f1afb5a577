"""LingBot-World as a library: a world from one image, steered by a camera, chunk by chunk.

The names below are imported when they are first used, so that ``import lingbot_core`` alone costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .camera.trajectory import CameraTrajectory
    from .engine.session import WorldSession
    from .engine.world import World

__all__ = ["CameraTrajectory", "World", "WorldSession", "__version__"]

_HOMES = {"World": ".engine.world", "WorldSession": ".engine.session", "CameraTrajectory": ".camera.trajectory"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
