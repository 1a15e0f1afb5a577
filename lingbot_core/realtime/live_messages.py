"""What the driver and the viewers of a live world may say: JSON, version 1, checked before anything is done.

Every message is an object with a ``type``; ``seq`` is a number of the sender's own that comes back with the answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .checks import boolean, one_of, optional, text, whole
from .errors import MessageError
from .live_steering import AXES, KEYS, LOOK_WAITING, SPEEDS, Control

VERSION = 1
FORMATS = ("jpeg", "webp", "fragments")
MAX_TEXT = 64 << 10
"""Characters of a message; only a record of controls is longer."""
MAX_RECORD = 32 << 20
MAX_PRESSES = 64
MAX_PROMPT = 20_000
MAX_REWIND = 4096
SEQ_LIMIT = 2**53
"""Beyond it numbers of JavaScript are no whole numbers any more."""


@dataclass(frozen=True)
class Hello:
    """A connection introduces itself. client: a name that a page keeps when it is loaded again. drive: it wants to."""

    client: str
    drive: bool
    format: str


@dataclass(frozen=True)
class Settings:
    """What is None stays as it is. move, turn: speeds. keep_going: also when nobody drives."""

    move: float | None = None
    turn: float | None = None
    keep_going: bool | None = None


def message_type(message: Mapping[str, Any]) -> str:
    """Raises MessageError for a message without one."""
    kind = message.get("type")
    if not isinstance(kind, str):
        raise MessageError('the message has no type; send an object such as {"type": "start"}', code="missing_field")
    return kind


def read_seq(message: Mapping[str, Any]) -> int | None:
    """The sender's number of a message, if it has one that can be sent back."""
    seq = message.get("seq")
    return seq if whole(0, SEQ_LIMIT)(seq) is None else None


def read_hello(message: Mapping[str, Any]) -> Hello:
    """Raises MessageError; code 'unsupported' for another version of the protocol."""
    version = message.get("v")
    if version != VERSION or isinstance(version, bool):
        raise MessageError(
            f"hello: v={version!r:.20} is spoken by another release; this one speaks {VERSION}: load the page again",
            code="unsupported",
        )
    client = optional(message, "client", text(100))
    if not client:
        raise MessageError("hello: client is missing; send a name that nobody else has", code="missing_field")
    return Hello(
        client, bool(optional(message, "drive", boolean)), optional(message, "format", one_of(*FORMATS)) or FORMATS[0]
    )


def read_control(message: Mapping[str, Any]) -> Control:
    """Raises MessageError naming the field."""
    seq = optional(message, "seq", whole(0, SEQ_LIMIT))
    if seq is None:
        raise MessageError("control: seq is missing; count your messages, from 0 on", code="missing_field")
    axes = _numbers(message, "axes", len(AXES), 1.0)
    right, up = _numbers(message, "look", 2, LOOK_WAITING)
    return Control(
        seq=seq,
        press=_keys(message, "press", MAX_PRESSES),
        held=frozenset(_keys(message, "held", len(KEYS))),
        axes=axes,
        look=(right, up),
    )


def read_settings(message: Mapping[str, Any]) -> Settings:
    """Raises MessageError naming the field."""
    return Settings(
        move=optional(message, "move", _speed),
        turn=optional(message, "turn", _speed),
        keep_going=optional(message, "keep_going", boolean),
    )


def read_prompt(message: Mapping[str, Any]) -> str:
    """Raises MessageError."""
    prompt = optional(message, "prompt", text(MAX_PROMPT))
    if prompt is None:
        raise MessageError("prompt: the text is missing; send it in the field prompt", code="missing_field")
    return str(prompt)


def read_rewind(message: Mapping[str, Any]) -> int:
    """How many chunks are to be taken back; one where it is not said."""
    chunks = optional(message, "chunks", whole(1, MAX_REWIND))
    return 1 if chunks is None else int(chunks)


def read_record(message: Mapping[str, Any]) -> str:
    """The text of a record that is to be walked again."""
    record = optional(message, "record", text(MAX_RECORD))
    if not record:
        raise MessageError("replay: the record is missing; send its text in the field record", code="missing_field")
    return str(record)


def _keys(message: Mapping[str, Any], name: str, most: int) -> str:
    keys = str(optional(message, name, text(most)) or "").lower()
    if unknown := sorted(set(keys) - KEYS):
        raise MessageError(
            f"{name} has {unknown[0]!r}, which is no key; use w a s d (move), q e (down, up) and i j k l (look)"
        )
    return keys


def _numbers(message: Mapping[str, Any], name: str, count: int, most: float) -> tuple[float, ...]:
    values = message.get(name)
    if values is None:
        return (0.0,) * count
    fits = isinstance(values, list) and len(values) == count and all(map(_is_number, values))
    if not fits:
        raise MessageError(f"{name} must be {count} numbers, not {values!r:.60}")
    return tuple(min(most, max(-most, float(value))) for value in values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _speed(value: Any) -> str | None:
    low, high = SPEEDS
    return None if _is_number(value) and low <= value <= high else f"a number from {low:g} to {high:g}"
