"""UniPC for flow matching: order 2, B(h) = expm1(-h), x0 prediction.

Zhao et al., "UniPC: A Unified Predictor-Corrector Framework for Fast Sampling of Diffusion Models"
(arXiv 2302.04867), with alpha = 1 - sigma and lambda = log(alpha / sigma).
All coefficients are Python floats, so a step never waits for the device.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from .schedule import flow_table

ORDER = 2


class UniPC:
    """The solver state of one chunk. ``timesteps``: what the model is given; call ``step`` once for each, in order."""

    def __init__(self, count: int, shift: float) -> None:
        table = flow_table(count, shift)
        self.timesteps = tuple(int(t) for t in table.timesteps)
        self.sigmas = tuple(float(s) for s in table.sigmas)
        self._index = 0
        self._x0s: list[Tensor] = []
        self._sample: Tensor | None = None
        self._order = 0

    def step(self, flow: Tensor, x: Tensor) -> Tensor:
        """flow, x: same shape, at ``timesteps[i]`` of the i-th call. Returns the sample for the next timestep.

        After the last call the result is the clean x0.
        """
        i = self._index
        x0 = x - self.sigmas[i] * flow
        if self._sample is not None:
            x = self._correct(self._sample, x0)
        self._x0s = [*self._x0s, x0][-ORDER:]
        # First and last steps have one usable neighbour less.
        self._order = min(ORDER, len(self.timesteps) - i, len(self._x0s))
        self._sample = x
        self._index += 1
        return self._predict(x)

    def _predict(self, x: Tensor) -> Tensor:
        """UniP: from timestep i to i + 1, where i is the step just taken."""
        i = self._index - 1
        x0 = self._x0s[-1]
        source, target = self.sigmas[i], self.sigmas[i + 1]
        if target == 0.0:  # lambda is infinite there: the exact limit is x0 itself
            return x0
        h, alpha, growth = _interval(source, target)
        out = (target / source) * x - (alpha * growth) * x0
        if self._order == ORDER:
            ratio = (_lambda(self.sigmas[i - 1]) - _lambda(source)) / h
            out = out - (alpha * growth * 0.5 / ratio) * (self._x0s[-2] - x0)
        return out

    def _correct(self, x: Tensor, new_x0: Tensor) -> Tensor:
        """UniC: redoes the last prediction from ``x`` now that the model has been evaluated at its end."""
        i = self._index
        x0 = self._x0s[-1]
        source, target = self.sigmas[i - 1], self.sigmas[i]
        h, alpha, growth = _interval(source, target)
        out = (target / source) * x - (alpha * growth) * x0
        if self._order == 1:
            return out - (alpha * growth * 0.5) * (new_x0 - x0)
        ratio = (_lambda(self.sigmas[i - 2]) - _lambda(source)) / h
        phi2 = growth / -h - 1
        phi3 = phi2 / -h - 0.5
        past, new = np.linalg.solve([[1.0, 1.0], [ratio, 1.0]], [phi2 / growth, 2 * phi3 / growth])
        correction = (float(past) / ratio) * (self._x0s[-2] - x0) + float(new) * (new_x0 - x0)
        return out - (alpha * growth) * correction


def _lambda(sigma: float) -> float:
    return math.log((1 - sigma) / sigma)


def _interval(source: float, target: float) -> tuple[float, float, float]:
    """(h, alpha at the target, expm1(-h)) between two sigmas."""
    h = _lambda(target) - _lambda(source)
    return h, 1 - target, math.expm1(-h)
