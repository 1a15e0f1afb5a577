"""What the host may queue on a device, and how far ahead of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

AHEAD = 1
"""Passes that may be queued behind the one that runs: none would leave the device idle between them, and more would
make progress a fiction and a cancel late."""


class Pace:
    """Keeps the host at most `AHEAD` passes ahead of the device. On a CPU there is nothing to wait for."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._queued: deque[torch.cuda.Event] = deque()

    def wait(self) -> None:
        """Before the next pass is queued: until no more than `AHEAD` are unfinished. The host sleeps meanwhile."""
        while len(self._queued) > AHEAD:
            self._queued.popleft().synchronize()

    def queued(self) -> None:
        """A pass has been queued."""
        if self._cuda:
            event = torch.cuda.Event(blocking=True)
            event.record()
            self._queued.append(event)


class SecondStream:
    """A stream beside the main one, of higher priority: for decoding a chunk while it is committed.

    Of a device without streams it is the only one, and everything happens in order; ``parallel`` is False then.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @property
    def parallel(self) -> bool:
        """Whether it is a stream of its own."""
        return self._stream is not None

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Work for this stream that needs what the main one was told to do so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with self.again():
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """More work for this stream, which needs nothing that the main one was told since."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What the main stream is told from now on comes after all of this one's work."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
