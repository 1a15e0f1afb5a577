"""Controls: one chunk's relative camera poses, and the one function that every way of steering goes through."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from ..errors import CameraError
from .intrinsics import check_pixels
from .keys import Keys, KeySteps, check_key_array, format_keys, parse_keys, walk
from .pose import Array, as_numbers, check_poses, interpolate, read_only, relative_steps, steps_from
from .trajectory import CameraTrajectory
from .units import StepStatistics, check_unit, step_statistics, translation_unit

__all__ = [
    "CameraCarry",
    "Controls",
    "KeyMotion",
    "StepStatistics",
    "clip_controls",
    "latent_actions",
    "latents_of_slice",
    "step_statistics",
    "to_controls",
    "translation_unit",
]

FirstDelta = Literal["identity", "from_rest"]
Intrinsics = tuple[float, float, float, float]


@dataclass(frozen=True, eq=False)
class Controls:
    """What steers one chunk of c latent frames; recorded and replayed as it is.

    relative: step of each latent frame from the one before it, translation in the session's unit, float64 [c, 4, 4].
    pose_after: the absolute camera-to-world pose of the last latent frame, float64 [4, 4]. prompt: a new prompt from
    this chunk on, or None. intrinsics: fx, fy, cx, cy in pixels of the session's picture, None for the session's own.
    actions: w a s d key states float64 [c, 4] for models with act control. keys: what was held, for the record.
    """

    relative: Array
    pose_after: Array
    prompt: str | None = None
    intrinsics: Intrinsics | None = None
    actions: Array | None = None
    keys: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        relative = _finite(self.relative, "controls: relative", (None, 4, 4))
        pose_after = _finite(self.pose_after, "controls: pose_after", (4, 4))
        object.__setattr__(self, "relative", read_only(relative))
        object.__setattr__(self, "pose_after", read_only(pose_after))
        if self.prompt is not None and not isinstance(self.prompt, str):
            raise CameraError(f"controls: prompt must be text, not {type(self.prompt).__name__}")
        if self.intrinsics is not None:
            object.__setattr__(self, "intrinsics", check_pixels(self.intrinsics, "controls: intrinsics"))
        if self.actions is not None:
            actions = check_key_array(self.actions, "controls: actions")
            if len(actions) != len(relative):
                raise CameraError(
                    f"controls: {len(actions)} rows of actions for {len(relative)} latent frames; give one each"
                )
            object.__setattr__(self, "actions", read_only(actions))
        if self.keys is not None:
            object.__setattr__(self, "keys", tuple(format_keys(parse_keys(keys)) for keys in self.keys))

    @property
    def latents(self) -> int:
        """Latent frames of the chunk."""
        return len(self.relative)

    def __eq__(self, other: object) -> bool:
        return self.to_json() == other.to_json() if isinstance(other, Controls) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.relative.shape, self.prompt, self.intrinsics, self.keys))

    def to_json(self) -> dict[str, Any]:
        """A value for ``json.dumps``; Python writes floats so that they come back bit for bit."""
        return {
            "relative": self.relative.tolist(),
            "pose_after": self.pose_after.tolist(),
            "prompt": self.prompt,
            "intrinsics": None if self.intrinsics is None else list(self.intrinsics),
            "actions": None if self.actions is None else self.actions.tolist(),
            "keys": None if self.keys is None else list(self.keys),
        }

    @classmethod
    def from_json(cls, data: str | bytes | Mapping[str, Any]) -> Controls:
        """Reads what :meth:`to_json` made, parsed or still as text; raises CameraError for anything else."""
        try:
            fields = json.loads(data) if isinstance(data, str | bytes) else data
        except (ValueError, RecursionError) as error:
            raise CameraError(f"controls are not valid JSON: {error}") from None
        if not isinstance(fields, Mapping):
            raise CameraError(f"controls are a JSON object, not {type(fields).__name__}")
        known = set(cls.__dataclass_fields__)
        if unknown := sorted(set(fields) - known):
            raise CameraError(f"controls have no field {unknown[0]!r}; the fields are {', '.join(sorted(known))}")
        if missing := [name for name in ("relative", "pose_after") if name not in fields]:
            raise CameraError(f"controls lack the field {missing[0]!r}")
        keys = fields.get("keys")
        if keys is not None:
            if not isinstance(keys, list | tuple) or not all(isinstance(text, str) for text in keys):
                raise CameraError(f"controls: keys must be a list of texts such as ['w', ''], not {keys!r:.60}")
            fields = {**fields, "keys": tuple(keys)}
        return cls(**fields)


def _finite(values: Any, name: str, shape: tuple[int | None, ...]) -> Array:
    array = as_numbers(values, name)
    fits = array.ndim == len(shape) and all(want in (None, have) for want, have in zip(shape, array.shape, strict=True))
    if not fits or not array.size:
        wanted = ", ".join("c" if side is None else str(side) for side in shape)
        raise CameraError(f"{name} has shape {list(array.shape)}; [{wanted}] is needed")
    if not np.isfinite(array).all():
        raise CameraError(f"{name} holds NaN or infinity; check the poses and the translation unit")
    return array


@dataclass(frozen=True, eq=False)
class CameraCarry:
    """Where a session's camera is between two chunks: its pose, float64 [4, 4], and the latent frames made so far."""

    pose: Array
    latents: int

    def __post_init__(self) -> None:
        if isinstance(self.latents, bool) or not isinstance(self.latents, int) or self.latents < 0:
            raise CameraError(f"carried latents={self.latents!r} must be a whole number of at least 0")
        object.__setattr__(self, "pose", read_only(_finite(self.pose, "carried pose", (4, 4))))

    @classmethod
    def start(cls) -> CameraCarry:
        """The camera of a session that has made nothing yet."""
        return cls(np.eye(4), 0)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CameraCarry):
            return NotImplemented
        return self.latents == other.latents and np.array_equal(self.pose, other.pose)

    def __hash__(self) -> int:
        return hash((self.latents, tuple(self.pose[:3, 3])))


@dataclass(frozen=True)
class KeyMotion:
    """Keys held during each latent frame of a chunk, and what a step of them does."""

    keys_per_latent: tuple[str | Keys, ...]
    steps: KeySteps


def to_controls(
    motion: ArrayLike | KeyMotion,
    *,
    latents: int,
    unit: float,
    first_delta: FirstDelta,
    carry: CameraCarry,
    prompt: str | None = None,
    intrinsics: Intrinsics | None = None,
    actions: Any = None,
) -> tuple[Controls, CameraCarry]:
    """Turns one chunk's motion into Controls and the carry for the next chunk.

    motion: absolute camera-to-world poses [N, 4, 4] with any N >= 1, or a KeyMotion with one entry per latent frame.
    latents: latent frames of the chunk, c. Latent frame j of a session's first chunk takes the poses at index
    ``linspace(0, N - 1, c)[j]``, of a later one at ``(j + 1) * N / c - 1``, where -1 is the carried pose.
    unit: what translations are divided by. first_delta: the session's very first step is the ``identity``, or is taken
    ``from_rest``, against the carried pose. Raises CameraError for malformed motion.
    """
    if latents < 1:
        raise CameraError(f"a chunk of {latents} latent frames does not exist; use at least 1")
    if first_delta not in get_args(FirstDelta):
        raise CameraError(f"first_delta={first_delta!r} is unknown; use one of {', '.join(get_args(FirstDelta))}")
    check_unit(unit)
    keys: tuple[str, ...] | None = None
    if isinstance(motion, KeyMotion):
        if len(motion.keys_per_latent) != latents:
            raise CameraError(f"{len(motion.keys_per_latent)} key states for {latents} latent frames; give one each")
        held = [parse_keys(text) for text in motion.keys_per_latent]
        keys = tuple(format_keys(names) for names in held)
        absolute = walk(carry.pose, held, motion.steps, per_latent=True)
    else:
        absolute = latents_of_slice(check_poses(motion), latents, carry)

    relative = relative_steps(absolute)
    if carry.latents > 0 or first_delta == "from_rest":
        relative[:1] = steps_from(carry.pose[None], absolute[:1])
    relative[:, :3, 3] /= unit
    controls = Controls(relative, absolute[-1], prompt, intrinsics, actions, keys)
    return controls, CameraCarry(absolute[-1], carry.latents + latents)


def latents_of_slice(poses: Array, latents: int, carry: CameraCarry) -> Array:
    """Absolute poses [latents, 4, 4] of the latent frames that poses [N, 4, 4] are for; see `to_controls`."""
    if carry.latents == 0:
        return interpolate(poses, np.linspace(0, len(poses) - 1, latents))
    # With the carried pose in front, source index i is index i + 1.
    return interpolate(np.concatenate([carry.pose[None], poses]), np.arange(1, latents + 1) * len(poses) / latents)


def clip_controls(
    trajectory: CameraTrajectory,
    *,
    chunk: int,
    unit: float,
    first_delta: FirstDelta,
    width: int,
    height: int,
    prompt: str | None = None,
    actions: Any = None,
) -> list[Controls]:
    """The Controls of a whole latent path, chunk by chunk.

    trajectory: rate ``latent``, a multiple of ``chunk`` poses (``CameraTrajectory.to_latent``). width, height: of the
    generated picture; its intrinsics are the path's first row, as in the reference. prompt: belongs to the first chunk.
    actions: w a s d states [F, 4], one row per latent frame.
    """
    if trajectory.rate != "latent" or len(trajectory) % chunk:
        raise CameraError(
            f"a path of {len(trajectory)} {trajectory.rate} poses is not a whole number of chunks of {chunk} latent "
            "frames; resample it with to_latent first"
        )
    states = None if actions is None else check_key_array(actions, "actions")
    if states is not None and len(states) != len(trajectory):
        raise CameraError(f"{len(states)} rows of actions for {len(trajectory)} latent frames; give one each")
    intrinsics = trajectory.intrinsics_at(width, height)
    carry, out = CameraCarry.start(), []
    for begin in range(0, len(trajectory), chunk):
        part = slice(begin, begin + chunk)
        controls, carry = to_controls(
            trajectory.poses[part],
            latents=chunk,
            unit=unit,
            first_delta=first_delta,
            carry=carry,
            prompt=prompt if begin == 0 else None,
            intrinsics=intrinsics,
            actions=None if states is None else states[part],
        )
        out.append(controls)
    return out


def latent_actions(actions: Any, latents: int) -> Array:
    """Every 4th row of key states given per video frame, [latents, 4]: what the act model sees.

    Rows between are ignored, as in the reference. Raises CameraError when there are too few rows.
    """
    rows = check_key_array(actions, "actions")
    needed = 4 * latents - 3
    if len(rows) < needed:
        raise CameraError(
            f"{len(rows)} rows of actions for {latents} latent frames; {needed} are needed (one per video frame)"
        )
    return rows[:needed:4]
