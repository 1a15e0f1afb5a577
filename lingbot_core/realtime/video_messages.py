"""The messages that a client of the video socket sends, checked, and nothing done yet."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from scipy.spatial.transform import Rotation

from ..camera.controls import FirstDelta
from ..camera.pose import MAX_DISTANCE, Array, read_only
from ..engine.image import check_size
from ..errors import ImageError, LengthError, PresetError
from ..presets import Preset, UniPCSteps
from .checks import MAX_NAME, Check, mapping, one_of, positive, unit, whole
from .checks import optional as optional_field
from .checks import text as text_of
from .errors import MessageError
from .infer import MAX_PROMPT

START_FIELDS = frozenset(
    {
        "type", "model", "prompt", "image_reference", "negative_prompt", "format", "width", "height", "size", "seconds",
        "fps", "num_frames", "num_inference_steps", "guidance_scale", "guidance_scale_2", "boundary_ratio",
        "flow_shift", "true_cfg_scale", "seed", "extra_params",
    }
)  # fmt: skip
EXTRA_FIELDS = frozenset({"flow_shift", "camera_action_script", "action_path", "translation_unit", "first_delta"})
FPS, MAX_FPS, MAX_SIDE, MAX_FRAMES, MAX_TRANSITION = 16.0, 240, 8192, 100_000, 1000
MAX_CONTROL = 1 << 17
"""Characters of a message that is no session.start."""
_ROTATION_SLACK = 1e-2


@dataclass(frozen=True)
class VideoStart:
    """A session.start that the loaded model can honour.

    preset: the recipe, with what the message changes of it. image: a data: URL or one of the web. chunks: None for an
    endless session, and where action_path decides. script: keys of each latent frame, [chunks][latent frames of a
    chunk]. action_path: as it was sent. size: (height, width), None for the model's own. translation_unit, first_delta:
    None where not given. unknown: names of fields that mean nothing here.
    """

    prompt: str
    image: str
    preset: Preset
    size: tuple[int, int] | None = None
    fps: float = FPS
    num_frames: int | None = None
    chunks: int | None = None
    seed: int = 0
    script: tuple[tuple[frozenset[str], ...], ...] | None = None
    action_path: str | None = None
    translation_unit: str | float | None = None
    first_delta: FirstDelta | None = None
    unknown: tuple[str, ...] = field(default=())


@dataclass(frozen=True, eq=False)
class CameraMove:
    """mode: 'velocity', one step of each latent frame, or 'target', a pose relative to the session's start.
    pose: rigid, read-only float64 [4, 4]."""

    mode: Literal["velocity", "target"]
    pose: Array


@dataclass(frozen=True, eq=False)
class Interaction:
    """What is to change at the next chunk. transition_chunks: None where not given. unknown: fields without meaning."""

    event_id: str
    prompt: str | None = None
    camera: CameraMove | None = None
    transition_chunks: int | None = None
    unknown: tuple[str, ...] = field(default=())


def message_type(message: Mapping[str, Any]) -> str:
    """The field type. Raises MessageError (missing_field, malformed_payload)."""
    kind = message.get("type")
    if kind is None:
        raise MessageError("the message has no type; send session.start, for instance", code="missing_field")
    if not isinstance(kind, str):
        raise MessageError("type must be text, such as session.start")
    return kind


def read_start(message: Mapping[str, Any], *, preset: Preset, model: str) -> VideoStart:
    """Reads a session.start. preset: of the loaded model; model: its name.

    Raises MessageError: missing_field, malformed_payload, bad_camera for the script, and ``unsupported`` naming the
    field that the model, its preset or this server cannot honour.
    """
    extra = _optional(message, "extra_params", mapping) or {}
    _check_model(message, model)
    if _optional(message, "format", text_of(MAX_NAME)) not in (None, "m4s"):
        raise _unsupported(message, "format", "this server sends m4s")
    prompt = _needed(message, "prompt", MAX_PROMPT)
    script = _script(extra, preset.chunk)
    action_path = _text(extra, "action_path", 4096, "extra_params.action_path")
    if script is not None and action_path is not None:
        raise MessageError("extra_params: camera_action_script and action_path exclude each other; send one of them")
    fps = float(_optional(message, "fps", _within(0, MAX_FPS)) or FPS)
    num_frames = _num_frames(message, fps)
    return VideoStart(
        prompt=prompt,
        image=_image(message),
        preset=_recipe(message, extra, preset),
        size=_size(message),
        fps=fps,
        num_frames=num_frames,
        chunks=_chunks(num_frames, script, preset),
        seed=_optional(message, "seed", whole(0, 2**63 - 1)) or 0,
        script=script,
        action_path=action_path,
        translation_unit=_optional(extra, "translation_unit", unit, "extra_params."),
        first_delta=_optional(extra, "first_delta", one_of("identity", "from_rest"), "extra_params."),
        unknown=(*_unknown(message, START_FIELDS), *_unknown(extra, EXTRA_FIELDS, "extra_params.")),
    )


def read_event_id(message: Mapping[str, Any]) -> str:
    """The event_id of a session.interaction, a new one where it has none. Raises MessageError."""
    interaction = message.get("interaction")
    given = interaction.get("event_id") if isinstance(interaction, Mapping) else None
    if given is None:
        return uuid.uuid4().hex
    if not isinstance(given, str) or not given or len(given) > MAX_NAME:
        raise MessageError(f"event_id must be text of 1 to {MAX_NAME} characters, or be left out")
    return _unicode(given, "event_id")


def read_interaction(message: Mapping[str, Any], event_id: str) -> Interaction:
    """Reads a session.interaction. event_id: see :func:`read_event_id`. Raises MessageError."""
    interaction = _object(message, "interaction", "the message")
    event = _object(interaction, "event", "interaction")
    prompt = _text(event, "prompt", MAX_PROMPT)
    if prompt is not None and not prompt.strip():
        raise MessageError("event.prompt must not be empty; leave it out to keep the prompt")
    media = _optional(event, "multi_modal_data", mapping) or {}
    camera = _camera(media)
    if event.get("negative_prompt") is not None:
        raise _unsupported(event, "negative_prompt", "it is fixed for a session")
    if prompt is None and camera is None:
        raise MessageError(
            "the event changes nothing; give event.prompt or event.multi_modal_data.camera", code="missing_field"
        )
    return Interaction(
        event_id=event_id,
        prompt=prompt,
        camera=camera,
        transition_chunks=_optional(interaction, "transition_chunks", whole(0, MAX_TRANSITION)),
        unknown=(
            *_unknown(message, {"type", "interaction"}),
            *_unknown(interaction, {"event_id", "event", "transition_chunks"}, "interaction."),
            *_unknown(event, {"prompt", "multi_modal_data", "negative_prompt"}, "event."),
            *_unknown(media, {"camera"}, "multi_modal_data."),
        ),
    )


# The parts of a start


def _check_model(message: Mapping[str, Any], model: str) -> None:
    wanted = _text(message, "model", MAX_NAME)
    if wanted is not None and wanted != model:
        raise _unsupported(message, "model", f"this server has {model!r}; send that, or leave it out")


def _image(message: Mapping[str, Any]) -> str:
    reference = _optional(message, "image_reference", mapping)
    if reference is None or reference.get("image_url") is None:
        raise MessageError(
            "session.start needs image_reference: {image_url: 'data:image/png;base64,...'}", code="missing_field"
        )
    if unknown := _unknown(reference, {"image_url"}, "image_reference."):
        raise MessageError(f"{unknown[0]:.60} is not known here; give image_url alone", code="unsupported")
    url = reference["image_url"]
    if not isinstance(url, str):
        raise MessageError("image_reference.image_url must be text, a data: URL")
    return url


def _recipe(message: Mapping[str, Any], extra: Mapping[str, Any], preset: Preset) -> Preset:
    """The preset with what the message changes of it."""
    steps = _optional(message, "num_inference_steps", whole(1, 1000))
    if steps is not None and steps != preset.steps and not isinstance(preset.selection, UniPCSteps):
        raise _unsupported(
            message, "num_inference_steps", f"the preset {preset.name} has {preset.steps} steps, fixed by its training"
        )
    guidance = _optional(message, "guidance_scale", _within(0, 1000))
    if guidance is not None and guidance != preset.guidance_scale and not isinstance(preset.selection, UniPCSteps):
        raise _unsupported(message, "guidance_scale", f"the preset {preset.name} is distilled and takes 1 only")
    for name, why in (
        ("guidance_scale_2", "there is no second model that it would be for"),
        ("boundary_ratio", "there is no second model to switch to"),
    ):
        if message.get(name) is not None:
            raise _unsupported(message, name, why)
    true_cfg = _optional(message, "true_cfg_scale", _within(0, 1000))
    if true_cfg is not None and (true_cfg != 1 or preset.guided):
        raise _unsupported(message, "true_cfg_scale", "this model has one guidance; use guidance_scale")
    shift = _optional(message, "flow_shift", positive)
    inner = _optional(extra, "flow_shift", positive, "extra_params.")
    if shift is not None and inner is not None and shift != inner:
        raise MessageError(f"flow_shift is given twice, as {shift:g} and as {inner:g}; send it once")
    negative = _text(message, "negative_prompt", MAX_PROMPT)
    try:
        recipe = preset.with_overrides(
            # What the preset has already is no change of it.
            steps=None if steps == preset.steps else steps,
            guidance_scale=None if guidance is None else float(guidance),
            shift=None if shift is None and inner is None else float(inner if shift is None else shift),
        )
        if negative and not recipe.guided:
            raise _unsupported(message, "negative_prompt", "it has no effect without guidance; leave it out")
        return recipe.with_overrides(negative_prompt=negative) if recipe.guided else recipe
    except PresetError as error:
        raise MessageError(str(error), code="unsupported") from None


def _size(message: Mapping[str, Any]) -> tuple[int, int] | None:
    """(height, width)"""
    height, width = (_optional(message, name, whole(1, MAX_SIDE)) for name in ("height", "width"))
    if (height is None) != (width is None):
        raise MessageError("give width and height together, or neither", code="missing_field")
    named = _text(message, "size", 32)
    size = None if height is None or width is None else (height, width)
    if named is not None:
        across, cross, down = named.lower().partition("x")
        sides = [int(side) for side in (down, across) if side.isascii() and side.isdigit() and len(side) <= 4]
        if not cross or len(sides) != 2 or max(sides) > MAX_SIDE:
            raise MessageError(f"size must be text such as '832x480' (width x height), not {named!r}")
        if size is not None and size != (sides[0], sides[1]):
            raise MessageError(f"size says {named}, but width and height say {size[1]}x{size[0]}; send one of them")
        size = sides[0], sides[1]
    if size is not None:
        try:
            check_size(*size)
        except ImageError as error:
            raise MessageError(str(error), code="unsupported") from None
    return size


def _num_frames(message: Mapping[str, Any], fps: float) -> int | None:
    num_frames = _optional(message, "num_frames", whole(1, MAX_FRAMES))
    given = message.get("seconds")
    if given is None:
        return num_frames
    if num_frames is not None:
        raise MessageError("num_frames and seconds exclude each other; send one of them")
    try:
        seconds = float(given) if isinstance(given, str) and len(given) < 20 else given
    except ValueError:
        seconds = given
    if positive(seconds) is not None:
        raise MessageError(f"seconds must be a number above 0, not {str(given)[:40]!r}")
    frames = int(seconds * fps)
    if not 1 <= frames <= MAX_FRAMES:
        raise MessageError(
            f"{seconds:g} seconds at {fps:g} frames per second are {frames} frames; 1 to {MAX_FRAMES} can be made",
            code="unsupported",
        )
    return frames


def _chunks(num_frames: int | None, script: tuple[Any, ...] | None, preset: Preset) -> int | None:
    """Chunks of the session; None without an end, and where action_path alone decides."""
    if num_frames is None:
        return None if script is None else len(script)
    try:
        chunks = preset.chunks_for(num_frames)
    except LengthError as error:
        raise MessageError(str(error), code="unsupported") from None
    if script is not None and len(script) != chunks:
        raise MessageError(
            f"camera_action_script has {len(script)} chunks, but {num_frames} frames are {chunks} chunks of "
            f"{preset.chunk} latent frames; send one list for each",
            code="bad_camera",
        )
    return chunks


def _script(extra: Mapping[str, Any], chunk: int) -> tuple[tuple[frozenset[str], ...], ...] | None:
    rows = extra.get("camera_action_script")
    if rows is None:
        return None
    if not isinstance(rows, list) or not rows or len(rows) > MAX_FRAMES // (4 * chunk):
        raise MessageError(
            f"camera_action_script must be a list of 1 to {MAX_FRAMES // (4 * chunk)} lists, one for each chunk",
            code="bad_camera",
        )
    return tuple(_script_row(row, index, chunk) for index, row in enumerate(rows))


def _script_row(row: Any, index: int, chunk: int) -> tuple[frozenset[str], ...]:
    where = f"camera_action_script[{index}]"
    if not isinstance(row, list) or len(row) != chunk:
        given = f"has {len(row)} entries" if isinstance(row, list) else "is no list"
        raise MessageError(
            f"{where} {given}; a chunk has {chunk} latent frames and needs one list of keys for each, such as "
            f"[['w'], {', '.join(['[]'] * (chunk - 1))}]",
            code="bad_camera",
        )
    for latent, keys in enumerate(row):
        if not isinstance(keys, list) or not all(isinstance(key, str) and key in _KEYS for key in keys):
            raise MessageError(
                f"{where}[{latent}] is {repr(keys)[:40]}; write a list of keys out of w a s d i j k l, or []",
                code="bad_camera",
            )
    return tuple(frozenset(keys) for keys in row)


_KEYS = frozenset({"w", "a", "s", "d", "i", "j", "k", "l"})


# The parts of an interaction


def _camera(media: Mapping[str, Any]) -> CameraMove | None:
    camera = _optional(media, "camera", mapping)
    if camera is None:
        return None
    if unknown := _unknown(camera, {"mode", "data"}):
        raise MessageError(f"camera has no field {unknown[0]:.40}; send mode and data", code="bad_camera")
    mode: Any = "target" if camera.get("mode") is None else camera["mode"]
    if mode not in ("velocity", "target"):
        raise MessageError(f"camera.mode must be velocity or target, not {repr(mode)[:40]}", code="bad_camera")
    data = _object(camera, "data", "camera")
    if unknown := _unknown(data, {"translation", "rotation"}):
        raise MessageError(
            f"camera.data has no field {unknown[0]:.40}; send translation [3] and rotation x y z w [4]",
            code="bad_camera",
        )
    pose = np.eye(4)
    pose[:3, 3] = _numbers(data, "translation", 3)
    rotation = _numbers(data, "rotation", 4)
    length = math.hypot(*rotation)
    if abs(length - 1) > _ROTATION_SLACK:
        raise MessageError(
            f"camera.data.rotation has the length {length:.4g}; a quaternion x y z w of length 1 is needed",
            code="bad_camera",
        )
    pose[:3, :3] = Rotation.from_quat(rotation).as_matrix()
    return CameraMove(mode, read_only(pose))


def _numbers(data: Mapping[str, Any], name: str, count: int) -> list[float]:
    values = data.get(name)
    if values is None:
        raise MessageError(f"camera.data needs {name} [{count}]", code="missing_field")
    fits = (
        isinstance(values, list)
        and len(values) == count
        and all(isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= MAX_DISTANCE for x in values)
    )
    if not fits:
        raise MessageError(
            f"camera.data.{name} must be {count} numbers within +-{MAX_DISTANCE:g}, not {repr(values)[:60]}",
            code="bad_camera",
        )
    return [float(x) for x in values]


# Fields


def _optional(values: Mapping[str, Any], name: str, check: Check, inside: str = "") -> Any:
    try:
        return optional_field(values, name, check)
    except MessageError as error:
        raise MessageError(f"{inside}{error}", code=error.code) from None


def _text(values: Mapping[str, Any], name: str, most: int, shown: str | None = None) -> str | None:
    value = _optional(values, name, text_of(most))
    return None if value is None else _unicode(value, shown or name)


def _needed(values: Mapping[str, Any], name: str, most: int) -> str:
    value = _text(values, name, most)
    if value is None:
        raise MessageError(f"session.start needs {name}", code="missing_field")
    return value


def _unicode(value: str, name: str) -> str:
    """Half of a surrogate pair can be written in JSON, and nowhere else."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise MessageError(f"{name} holds half of a surrogate pair, which is no text; send whole characters") from None
    return value


def _object(values: Mapping[str, Any], name: str, owner: str) -> Mapping[str, Any]:
    value = _optional(values, name, mapping)
    if value is None:
        raise MessageError(f"{owner} needs the object {name}", code="missing_field")
    found: Mapping[str, Any] = value
    return found


def _within(low: float, high: float) -> Check:
    """A number above ``low`` and at most ``high``."""

    def check(value: Any) -> str | None:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and low < value <= high
        return None if fits else f"a number above {low:g} and at most {high:g}"

    return check


def _unknown(values: Mapping[str, Any], known: frozenset[str] | set[str], inside: str = "") -> tuple[str, ...]:
    return tuple(f"{inside}{name}" for name in values if name not in known)


def _unsupported(values: Mapping[str, Any], name: str, why: str) -> MessageError:
    return MessageError(f"{name}={repr(values[name])[:60]} cannot be honoured: {why}", code="unsupported")
