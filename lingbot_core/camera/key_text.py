"""Keys as people write them: an action string, or one line for each chunk."""

from __future__ import annotations

import dataclasses
import math
import re

from ..errors import CameraError
from .keys import Keys, KeySteps, parse_action_string, parse_keys

MAX_KEY_TEXT = 1 << 20
"""Characters; a text of one line for every chunk of the longest run is far below."""

MAX_SPEED = 1000.0

# Also counts that are refused later: who writes one means segments.
_COUNTED = re.compile(r"-\s*[\d.]+\s*$")


def key_segments(text: str) -> tuple[tuple[Keys, int], ...] | None:
    """Segments (keys, steps) of an action string such as ``w-12, wj-8, none-4``; None for a text without counts.

    A line break separates segments as a comma does. Raises CameraError naming the segment.
    """
    _check_size(text)
    parts = [part for part in re.split("[,\\n\uff0c]", text) if part.strip()]
    if not parts:
        raise CameraError("there are no keys; write segments such as w-12, wj-8, none-4, or one line per chunk")
    if not any(_COUNTED.search(part) for part in parts):
        return None
    return parse_action_string(",".join(parts))


def key_lines(text: str, *, chunk: int) -> list[tuple[str, ...]]:
    """Keys of each latent frame, [chunks][chunk], of a text with one line for each chunk.

    A line holds the keys of the whole chunk (``wj``), or one entry for each of its latent frames, separated by spaces
    or commas (``w w wj``); ``none`` is no key. Empty lines and those that begin with ``#`` are skipped. Raises
    CameraError naming the line.
    """
    _check_size(text)
    lines = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                lines.append(keys_of_chunk(line, chunk=chunk))
            except CameraError as error:
                raise CameraError(f"keys, line {number}: {error}") from None
    if not lines:
        raise CameraError("there are no keys; write segments such as w-12, wj-8, none-4, or one line per chunk")
    return lines


def keys_of_chunk(text: str, *, chunk: int) -> tuple[str, ...]:
    """Keys of each latent frame of one chunk, from one entry for all of them or one for each."""
    entries = text.replace(",", " ").replace("\uff0c", " ").split()
    held = tuple("".join(sorted(parse_keys(entry))) for entry in entries)
    if len(held) not in (1, chunk):
        raise CameraError(
            f"{len(held)} entries for one chunk; write one for the whole chunk, or {chunk}, one for each latent frame"
        )
    return held * chunk if len(held) == 1 else held


def scaled_steps(steps: KeySteps, *, speed: float = 1.0, turn: float = 1.0) -> KeySteps:
    """Key steps whose moves are ``speed`` times as long and whose turns are ``turn`` times as wide."""
    for name, factor in (("speed", speed), ("turn", turn)):
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not math.isfinite(factor):
            raise CameraError(f"{name}={factor!r} must be a number")
        if not 0 <= factor <= MAX_SPEED:
            raise CameraError(f"{name}={factor:g} must be a number from 0 to {MAX_SPEED:g}")
    if speed == 1 and turn == 1:
        return steps
    return dataclasses.replace(
        steps,
        name=f"{steps.name}, speed {speed:g}, turn {turn:g}",
        move=steps.move * speed,
        pitch_deg=steps.pitch_deg * turn,
        yaw_deg=steps.yaw_deg * turn,
    )


def _check_size(text: str) -> None:
    if len(text) > MAX_KEY_TEXT:
        raise CameraError(f"the keys are {len(text)} characters long; at most {MAX_KEY_TEXT} are accepted")
