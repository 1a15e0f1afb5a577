"""A walk over the headers of msgpack data, before anything is made of them.

msgpack sets memory aside for as many entries as a list claims to have, and does so again for the list inside it: a few
kilobytes could claim gigabytes. After this walk every claim has been compared with the limits and with the bytes.
"""

from __future__ import annotations

from typing import NamedTuple

from .errors import MessageError
from .limits import Limits


class _Head(NamedTuple):
    """What a first byte announces: a number of ``length_bytes`` follows it and is added to ``fixed``.

    fixed: bytes of the value behind that, or entries of a list or map.
    """

    kind: str
    fixed: int = 0
    length_bytes: int = 0


def _heads() -> list[_Head | None]:
    table: list[_Head | None] = [None] * 256
    for byte in (*range(0x80), *range(0xE0, 0x100)):
        table[byte] = _Head("number")
    for count in range(16):
        table[0x80 + count] = _Head("map", count)
        table[0x90 + count] = _Head("list", count)
    for count in range(32):
        table[0xA0 + count] = _Head("string", count)
    for byte, kind in ((0xC0, "nil"), (0xC2, "boolean"), (0xC3, "boolean")):
        table[byte] = _Head(kind)
    for first, kind in ((0xC4, "binary"), (0xC7, "extension"), (0xD9, "string")):
        for power in range(3):
            table[first + power] = _Head(kind, 0, 1 << power)
    table[0xCA], table[0xCB] = _Head("number", 4), _Head("number", 8)  # floats; then integers without and with a sign
    for first in (0xCC, 0xD0):
        for power in range(4):
            table[first + power] = _Head("number", 1 << power)
    for byte in range(0xD4, 0xD9):
        table[byte] = _Head("extension")
    for first, kind in ((0xDC, "list"), (0xDE, "map")):
        table[first] = _Head(kind, 0, 2)
        table[first + 1] = _Head(kind, 0, 4)
    return table


_HEADS = _heads()


def check_structure(data: bytes, limits: Limits) -> None:
    """Raises MessageError unless ``data`` is exactly one msgpack map, whole and within ``limits``.

    Refused are data that end early or go on, too many entries, too many levels, extension types (timestamps among
    them), and bytes that msgpack does not know. Nothing is allocated. Text is not looked at.
    """
    end, at, entries = len(data), 0, 0
    waiting = [1]  # values still to come, of every list and map that is open
    while waiting:
        if not waiting[-1]:
            waiting.pop()
            continue
        waiting[-1] -= 1
        if at >= end:
            raise _cut_off(f"its {end} bytes end where a value should begin")
        head = _HEADS[data[at]]
        if head is None:
            raise MessageError(f"byte {at} of the message (0x{data[at]:02x}) is no msgpack; send one msgpack map")
        if head.kind == "extension":
            raise MessageError(
                f"byte {at} of the message begins a msgpack extension (a timestamp for instance); send numbers, "
                "strings, bytes, lists, maps and arrays only"
            )
        if at == 0 and head.kind != "map":
            raise MessageError(f"the message is a {head.kind}; send a msgpack map of fields")
        start, at = at, at + 1 + head.length_bytes
        if at > end:
            raise _cut_off(f"a {head.kind} at byte {start} has no length")
        count = head.fixed + int.from_bytes(data[start + 1 : at])
        if head.kind not in ("list", "map"):
            at += count
            if at > end:
                raise _cut_off(f"a {head.kind} at byte {start} needs {count} bytes and has {end - at + count}")
            continue
        entries += count
        if entries > limits.items:
            raise MessageError(
                f"the message has more than {limits.items} entries (a {head.kind} at byte {start} claims {count}); "
                "send numbers as arrays"
            )
        values = 2 * count if head.kind == "map" else count
        if values > end - at:
            raise _cut_off(f"a {head.kind} at byte {start} claims {count} entries and has {end - at} bytes for them")
        if len(waiting) > limits.depth:
            raise MessageError(
                f"lists and maps lie more than {limits.depth} deep inside one another (at byte {start}); "
                "send a flatter message"
            )
        waiting.append(values)
    if at != end:
        raise MessageError(f"{end - at} bytes follow the end of the message; send one msgpack map per message")


def _cut_off(how: str) -> MessageError:
    return MessageError(f"the message is cut off: {how}; send it whole, in one binary frame")
