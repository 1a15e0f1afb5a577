"""When the frames of a live world are shown, and when its next chunk has to begin. Pure arithmetic on seconds.

A world that is made faster than it plays waits before every chunk for as long as it can, so that the chunk takes the
newest controls; one that is slower plays each chunk somewhat slower, so that it stands still less.
"""

from __future__ import annotations

from dataclasses import dataclass

STRETCH = 2.0
"""A frame is shown for at most so many times its time; slower worlds stand still between their chunks."""
BACKLOG = 0.12
"""Seconds of a slow world's frames that may wait when newer ones come; what would be shown later is dropped. Those of a
fast one may all wait: its next chunk began only when it had to."""
EARLY = 0.9
"""A slow world's chunk is shown in so much of the time that the next one takes: it rather stands still for a moment
than hold up the newer frames."""
MARGIN, RESERVE = 1.15, 0.03
"""A chunk is expected to take so many times as long as the last ones, and so many seconds more."""
_MEMORY = 0.3


@dataclass(frozen=True)
class Showing:
    """first: when the first frame of a chunk is shown. interval: seconds from frame to frame."""

    first: float
    interval: float

    def due(self, index: int) -> float:
        """When a frame is shown."""
        return self.first + index * self.interval


class Pace:
    """fps: of the video."""

    def __init__(self, fps: float) -> None:
        self.fps = fps
        self._until, self._stretched = float("-inf"), False
        self._seconds: float | None = None
        self._to_frames: float | None = None

    @property
    def chunk_seconds(self) -> float | None:
        """That a chunk takes, of late; None before the first."""
        return self._seconds

    def took(self, to_frames: float, whole: float) -> None:
        """A chunk was made. to_frames: seconds from its beginning to its frames; whole: to its end."""
        self._to_frames = _mean(self._to_frames, to_frames)
        self._seconds = _mean(self._seconds, whole)

    def show(self, frames: int, now: float) -> Showing:
        """A chunk's frames are there. Those before it that are due at ``first`` or later are to be dropped."""
        natural = 1.0 / self.fps
        backlog = BACKLOG if self._stretched else frames * natural
        first = max(now, min(self._until, now + backlog))
        slow = (self._seconds or 0.0) * EARLY / frames
        interval = min(max(natural, slow), STRETCH * natural)
        self._until, self._stretched = first + frames * interval, interval > natural
        return Showing(first, interval)

    def wait(self, now: float) -> float:
        """Seconds until the next chunk should begin."""
        if self._to_frames is None:
            return 0.0
        return max(0.0, self._until - now - self._to_frames * MARGIN - RESERVE)

    def ahead(self, now: float) -> float:
        """Seconds of video that are made and not yet shown."""
        return max(0.0, self._until - now)

    def is_real_time(self, frames: int) -> bool | None:
        """Whether chunks of so many frames are made as fast as they play; None before the first."""
        return None if self._seconds is None else self._seconds <= frames / self.fps

    def cut(self) -> None:
        """What waits is not shown any more."""
        self._until = float("-inf")


def _mean(before: float | None, now: float) -> float:
    return now if before is None else before + _MEMORY * (now - before)
