"""UniPC against diffusers' own, on a flow whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import UniPCMultistepScheduler

from lingbot_core.schedule import flow_table
from lingbot_core.solver import UniPC


def flow(x: torch.Tensor, t: float) -> torch.Tensor:
    """Not linear in x or t, so that every order of the solver matters."""
    return torch.tanh(2 * x) * (0.3 + t / 1000) + torch.cos(3 * x)


def start() -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("shift", [5.0, 10.0])
@pytest.mark.parametrize("count", [1, 2, 3, 6, 40])
def test_every_step_equals_diffusers(count, shift):
    oracle = UniPCMultistepScheduler(
        solver_order=2,
        solver_type="bh2",
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=shift,
    )
    oracle.set_timesteps(count)
    solver = UniPC(count, shift)
    # How diffusers spaces sigmas depends on its version; test_schedule checks ours.
    oracle.sigmas = torch.tensor(solver.sigmas, dtype=torch.float64)
    oracle.timesteps = torch.tensor(solver.timesteps)
    oracle.set_begin_index(0)
    x = expected = start()
    for t in solver.timesteps:
        expected = oracle.step(flow(expected, t), t, expected).prev_sample
        x = solver.step(flow(x, t), x)
        assert (x - expected).abs().max() < 1e-9
    print(f"\n{count} steps, shift {shift}: {(x - expected).abs().max():.1e} from diffusers")


def test_more_steps_come_closer_to_the_exact_solution():
    """x(sigma) = data + sigma * (noise - data) has the constant flow noise - data: any step count is exact."""
    data, noise = start(), start().flip(0)
    for count in (1, 2, 6, 40):
        solver = UniPC(count, 5.0)
        sigma = solver.sigmas[0]
        x = (1 - sigma) * data + sigma * noise
        for _ in solver.timesteps:
            x = solver.step(noise - data, x)
        assert (x - data).abs().max() < 1e-6


def test_the_solver_is_second_order():
    """On dx/dsigma = x (flow = x) the exact factor is known; twice the steps, about a quarter of the error."""

    def error(count: int) -> float:
        solver = UniPC(count, 1.0)
        x = torch.ones(1, dtype=torch.float64)
        for _ in solver.timesteps:
            x = solver.step(x, x)
        return abs(float(x) - float(np.exp(-solver.sigmas[0])))

    assert error(80) < error(40) / 3 < error(20) / 9


def test_steps_of_one_chunk_leave_nothing_to_the_next():
    runs = []
    for _ in range(2):
        solver = UniPC(6, 5.0)
        x = start()
        for t in solver.timesteps:
            x = solver.step(flow(x, t), x)
        runs.append(x)
    assert torch.equal(*runs)


def test_timesteps_and_sigmas_are_those_of_the_table():
    solver, table = UniPC(40, 10.0), flow_table(40, 10.0)
    assert solver.timesteps == tuple(table.timesteps.tolist())
    assert solver.sigmas == tuple(float(s) for s in table.sigmas)
    assert solver.sigmas[-1] == 0
