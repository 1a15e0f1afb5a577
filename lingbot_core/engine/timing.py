"""What surrounds the work of a session: seconds per stage, and settings that do not depend on the caller."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Inference mode belongs to a thread, so it is entered whoever calls; a caller's autocast would change numbers."""
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        yield


class Stopwatch:
    """Collects the seconds of named stages without making the host wait between them.

    On a GPU by events, which are read when they are asked for. Stages on different streams overlap.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times the body; the same name may be used again and adds up."""
        if self._cuda:
            start, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
        else:
            begun = time.perf_counter()
            yield
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begun

    def seconds(self, *names: str) -> dict[str, float]:
        """Stage -> seconds, of all stages or of those named. Waits for the device to finish these."""
        rest = []
        for name, start, end in self._events:
            if names and name not in names:
                rest.append((name, start, end))
                continue
            end.synchronize()
            self._seconds[name] = self._seconds.get(name, 0.0) + start.elapsed_time(end) / 1000
        self._events = rest
        return dict(self._seconds)
