"""Milliseconds of a function on the device, and of its host side alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def synchronize(device: torch.device) -> None:
    """Waits for everything that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(function: Callable[[], Any], device: torch.device, *, runs: int = 5, warm: int = 2) -> float:
    """Median over ``runs`` calls; on a GPU between events, so that the host's time does not count."""
    for _ in range(warm):
        function()
    synchronize(device)
    if device.type != "cuda":
        return statistics.median(host_milliseconds(function) for _ in range(runs))
    times = []
    for _ in range(runs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize(device)
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def host_milliseconds(function: Callable[[], Any]) -> float:
    """Of one call until it returns; on a GPU that is before the work is done."""
    begin = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - begin)
