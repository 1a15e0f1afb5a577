"""Steps that are not finite change nothing; exploded weights are put back; a schedule spans several runs."""

from __future__ import annotations

import torch
from torch import nn

from training.optimise import Guard, Optimiser, Schedule, clear_grads, cosine


def make(lr: float = 0.1) -> tuple[nn.Linear, Optimiser]:
    torch.manual_seed(0)
    layer = nn.Linear(3, 1)
    return layer, Optimiser(layer, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, clip=1.0, ema=0.9)


def one_step(layer: nn.Linear, optimiser: Optimiser, scale: float = 1.0) -> float:
    clear_grads(optimiser.parameters)
    loss = (layer(torch.ones(4, 3)) * scale - 2).square().mean()
    loss.backward()
    optimiser.prepare(1.0)
    optimiser.step()
    return float(loss.detach())


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    layer, optimiser = make()
    one_step(layer, optimiser)
    before = [p.detach().clone() for p in layer.parameters()]
    one_step(layer, optimiser, float("nan"))
    assert float(optimiser.skipped) == 1
    assert all(torch.equal(p, b) for p, b in zip(layer.parameters(), before, strict=True))
    assert one_step(layer, optimiser) < 100
    assert not torch.equal(layer.weight, before[0])


def test_the_average_follows_the_weights() -> None:
    layer, optimiser = make()
    for _ in range(200):
        loss = one_step(layer, optimiser)
    assert loss < 1e-2
    torch.testing.assert_close(optimiser.averaged()["weight"], layer.weight.detach(), atol=0.05, rtol=0)


def test_exploded_weights_are_put_back_and_the_rate_falls() -> None:
    layer, optimiser = make()
    loss = one_step(layer, optimiser)
    guard = Guard(optimiser)
    assert not guard.check(loss)
    good = layer.weight.detach().clone()
    layer.weight.data.fill_(1e6)
    assert guard.check(1e12)
    assert torch.equal(layer.weight.detach(), good)
    assert optimiser.peak < 0.1
    one_step(layer, optimiser)
    assert torch.isfinite(layer.weight).all()


def test_progress_goes_on_where_an_earlier_run_ended() -> None:
    later = Schedule(seconds=100.0, limit=50.0, before_seconds=40.0)
    assert 0.4 <= later.progress(0) < 0.41
    counted = Schedule(seconds=1.0, limit=1e9, steps=10)
    assert counted.progress(5) == 0.5
    assert not counted.over(9)
    assert counted.over(10)
    assert cosine(0.0) == 1.0
    assert abs(cosine(1.0) - 0.02) < 1e-9
