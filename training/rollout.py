"""Clips as the model itself makes them: chunk after chunk with the steps of its preset, without gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from lingbot_core.presets import Preset
from lingbot_core.schedule import distilled_steps

from .dit_forward import Batch, Teacher

COMMIT_TIME = 0.0


@torch.no_grad()
def roll_out(
    teacher: Teacher, preset: Preset, batch: Batch, truth: Tensor, start: Tensor, generator: torch.Generator
) -> Tensor:
    """Every chunk of the clips, sampled one after the other on what was sampled before: [B, n, 16, c, h, w].

    truth: latents of the same shape. start: int64 [B], the step each clip's sampling begins at: 0 makes chunks freely
    from noise, a later one begins with the truth at that step's noise level and stays nearer to it.
    """
    steps = distilled_steps(preset)
    chunks = truth.shape[1]
    view, text = teacher.embed_camera(batch.rays), teacher.embed_text()
    history: list[list[tuple[Tensor, Tensor]]] = []
    out = []
    begin = start.view(-1, 1, 1, 1, 1)

    def noise() -> Tensor:
        return torch.empty(truth[:, 0].shape, device=truth.device).normal_(generator=generator)

    for index in range(chunks):
        past = teacher.no_past(len(truth))
        recent = history[max(0, len(history) - (teacher.window - 1)) :]
        if recent:
            past = [
                (torch.cat([h[layer][0] for h in recent], dim=1), torch.cat([h[layer][1] for h in recent], dim=1))
                for layer in range(len(past))
            ]
        real = truth[:, index].float()
        levels = [1.0, *(float(step.renoise) for step in steps if step.renoise is not None)]
        x, x0 = noise(), real
        for number, step in enumerate(steps):
            if number:
                x = (1 - levels[number]) * x0 + levels[number] * noise()
            flow, _ = teacher.chunk_forward(x, step.t, batch, index, past, (view, text))
            # Until its own first step a clip has only the truth to be noised.
            x0 = torch.where(number >= begin, x - step.sigma * flow, real)
        _, own = teacher.chunk_forward(x0, COMMIT_TIME, batch, index, past, (view, text))
        history.append(own)
        out.append(x0)
    return torch.stack(out, dim=1)
