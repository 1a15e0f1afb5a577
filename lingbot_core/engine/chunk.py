"""Denoising one chunk, and remembering it: the only loop over the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..models.dit import ChunkContext
from ..presets import Preset, UniPCSteps
from ..schedule import distilled_steps, flow_to_x0, renoise
from ..solver import UniPC
from .streams import Pace
from .transfer import to_device

Draw = Callable[[int], Tensor]
OnStep = Callable[[int, int], None]


class Transformer(Protocol):
    """A CausalWanDiT, or what stands in for one (models/graphs.py)."""

    def __call__(self, x: Tensor, t: float, context: ChunkContext) -> Tensor: ...

    def remember(self, x: Tensor, t: float, context: ChunkContext) -> None: ...


COMMIT_TIME = 0.0
"""The time at which a finished chunk is written into the cache."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """What ``advance`` hands out.

    frames: float32 [3, T, height, width] in [-1, 1] on the compute device; latents: float32 [16, frames, h, w];
    poses: float64 [frames, 4, 4] relative poses that were used; timings: seconds per stage.
    """

    index: int
    frames: Tensor
    latents: Tensor
    poses: np.ndarray
    prompt: str
    timings: dict[str, float]


@dataclass(frozen=True)
class Denoised:
    """x0: float32 [16, frames, h, w]. last_input: what the last step's forward read, where the commit is skipped."""

    x0: Tensor
    last_input: Tensor | None


@torch.inference_mode()
def denoise(
    dit: Transformer,
    preset: Preset,
    contexts: Sequence[ChunkContext],
    draw: Draw,
    *,
    on_step: OnStep | None = None,
) -> Denoised:
    """Samples one chunk.

    contexts: the positive branch and, with guidance, the negative one; their caches must have been begun for this
    chunk. draw(i): noise for step i, float32, on any device. on_step(i, total): called before every step; whatever
    it raises passes through, and the chunk can simply be denoised again.
    """
    total = preset.steps
    device = contexts[0].condition.device
    pace = Pace(device)

    def noise(step: int) -> Tensor:
        return to_device(draw(step).float(), device)

    def flow_at(x: Tensor, t: float, step: int) -> Tensor:
        pace.wait()
        if on_step is not None:
            on_step(step, total)
        flow = _guided(dit, preset, contexts, x, t)
        pace.queued()
        return flow

    x = noise(0)
    if isinstance(preset.selection, UniPCSteps):
        solver = UniPC(preset.selection.count, preset.shift)
        for i, timestep in enumerate(solver.timesteps):
            x = solver.step(flow_at(x, float(timestep), i), x)
        return Denoised(x, None)
    x0 = x
    last_input = x
    for i, step in enumerate(distilled_steps(preset)):
        last_input = x
        x0 = flow_to_x0(flow_at(x, step.t, i), x, step.sigma)
        if step.renoise is not None:
            # Drawn on the host while the device is at the step before it.
            x = renoise(x0, noise(i + 1), step.renoise)
    return Denoised(x0, last_input if preset.reuse_last_step_kv else None)


def draws(preset: Preset) -> int:
    """Noise tensors a chunk needs: the first latent, and one for each re-noising of a distilled recipe."""
    return 1 if isinstance(preset.selection, UniPCSteps) else preset.steps


def _guided(dit: Transformer, preset: Preset, contexts: Sequence[ChunkContext], x: Tensor, t: float) -> Tensor:
    """The flow; with guidance negative + scale * (positive - negative). The camera is the same in both branches."""
    positive = dit(x, t, contexts[0])
    if not preset.guided:
        return positive
    negative = dit(x, t, contexts[1])
    return negative + preset.guidance_scale * (positive - negative)


@torch.inference_mode()
def commit(dit: Transformer, contexts: Sequence[ChunkContext], x0: Tensor) -> None:
    """Writes a finished chunk's keys and values, made from its clean latents at time 0, into every branch's cache."""
    for context in contexts:
        dit.remember(x0, COMMIT_TIME, context)


@torch.inference_mode()
def replay_commit(
    dit: Transformer, preset: Preset, contexts: Sequence[ChunkContext], x0: Tensor, last_input: Tensor | None
) -> None:
    """Brings the cache to where it stood after the chunk, from what history holds of it.

    With ``reuse_last_step_kv`` that is the last noisy forward; otherwise the commit.
    """
    if not preset.reuse_last_step_kv:
        commit(dit, contexts, x0)
        return
    if last_input is None:
        raise ValueError("a history made with reuse_last_step_kv holds the input of every last step")
    for context in contexts:
        dit.remember(last_input, distilled_steps(preset)[-1].t, context)
