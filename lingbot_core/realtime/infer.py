"""One ``infer`` message of the camera socket: what is in it, checked, and nothing done yet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..camera.controls import FirstDelta
from ..camera.keys import PER_LATENT
from ..camera.pose import Array
from ..engine.events import ChunkEvent, parse_events
from ..errors import CameraError, LingBotError
from .cameras import read_cameras
from .checks import MAX_NAME, boolean, mapping, one_of, optional, positive, request_name, text, unit, whole
from .errors import Code, MessageError
from .limits import Limits

FIELDS = frozenset(
    {
        "endpoint",
        "session_id",
        "image",
        "prompt",
        "camera",
        "cameras",
        "extra_body",
        "keep_world",
        "event",
        "request_id",
    }
)
OPTIONS = frozenset(
    {"height", "width", "num_frames", "fps", "seed", "frames_per_chunk", "translation_unit", "first_delta"}
)
MAX_PROMPT, MAX_FRAMES = 20_000, 100_000


@dataclass(frozen=True)
class Infer:
    """What steers is either cameras or an event. poses: camera to world, float64 [N, 4, 4]; intrinsics: fx, fy, cx, cy
    of the first row, in pixels of a view of 832 x 480. event: one line of an event script (engine/events.py), whose
    prompt never begins a new world. request_id: comes back with every answer. image, prompt: None where unchanged.
    keep_world: a changed prompt does not begin a new world. unknown: names of fields that mean nothing here.

    From extra_body: size (height, width), num_frames that are wished for, fps, seed, frames_per_part (uint8 arrays of
    so many frames in place of mp4), translation_unit and first_delta (see WorldSession.start); None where not given.
    """

    session_id: str | None
    poses: Array | None = None
    intrinsics: Array | None = None
    event: ChunkEvent | None = None
    request_id: str | int | None = None
    image: Any = None
    prompt: str | None = None
    keep_world: bool = False
    size: tuple[int, int] | None = None
    num_frames: int | None = None
    fps: float | None = None
    seed: int | None = None
    frames_per_part: int | None = None
    translation_unit: str | float | None = None
    first_delta: FirstDelta | None = None
    unknown: tuple[str, ...] = field(default=())


def read_infer(message: Mapping[str, Any], limits: Limits, chunk: int) -> Infer:
    """chunk: latent frames of a chunk. Raises MessageError."""
    options = optional(message, "extra_body", mapping) or {}
    event = _event(message, chunk)
    cameras = None if event is not None else read_cameras(message, limits)
    height, width = (optional(options, name, whole(1, 8192)) for name in ("height", "width"))
    if (height is None) != (width is None):
        raise MessageError("extra_body: give height and width together, or neither", code="missing_field")
    return Infer(
        session_id=session_id(message),
        poses=None if cameras is None else cameras.poses,
        intrinsics=None if cameras is None else cameras.intrinsics[0],
        event=event,
        request_id=optional(message, "request_id", request_name),
        image=message.get("image"),
        prompt=optional(message, "prompt", text(MAX_PROMPT)),
        keep_world=bool(optional(message, "keep_world", boolean)),
        size=None if height is None or width is None else (height, width),
        num_frames=optional(options, "num_frames", whole(1, MAX_FRAMES)),
        fps=optional(options, "fps", positive),
        seed=optional(options, "seed", whole(0, 2**63 - 1)),
        frames_per_part=optional(options, "frames_per_chunk", whole(1, MAX_FRAMES)),
        translation_unit=optional(options, "translation_unit", unit),
        first_delta=optional(options, "first_delta", one_of("identity", "from_rest")),
        unknown=(
            *(str(name) for name in message if name not in FIELDS),
            *(f"extra_body.{name}" for name in options if name not in OPTIONS),
        ),
    )


def _event(message: Mapping[str, Any], chunk: int) -> ChunkEvent | None:
    line = optional(message, "event", mapping)
    if line is None:
        return None
    if message.get("cameras") is not None or message.get("camera") is not None:
        raise MessageError("the message has both an event and cameras; send one of them", code="bad_camera")
    optional(line, "prompt", text(MAX_PROMPT))
    try:
        script = json.dumps(_plain(line))
    except (TypeError, ValueError):
        raise MessageError("event must hold plain maps, lists, texts and numbers") from None
    try:
        [event] = parse_events(script + "\n", chunk=chunk, steps=PER_LATENT)
    except LingBotError as error:
        code: Code = "bad_camera" if isinstance(error, CameraError) else "malformed_payload"
        raise MessageError(str(error).replace("event script, line 1", "event"), code=code) from None
    return event


def _plain(value: Any) -> Any:
    """Arrays as lists, so that poses may be sent either way."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(inside) for name, inside in value.items()}
    return [_plain(inside) for inside in value] if isinstance(value, list) else value


def session_id(message: Mapping[str, Any]) -> str | None:
    """The session a message is for; None is the one without a name."""
    return optional(message, "session_id", text(MAX_NAME))
