"""A server in this process, and peers of its video socket that speak to it as text and bytes."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import cv2
import numpy as np
from aiohttp import web
from aiohttp.test_utils import TestServer

from lingbot_core.realtime.connection import Connection
from lingbot_core.realtime.host import Host, LoadedHost
from lingbot_core.realtime.server import VIDEO, Visitors, application
from lingbot_core.realtime.service import Service
from lingbot_core.realtime.video_socket import VideoSocket
from lingbot_core.realtime.worker import ThreadWorker

HEIGHT, WIDTH = 32, 48
HURRIED = "/hurried"
"""The video socket with less patience: half a second for a start, and as much without progress."""


def noise_picture(height: int = HEIGHT, width: int = WIDTH) -> bytes:
    small = np.random.default_rng(3).integers(0, 255, (height // 4, width // 4, 3), dtype=np.uint8)
    done, png = cv2.imencode(".png", cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC))
    assert done
    return png.tobytes()


def data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


PICTURE = noise_picture()


def start(**fields: Any) -> dict[str, Any]:
    """A session.start; a field of None is left out."""
    message = {
        "type": "session.start",
        "prompt": "a sunny day",
        "image_reference": {"image_url": data_url(PICTURE)},
        "width": WIDTH,
        "height": HEIGHT,
        **fields,
    }
    return {name: value for name, value in message.items() if value is not None}


def camera(mode: str | None, translation: Any = (0, 0, 0), rotation: Any = (0, 0, 0, 1)) -> dict[str, Any]:
    data = {"translation": list(translation), "rotation": list(rotation)}
    return {"multi_modal_data": {"camera": {"data": data, **({"mode": mode} if mode else {})}}}


def interaction(event: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "session.interaction", "interaction": {"event": event, **fields}}


class VideoPeer:
    """events: all messages so far but the chunks. chunks: (metadata, fragment) of all chunks so far."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.events: list[dict[str, Any]] = []
        self.chunks: list[tuple[dict[str, Any], bytes]] = []

    async def send(self, message: Any) -> None:
        await self.socket.send_str(message if isinstance(message, str) else json.dumps(message))

    async def get(self) -> dict[str, Any]:
        """The next message; that of a chunk brings its fragment, which has to be the very next frame."""
        frame = await self.socket.receive(timeout=30)
        assert frame.type == aiohttp.WSMsgType.TEXT, frame
        message = json.loads(frame.data)
        if message["type"] == "video.chunk_metadata":
            fragment = await self.socket.receive(timeout=30)
            assert fragment.type == aiohttp.WSMsgType.BINARY, fragment
            self.chunks.append((message, fragment.data))
        else:
            self.events.append(message)
        return message

    async def ask(self, message: Any) -> dict[str, Any]:
        await self.send(message)
        return await self.get()

    async def until(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Reads on to a message of that type, with these fields."""
        while True:
            message = await self.get()
            if message["type"] == kind and all(message[name] == value for name, value in fields.items()):
                return message
            assert kind == "error" or message["type"] != "error", message

    async def closed(self) -> tuple[int | None, str]:
        """Code and reason of the close that comes next."""
        frame = await self.socket.receive(timeout=30)
        assert frame.type == aiohttp.WSMsgType.CLOSE, frame
        return frame.data, frame.extra

    @property
    def video(self) -> bytes:
        return b"".join(fragment for _, fragment in self.chunks)


class VideoServer:
    def __init__(self, service: Service, server: TestServer, client: aiohttp.ClientSession) -> None:
        self.service, self.server, self.client = service, server, client

    @asynccontextmanager
    async def peer(self, path: str = VIDEO) -> AsyncIterator[VideoPeer]:
        async with self.client.ws_connect(self.server.make_url(path), max_msg_size=0) as socket:
            yield VideoPeer(socket)

    async def becomes_true(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        end = asyncio.get_running_loop().time() + seconds
        while not condition():
            assert asyncio.get_running_loop().time() < end, "it did not become true"
            await asyncio.sleep(0.01)


@asynccontextmanager
async def video_server(world: Any = None, *, host: Host | None = None, **options: Any) -> AsyncIterator[VideoServer]:
    """world, host: neither for a server that is still loading. options: of Service."""
    service, worker = Service(**options), ThreadWorker()
    if host is not None or world is not None:
        service.open(host or LoadedHost(world), worker)
    app = application(service, Visitors())

    async def hurried(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        await VideoSocket(service, Connection(socket, slow=0.5), start_seconds=0.5, stall_seconds=0.5).serve()
        return socket

    app.router.add_get(HURRIED, hurried)
    try:
        async with TestServer(app) as server, aiohttp.ClientSession() as client:
            yield VideoServer(service, server, client)
    finally:
        await service.close()
        worker.close()


def run(coroutine: Coroutine[Any, Any, Any], seconds: float = 120) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(coroutine, seconds)

    return asyncio.run(limited())
