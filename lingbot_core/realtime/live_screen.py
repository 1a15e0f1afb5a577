"""Frames of a live world on their way from the worker to all who watch: encoded, paced, dropped when they are old."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import numpy as np

from ..engine.history import StartRecord
from .live_frames import Encoder, encode_picture, pack_frame
from .live_pace import Pace, Showing
from .live_steering import Taken

WAITING_CHUNKS = 2
"""Chunks that may wait to be encoded."""


class Viewer(Protocol):
    """A connection. format: of the frames that it wants. client: the name of its page. visible: whether it is seen."""

    client: str
    format: str
    visible: bool

    def say(self, message: Mapping[str, Any], *, replaces: str | None = None) -> None: ...

    def show(self, frame: bytes) -> None: ...

    def forget_frames(self) -> None: ...

    @property
    def dropped(self) -> int: ...


@dataclass(frozen=True)
class _Frame:
    """header: without what depends on the time. latency_from: when the control that it is the answer to had come."""

    due: float
    header: Mapping[str, Any]
    data: Mapping[str, bytes]
    latency_from: float | None


class Screen:
    """Of one world, on the event loop.

    picture: the start image, uint8 [H, W, 3], shown before the first chunk. viewers: who watches; the list of the world
    itself. clock: the server's time in messages.
    """

    def __init__(
        self,
        start: StartRecord,
        viewers: Sequence[Viewer],
        clock: Callable[[], float],
        picture: np.ndarray | None = None,
    ) -> None:
        self.pace = Pace(start.fps)
        self._loop = asyncio.get_running_loop()
        self._viewers, self._clock, self._picture = viewers, clock, picture
        self._encoder = Encoder(width=start.width, height=start.height, fps=start.fps)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lingbot-live")
        self._places = threading.Semaphore(WAITING_CHUNKS)
        self._queue: deque[_Frame] = deque()
        self._queued = asyncio.Event()
        self._generation = 0  # rises when what waits to be shown is of a place that was left
        self._showing = Showing(0.0, 0.0)
        self._shown = 0
        self._newest: tuple[dict[str, Any], np.ndarray] | None = None
        self._latencies: deque[float] = deque(maxlen=32)

    @property
    def is_busy(self) -> bool:
        """Whether frames wait to be shown."""
        return bool(self._queue)

    @property
    def latency(self) -> float | None:
        """Seconds from a control to the first frame that has it, of late: until it leaves."""
        return median(self._latencies) if self._latencies else None

    def put(self, index: int, frames: np.ndarray, taken: Taken | None) -> None:
        """A chunk's frames, uint8 [T, H, W, 3], which nobody changes any more. Called by the worker."""
        header = {"type": "frame", "chunk": index, "of": len(frames), "seq": -1 if taken is None else taken.seq}
        self._newest = ({**header, "index": len(frames) - 1}, frames[-1])
        formats = {viewer.format for viewer in list(self._viewers)}
        generation, since = self._generation, None if taken is None else taken.at

        def show(number: int, data: Mapping[str, bytes]) -> None:
            self._on_loop(self._arrived, generation, {**header, "index": number}, data, since)

        def encode() -> None:
            try:
                self._encoder.chunk(frames, formats, show)
            finally:
                self._places.release()

        # Never the newest frames late: beyond that they are in the world, and nobody sees them.
        if self._places.acquire(blocking=False) and not self._submit(encode):
            self._places.release()

    def welcome(self, viewer: Viewer) -> None:
        """Shows a viewer the picture where the world stands; a player of fragments gets what comes before the first."""
        if viewer.format == "fragments":
            self._submit(lambda: self._send(viewer, {"type": "init"}, self._encoder.init_segment()))
            return
        if self._newest is not None:
            header, frame = self._newest
        elif self._picture is not None:
            header, frame = {"type": "frame", "chunk": -1, "index": 0, "of": 1, "seq": -1}, self._picture
        else:
            return
        header = {**header, "frame": self._shown}
        self._submit(lambda: self._send(viewer, header, encode_picture(frame, viewer.format)))

    def clear(self) -> None:
        """The world stands elsewhere: nothing of what waits is shown."""
        self._generation += 1
        self._queue.clear()
        self._newest = None
        self.pace.cut()
        for viewer in self._viewers:
            viewer.forget_frames()

    async def play(self) -> None:
        """Lets every frame go when its time has come, for ever."""
        while True:
            if not self._queue:
                self._queued.clear()
                await self._queued.wait()
                continue
            wait = self._queue[0].due - self._loop.time()
            if wait > 0:
                await asyncio.sleep(min(wait, 0.1))  # what waits may change meanwhile
                continue
            self._release(self._queue.popleft())

    def close(self) -> None:
        """Waits for what is being encoded."""
        self._thread.shutdown()

    def _arrived(self, generation: int, header: dict[str, Any], data: Mapping[str, bytes], since: float | None) -> None:
        if generation != self._generation:
            return
        first = header["index"] == 0
        if first:
            self._showing = self.pace.show(header["of"], self._loop.time())
            self._queue = deque(frame for frame in self._queue if frame.due < self._showing.first)
        self._queue.append(_Frame(self._showing.due(header["index"]), header, data, since if first else None))
        self._queued.set()

    def _release(self, frame: _Frame) -> None:
        self._shown += 1
        if frame.latency_from is not None:
            self._latencies.append(self._loop.time() - frame.latency_from)
        header = {**frame.header, "frame": self._shown, "time": self._clock()}
        packed: dict[str, bytes] = {}
        for viewer in self._viewers:
            data = frame.data.get(viewer.format)
            if data is not None and viewer.visible:
                if viewer.format not in packed:
                    packed[viewer.format] = pack_frame({**header, "format": viewer.format}, data)
                viewer.show(packed[viewer.format])

    def _send(self, viewer: Viewer, header: Mapping[str, Any], data: bytes) -> None:
        """In the encoder's thread: a message for one viewer."""
        self._on_loop(viewer.show, pack_frame({**header, "time": self._clock(), "format": viewer.format}, data))

    def _submit(self, work: Callable[[], None]) -> bool:
        """Has the encoder's thread do something; False once it has ended."""

        def logged() -> None:
            try:
                work()
            except Exception as error:
                logging.getLogger("lingbot_world.live").error("frames could not be encoded", exc_info=error)

        try:
            self._thread.submit(logged)
        except RuntimeError:
            return False
        return True

    def _on_loop(self, work: Callable[..., None], *values: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(work, *values)
