"""Timesteps, sigmas, flow -> x0 and re-noising: pure functions.

The table recipes reproduce the published sampler including its quirks: timesteps are truncated to integers, so
neighbouring entries share one value; the sigma that turns a flow into x0 is that of the *first* entry with the
step's integer, the sigma that re-noises to a step is that of the *second* one where there are several.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from .presets import LabelSteps, Preset, TableSteps, UniPCSteps

TRAIN_STEPS = 1000
# Largest and smallest sigma of the unshifted training schedule: 1 - linspace(1, 1/1000, 1000).
SIGMA_MAX = 0.999
SIGMA_MIN = 0.0


@dataclass(frozen=True)
class Step:
    """One denoising forward of a distilled recipe.

    t: the time given to the model. sigma: x0 = x - sigma * flow.
    renoise: sigma of the noise added on the way to the *next* step; None after the last.
    """

    t: float
    sigma: float
    renoise: float | None


@dataclass(frozen=True)
class FlowTable:
    """sigmas: float32 [n + 1], falling, 0 appended. timesteps: int64 [n], truncated from 1000 * sigma."""

    sigmas: np.ndarray
    timesteps: np.ndarray

    def first_sigma(self, timestep: int) -> float:
        """Sigma of the first entry with this integer timestep (flow -> x0)."""
        return float(self.sigmas[np.abs(self.timesteps - timestep).argmin()])

    def second_sigma(self, timestep: int) -> float:
        """Sigma of the second entry with this integer timestep, or of the only one (re-noising)."""
        same = np.flatnonzero(self.timesteps == timestep)
        return float(self.sigmas[same[min(1, len(same) - 1)]])


@lru_cache(maxsize=32)
def flow_table(count: int, shift: float) -> FlowTable:
    """The UniPC flow-matching table of ``count`` steps: sigma' = shift * sigma / (1 + (shift - 1) * sigma)."""
    base = np.linspace(SIGMA_MAX, SIGMA_MIN, count + 1)[:-1]
    shifted = shift * base / (1 + (shift - 1) * base)
    sigmas = np.append(shifted, 0.0).astype(np.float32)
    timesteps = (shifted * TRAIN_STEPS).astype(np.int64)
    sigmas.setflags(write=False)
    timesteps.setflags(write=False)
    return FlowTable(sigmas, timesteps)


def distilled_steps(preset: Preset) -> tuple[Step, ...]:
    """The steps of a few-step recipe, in order. The preset's selection must be TableSteps or LabelSteps."""
    match preset.selection:
        case TableSteps(indices):
            table = flow_table(TRAIN_STEPS, preset.shift)
            times = [int(table.timesteps[i]) for i in indices]
            x0_sigmas = [table.first_sigma(t) for t in times]
            noise_sigmas = [table.second_sigma(t) for t in times]
            model_times = [float(t) for t in times]
        case LabelSteps(labels):
            x0_sigmas = [preset.shift * (x / 1000) / (1 + (preset.shift - 1) * (x / 1000)) for x in labels]
            noise_sigmas = x0_sigmas
            model_times = [1000.0 * sigma for sigma in x0_sigmas]
        case UniPCSteps():
            raise TypeError("a UniPC recipe has no distilled steps; use solver.UniPC")
    following = [*noise_sigmas[1:], None]
    return tuple(Step(t, s, n) for t, s, n in zip(model_times, x0_sigmas, following, strict=True))


def flow_to_x0(flow: Tensor, x: Tensor, sigma: float) -> Tensor:
    """x0 = x - sigma * flow in float64, cast back to the dtype of ``flow``; any shape."""
    return (x.double() - sigma * flow.double()).to(flow.dtype)


def renoise(x0: Tensor, noise: Tensor, sigma: float) -> Tensor:
    """(1 - sigma) * x0 + sigma * noise, in the dtype of x0. sigma is rounded to that dtype first, as the table is."""
    level = torch.tensor(sigma, dtype=x0.dtype)  # a CPU scalar: mixes with device tensors without a copy
    return (1 - level) * x0 + level * noise
