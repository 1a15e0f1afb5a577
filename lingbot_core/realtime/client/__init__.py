"""Clients of a realtime server: poses in, video out; and what a client needs around that.

:class:`CameraClient` and :class:`SyncCameraClient` speak ``/v1/realtime/world/camera``, :class:`VideoClient` speaks
``/v1/realtime/video``. docs/realtime.md has the messages.
"""

from __future__ import annotations

from ...errors import ServerError, ServerGoneError
from .blocking import SyncCameraClient
from .camera import CameraClient, CameraFrame
from .files import FragmentFile, write_mp4
from .paths import clip_maximum, slices
from .video import VideoClient, camera_delta, key_velocity

__all__ = [
    "CameraClient",
    "CameraFrame",
    "FragmentFile",
    "ServerError",
    "ServerGoneError",
    "SyncCameraClient",
    "VideoClient",
    "camera_delta",
    "clip_maximum",
    "key_velocity",
    "slices",
    "write_mp4",
]
