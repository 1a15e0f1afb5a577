"""The camera that a video session is started with: a script of keys, or a folder of files below a trusted one."""

from __future__ import annotations

from pathlib import Path

from ..camera.controls import KeyMotion
from ..camera.formats.npy import load_camera_set
from ..camera.keys import PER_LATENT, format_keys
from ..engine.events import ChunkEvent
from ..engine.route.base import Route
from ..engine.route.sources import route_from_camera, route_from_events
from ..errors import CameraError, InputFileError, LengthError
from .errors import MessageError
from .video_messages import VideoStart

_FILES = ("poses.npy", "intrinsics.npy", "action.npy")


def route_of(start: VideoStart, trusted: Path | None) -> Route | None:
    """The route that the start names; None where it names none. Reads files: not for the event loop.

    trusted: the folder below which action_path may lie; None refuses it. Raises MessageError (bad_camera, unsupported).
    """
    if start.script is not None:
        events = [
            ChunkEvent(index, None, KeyMotion(tuple(format_keys(keys) for keys in row), PER_LATENT))
            for index, row in enumerate(start.script)
        ]
        return route_from_events(events, start.preset, source="camera_action_script")
    if start.action_path is None:
        return None
    folder = trusted_path(start.action_path, trusted)
    try:
        path = load_camera_set(folder, fps=start.fps)
        return route_from_camera(path, start.preset, num_frames=start.num_frames, source="action_path")
    except LengthError as error:
        raise MessageError(f"action_path: {error}", code="unsupported") from None
    except (CameraError, InputFileError) as error:
        # Messages name files by the place on this machine, which is nobody's business.
        text = str(error).replace(str(folder), start.action_path)
        raise MessageError(f"action_path: {text}", code="bad_camera") from None


def trusted_path(given: str, trusted: Path | None) -> Path:
    """The place below ``trusted`` that a message names. Raises MessageError for any other place.

    A relative path without ``..``, no part of which is a symbolic link: neither the folder nor the files in it. Who may
    write below the trusted folder is trusted; that nobody swaps a file for a link meanwhile is up to them.
    """
    if trusted is None:
        raise MessageError(
            "action_path cannot be honoured: this server was started without a folder for it (--action-root)",
            code="unsupported",
        )
    refused = MessageError(
        f"action_path={given[:60]!r} is refused; give a relative path below the server's folder, without .. or links",
        code="unsupported",
    )
    parts = Path(given).parts
    if not given or "\0" in given or "\\" in given or Path(given).is_absolute() or not parts or ".." in parts:
        raise refused
    place = trusted.resolve()
    try:
        for part in parts:
            place = place / part
            if place.is_symlink():
                raise refused
        if not place.exists():
            raise MessageError(f"action_path={given[:60]!r} does not exist on this server", code="bad_camera")
        beside = place if place.is_dir() else place.parent
        if any((beside / name).is_symlink() for name in _FILES):
            raise refused
    except OSError:  # a name that is too long, a folder that may not be read
        raise refused from None
    return place
