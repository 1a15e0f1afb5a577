"""One WebSocket of a realtime server, as a client holds it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from ...errors import ServerGoneError

if TYPE_CHECKING:
    import aiohttp

MAX_MESSAGE = 1 << 28
"""Bytes of one message; a chunk of 12 frames at 1920 x 1080 as plain arrays is a quarter of it."""

MAX_WAITING = 1 << 28
"""Bytes that may wait here to be taken; from there on nothing more is read, and the server sees a slow reader."""

_SCHEMES = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}


class ClientSocket:
    """Sends and receives whole messages; every way to lose the server is one ServerGoneError.

    A task reads all the time, so that pings and pongs are seen also while nobody waits for a message. timeout: seconds
    to connect, and for the closing handshake. heartbeat: seconds between pings, so that a server that vanished without
    a word is noticed; None waits for ever, as for a server that answers no pings while it works.
    """

    def __init__(self, url: str, path: str, *, timeout: float = 30.0, heartbeat: float | None = 30.0) -> None:
        self.url = endpoint(url, path)
        self._timeout, self._heartbeat = timeout, heartbeat
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: deque[bytes | str] = deque()
        self._held = 0  # bytes that wait
        self._end: ServerGoneError | None = None
        self._changed = asyncio.Condition()

    @property
    def connected(self) -> bool:
        return self._socket is not None and self._end is None

    async def open(self) -> None:
        """Connects, anew if it was connected before."""
        import aiohttp

        await self.close()
        self._changed = asyncio.Condition()  # of this loop; it may be another one than before
        limit = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout, sock_read=None)
        self._session = aiohttp.ClientSession(timeout=limit)
        try:
            self._socket = await self._session.ws_connect(
                self.url,
                timeout=aiohttp.ClientWSTimeout(ws_close=self._timeout),
                heartbeat=self._heartbeat,
                max_msg_size=MAX_MESSAGE,
            )
        except aiohttp.WSServerHandshakeError as error:
            await self.close()
            raise ServerGoneError(
                f"{self.url} answered {error.status} instead of a WebSocket; check the address and the path, and that "
                "its server accepts this host"
            ) from error
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            await self.close()
            raise ServerGoneError(
                f"no connection to {self.url} ({error or type(error).__name__}); start the server, or check the address"
            ) from error
        except BaseException:
            await self.close()
            raise
        self._reader = asyncio.ensure_future(self._read(self._socket))

    async def send(self, message: bytes | str) -> None:
        """Sends one message, binary or text by its type."""
        import aiohttp

        if self._socket is None or self._end is not None:
            raise self._lost()
        try:
            if isinstance(message, str):
                await self._socket.send_str(message)
            else:
                await self._socket.send_bytes(message)
        except (aiohttp.ClientError, OSError) as error:
            raise self._end or self._gone(str(error) or type(error).__name__) from error

    async def receive(self) -> bytes | str:
        """The next message, binary or text. What came before the server went away comes first."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._waiting or self._reader is None or self._end is not None)
            if not self._waiting:
                raise self._lost()
            message = self._waiting.popleft()
            self._held -= len(message)
            self._changed.notify_all()
            return message

    async def close(self) -> None:
        """Says good-bye if there is a connection; what was not taken is dropped."""
        socket, session, reader = self._socket, self._session, self._reader
        self._socket = self._session = self._reader = self._end = None
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        self._waiting.clear()
        self._held = 0
        async with self._changed:
            self._changed.notify_all()
        if socket is not None:
            await socket.close()
        if session is not None:
            await session.close()

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        import aiohttp

        end: ServerGoneError | None = None
        while end is None:
            message = await socket.receive()
            async with self._changed:
                if message.type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                    self._waiting.append(message.data)
                    self._held += len(message.data)
                elif message.type is aiohttp.WSMsgType.CLOSE:
                    why = f"it closed with code {message.data}"
                    end = self._gone(f"{why}: {message.extra}" if message.extra else why)
                else:
                    end = self._gone(str(message.data or "") or "the connection broke")
                self._end = end
                self._changed.notify_all()
                await self._changed.wait_for(lambda: self._held < MAX_WAITING)

    def _lost(self) -> ServerGoneError:
        return self._end or ServerGoneError(
            f"there is no connection to {self.url}; connect first, or use it as a context manager"
        )

    def _gone(self, why: str) -> ServerGoneError:
        return ServerGoneError(
            f"{self.url} is gone ({why}); connect again, the same session_id goes on while the server remembers it"
        )


def endpoint(url: str, path: str) -> str:
    """The WebSocket address of ``path`` on a server.

    url: ws, wss, http or https, or a bare host:port; a path in it stays in front, as behind a proxy. Raises
    ServerGoneError for what is no address.
    """
    try:
        parts = urlsplit(url if "://" in url else f"ws://{url}")
        usable = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an unclosed bracket, a port that is no number
        usable = False
    if not usable or any(letter.isspace() for letter in url):
        raise ServerGoneError(f"{url!r} is no address of a server, such as ws://127.0.0.1:8760")
    prefix = parts.path.rstrip("/")
    whole = prefix if prefix.endswith(path) else prefix + path
    return urlunsplit((_SCHEMES[parts.scheme], parts.netloc, whole, parts.query, ""))
