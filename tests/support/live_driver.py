"""A program that drives a live world of a ComfyUI server, as its page does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp


class Driver:
    """A program that drives the walk of a name."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket, self.seq = socket, 0
        self.status: dict[str, Any] = {}
        self.told: list[dict[str, Any]] = []
        self.frames = 0

    async def read(self, until: Callable[[], Any], seconds: float = 60.0) -> Any:
        end = time.monotonic() + seconds
        while not (found := until()):
            message = await self.socket.receive(timeout=max(0.1, end - time.monotonic()))
            if message.type is aiohttp.WSMsgType.BINARY:
                self.frames += 1
                continue
            assert message.type is aiohttp.WSMsgType.TEXT, message
            told = message.json()
            self.told.append(told)
            if told["type"] == "status":
                self.status = told
        return found

    async def control(self, held: str) -> None:
        self.seq += 1
        await self.socket.send_json({"type": "control", "seq": self.seq, "held": held, "press": held})

    async def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        self.seq += 1
        seq = self.seq
        await self.socket.send_json({"type": kind, "seq": seq, **fields})
        return await self.read(lambda: next((m for m in self.told if m.get("seq") == seq), None))

    async def step(self, held: str) -> None:
        before = self.status["chunks"]
        await self.control(held)
        await self.ask("step")
        await self.read(lambda: self.status["chunks"] > before and not self.status["making"])


def drive(server: Any, work: Callable[[Driver], Awaitable[Any]], name: str = "live") -> Any:
    """Waits for the walk of that name on ``server.url``, and returns what ``work`` makes of it."""

    async def scenario() -> Any:
        address = f"{server.url}/v1/live?world={name}"
        async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
            await socket.send_json({"type": "hello", "v": 1, "client": "test", "drive": True})
            driver = Driver(socket)
            await driver.read(lambda: [m for m in driver.told if m["type"] == "hello"])
            await driver.read(lambda: driver.status)
            return await work(driver)

    return asyncio.run(scenario())
