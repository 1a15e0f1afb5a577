"""What both trainings share: schedule, AdamW with a guard against NaN, moving average, CUDA graph of a whole step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class Schedule:
    """How far the training is. seconds: of the whole plan, spent over any number of runs; steps: end there instead.

    before_seconds, before_steps: spent by earlier runs. limit: seconds of this run.
    """

    seconds: float
    limit: float
    steps: int | None = None
    before_seconds: float = 0.0
    before_steps: int = 0
    begin: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds of this run."""
        return time.monotonic() - self.begin

    def progress(self, step: int) -> float:
        """0 at the start of the plan, 1 at its end. step: counted over all runs."""
        if self.steps is not None:
            return min(1.0, step / self.steps)
        return min(1.0, (self.before_seconds + self.elapsed) / self.seconds)

    def over(self, step: int) -> bool:
        """Whether this run has to stop."""
        return self.elapsed >= self.limit or self.progress(step) >= 1.0


def cosine(progress: float, final: float = 0.02) -> float:
    """1 falling to ``final``."""
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class Optimiser:
    """AdamW in one fused kernel, gradient clipping, and an exponential moving average of the weights.

    A step whose gradients are not finite changes nothing and is counted in ``skipped``. No step waits for the device.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        clip: float,
        ema: float,
    ) -> None:
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.names = [name for name, p in module.named_parameters() if p.requires_grad]
        self.device = self.parameters[0].device
        self.peak, self.clip, self.decay = lr, clip, ema
        self.lr = torch.tensor(lr, device=self.device)
        matrices = [p for p in self.parameters if p.ndim > 1]
        vectors = [p for p in self.parameters if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        capturable = self.device.type == "cuda"
        self.adam = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=self.lr, betas=betas, eps=1e-8, fused=True, capturable=capturable
        )
        self.average = [p.detach().clone() for p in self.parameters]
        self.skipped = torch.zeros((), device=self.device)
        self.norm = torch.zeros((), device=self.device)
        self._weight = torch.ones((), device=self.device)
        self.updates = 0

    def prepare(self, factor: float) -> None:
        """Before a step: the learning rate as a part of its peak, and the weight of the average (short at first)."""
        self.lr.fill_(self.peak * factor)
        self.updates += 1
        self._weight.fill_(1 - min(self.decay, (1 + self.updates) / (10 + self.updates)))

    def step(self) -> None:
        """After backward: clips, updates, averages. Everything runs on the device and may be captured."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        self.norm.copy_(norm)
        bad = (~torch.isfinite(norm)).float()
        torch._foreach_mul_(grads, (self.clip / (norm + 1e-6)).clamp(max=1.0))
        self.adam.found_inf = bad  # type: ignore[attr-defined]  # the fused kernel then leaves everything as it is
        self.adam.step()
        self.skipped.add_(bad)
        towards = torch._foreach_sub([p.detach() for p in self.parameters], self.average)
        torch._foreach_mul_(towards, self._weight)
        torch._foreach_add_(self.average, towards)

    def averaged(self) -> dict[str, Tensor]:
        """The moving average by name."""
        return dict(zip(self.names, self.average, strict=True))

    def raw(self) -> dict[str, Tensor]:
        """The weights by name."""
        return {name: p.detach() for name, p in zip(self.names, self.parameters, strict=True)}

    def second_moments(self) -> dict[str, Tensor]:
        """Adam's running squares by name, where there are any yet."""
        states = [self.adam.state.get(p, {}).get("exp_avg_sq") for p in self.parameters]
        return {name: s for name, s in zip(self.names, states, strict=True) if s is not None}

    @torch.no_grad()
    def restore(
        self, raw: dict[str, Tensor], average: dict[str, Tensor], squares: dict[str, Tensor] | None = None
    ) -> None:
        """Puts weights back. Adam's first moments begin at zero, its running squares at ``squares`` if given."""
        for name, p, a in zip(self.names, self.parameters, self.average, strict=True):
            p.copy_(raw[name])
            a.copy_(average[name])
            state = self.adam.state[p]
            if not state and not squares:
                continue
            state.setdefault("step", torch.zeros((), device=self.device))
            state.setdefault("exp_avg", torch.zeros_like(p))
            state.setdefault("exp_avg_sq", torch.zeros_like(p))
            state["exp_avg"].zero_()
            if squares and name in squares:
                state["exp_avg_sq"].copy_(squares[name])
                state["step"].fill_(10_000.0)  # the squares are an average already and need no correction
            else:
                state["exp_avg_sq"].zero_()
                state["step"].zero_()


class Guard:
    """Keeps a copy of the last good weights and goes back to it when the loss explodes or steps are skipped."""

    def __init__(self, optimiser: Optimiser, *, factor: float = 4.0, patience: int = 10) -> None:
        self.optimiser, self.factor, self.patience = optimiser, factor, patience
        self.smooth: float | None = None
        self.seen = 0.0
        self.restored = 0
        self._keep()

    def _keep(self) -> None:
        o = self.optimiser
        self._raw = {name: t.clone() for name, t in o.raw().items()}
        self._average = {name: t.clone() for name, t in o.averaged().items()}
        self._squares = {name: t.clone() for name, t in o.second_moments().items()}

    def check(self, loss: float) -> bool:
        """loss: a recent mean. Returns whether the weights were put back; the peak rate is then 0.6 of what it was."""
        o = self.optimiser
        skipped = float(o.skipped)
        recent, self.seen = skipped - self.seen, skipped
        bad = not math.isfinite(loss) or recent > self.patience
        bad = bad or (self.smooth is not None and loss > self.factor * self.smooth)
        if bad:
            o.restore(self._raw, self._average, self._squares or None)
            o.peak *= 0.6
            self.restored += 1
            return True
        self.smooth = loss if self.smooth is None else 0.8 * self.smooth + 0.2 * loss
        self._keep()
        return False

    def forget(self) -> None:
        """The loss means something else from now on."""
        self.smooth = None


def replayed(work: Callable[[], Tensor], device: torch.device, warm_up: int = 3) -> Callable[[], Tensor]:
    """``work`` as a CUDA graph; on other devices ``work`` itself.

    work: a whole step on fixed tensors that returns a fixed scalar; it runs ``warm_up`` times first.
    """
    if device.type != "cuda":
        return work
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()

    def replay() -> Tensor:
        graph.replay()
        return out

    # Tensors that only ``work`` knows would else be freed, and the graph would go on reading their memory.
    replay.work = work  # type: ignore[attr-defined]

    return replay


def clear_grads(parameters: Iterable[Tensor]) -> None:
    """Forgets gradients; the next backward writes new ones instead of adding."""
    for p in parameters:
        p.grad = None
