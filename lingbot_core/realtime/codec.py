"""Messages as bytes: msgpack with numpy arrays, readable by and from openpi-client.

What comes in is bounded before it is built (:class:`Limits`), and whatever is wrong with it is a MessageError.
"""

from __future__ import annotations

from typing import Any

import msgpack

from .errors import MessageError
from .limits import DEFAULT_LIMITS, Limits
from .structure import check_structure
from .wire_arrays import BYTES_KEYS, from_wire, to_wire

__all__ = ["DEFAULT_LIMITS", "Limits", "pack", "unpack"]


def pack(value: Any) -> bytes:
    """The bytes of ``value``: nil, booleans, numbers, strings, bytes, lists, maps, numpy arrays and scalars.

    They are those that openpi-client writes. Raises MessageError("internal") naming what cannot be sent.
    """
    try:
        return bytes(msgpack.packb(value, default=to_wire))
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageError(f"this message cannot be sent: {error}", code="internal") from error


def unpack(data: bytes, limits: Limits = DEFAULT_LIMITS) -> dict[str, Any]:
    """The map of fields that ``data`` holds.

    Arrays come back as read-only numpy arrays of native byte order, scalars as numpy scalars, all other values as
    Python's own; NaN is let through. Raises MessageError("malformed_payload") for anything but one whole map within
    ``limits`` whose keys are strings, each of them once.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise MessageError(f"a message of the type {type(data).__name__} is no msgpack; send a binary frame")
    data = bytes(data)  # the same object, if it was bytes
    if len(data) > limits.message_bytes:
        raise MessageError(f"the message has {len(data)} bytes; at most {limits.message_bytes} are read")
    check_structure(data, limits)

    def build(pairs: list[tuple[Any, Any]]) -> Any:
        return from_wire(_fields(pairs), limits)

    try:
        message = msgpack.unpackb(data, object_pairs_hook=build, strict_map_key=False)
    except UnicodeDecodeError as error:
        raise MessageError("a string of the message is not UTF-8; send bytes as msgpack's bin") from error
    except ValueError as error:  # no other is known to get past the walk over the headers
        raise MessageError(f"the message is no msgpack that can be read: {error}") from error
    if not isinstance(message, dict):
        raise MessageError("the message is an array or a scalar; send a msgpack map of fields")
    return message


def _fields(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    as_bytes = False
    for key, value in pairs:
        name = key
        if isinstance(key, bytes):
            name, as_bytes = BYTES_KEYS.get(key), True
        if not isinstance(name, str):
            shown = repr(key[:40]) if isinstance(key, bytes) else f"of the type {type(key).__name__}"
            raise MessageError(f"a key of a map is {shown}; keys are strings, and bytes only where an array is meant")
        if name in fields:
            raise MessageError(f"a map has the key {name[:40]!r} twice; send it once")
        fields[name] = value
    if as_bytes and "__ndarray__" not in fields and "__npgeneric__" not in fields:
        raise MessageError("a map has keys of bytes and is no array (__ndarray__ is not there); use strings as keys")
    return fields
