"""One WebSocket of a realtime server, as a client holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from ...errors import ServerGoneError

if TYPE_CHECKING:
    import aiohttp

MAX_MESSAGE = 1 << 28
"""Bytes of one message; a chunk of 12 frames at 1920 x 1080 as plain arrays is a quarter of it."""

_SCHEMES = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}


class ClientSocket:
    """Sends and receives whole messages; every way to lose the server is one ServerGoneError.

    timeout: seconds to connect, and for the closing handshake. heartbeat: seconds between pings, so that a server that
    vanished without a word is noticed; None waits for ever, as for a server that answers no pings while it works.
    """

    def __init__(self, url: str, path: str, *, timeout: float = 30.0, heartbeat: float | None = 30.0) -> None:
        self.url = endpoint(url, path)
        self._timeout, self._heartbeat = timeout, heartbeat
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    @property
    def connected(self) -> bool:
        return self._socket is not None and not self._socket.closed

    async def open(self) -> None:
        """Connects, anew if it was connected before."""
        import aiohttp

        await self.close()
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

    async def send(self, message: bytes | str) -> None:
        """Sends one message, binary or text by its type."""
        import aiohttp

        socket = self._open_socket()
        try:
            if isinstance(message, str):
                await socket.send_str(message)
            else:
                await socket.send_bytes(message)
        except (aiohttp.ClientError, OSError) as error:
            raise self._gone(str(error) or type(error).__name__) from error

    async def receive(self) -> bytes | str:
        """The next message, binary or text."""
        import aiohttp

        message = await self._open_socket().receive()
        if message.type is aiohttp.WSMsgType.TEXT:
            return str(message.data)
        if message.type is aiohttp.WSMsgType.BINARY:
            return bytes(message.data)
        if message.type is aiohttp.WSMsgType.CLOSE:
            raise self._gone(f"it closed with code {message.data}{': ' if message.extra else ''}{message.extra or ''}")
        raise self._gone(str(message.data or "") or "the connection broke")

    async def close(self) -> None:
        """Says good-bye if there is a connection."""
        socket, session = self._socket, self._session
        self._socket = self._session = None
        if socket is not None:
            await socket.close()
        if session is not None:
            await session.close()

    def _open_socket(self) -> aiohttp.ClientWebSocketResponse:
        if self._socket is None:
            raise ServerGoneError(f"there is no connection to {self.url}; connect first, or use `async with`")
        return self._socket

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
        raise ServerGoneError(f"{url!r} is no address of a server, such as ws://127.0.0.1:8189")
    prefix = parts.path.rstrip("/")
    whole = prefix if prefix.endswith(path) else prefix + path
    return urlunsplit((_SCHEMES[parts.scheme], parts.netloc, whole, parts.query, ""))
