"""What all sockets share: reading while a chunk runs, a bounded number of waiting messages, too slow readers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import WSMsgType, web

Data = bytes | str

# The event loop itself keeps no task alive. aiohttp cancels a request whose client is gone.
_working: set[asyncio.Task[None]] = set()


class GoneError(Exception):
    """The other side is gone, or reads so slowly that it was closed."""


class Connection:
    """A web socket. waiting: messages that may wait while one is worked on. slow: seconds that a message may take to
    leave.
    """

    def __init__(self, socket: web.WebSocketResponse, *, waiting: int = 16, slow: float = 30.0) -> None:
        self._socket, self._slow = socket, slow
        self._waiting = waiting
        self._queue: asyncio.Queue[Data | None] = asyncio.Queue()
        self._closed = False

    async def run(
        self,
        handle: Callable[[Data], Awaitable[None]],
        flooded: Callable[[], Awaitable[None]],
        closed: Callable[[], None],
    ) -> None:
        """Hands messages over one after the other until the socket closes; those that still wait then are dropped.

        Reading goes on meanwhile, so that pings are answered and a closed socket is noticed while a chunk runs.
        flooded: called for a message that is dropped because too many wait. closed: called at once when the other side
        is gone. What handles a message is never cancelled: it is told, and comes to its own end.
        """
        reader = asyncio.ensure_future(self._read(flooded, closed))
        work = asyncio.ensure_future(self._work(handle))
        _working.add(work)
        work.add_done_callback(_working.discard)
        try:
            await asyncio.shield(work)
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _work(self, handle: Callable[[Data], Awaitable[None]]) -> None:
        try:
            while not self._closed and (data := await self._queue.get()) is not None and not self._closed:
                await handle(data)
        except GoneError:
            pass

    async def send(self, data: Data) -> None:
        """Raises GoneError."""
        write = self._socket.send_bytes(data) if isinstance(data, bytes) else self._socket.send_str(data)
        try:
            await asyncio.wait_for(write, self._slow)
        except TimeoutError:
            # Half of a message may have left: nothing more can be said on this socket.
            transport = self._socket._req.transport if self._socket._req is not None else None
            if transport is not None:
                transport.abort()
            raise GoneError("reads too slowly") from None
        except (ConnectionError, RuntimeError) as error:
            raise GoneError(str(error)) from None

    async def close(self, code: int, reason: str) -> None:
        """Ends the socket with a code and a reason of at most 123 bytes."""
        await self._socket.close(code=code, message=reason.encode()[:123])

    async def _read(self, flooded: Callable[[], Awaitable[None]], closed: Callable[[], None]) -> None:
        try:
            async for message in self._socket:
                if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                    break
                if self._queue.qsize() >= self._waiting:
                    await flooded()
                else:
                    self._queue.put_nowait(message.data)
        except GoneError:
            pass
        finally:
            self._closed = True
            closed()
            self._queue.put_nowait(None)
