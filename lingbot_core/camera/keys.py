"""Steering by keys: W/S forward and back, A/D left and right, I/K look up and down, J/L look left and right.

One step turns first (R' = Ry(yaw) R Rx(pitch)) and then moves along the new forward and right axes laid into the
ground plane. Diagonals are not normalised and opposite keys cancel.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.spatial.transform import Rotation

from ..errors import CameraError
from .pose import MAX_POSES, Array, as_numbers

Keys = frozenset[str]

WASD, IJKL = "wasd", "ijkl"
ALL_KEYS = frozenset(WASD + IJKL)

# Ten steps of 8.5 degrees shall reach a limit of 85 degrees although their sum is off by rounding.
_LIMIT_SLACK_DEG = 1e-9


@dataclass(frozen=True)
class KeySteps:
    """What one step of a held key does.

    move: units of the world. pitch_deg, yaw_deg: degrees. steps_per_latent: steps during one latent frame.
    pitch_limit_deg: the pitch part of a step that would pass it is dropped; its yaw and move still happen.
    """

    name: str
    move: float
    pitch_deg: float
    yaw_deg: float
    steps_per_latent: int
    pitch_limit_deg: float = 85.0

    def __post_init__(self) -> None:
        for field in ("move", "pitch_deg", "yaw_deg"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise CameraError(f"key steps {self.name}: {field}={value} must be a number of at least 0")
        steps = self.steps_per_latent
        if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= 64:
            raise CameraError(f"key steps {self.name}: steps_per_latent={steps!r} must be a whole number from 1 to 64")
        if not 0 < self.pitch_limit_deg < 90:
            raise CameraError(
                f"key steps {self.name}: pitch_limit_deg={self.pitch_limit_deg} must lie between 0 and 90"
            )

    @property
    def move_per_latent(self) -> float:
        """Units that one held key moves during one latent frame."""
        return self.move * self.steps_per_latent


# The realtime servers step once per latent frame; upstream's action strings once per video frame.
PER_LATENT = KeySteps("per-latent", move=0.05, pitch_deg=4.0, yaw_deg=6.0, steps_per_latent=1)
PER_VIDEO = KeySteps("per-video", move=0.05, pitch_deg=2.0, yaw_deg=2.0, steps_per_latent=4)
KEY_STEPS: dict[str, KeySteps] = {steps.name: steps for steps in (PER_LATENT, PER_VIDEO)}


def parse_keys(text: str | Iterable[str]) -> Keys:
    """The set of keys in a string such as ``wd``: any case, ``none`` or nothing for no key. A set passes through.

    Raises CameraError for other letters.
    """
    if isinstance(text, str):
        lower = text.strip().lower()
        keys = frozenset() if lower == "none" else frozenset(lower)
    else:
        keys = frozenset(str(key).lower() for key in text)
    unknown = sorted(keys - ALL_KEYS)
    if unknown:
        shown = text if isinstance(text, str) else "".join(sorted(keys))
        raise CameraError(
            f"keys {shown[:40]!r}: {unknown[0]!r} is not a key; use w a s d (move), i j k l (look), or none"
        )
    return keys


def format_keys(keys: Iterable[str]) -> str:
    """The keys as one sorted string, ``""`` for none; :func:`parse_keys` reads it back."""
    return "".join(sorted(keys))


def normalize_action_string(text: str) -> str:
    """Removes all white space and turns full-width commas into plain ones."""
    return "".join(text.replace("\uff0c", ",").split())


def parse_action_string(text: str) -> tuple[tuple[Keys, int], ...]:
    """Segments (keys, video frames) of a string such as ``w-10,iw-15,none-10``.

    Commas separate segments and the last ``-`` of a segment separates its keys from its whole number of frames.
    White space and case do not matter; a segment without keys (``-3``) means none. Raises CameraError naming the
    segment.
    """
    normalized = normalize_action_string(text)
    if not normalized:
        raise CameraError("the action string is empty; write segments such as w-10,iw-15,none-10")
    segments: list[tuple[Keys, int]] = []
    for number, segment in enumerate(normalized.split(","), start=1):
        where = f"action string, segment {number} ({segment[:40]!r})"
        if not segment:
            raise CameraError(f"action string, segment {number} is empty; remove the extra comma")
        letters, dash, digits = segment.rpartition("-")
        if not dash:
            raise CameraError(f"{where}: there is no number of frames; write it as keys-frames, such as w-10 or none-5")
        # Only plain digits: int() would also take signs, underscores and digits of other scripts.
        if not (digits.isascii() and digits.isdigit()) or len(digits) > 9 or int(digits) == 0:
            raise CameraError(f"{where}: {digits[:40]!r} is not a number of frames; use a whole number of at least 1")
        if re.search(r"-\d", letters):
            raise CameraError(f"{where}: a comma is missing; write one between segments, such as w-10, iw-15")
        try:
            segments.append((parse_keys(letters), int(digits)))
        except CameraError as error:
            raise CameraError(f"{where}: {error}") from None
    total = sum(count for _, count in segments)
    if total >= MAX_POSES:
        raise CameraError(f"the action string lasts {total} frames; fewer than {MAX_POSES} are accepted")
    return tuple(segments)


def frames_of(segments: Iterable[tuple[Keys, int]]) -> list[Keys]:
    """One set of keys per video frame."""
    return [keys for keys, count in segments for _ in range(count)]


def pad_to_4k1(frames: Sequence[Keys]) -> list[Keys]:
    """Adds frames without keys up to the next total of the form 4k + 1."""
    return [*frames, *[frozenset[str]()] * (-(len(frames) - 1) % 4)]


def pitch_of(pose: ArrayLike) -> float:
    """Degrees that a pose looks above (+) or below (-) the horizon, within +-90."""
    matrix = np.asarray(pose, dtype=np.float64)
    forward = matrix[:3, 2]
    return math.degrees(math.atan2(-forward[1], math.hypot(forward[0], forward[2])))


def step_pose(pose: ArrayLike, keys: Iterable[str], steps: KeySteps) -> Array:
    """The pose [4, 4] after ONE step with these keys held.

    The pitch is read from the pose, so that steering may begin anywhere. A pose that already looks beyond the limit may
    still turn back towards the horizon.
    """
    held = parse_keys(keys)

    def axis(positive: str, negative: str) -> int:
        return (positive in held) - (negative in held)

    return move_pose(
        pose,
        forward=axis("w", "s"),
        right=axis("d", "a"),
        pitch_deg=axis("i", "k") * steps.pitch_deg,
        yaw_deg=axis("l", "j") * steps.yaw_deg,
        distance=steps.move,
        pitch_limit_deg=steps.pitch_limit_deg,
    )


def move_pose(
    pose: ArrayLike,
    *,
    forward: float = 0.0,
    right: float = 0.0,
    up: float = 0.0,
    pitch_deg: float = 0.0,
    yaw_deg: float = 0.0,
    distance: float = PER_LATENT.move,
    pitch_limit_deg: float = PER_LATENT.pitch_limit_deg,
) -> Array:
    """The pose [4, 4] after one step of any size: what :func:`step_pose` does for keys, for sticks and mice, too.

    forward, right, up: in steps of ``distance`` along the pose's own axes laid into the ground plane, and against the
    world's +Y. pitch_deg, yaw_deg: up and right. A pitch that would pass the limit is dropped, the rest still happens.
    """
    before = np.asarray(pose, dtype=np.float64)
    pitch = pitch_deg
    # An upside-down camera sinks when it pitches up.
    now, change = pitch_of(before), math.copysign(1.0, before[1, 1]) * pitch
    limit = pitch_limit_deg + _LIMIT_SLACK_DEG
    if abs(now + change) > limit and abs(now + change) > abs(now):
        pitch = 0.0

    after = np.eye(4)
    rotation = before[:3, :3]
    if pitch:
        rotation = rotation @ Rotation.from_euler("x", pitch, degrees=True).as_matrix()
    if yaw_deg:
        rotation = Rotation.from_euler("y", yaw_deg, degrees=True).as_matrix() @ rotation
    after[:3, :3] = rotation
    ahead, aside = _in_ground_plane(rotation[:, 2]), _in_ground_plane(rotation[:, 0])
    after[:3, 3] = before[:3, 3] + distance * (forward * ahead + right * aside)
    if up:
        after[1, 3] -= distance * up
    return after


def _in_ground_plane(direction: Array) -> Array:
    flat = direction * [1.0, 0.0, 1.0]
    # Upstream's guard against straight up or down; it shortens every move by a millionth, so it is part of the rule.
    return flat / (np.linalg.norm(flat) + 1e-6)


def walk(pose: ArrayLike, keys_per_frame: Sequence[Iterable[str]], steps: KeySteps, *, per_latent: bool) -> Array:
    """The poses [N, 4, 4] after each frame, beginning from ``pose``, which is not among them.

    per_latent: the frames are latent frames of ``steps.steps_per_latent`` steps each; otherwise each frame is one step.
    """
    current = np.asarray(pose, dtype=np.float64)
    out = np.empty((len(keys_per_frame), 4, 4))
    for frame, keys in enumerate(keys_per_frame):
        for _ in range(steps.steps_per_latent if per_latent else 1):
            current = step_pose(current, keys, steps)
        out[frame] = current
    return out


def action_string_poses(text: str) -> Array:
    """Upstream's poses of an action string, one per video frame, [4k + 2, 4, 4]: the identity, then each frame."""
    frames = pad_to_4k1(frames_of(parse_action_string(text)))
    start = np.eye(4)
    return np.concatenate([start[None], walk(start, frames, PER_VIDEO, per_latent=False)])


def keys_from_arrays(wasd: Any, ijkl: Any = None) -> list[Keys]:
    """One set of keys per row of 0/1 arrays [F, 4] in the column orders w a s d and i j k l."""
    moves = check_key_array(wasd, "wasd")
    looks = np.zeros_like(moves) if ijkl is None else check_key_array(ijkl, "ijkl")
    if len(looks) != len(moves):
        raise CameraError(f"ijkl has {len(looks)} rows but wasd has {len(moves)}; give both one row per frame")
    pressed = np.concatenate([moves, looks], axis=1) > 0.5
    return [frozenset(key for key, down in zip(WASD + IJKL, row, strict=True) if down) for row in pressed]


def arrays_from_keys(frames: Iterable[Iterable[str]]) -> tuple[Array, Array]:
    """The 0/1 arrays (wasd [F, 4], ijkl [F, 4]) of one set of keys per frame."""
    rows = [[float(key in keys) for key in WASD + IJKL] for keys in map(parse_keys, frames)]
    both = np.array(rows, dtype=np.float64).reshape(-1, 8)
    return both[:, :4], both[:, 4:]


def check_key_array(values: Any, name: str) -> Array:
    """Checks an array [F, 4] of key states within 0..1 and returns it as float64."""
    array = as_numbers(values, name)
    if array.ndim != 2 or array.shape[1] != 4 or not 1 <= len(array) <= MAX_POSES:
        raise CameraError(f"{name} has shape {list(array.shape)}; key states are [F, 4] with 1 to {MAX_POSES} rows")
    bad = ~((array >= 0) & (array <= 1)).all(axis=1)
    if bad.any():
        row = int(np.argmax(bad))
        raise CameraError(f"{name}: row {row} ({array[row].tolist()}) must hold numbers from 0 to 1 (1 = pressed)")
    return array


class HeldKeys:
    """Which keys are down, for a keyboard that reports from another thread than the one that generates.

    A key that went down and up again between two takes is still in the next one, so that a short tap moves one step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._down: set[str] = set()
        self._tapped: set[str] = set()

    def down(self, keys: str | Iterable[str]) -> None:
        """Presses one or more keys; CameraError for a letter that is not a key."""
        pressed = parse_keys(keys)
        with self._lock:
            self._down |= pressed
            self._tapped |= pressed

    def up(self, keys: str | Iterable[str]) -> None:
        """Releases one or more keys."""
        released = parse_keys(keys)
        with self._lock:
            self._down -= released

    def release_all(self) -> None:
        """Releases everything and forgets taps: the window lost its focus, or its connection."""
        with self._lock:
            self._down.clear()
            self._tapped.clear()

    def take(self) -> Keys:
        """The keys of one latent frame: those held, and those tapped since the last take."""
        with self._lock:
            keys = frozenset(self._down | self._tapped)
            self._tapped.clear()
        return keys
