"""Random weights that stay finite through any depth."""

from __future__ import annotations

from torch import nn


def randomise(module: nn.Module) -> None:
    """Small normal weights, zero biases, norms of one."""
    for name, parameter in module.named_parameters():
        if name.endswith(("gamma", "norm_q.weight", "norm_k.weight", "norm3.weight")):
            parameter.data.fill_(1)
        elif parameter.ndim >= 2:
            parameter.data.normal_(0, 0.014 if "modulation" in name else 0.02)
            if "cam_scale_layer" in name or "cam_shift_layer" in name:
                parameter.data.mul_(0.05)
        else:
            parameter.data.zero_()
