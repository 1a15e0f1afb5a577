"""What the camera socket adds to a chunk, and how soon frames leave after their decode.

    python -m benchmarks.realtime [--model tiny] [--chunks 8] [--rounds 5]

The same walk, in turn: a session of the library alone, and a client of a server in this process. Ratios of whole walks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp.test_utils import TestServer

from lingbot_core.engine.image import frames_to_uint8, prepare_image
from lingbot_core.engine.session import WorldSession
from lingbot_core.engine.world import World
from lingbot_core.realtime import camera_socket, making
from lingbot_core.realtime.codec import pack, unpack
from lingbot_core.realtime.host import LoadedHost
from lingbot_core.realtime.server import CAMERA, Visitors, application
from lingbot_core.realtime.service import Service
from lingbot_core.realtime.worker import ThreadWorker

PICTURE = Path(__file__).resolve().parents[1] / "examples" / "tiny" / "day.png"
PROMPT = "a sunny day"
STEP = 0.05


def poses(chunk: int, chunks: int) -> list[np.ndarray]:
    """A straight walk in slices of 1 + 4(c - 1), then 4c poses."""
    count = 4 * chunk * chunks - 3
    path = np.tile(np.eye(4), (count, 1, 1))
    path[:, 2, 3] = STEP * np.arange(count)
    ends = [4 * chunk * (i + 1) - 3 for i in range(chunks)]
    return [path[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def alone(world: World, parts: list[np.ndarray]) -> float:
    """Seconds of the chunks after the first."""
    session = WorldSession.start(world, prepare_image(PICTURE.read_bytes(), area=world.area), PROMPT)
    for index, part in enumerate(parts):
        if index == 1:
            begin = time.perf_counter()
        frames_to_uint8(session.advance(session.controls(part)).frames)
    spent = time.perf_counter() - begin
    session.close()
    return spent


@contextmanager
def watched(leaving: list[float]) -> Iterator[None]:
    """Notes how long after its decode each chunk has left."""
    to_uint8, decoded = making.frames_to_uint8, [0.0]
    send = camera_socket.CameraSocket._send

    def noted(frames: Any) -> Any:
        decoded[0] = time.perf_counter()
        return to_uint8(frames)

    async def sent(self: Any, message: Any) -> None:
        await send(self, message)
        if message.get("type") == "frame":
            leaving.append(1000 * (time.perf_counter() - decoded[0]))

    making.frames_to_uint8, camera_socket.CameraSocket._send = noted, sent  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        making.frames_to_uint8, camera_socket.CameraSocket._send = to_uint8, send  # type: ignore[method-assign,assignment]


async def through_the_socket(world: World, parts: list[np.ndarray]) -> float:
    """Seconds of the chunks after the first, as a client sees them."""
    service, worker = Service(), ThreadWorker()
    service.open(LoadedHost(world), worker)
    intrinsics = np.array([500.0, 500.0, 416.0, 240.0])
    begin = 0.0
    async with (
        TestServer(application(service, Visitors())) as server,
        aiohttp.ClientSession() as client,
        client.ws_connect(server.make_url(CAMERA), max_msg_size=0) as socket,
    ):
        await socket.receive()
        for index, part in enumerate(parts):
            if index == 1:
                # As in the session alone, the commit of the chunk before is not counted.
                while service.sessions()[0]["chunks"] < 1 or service.sessions()[0]["state"] == "running":
                    await asyncio.sleep(0.001)
                begin = time.perf_counter()
            message: dict[str, Any] = {"cameras": {"poses": part, "intrinsics": intrinsics}}
            if index == 0:
                message |= {
                    "image": PICTURE.read_bytes(),
                    "prompt": PROMPT,
                    "extra_body": {"translation_unit": 1.0},
                }
            await socket.send_bytes(pack(message))
            answer = unpack((await socket.receive()).data)
            assert answer["type"] == "frame", answer
        while service.sessions()[0]["chunks"] < len(parts):
            await asyncio.sleep(0.001)
        spent = time.perf_counter() - begin
    await service.close()
    worker.close()
    return spent


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    world = World.load(options.model)
    parts = poses(world.preset.chunk, options.chunks)
    ratios, own, leaving = [], [], []
    alone(world, parts)
    for _ in range(options.rounds):
        first = alone(world, parts)
        with watched(leaving):
            second = asyncio.run(through_the_socket(world, parts))
        ratios.append(second / first)
        own.append(first / (options.chunks - 1))
    print(
        json.dumps(
            {
                "model": world.name,
                "chunks": options.chunks,
                "seconds_per_chunk_alone": round(statistics.median(own), 4),
                "ratio": round(statistics.median(ratios), 4),
                "ratios": [round(ratio, 4) for ratio in ratios],
                "ms_from_decode_to_sent": {
                    "median": round(statistics.median(leaving), 2),
                    "worst": round(max(leaving), 2),
                },
            }
        )
    )


if __name__ == "__main__":
    main()
