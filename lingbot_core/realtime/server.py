"""The routes, for a server of its own and for ComfyUI's, and who may use them."""

from __future__ import annotations

import ipaddress
import socket as socket_module
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from .camera_socket import CameraSocket
from .connection import Connection
from .service import Service
from .video_socket import VideoSocket

CAMERA, VIDEO, SESSIONS = "/v1/realtime/world/camera", "/v1/realtime/video", "/v1/realtime/sessions"
LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
KEEP_ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 60_000}
"""Seconds of silence, seconds between questions, questions, and ms that data may stay unanswered: a minute in all."""
WEB = Path(__file__).parents[1] / "web"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Visitors:
    """Which names of this server, and which pages, are accepted.

    hosts: of the Host header, without the port; a page that was lured to a name of its own for this address is thus
    kept out. Besides them IP addresses are accepted where ``any_address`` is set, which cannot be lured so, and all
    names where ``any_host`` is, for a server that is open to its network anyway. origins: scheme://host:port of other
    servers' pages; a page of this server, and whoever sends no Origin, is accepted.
    """

    hosts: Collection[str] = LOCAL
    origins: Collection[str] = ()
    any_address: bool = False
    any_host: bool = False

    def refusal(self, request: web.BaseRequest) -> str | None:
        """Why a request is not answered, or None."""
        host = request.headers.get("Host", "")
        name = _name(host)
        known = self.any_host or name in {known.lower() for known in self.hosts}
        if not known and not (self.any_address and _is_address(name)):
            return f"this server does not go by the name {host[:100]!r}; start it with --allow-host for that"
        origin = request.headers.get("Origin")
        if origin is None or origin in self.origins or (host and origin.partition("://")[2] == host):
            return None
        return f"pages of {origin[:100]!r} may not use this server; start it with --allow-origin for them"


def routes(service: Service, visitors: Callable[[], Visitors]) -> list[web.RouteDef]:
    """What is the same everywhere: the sockets, and the list of sessions. visitors: asked at every request."""

    async def camera(request: web.Request) -> web.StreamResponse:
        socket = await _upgrade(request, service)
        service.connections += 1
        try:
            await CameraSocket(service, Connection(socket)).serve()
        finally:
            service.connections -= 1
        return socket

    async def video(request: web.Request) -> web.StreamResponse:
        socket = await _upgrade(request, service, autoping=False)
        service.connections += 1
        try:
            await VideoSocket(service, Connection(socket)).serve()
        finally:
            service.connections -= 1
        return socket

    async def sessions(_: web.Request) -> web.StreamResponse:
        return web.json_response({"state": service.state, "sessions": service.sessions()})

    return [web.get(path, guarded(handler, visitors)) for path, handler in
            ((CAMERA, camera), (VIDEO, video), (SESSIONS, sessions))]  # fmt: skip


def application(service: Service, visitors: Visitors) -> web.Application:
    """A server of its own: the sockets, /health, /metrics and a page to walk on."""
    app = web.Application()

    async def health(_: web.Request) -> web.StreamResponse:
        state = service.state
        return web.json_response({"state": state}, status=200 if state == "ready" else 503)

    async def metrics(_: web.Request) -> web.StreamResponse:
        return web.Response(text=service.metrics.text(), content_type="text/plain", charset="utf-8")

    async def page(_: web.Request) -> web.StreamResponse:
        return web.FileResponse(WEB / "player.html")

    app.add_routes(routes(service, lambda: visitors))
    app.add_routes([web.get(path, guarded(handler, lambda: visitors)) for path, handler in
                    (("/health", health), ("/metrics", metrics), ("/", page))])  # fmt: skip
    app.router.add_static("/", WEB)
    app.on_shutdown.append(lambda _: _close_sockets(service))
    return app


def guarded(handler: Handler, visitors: Callable[[], Visitors]) -> Handler:
    """The handler, for accepted visitors only."""

    async def checked(request: web.Request) -> web.StreamResponse:
        if (refusal := visitors().refusal(request)) is not None:
            return web.json_response({"error": refusal}, status=403)
        return await handler(request)

    return checked


async def _close_sockets(service: Service) -> None:
    await service.hang_up("the server stops")


async def _upgrade(request: web.Request, service: Service, *, autoping: bool = True) -> web.WebSocketResponse:
    socket = web.WebSocketResponse(
        max_msg_size=service.limits.message_bytes, compress=False, heartbeat=None, autoping=autoping
    )
    await socket.prepare(request)
    if request.transport is not None:
        notice_dead_peers(request.transport.get_extra_info("socket"))
    service.sockets.add(socket)
    return socket


def notice_dead_peers(connection: Any) -> None:
    """Has TCP itself ask whether a silent peer still lives, so that a machine that vanished frees its session.

    Not by pings of the web socket: clients that only read when they expect something would not answer them.
    """
    if connection is None:
        return
    connection.setsockopt(socket_module.SOL_SOCKET, socket_module.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if (option := getattr(socket_module, name, None)) is not None:
            connection.setsockopt(socket_module.IPPROTO_TCP, option, value)


def _name(host: str) -> str:
    """The name in a Host header, without the port and the brackets of an IPv6 address."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:  # an unclosed bracket
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
