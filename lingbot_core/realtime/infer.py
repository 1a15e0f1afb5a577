"""One ``infer`` message of the camera socket: what is in it, checked, and nothing done yet."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..camera.controls import FirstDelta
from ..camera.pose import Array
from .cameras import read_cameras
from .errors import MessageError

T = TypeVar("T")

FIELDS = frozenset(
    {"endpoint", "session_id", "image", "prompt", "camera", "cameras", "extra_body", "keep_world", "request_id"}
)
OPTIONS = frozenset(
    {"height", "width", "num_frames", "fps", "seed", "frames_per_chunk", "translation_unit", "first_delta"}
)
MAX_NAME, MAX_PROMPT, MAX_FRAMES = 256, 20_000, 100_000


@dataclass(frozen=True)
class Infer:
    """poses: camera to world, float64 [N, 4, 4]; intrinsics: fx, fy, cx, cy of the first row, in pixels of a view of
    832 x 480, or None. image, prompt: None where unchanged. keep_world: a changed prompt does not begin a new world.
    unknown: names of fields that mean nothing here.

    From extra_body: size (height, width), num_frames that are wished for, fps, seed, frames_per_part (uint8 arrays of
    so many frames in place of mp4), translation_unit and first_delta (see WorldSession.start); None where not given.
    """

    session_id: str | None
    poses: Array
    intrinsics: Array | None
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


def read_infer(message: Mapping[str, Any]) -> Infer:
    """Raises MessageError."""
    options = _option(message, "extra_body", dict, dict) or {}
    poses, intrinsics = read_cameras(message)
    height, width = (_option(options, name, whole(1, 8192), int) for name in ("height", "width"))
    if (height is None) != (width is None):
        raise MessageError("extra_body: give height and width together, or neither", code="missing_field")
    unit = options.get("translation_unit")
    if unit is not None and (isinstance(unit, bool) or not isinstance(unit, int | float | str)):
        raise _bad("extra_body.translation_unit", "clip, key, a percentile such as p95, or a number above 0", unit)
    return Infer(
        session_id=session_id(message),
        poses=poses,
        intrinsics=intrinsics,
        image=message.get("image"),
        prompt=_option(message, "prompt", text(MAX_PROMPT), str),
        keep_world=bool(_option(message, "keep_world", boolean, bool)),
        size=None if height is None or width is None else (height, width),
        num_frames=_option(options, "num_frames", whole(1, MAX_FRAMES), int),
        fps=_option(options, "fps", positive, float),
        seed=_option(options, "seed", whole(0, 2**63 - 1), int),
        frames_per_part=_option(options, "frames_per_chunk", whole(1, MAX_FRAMES), int),
        translation_unit=unit,
        first_delta=_option(options, "first_delta", one_of("identity", "from_rest"), str),  # type: ignore[arg-type]
        unknown=(
            *(str(name) for name in message if name not in FIELDS),
            *(f"extra_body.{name}" for name in options if name not in OPTIONS),
        ),
    )


def session_id(message: Mapping[str, Any]) -> str | None:
    """The session a message is for; None is the one without a name."""
    return _option(message, "session_id", text(MAX_NAME), str)


# Checks: each returns what is wanted, in words, when a value is not it.

Check = Callable[[Any], str | None]


def whole(low: int, high: int) -> Check:
    return lambda value: (
        None
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        else f"a whole number from {low} to {high}"
    )


def text(most: int) -> Check:
    return lambda value: (
        None if isinstance(value, str) and len(value) <= most else f"text of at most {most} characters"
    )


def positive(value: Any) -> str | None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6 and math.isfinite(value)
    return None if fits else "a number above 0"


def boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def dict_(value: Any) -> str | None:
    return None if isinstance(value, Mapping) else "a map"


def one_of(*names: str) -> Check:
    return lambda value: None if value in names else " or ".join(names)


def _option(values: Mapping[str, Any], name: str, check: Any, _: type[T]) -> T | None:
    value = values.get(name)
    if value is None:
        return None
    wanted = dict_(value) if check is dict else check(value)
    if wanted is not None:
        raise _bad(name, wanted, value)
    return value  # type: ignore[no-any-return]


def _bad(name: str, wanted: str, value: Any) -> MessageError:
    shown = repr(value)
    return MessageError(
        f"{name} must be {wanted}, not {shown[:60]}{'...' if len(shown) > 60 else ''}", code="malformed_payload"
    )
