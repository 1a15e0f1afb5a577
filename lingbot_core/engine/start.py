"""What a session is started with: checked once, then fixed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np

from ..camera.controls import FirstDelta
from ..camera.intrinsics import check_pixels
from ..errors import CameraError, LengthError, PresetError, SessionError
from ..presets import Preset
from .condition import Condition
from .history import StartRecord
from .noise import SEED_LIMIT
from .world import World

FIRST_DELTAS = get_args(FirstDelta)
NOISES = ("seeded", "reference")


def make_start(
    world: World,
    condition: Condition,
    *,
    preset: Preset,
    prompt: str,
    negative_prompt: str | None,
    seed: int,
    noise: str,
    chunks: int | None,
    translation_unit: float,
    unit_rule: str,
    first_delta: FirstDelta,
    intrinsics: Sequence[float] | None,
    fps: float,
) -> StartRecord:
    """The start record of these settings (see WorldSession.start); raises the error of the first that is wrong."""
    if first_delta not in FIRST_DELTAS:
        raise CameraError(f"first_delta={first_delta!r} is unknown; use one of {', '.join(FIRST_DELTAS)}")
    if noise not in NOISES:
        raise SessionError(f"noise={noise!r} is unknown; use one of {', '.join(NOISES)}")
    if noise == "reference" and chunks is None:
        raise SessionError("noise='reference' draws the whole clip at once: declare its length with chunks=N")
    if chunks is not None:
        check_whole("chunks", chunks, 1)
    if negative_prompt:
        refuse_negative(preset)
    if not _positive(translation_unit):
        raise CameraError(
            f"translation_unit={translation_unit!r} must be a positive number; camera.translation_unit resolves "
            "'clip', 'key' and percentiles"
        )
    if not _positive(fps):
        raise SessionError(f"fps={fps!r} must be a positive number")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < SEED_LIMIT:
        raise SessionError(f"seed={seed!r} must be a whole number from 0 to 2**63 - 1")
    return StartRecord(
        preset=preset,
        prompt=prompt,
        negative_prompt=preset.negative_prompt if negative_prompt is None else negative_prompt,
        seed=seed,
        noise=noise,
        image=condition.digest,
        height=condition.height,
        width=condition.width,
        intrinsics=check_pixels(
            world.default_intrinsics(condition.width, condition.height) if intrinsics is None else intrinsics
        ),
        translation_unit=float(translation_unit),
        unit_rule=unit_rule,
        first_delta=first_delta,
        fps=float(fps),
        chunks=chunks,
        model=world.fingerprint,
    )


def check_whole(name: str, value: object, least: int) -> None:
    """Raises LengthError unless ``value`` is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise LengthError(f"{name}={value!r} must be a whole number of at least {least}")


def _positive(value: object) -> bool:
    return isinstance(value, int | float | np.number) and bool(np.isfinite(value) and value > 0)


def refuse_negative(preset: Preset) -> None:
    """Raises PresetError when a negative prompt would have no effect."""
    if not preset.guided:
        raise PresetError(
            f"preset {preset.name}: a negative prompt has no effect at guidance 1; leave it empty, or use the preset "
            "v2-causal-pretrain"
        )
