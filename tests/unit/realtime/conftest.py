"""A server with the embedded model in this process, and peers that speak to it as bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import cv2
import numpy as np
import pytest
from aiohttp.test_utils import TestServer

from lingbot_core.engine.world import World
from lingbot_core.realtime.codec import pack, unpack
from lingbot_core.realtime.host import LoadedHost
from lingbot_core.realtime.server import CAMERA, Visitors, application
from lingbot_core.realtime.service import Service
from lingbot_core.realtime.worker import ThreadWorker

EXAMPLE = Path(__file__).parents[3] / "examples" / "04"
HEIGHT, WIDTH = 32, 48
SMALL = {"height": HEIGHT, "width": WIDTH}


def run(coroutine: Coroutine[Any, Any, Any], seconds: float = 60) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(coroutine, seconds)

    return asyncio.run(limited())


@pytest.fixture(scope="session")
def tiny() -> World:
    return World.load("tiny", device="cpu")


@pytest.fixture(scope="session")
def picture() -> bytes:
    pixels = np.random.default_rng(3).integers(0, 255, (HEIGHT // 4, WIDTH // 4, 3), dtype=np.uint8)
    done, png = cv2.imencode(".png", cv2.resize(pixels, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC))
    assert done
    return png.tobytes()


@pytest.fixture(scope="session")
def path() -> tuple[np.ndarray, np.ndarray]:
    """poses [533, 4, 4] and intrinsics [533, 4] of an example."""
    return np.load(EXAMPLE / "poses.npy"), np.load(EXAMPLE / "intrinsics.npy")


class Peer:
    """One web socket, in messages."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.config: dict[str, Any] = {}

    async def send(self, **message: Any) -> None:
        await self.socket.send_bytes(pack(message))

    async def get(self) -> dict[str, Any]:
        message = await self.socket.receive(timeout=30)
        assert message.type == aiohttp.WSMsgType.BINARY, message
        return unpack(message.data)

    async def ask(self, **message: Any) -> dict[str, Any]:
        await self.send(**message)
        return await self.get()

    async def frames(self, **message: Any) -> np.ndarray:
        """The frames of an infer, uint8 [T, H, W, 3]."""
        options = {"frames_per_chunk": 1000, **message.pop("extra_body", {})}
        answer = await self.ask(**message, extra_body=options)
        assert answer["type"] == "frame", answer
        return answer["video"]


class Serving:
    def __init__(self, service: Service, server: TestServer, client: aiohttp.ClientSession) -> None:
        self.service, self.server, self.client = service, server, client

    @asynccontextmanager
    async def peer(self, **options: Any) -> AsyncIterator[Peer]:
        async with self.client.ws_connect(self.server.make_url(CAMERA), max_msg_size=0, **options) as socket:
            peer = Peer(socket)
            peer.config = await peer.get()
            yield peer

    async def until(self, condition: Any, seconds: float = 20) -> None:
        """Waits until ``condition()`` is true."""
        end = asyncio.get_running_loop().time() + seconds
        while not condition():
            assert asyncio.get_running_loop().time() < end, "it did not come true"
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(world: World | None, **options: Any) -> AsyncIterator[Serving]:
    """world: None for a server that is still loading."""
    service, worker = Service(**options), ThreadWorker()
    if world is not None:
        service.open(LoadedHost(world), worker)
    async with TestServer(application(service, Visitors())) as server, aiohttp.ClientSession() as client:
        yield Serving(service, server, client)
    await service.close()
    worker.close()


@pytest.fixture
def small_area(monkeypatch) -> None:
    """Pictures of no particular size become small ones."""
    monkeypatch.setattr(LoadedHost, "area", HEIGHT * WIDTH)


async def hostile_peer(peer: Peer, data: bytes) -> str:
    """What one binary message is answered with: a code, or a type."""
    await peer.socket.send_bytes(data)
    answer = await peer.get()
    while answer["type"] == "frame" and answer["index"] < answer["total"] - 1:
        answer = await peer.get()
    return answer.get("code", answer["type"])
