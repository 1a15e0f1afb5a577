"""Live worlds by name, the routes that lead to them, and the page to walk on."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from ..errors import LingBotError
from .limits import Limits
from .live_socket import LiveSocket, quietly_close
from .live_world import LiveWorld
from .server import WEB, Visitors, guarded, notice_dead_peers

LIVE, RECORD = "/v1/live", "/v1/live/record"
MESSAGE_BYTES = 64 << 20
"""Of one message; beyond it the connection is closed, because what is in between cannot be skipped. What is longer than
a message of its type may be is refused with an error."""


class LiveWorlds:
    """What is open, and who is connected. A page may come before its world does, and stay when it ends."""

    def __init__(self) -> None:
        self._open: dict[str, LiveWorld] = {}
        self._sockets: weakref.WeakKeyDictionary[LiveSocket, str] = weakref.WeakKeyDictionary()
        self._connections: weakref.WeakSet[web.WebSocketResponse] = weakref.WeakSet()

    def get(self, name: str) -> LiveWorld | None:
        """The world of that name."""
        return self._open.get(name)

    def open(self, name: str, world: LiveWorld) -> None:
        """From now on pages of that name are connected to it. Raises LingBotError while another one is."""
        if name in self._open:
            raise LingBotError(f"a live world {name!r} is open already; stop it first, or use another name")
        self._open[name] = world
        for socket, wanted in list(self._sockets.items()):
            if wanted == name:
                socket.attach(world)

    def close(self, name: str, reason: str) -> None:
        """The world of that name is over; its pages are told, and wait for the next one."""
        world = self._open.pop(name, None)
        for socket in list(self._sockets):
            if world is not None and socket.world is world:
                socket.detach(reason)

    async def connect(self, connection: web.WebSocketResponse, name: str) -> None:
        """Serves one connection."""
        socket = LiveSocket(connection, Limits(), name=name, greeted=self._greeted)
        self._sockets[socket] = name
        self._connections.add(connection)
        await socket.serve()

    async def hang_up(self, reason: str) -> None:
        """Closes all connections."""
        await quietly_close(list(self._connections), reason)

    def _greeted(self, socket: LiveSocket) -> None:
        world = self._open.get(self._sockets[socket])
        if world is not None:
            socket.attach(world)


def live_routes(worlds: LiveWorlds, visitors: Callable[[], Visitors]) -> list[web.RouteDef]:
    """The socket, ``/v1/live?world=NAME``, and the record of a world's controls. visitors: asked at every request."""

    async def live(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(max_msg_size=MESSAGE_BYTES, compress=False, heartbeat=None, autoping=False)
        await socket.prepare(request)
        if request.transport is not None:
            notice_dead_peers(request.transport.get_extra_info("socket"))
        await worlds.connect(socket, request.query.get("world", "")[:200])
        return socket

    async def record(request: web.Request) -> web.StreamResponse:
        world = worlds.get(request.query.get("world", ""))
        if world is None:
            return web.json_response({"error": "no such world is open"}, status=404)
        try:
            text = await world.record()
        except LingBotError as error:
            return web.json_response({"error": str(error)}, status=409)
        headers = {"Content-Disposition": 'attachment; filename="controls.jsonl"'}
        return web.Response(text=text, content_type="application/jsonl", headers=headers)

    return [web.get(path, guarded(handler, visitors)) for path, handler in ((LIVE, live), (RECORD, record))]


def web_routes(prefix: str) -> list[web.RouteDef]:
    """The modules of the live element, below a prefix. Browsers ask every time whether they are still the newest."""

    async def module(request: web.Request) -> web.StreamResponse:
        file = WEB / request.match_info["file"]
        if file.parent != WEB or not file.is_file():
            return web.Response(status=404)
        return web.FileResponse(file, headers={"Cache-Control": "no-cache"})

    return [web.get(prefix + "/{file}", module)]


def play_application(worlds: LiveWorlds, visitors: Visitors, *, page: Path = WEB / "play.html") -> web.Application:
    """A server of its own for one page: the page, the socket, and /health."""
    app = web.Application()

    async def health(_: web.Request) -> web.StreamResponse:
        ready = worlds.get("") is not None
        return web.json_response({"state": "ready" if ready else "loading"}, status=200 if ready else 503)

    async def index(_: web.Request) -> web.StreamResponse:
        return web.FileResponse(page)

    async def on_shutdown(_: web.Application) -> None:
        await worlds.hang_up("the server stops")

    app.add_routes(live_routes(worlds, lambda: visitors))
    app.add_routes([web.get(path, guarded(handler, lambda: visitors)) for path, handler in
                    (("/health", health), ("/", index))])  # fmt: skip
    app.add_routes(web_routes(""))
    app.on_shutdown.append(on_shutdown)
    return app
