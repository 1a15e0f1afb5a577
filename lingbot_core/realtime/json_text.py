"""JSON messages as text, bounded before anything is made of them."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from .errors import MessageError
from .limits import DEFAULT_LIMITS, Limits

MAX_DIGITS = 20
"""Of a whole number; more are no number that anything here counts with."""


def read_json(text: str, limits: Limits = DEFAULT_LIMITS) -> dict[str, Any]:
    """The object of fields that ``text`` holds.

    Refused as MessageError("malformed_payload") are text that is no JSON object, NaN and infinity, whole numbers of
    more than 20 digits, a key that an object has twice, and more entries or levels than ``limits`` allow.
    """
    # A list takes twenty times the bytes of its brackets. Those inside of strings count too: nobody writes so many.
    entries = sum(text.count(mark) for mark in "[{,")
    if entries > limits.items:
        raise MessageError(f"the message has {entries} entries; at most {limits.items} are read")
    try:
        message = json.loads(
            text, object_pairs_hook=_fields, parse_constant=_refuse_constant, parse_int=_whole, parse_float=_finite
        )
    except RecursionError:
        raise _too_deep(limits) from None
    except ValueError as error:
        raise MessageError(f"the message is not valid JSON: {error}; send one JSON object per text frame") from None
    if not isinstance(message, dict):
        raise MessageError("the message is JSON but no object; send an object with the field type")
    _check_depth(message, limits)
    return message


def _check_depth(message: Any, limits: Limits) -> None:
    level = [message]
    for _ in range(limits.depth):
        inside = [entry for value in level for entry in (value.values() if isinstance(value, dict) else value)]
        level = [value for value in inside if isinstance(value, dict | list)]
        if not level:
            return
    raise _too_deep(limits)


def _too_deep(limits: Limits) -> MessageError:
    return MessageError(f"lists and objects lie more than {limits.depth} deep in one another; send a flatter message")


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise MessageError(f"an object has the field {twice[:40]!r} twice; send it once")
    return fields


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise MessageError(f"a whole number of {len(digits)} digits is in the message; at most {MAX_DIGITS} are read")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise MessageError(f"the number {digits[:20]} is too large; send finite numbers")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise MessageError(f"{name} is no JSON; send finite numbers")
