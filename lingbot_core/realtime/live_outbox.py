"""What waits to be sent to one viewer: bounded, so that a slow one sees fewer frames and never old ones."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from .connection import GoneError

FRAMES = 8
"""Frames that wait; then the oldest is dropped."""
UNREAD = 8
"""Frames that may be on their way. Buffers between two programs hold minutes of small pictures, so each is followed by
a ping, which is answered when the other side comes to it."""
TEXTS = 512
PATIENCE = 15.0
"""Seconds without an answer after which the other side is taken for gone: a lid that was closed, a cable."""
SILENCE = 5.0
"""Seconds after which it is asked whether it is still there."""


class Outbox:
    """Of a socket with ``autoping=False``. dropped: frames that were not sent, because newer ones were there."""

    def __init__(self, socket: web.WebSocketResponse, *, patience: float = PATIENCE, silence: float = SILENCE) -> None:
        self._socket, self._patience, self._silence = socket, patience, silence
        self._texts: deque[tuple[str | None, Mapping[str, Any]]] = deque()
        self._frames: deque[bytes] = deque()
        self._unread: dict[bytes, float] = {}  # a ping and when it left, the oldest first
        self._marks = 0
        self._news = asyncio.Event()
        self._closing: tuple[int, str] | None = None
        self.dropped = 0

    def say(self, message: Mapping[str, Any], *, replaces: str | None = None) -> None:
        """Queues a message. replaces: a name; one of the same name that still waits is not sent any more."""
        if replaces is not None:
            self._texts = deque(waiting for waiting in self._texts if waiting[0] != replaces)
        self._texts.append((replaces, message))
        self._news.set()

    def show(self, frame: bytes) -> None:
        """Queues a frame."""
        if len(self._frames) >= FRAMES:
            self._frames.popleft()
            self.dropped += 1
        self._frames.append(frame)
        self._news.set()

    def forget_frames(self) -> None:
        """What waits is of a place that was left."""
        self._frames.clear()

    def close(self, code: int, reason: str) -> None:
        """Ends the socket once all that was said has left."""
        self._closing = (code, reason)
        self._news.set()

    def was_read(self, mark: bytes) -> None:
        """A pong came."""
        if mark in self._unread:
            for known in list(self._unread):
                del self._unread[known]
                if known == mark:
                    break
            self._news.set()

    async def run(self) -> None:
        """Sends until the socket is closed. Raises GoneError when the other side does not read, or is not there."""
        loop = asyncio.get_running_loop()
        while True:
            self._news.clear()
            while self._texts:
                if len(self._texts) > TEXTS:
                    raise self._abort("reads too slowly")
                _, message = self._texts.popleft()
                await self._send(json.dumps(message, ensure_ascii=False, allow_nan=False))
            if self._frames and len(self._unread) < UNREAD:
                await self._send(self._frames.popleft())
                await self._mark()
                continue
            if self._closing is not None:
                code, reason = self._closing
                await self._socket.close(code=code, message=reason.encode()[:123])
                return
            try:
                async with asyncio.timeout(self._silence):  # wait_for of Python 3.11 loses cancels
                    await self._news.wait()
            except TimeoutError:
                await self._mark()
            oldest = next(iter(self._unread.values()), None)
            if oldest is not None and loop.time() - oldest > self._patience:
                raise self._abort("does not answer")

    async def _mark(self) -> None:
        self._marks += 1
        mark = self._marks.to_bytes(8)
        self._unread[mark] = asyncio.get_running_loop().time()
        await self._guarded(self._socket.ping(mark))

    async def _send(self, data: str | bytes) -> None:
        await self._guarded(self._socket.send_str(data) if isinstance(data, str) else self._socket.send_bytes(data))

    async def _guarded(self, sending: Any) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await sending
        except TimeoutError:
            raise self._abort("reads too slowly") from None
        except (ConnectionError, RuntimeError) as error:
            raise GoneError(str(error)) from None

    def _abort(self, why: str) -> GoneError:
        request = self._socket._req
        if request is not None and request.transport is not None:
            request.transport.abort()
        return GoneError(why)
