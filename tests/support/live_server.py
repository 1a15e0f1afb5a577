"""A live world of the embedded model on a server in this process, and clients that speak to it as text and bytes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import aiohttp
import cv2
import numpy as np
from aiohttp.test_utils import TestServer

from lingbot_core.engine.image import PreparedImage, frames_to_uint8, prepare_image
from lingbot_core.engine.world import World
from lingbot_core.errors import PromptError
from lingbot_core.realtime.host import Beginning, LoadedHost
from lingbot_core.realtime.live_frames import unpack_frame
from lingbot_core.realtime.live_routes import LIVE, LiveWorlds, play_application
from lingbot_core.realtime.live_walk import HostWalk
from lingbot_core.realtime.live_world import LiveWorld
from lingbot_core.realtime.server import Visitors
from lingbot_core.realtime.worker import ThreadWorker

SETTINGS = {"translation_unit": 0.05, "unit_rule": "key", "first_delta": "from_rest", "rewind_depth": 1}
SIZE = (32, 48)


class HeldHost(LoadedHost):
    """A test can hold up the worker, or let it fail. gate: cleared, it waits before its next work; waiting: it does."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.gate, self.waiting = threading.Event(), threading.Event()
        self.gate.set()
        self.problem: Exception | None = None
        self.unsayable: set[str] = set()

    def encode(self, prompts: tuple[str, ...]) -> Any:
        if bad := self.unsayable & set(prompts):
            raise PromptError(f"{bad.pop()} cannot be said")
        return super().encode(prompts)

    async def hold(self) -> None:
        """Until the worker waits at the gate."""
        self.gate.clear()
        self.waiting.clear()
        assert await asyncio.to_thread(self.waiting.wait, 20)

    @contextmanager
    def drive(self, handle: Any) -> Any:
        if not self.gate.is_set():
            self.waiting.set()
            assert self.gate.wait(30)
        if self.problem is not None:
            raise self.problem
        with super().drive(handle) as drive:
            yield drive


class LivePeer:
    """told: all messages so far. frames: (header, picture's bytes)."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.told: list[dict[str, Any]] = []
        self.frames: list[tuple[dict[str, Any], bytes]] = []
        self.ended: aiohttp.WSMessage | None = None
        self.reading = True
        self._seq = 100
        self._news = asyncio.Event()
        self._reader = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        while self.reading:
            message = await self.socket.receive()
            if message.type is aiohttp.WSMsgType.TEXT:
                self.told.append(message.json())
            elif message.type is aiohttp.WSMsgType.BINARY:
                self.frames.append(unpack_frame(message.data))
            else:
                self.ended = message
                self.reading = False
            self._news.set()

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send_json({"type": kind, **fields})

    async def control(self, held: str = "", press: str | None = None, **fields: Any) -> int:
        """Sends what is held; returns its number."""
        self._seq += 1
        await self.send("control", seq=self._seq, held=held, press=held if press is None else press, **fields)
        return self._seq

    async def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Sends a message, and returns what it is answered with."""
        self._seq += 1
        seq = self._seq
        await self.send(kind, seq=seq, **fields)
        return await self.until(lambda: next((m for m in self.told if m.get("seq") == seq), None))

    async def until(self, condition: Callable[[], Any], seconds: float = 30) -> Any:
        """Waits until ``condition()`` gives something that counts, and returns that."""
        end = asyncio.get_running_loop().time() + seconds
        while not (found := condition()):
            assert asyncio.get_running_loop().time() < end, f"it did not happen; told: {self.told[-3:]}"
            self._news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), 0.05)
        return found

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.told if message["type"] == kind]

    @property
    def status(self) -> dict[str, Any]:
        found = self.of("status")
        return found[-1] if found else {}

    @property
    def chunks(self) -> int:
        return self.status.get("chunks", 0)

    async def chunk(self, count: int) -> dict[str, Any]:
        """Waits until the world has so many chunks; returns the message of the last."""
        await self.until(lambda: self.chunks >= count)
        return self.of("chunk")[-1]

    async def become(self, state: str) -> None:
        await self.until(lambda: self.status.get("state") == state)

    async def leave(self) -> None:
        self.reading = False
        self._reader.cancel()
        await self.socket.close()

    def vanish(self) -> None:
        """As a cable that is cut: no goodbye."""
        self.reading = False
        self._reader.cancel()
        assert self.socket._response.connection is not None
        self.socket._response.connection.transport.abort()


class LiveServer:
    def __init__(self, worlds: LiveWorlds, world: LiveWorld, host: HeldHost, server: TestServer, worker: Any) -> None:
        self.worlds, self.world, self.host, self.server, self.worker = worlds, world, host, server, worker
        self.client = aiohttp.ClientSession()
        self.life = asyncio.ensure_future(world.run())

    @property
    def history(self) -> Any:
        return self.world.walk.handle.history

    async def peer(self, *, drive: bool = True, client: str = "", hello: bool = True, **fields: Any) -> LivePeer:
        """A connection that has introduced itself."""
        socket = await self.client.ws_connect(self.server.make_url(LIVE), max_msg_size=0)
        peer = LivePeer(socket)
        if hello:
            name = client or f"page {id(peer)}"
            await peer.send("hello", v=1, client=name, drive=drive, **fields)
            await peer.until(lambda: peer.of("hello") or peer.of("waiting") or peer.of("error"))
        return peer


def picture(size: tuple[int, int] = SIZE) -> PreparedImage:
    pixels = np.random.default_rng(3).integers(0, 255, (size[0] // 4, size[1] // 4, 3), dtype=np.uint8)
    return prepare_image(cv2.resize(pixels, size[::-1], interpolation=cv2.INTER_CUBIC), size=size)


@asynccontextmanager
async def live_world(
    loaded: World, *, image: PreparedImage | None = None, seed: int = 0, **options: Any
) -> AsyncIterator[tuple[HeldHost, ThreadWorker, LiveWorld]]:
    """A world that nobody runs yet. options: of LiveWorld."""
    host, worker = HeldHost(loaded), ThreadWorker()
    image = picture() if image is None else image
    beginning = Beginning(image, "a sunny day", loaded.preset, {**SETTINGS, "seed": seed})
    handle = await asyncio.wrap_future(worker.submit(lambda: host.begin(beginning)))
    shown = frames_to_uint8(image.pixels[:, None])[0]
    try:
        yield host, worker, LiveWorld(HostWalk(host, handle), worker, picture=shown, **options)
    finally:
        host.gate.set()
        await asyncio.to_thread(worker.close)


@asynccontextmanager
async def live_server(loaded: World, *, port: int = 0, **options: Any) -> AsyncIterator[LiveServer]:
    """port: 0 takes a free one. options: of live_world."""
    async with live_world(loaded, **options) as (host, worker, world):
        worlds = LiveWorlds()
        worlds.open("", world)
        async with TestServer(play_application(worlds, Visitors()), port=port or None) as server:
            at = LiveServer(worlds, world, host, server, worker)
            try:
                yield at
            finally:
                host.gate.set()
                world.close()
                await at.life
                await at.client.close()
