"""Types of command-line values: each reads text, or says in one sentence what it should have been."""

from __future__ import annotations

import math
import os
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

SEED_LIMIT = 2**63
NAMED_SIZES = ("480p", "720p")

Size = str | tuple[int, int]


def path(text: str) -> Path:
    """A path; nothing at all would be the current folder."""
    if not text:
        raise ArgumentTypeError("the path is empty; name a file or folder")
    return Path(text)


def file_to_write(text: str) -> Path:
    """The path of a file, which does not end like that of a folder."""
    if text.endswith((os.sep, os.altsep or os.sep)):
        raise ArgumentTypeError(f"{text!r} is a folder; name a file in it")
    return path(text)


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """A whole number from ``low`` to ``high``."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            upper = "" if high is None else f" and at most {high}"
            raise ArgumentTypeError(f"{text!r} must be a whole number of at least {low}{upper}")
        return value

    return number


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


def seconds(text: str) -> float:
    """A finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ArgumentTypeError(f"{text!r} must be a number of seconds, at least 0")
    return value


def numbers(kind: type[int] | type[float]) -> Callable[[str], tuple[float, ...]]:
    """Numbers separated by commas."""

    def values(text: str) -> tuple[float, ...]:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            what = "whole numbers" if kind is int else "numbers"
            raise ArgumentTypeError(f"{text!r} must be {what} separated by commas, such as 0,250,500,750") from None

    return values


def window(text: str) -> int:
    """Latent frames, or ``none``."""
    return 0 if text.strip().lower() == "none" else whole(0)(text)


def size(text: str) -> Size:
    """``480p`` or ``720p`` (areas), or HEIGHTxWIDTH as (height, width)."""
    name = text.strip().lower()
    if name in NAMED_SIZES:
        return name
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", name)
    if match is None:
        raise ArgumentTypeError(f"{text!r} must be {', '.join(NAMED_SIZES)} or HEIGHTxWIDTH in pixels, such as 480x832")
    return int(match[1]), int(match[2])


def device(text: str) -> str:
    """``auto``, ``cpu``, ``cuda``, ``cuda:1``: a device that is there."""
    if text == "auto":
        return text
    import torch

    try:
        where = torch.device(text)
    except RuntimeError:
        raise ArgumentTypeError(f"{text!r} is no device; use auto, cpu, cuda or cuda:N") from None
    if where.type not in ("cpu", "cuda"):
        raise ArgumentTypeError(f"device {text!r} is not supported; use auto, cpu, cuda or cuda:N")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise ArgumentTypeError(f"device {text!r} is not here: PyTorch sees {torch.cuda.device_count()} CUDA GPUs")
    return text
