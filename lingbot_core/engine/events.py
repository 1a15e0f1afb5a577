"""Event scripts: JSON lines, one chunk each, that say what changes when the chunk begins.

A line is an object with these fields::

    event_id   whole number of at least 0, larger than on every line before (needed)
    prompt     text: the prompt from this chunk on; absent or null: unchanged
    camera     the motion of this chunk, an object in one of the two forms below; absent or null: keep still

    {"schema": "lingbot.camera_actions.v1", "frames": [["w"], ["w", "j"], []]}
    {"schema": "lingbot.camera_trajectory.v1", "poses": [N 4x4 matrices], "intrinsics": [N or 1 rows of 4]}

``frames`` holds one list of keys (w a s d i j k l) per latent frame of the chunk. ``poses`` are absolute
camera-to-world matrices in OpenCV axes, any N >= 1, resampled to the chunk's latent frames as
``camera.controls.to_controls`` does; ``intrinsics`` (optional) are fx, fy, cx, cy in pixels of 832 x 480, of which the
first row counts.

The fields of the camera may also stand on the line itself, as in
``{"event_id": 1, "prompt": "...", "frames": [["j"], [], []]}``; ``schema`` may be left out, and the fields below it may
be wrapped in ``data``, or the whole object in ``controls: [{"track": "camera", ...}]``, as realtime servers have it.
``mode`` may be "frames" or "script". Empty lines are skipped.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..camera.controls import Intrinsics, KeyMotion
from ..camera.intrinsics import check_intrinsics
from ..camera.keys import KeySteps, format_keys, parse_keys
from ..camera.pose import Array, check_poses, read_only
from ..errors import CameraError, InputFileError, LingBotError, PromptError

ACTIONS_SCHEMA = "lingbot.camera_actions.v1"
TRAJECTORY_SCHEMA = "lingbot.camera_trajectory.v1"

MAX_LINE_BYTES = 1 << 20
"""A line with a pose for every video frame of the largest chunk takes a tenth of it."""
MAX_LINES = 10_000
MAX_EVENT_ID = 2**53 - 1  # the largest whole number that every JSON reader keeps

_LINE_FIELDS = ("event_id", "prompt", "camera", "controls")
_CAMERA_FIELDS = ("schema", "data", "mode", "frames", "poses", "intrinsics")
_FIELDS = {ACTIONS_SCHEMA: ("frames", "mode"), TRAJECTORY_SCHEMA: ("poses", "intrinsics")}


@dataclass(frozen=True, eq=False)
class ChunkEvent:
    """What happens when one chunk begins.

    prompt: the new prompt, or None. motion: keys per latent frame, absolute poses float64 [N, 4, 4], or None to keep
    still. intrinsics: fx, fy, cx, cy in pixels of 832 x 480 from this chunk on, or None for those in force.
    """

    event_id: int
    prompt: str | None = None
    motion: KeyMotion | Array | None = None
    intrinsics: Intrinsics | None = None


def parse_events(source: str | Path, *, chunk: int, steps: KeySteps) -> list[ChunkEvent]:
    """Reads an event script.

    source: a file, or the script itself (text with a line break, or that begins with ``{``). chunk: latent frames of a
    chunk. steps: what a held key does. Raises InputFileError, PromptError or CameraError naming the line.
    """
    if isinstance(source, str) and ("\n" in source or source.lstrip().startswith("{")):
        name, lines = "event script", _text_lines(source)
    else:
        name, lines = str(source), _file_lines(Path(source))
    events: list[ChunkEvent] = []
    for number, line in lines:
        where = f"{name}, line {number}"
        if number > MAX_LINES:
            raise InputFileError(f"{name} has more than {MAX_LINES} lines; split it into several runs")
        if len(line) > MAX_LINE_BYTES:
            raise InputFileError(
                f"{where} is longer than {MAX_LINE_BYTES} bytes; a line holds the poses of one chunk only"
            )
        if not line.strip():
            continue
        event = _event(_object(line, where), where, chunk, steps)
        if events and event.event_id <= events[-1].event_id:
            raise InputFileError(
                f"{where}: event_id {event.event_id} follows {events[-1].event_id}; ids must rise from line to line"
            )
        events.append(event)
    if not events:
        raise InputFileError(
            f'{name} holds no event; write one line per chunk, such as {{"event_id": 1, "frames": {_example(chunk)}}}'
        )
    return events


def _text_lines(text: str) -> Iterator[tuple[int, bytes]]:
    # Not splitlines(): it also splits at characters that JSON text may hold.
    for number, line in enumerate(text.split("\n"), start=1):
        yield number, line.encode("utf-8", "surrogatepass")


def _file_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        # A pipe would be waited for without end.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise InputFileError(f"{path} cannot be read: it is not a regular file; give a file of JSON lines")
        with path.open("rb") as file:
            yield from enumerate(iter(lambda: _read_line(file), b""), start=1)
    except FileNotFoundError:
        raise InputFileError(f"{path} does not exist; give a file with one JSON object per chunk and line") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        reason = getattr(error, "strerror", None) or error
        raise InputFileError(f"{path} cannot be read: {reason}; give a file of JSON lines") from None


def _read_line(file: BinaryIO) -> bytes:
    # One byte more than allowed is enough to see that a line is too long.
    return file.readline(MAX_LINE_BYTES + 1)


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_without_repeats)
    except UnicodeDecodeError:
        raise InputFileError(f"{where} is not UTF-8 text; save the script as UTF-8") from None
    except RecursionError:
        raise InputFileError(f"{where} is nested too deeply for an event") from None
    except _RepeatedField as error:
        raise InputFileError(f"{where}: the field {error.args[0]!r:.60} is given twice; keep one") from None
    except ValueError as error:
        raise InputFileError(f"{where} is not valid JSON: {error}; write one object per line") from None
    if not isinstance(value, dict):
        raise InputFileError(f"{where} must be a JSON object, not {_kind(value)}")
    return value


class _RepeatedField(Exception):
    """Carries its name."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _RepeatedField(name)
        found[name] = value
    return found


def _event(line: dict[str, Any], where: str, chunk: int, steps: KeySteps) -> ChunkEvent:
    known = (*_LINE_FIELDS, *_CAMERA_FIELDS)
    if unknown := [field for field in line if field not in known]:
        raise InputFileError(f"{where}: there is no field {unknown[0]!r}; the fields are {', '.join(known)}")
    event_id = line.get("event_id")
    if isinstance(event_id, bool) or not isinstance(event_id, int) or not 0 <= event_id <= MAX_EVENT_ID:
        given = "is missing" if event_id is None else f"is {event_id!r:.40}"
        raise InputFileError(f"{where}: event_id {given}; it must be a whole number from 0 to 2**53 - 1")
    prompt = line.get("prompt")
    if prompt is not None and (not isinstance(prompt, str) or not prompt.strip()):
        raise PromptError(f"{where}: prompt must be text that is not empty; leave it out to keep the prompt")
    camera = _camera(line, where)
    try:
        motion, intrinsics = _motion(camera, chunk, steps)
    except LingBotError as error:
        raise type(error)(f"{where}: {error}") from None
    return ChunkEvent(event_id, prompt, motion, intrinsics)


def _camera(line: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of the line's camera object, unwrapped; empty when there is none."""
    places: dict[str, Any] = {
        "its own fields": {field: line[field] for field in _CAMERA_FIELDS if line.get(field) is not None},
        "camera": line.get("camera"),
        "controls": line.get("controls"),
    }
    given = {place: value for place, value in places.items() if value not in (None, {}, [])}
    if len(given) > 1:
        raise CameraError(f"{where}: the camera is given twice, by {' and by '.join(given)}; keep one")
    if not given:
        return {}
    (camera,) = given.values()
    if "controls" in given:
        if not isinstance(camera, list) or len(camera) != 1:
            raise CameraError(f"{where}: controls must be a list of one camera object")
        camera = camera[0]
    if not isinstance(camera, dict):
        raise CameraError(f"{where}: the camera must be an object with 'frames' or 'poses', not {_kind(camera)}")
    camera = dict(camera)
    if camera.pop("track", "camera") != "camera":
        raise CameraError(f"{where}: only the track 'camera' can be controlled")
    data = camera.pop("data", None)
    if data is not None:
        if not isinstance(data, dict):
            raise CameraError(f"{where}: data must be an object with 'frames' or 'poses', not {_kind(data)}")
        if twice := sorted(camera.keys() & data.keys()):
            raise CameraError(f"{where}: {twice[0]!r} is given twice, inside and outside of data; keep one")
        camera |= data
    return {field: value for field, value in camera.items() if value is not None}


def _motion(camera: dict[str, Any], chunk: int, steps: KeySteps) -> tuple[KeyMotion | Array | None, Intrinsics | None]:
    if not camera:
        return None, None
    schema = camera.pop("schema", TRAJECTORY_SCHEMA if "poses" in camera else ACTIONS_SCHEMA)
    fields = _FIELDS.get(schema) if isinstance(schema, str) else None
    if fields is None:
        raise CameraError(f"schema {schema!r:.60} is unknown; use {ACTIONS_SCHEMA} or {TRAJECTORY_SCHEMA}")
    if foreign := [field for field in camera if field not in fields]:
        raise CameraError(f"{schema} has no field {foreign[0]!r}; its fields are {', '.join(fields)}")
    if fields[0] not in camera:
        raise CameraError(f"{schema} needs the field {fields[0]!r}")
    if schema == ACTIONS_SCHEMA:
        if camera.get("mode", "frames") not in ("frames", "script"):
            raise CameraError(
                f"mode {camera['mode']!r:.40} belongs to a live connection; in a script write the keys of each latent "
                "frame with mode 'frames'"
            )
        return KeyMotion(_keys(camera["frames"], chunk), steps), None
    poses = check_poses(camera["poses"])
    if "intrinsics" not in camera:
        return read_only(poses), None
    fx, fy, cx, cy = check_intrinsics(camera["intrinsics"], rows=len(poses))[0].tolist()
    return read_only(poses), (fx, fy, cx, cy)


def _keys(frames: Any, chunk: int) -> tuple[str, ...]:
    if not isinstance(frames, list) or len(frames) != chunk:
        given = f"{len(frames)} entries" if isinstance(frames, list) else _kind(frames)
        raise CameraError(
            f"frames has {given}; a chunk has {chunk} latent frames and needs one list of keys for each, such as "
            f"{_example(chunk)}"
        )
    held = []
    for index, keys in enumerate(frames):
        if not isinstance(keys, list) or not all(isinstance(key, str) and len(key) == 1 for key in keys):
            raise CameraError(f"frames[{index}] is {keys!r:.40}; write a list of single keys such as ['w', 'j'], or []")
        held.append(format_keys(parse_keys(keys)))
    return tuple(held)


def _example(chunk: int) -> str:
    return json.dumps([["w"], *[[]] * (chunk - 1)])


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
