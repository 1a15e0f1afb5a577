"""Milliseconds per chunk of our transformer and of the reference's, with the same random weights."""

from __future__ import annotations

import gc
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lingbot_core.models.dit import CausalWanDiT
from lingbot_core.presets import Preset
from lingbot_core.schedule import distilled_steps, flow_to_x0, renoise

from ..parity import Forward, Inputs, OurRun, ReferenceRun
from .host import SYNCED
from .timing import synchronize

COMMIT = 0.0
GIB = 2**30


class Clock:
    """Wall clock at the device's pace, and how much of it the host was busy inside ``calls``."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._at = device, 0.0
        self.host = 0.0
        self.start()

    def start(self) -> None:
        synchronize(self._device)
        self._at = time.perf_counter()

    def lap(self) -> float:
        """Milliseconds since the last lap or start."""
        before = self._at
        self.start()
        return round(1000 * (self._at - before), 2)

    def call(self, function: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = function()
        self.host += 1000 * (time.perf_counter() - begin)
        return result


@torch.inference_mode()
def ours(dit: CausalWanDiT, inputs: Inputs, preset: Preset) -> dict[str, Any]:
    """A walk; per chunk ms of the camera's layers (in `open`), of the steps and of the commit."""
    _begin(inputs.device)
    run = OurRun(dit, inputs, preset.window, preset.sink)
    return _walk(run, inputs, preset, lambda _, x0: run.remember(x0, COMMIT))


@torch.inference_mode()
def reference(model: torch.nn.Module, inputs: Inputs, preset: Preset) -> dict[str, Any]:
    """The reference's five forwards of the same chunks; it spends its camera's layers in each of them."""
    _begin(inputs.device)
    run = ReferenceRun(model, inputs, preset.window, preset.sink)
    return _walk(run, inputs, preset, lambda forward, x0: forward(x0, COMMIT))


def _walk(
    run: OurRun | ReferenceRun, inputs: Inputs, preset: Preset, commit: Callable[[Forward, Tensor], Any]
) -> dict[str, Any]:
    """`all` is the sum of the other laps; `host`: what of it the host was busy inside forwards."""
    clock = Clock(inputs.device)
    rows = []
    x0 = torch.zeros(1)
    for index in range(inputs.chunks):
        clock.host = 0.0
        clock.start()
        with run.chunk(index) as forward:
            row = {"open": clock.lap()}
            x0 = _sample(lambda x, t, f=forward: clock.call(lambda: f(x, t)), inputs, index, preset)
            row["denoise"] = clock.lap()
            clock.call(lambda f=forward, x0=x0: commit(f, x0))
            row["commit"] = clock.lap()
        del forward  # with it the chunk's camera, before the next one's is made, as a session does it
        rows.append(row | {"all": round(sum(row.values()), 2), "host": round(clock.host, 2)})
    return {"chunks": rows, "sum_ms": round(sum(row["all"] for row in rows), 1), **_end(inputs.device, x0)}


def _sample(forward: Forward, inputs: Inputs, index: int, preset: Preset) -> Tensor:
    x = x0 = inputs.draw(index, 0)
    for i, step in enumerate(distilled_steps(preset)):
        x0 = flow_to_x0(forward(x, step.t), x, step.sigma)
        if step.renoise is not None:
            x = renoise(x0, inputs.draw(index, i + 1), step.renoise)
    return x0


@torch.inference_mode()
def profile(dit: CausalWanDiT, inputs: Inputs, preset: Preset, chunk: int) -> dict[str, Any]:
    """One forward with ``chunk`` chunks before it: the device's milliseconds by kernel, and how many were launched."""
    run = OurRun(dit, inputs, preset.window, preset.sink)
    for index in range(chunk):
        with run.chunk(index):
            run.remember(inputs.draw(index, 0), COMMIT)
    with run.chunk(chunk) as forward:
        x = inputs.draw(chunk, 0)
        forward(x, 900.0)
        synchronize(inputs.device)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if inputs.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profiler:
            forward(x, 900.0)
            synchronize(inputs.device)
    spent: Counter[str] = Counter()
    launches = 0
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name[:90]] += event.self_device_time_total / 1000
            launches += 1
    del run, forward
    _tidy(inputs.device)
    return {
        "chunk": chunk,
        "launches": launches,
        "busy_ms": round(sum(spent.values()), 2),
        "kernels_ms": {name: round(ms, 3) for name, ms in spent.most_common(24)},
    }


@torch.inference_mode()
def syncs(dit: CausalWanDiT, inputs: Inputs, preset: Preset) -> int:
    """Times that the host waits for the device within the second chunk's steps and commit."""
    run = OurRun(dit, inputs, preset.window, preset.sink)
    with run.chunk(0):
        run.remember(inputs.draw(0, 0), COMMIT)
    with run.chunk(1) as forward, warnings.catch_warnings(record=True) as caught:
        noise = inputs.draw(1, 0)
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for step in distilled_steps(preset):
                forward(noise, step.t)
            run.remember(noise, COMMIT)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum(SYNCED in str(warning.message) for warning in caught)


def _begin(device: torch.device) -> None:
    _tidy(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _end(device: torch.device, x0: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {"finite": bool(torch.isfinite(x0).all())}
    if device.type == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_allocated(device) / GIB, 2)
    return found


def _tidy(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
