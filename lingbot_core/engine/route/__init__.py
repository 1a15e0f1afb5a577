"""Where a run's camera comes from: a path that is known as a whole, keys, or an event script, one line per chunk."""

from __future__ import annotations

from .base import Route, Steered, for_image, unit_rule
from .keys import VideoKeysRoute
from .path import PathRoute
from .recorded import RecordedRoute
from .script import ScriptRoute
from .sources import route_from_camera, route_from_events, route_from_keys

__all__ = [
    "PathRoute",
    "RecordedRoute",
    "Route",
    "ScriptRoute",
    "Steered",
    "VideoKeysRoute",
    "for_image",
    "route_from_camera",
    "route_from_events",
    "route_from_keys",
    "unit_rule",
]
