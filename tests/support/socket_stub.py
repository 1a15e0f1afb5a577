"""A small server for WebSockets and files, whose every message the test writes itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
from aiohttp import web

Talk = Callable[["Peer"], Awaitable[None]]


class Peer:
    """One connection, as a test's talk sees it."""

    def __init__(self, socket: web.WebSocketResponse, request: web.Request) -> None:
        self.socket, self.request = socket, request

    async def send(self, message: bytes | str) -> None:
        if isinstance(message, str):
            await self.socket.send_str(message)
        else:
            await self.socket.send_bytes(message)

    async def receive(self) -> bytes | str:
        """The next message; GoneError when the client went away."""
        message = await self.socket.receive()
        if message.type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
            return message.data
        raise Gone

    def vanish(self) -> None:
        """Breaks the connection without a word, as a killed process does."""
        assert self.request.transport is not None
        self.request.transport.abort()


class Gone(Exception):
    """The client went away."""


class SocketStub:
    """``with SocketStub({path: talk}) as stub``: each connection to a path is one call of its talk, in a thread.

    folder: files that are served under every other path. heartbeat: seconds between pings of this server. ``failures``
    are exceptions in talks; leaving the block raises the first.
    """

    def __init__(self, talks: dict[str, Talk], folder: Path | None = None, heartbeat: float | None = None) -> None:
        self.talks, self.folder, self.heartbeat = talks, folder, heartbeat
        self.failures: list[BaseException] = []
        self.connections = 0
        self._ready = threading.Event()

    def __enter__(self) -> SocketStub:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)
        if kind is None and self.failures:
            raise self.failures[0]

    def log(self) -> str:
        return "\n".join(map(repr, self.failures))

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        for path in self.talks:
            app.router.add_get(path, self._connect)
        if self.folder is not None:
            app.router.add_get("/{file:.+}", self._file)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready.set()
        await self._over.wait()
        await runner.cleanup()

    async def _connect(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=1 << 26, heartbeat=self.heartbeat)
        await socket.prepare(request)
        self.connections += 1
        try:
            await self.talks[request.path](Peer(socket, request))
        except (Gone, ConnectionError):
            pass
        except Exception as error:
            self.failures.append(error)
        return socket

    async def _file(self, request: web.Request) -> web.StreamResponse:
        assert self.folder is not None
        file = (self.folder / request.match_info["file"]).resolve()
        if not file.is_relative_to(self.folder.resolve()) or not file.is_file():
            return web.Response(status=404)
        return web.FileResponse(file)
