"""Checks of a message's plain fields: each returns what is wanted, in words, when a value is not it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .errors import MessageError

MAX_NAME = 256

Check = Callable[[Any], str | None]


def whole(low: int, high: int) -> Check:
    """A whole number."""

    def check(value: Any) -> str | None:
        fits = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        return None if fits else f"a whole number from {low} to {high}"

    return check


def text(most: int) -> Check:
    """Text."""
    return lambda value: None if isinstance(value, str) and len(value) <= most else f"text of at most {most} characters"


def positive(value: Any) -> str | None:
    """A number."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6
    return None if fits else "a number above 0"


def unit(value: Any) -> str | None:
    """A translation unit, whose words are checked where it is resolved."""
    fits = isinstance(value, int | float | str) and not isinstance(value, bool)
    return None if fits else "clip, key, a percentile such as p95, or a number above 0"


def request_name(value: Any) -> str | None:
    """A name that a client gives a message."""
    fits = isinstance(value, str | int) and not isinstance(value, bool) and len(str(value)) <= MAX_NAME
    return None if fits else f"text of at most {MAX_NAME} characters, or a whole number"


def boolean(value: Any) -> str | None:
    """A switch."""
    return None if isinstance(value, bool) else "true or false"


def mapping(value: Any) -> str | None:
    """A map of fields."""
    return None if isinstance(value, Mapping) else "a map"


def one_of(*names: str) -> Check:
    """A name."""
    return lambda value: None if value in names else " or ".join(names)


def optional(values: Mapping[str, Any], name: str, check: Check) -> Any:
    """A field that may be absent or null, checked; MessageError names it."""
    value = values.get(name)
    if isinstance(value, np.generic):
        value = value.item()
    if value is None:
        return None
    wanted = check(value)
    if wanted is None:
        return value
    shown = repr(value)
    raise MessageError(f"{name} must be {wanted}, not {shown[:60]}{'...' if len(shown) > 60 else ''}")
