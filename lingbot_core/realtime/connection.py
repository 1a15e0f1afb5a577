"""What all sockets share: reading while a chunk runs, a bounded number of waiting messages, too slow readers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from aiohttp import WSMsgType, web

Data = bytes | str

# The event loop itself keeps no task alive. aiohttp cancels a request whose client is gone.
_working: set[asyncio.Task[None]] = set()


class GoneError(Exception):
    """The other side is gone, or reads so slowly that it was closed."""


class Connection:
    """A web socket. waiting: messages that may wait while one is worked on. slow: seconds that a message may take to
    leave, and that :meth:`unread_at_most` waits.

    Marks need a socket with ``autoping=False``; pings of the other side are answered here then.
    """

    def __init__(self, socket: web.WebSocketResponse, *, waiting: int = 16, slow: float = 30.0) -> None:
        self._socket, self._slow = socket, slow
        self._waiting = waiting
        self._queue: asyncio.Queue[Data | None] = asyncio.Queue()
        self._marks, self._unread = 0, deque[bytes]()
        self._news = asyncio.Event()
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
            raise self._abort() from None
        except (ConnectionError, RuntimeError) as error:
            raise GoneError(str(error)) from None

    async def mark(self) -> None:
        """Marks a place behind what was sent: a ping, which is answered once all before it was read. Buffers between
        the two sides hold minutes of video, so that what has left says little. Raises GoneError."""
        self._marks += 1
        mark = self._marks.to_bytes(8)
        self._unread.append(mark)
        try:
            await asyncio.wait_for(self._socket.ping(mark), self._slow)
        except TimeoutError:
            raise self._abort() from None
        except (ConnectionError, RuntimeError) as error:
            raise GoneError(str(error)) from None

    async def unread_at_most(self, marks: int) -> None:
        """Waits until the other side has read all but so many marks. Raises GoneError."""
        try:
            async with asyncio.timeout(self._slow):
                while len(self._unread) > marks:
                    if self._closed:
                        raise GoneError("it has closed")
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise self._abort() from None

    async def close(self, code: int, reason: str) -> None:
        """Ends the socket with a code and a reason of at most 123 bytes."""
        await self._socket.close(code=code, message=reason.encode()[:123])

    async def finish(self, code: int, reason: str) -> None:
        """Like :meth:`close`, once the other side has read all. A socket that closes at once may take with it what lies
        unread, and whoever answers a mark then finds nobody. Raises GoneError."""
        await self.mark()
        await self.unread_at_most(0)
        try:
            await self.close(code, reason)
        except (ConnectionError, RuntimeError) as error:
            raise GoneError(str(error)) from None

    async def _read(self, flooded: Callable[[], Awaitable[None]], closed: Callable[[], None]) -> None:
        try:
            async for message in self._socket:
                if message.type is WSMsgType.PING:
                    await self._socket.pong(message.data)
                    continue
                if message.type is WSMsgType.PONG:
                    self._was_read(bytes(message.data))
                    continue
                if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                    break
                if self._queue.qsize() >= self._waiting:
                    await flooded()
                else:
                    self._queue.put_nowait(message.data)
        except (GoneError, ConnectionError):
            pass
        finally:
            self._closed = True
            self._news.set()
            closed()
            self._queue.put_nowait(None)

    def _was_read(self, mark: bytes) -> None:
        if mark in self._unread:
            while self._unread.popleft() != mark:
                pass
            self._news.set()

    def _abort(self) -> GoneError:
        transport = self._socket._req.transport if self._socket._req is not None else None
        if transport is not None:
            transport.abort()
        return GoneError("reads too slowly")
