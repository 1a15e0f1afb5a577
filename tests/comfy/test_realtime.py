"""A world served by a running ComfyUI."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import cv2
import numpy as np
import pytest
from comfy_client import problems

ADDRESS = "/v1/realtime/world/camera"
POSES = np.tile(np.eye(4), (21, 1, 1))
POSES[:, 2, 3] = np.arange(21) * 0.05
INTRINSICS = np.array([500.0, 500.0, 416.0, 240.0])


@pytest.fixture(scope="module")
def codec(pack):
    import importlib

    return importlib.import_module(f"{pack.__name__}.lingbot_core.realtime.codec")


def endpoint(**settings: Any) -> dict[str, Any]:
    load = {"folder": "tiny", "weight_dtype": "as stored", "preset": "auto"}
    serve = {"sessions": 2, "timeout": 0.0, "cache_gib": 0.0, "allow_origins": "", **settings}
    return {
        "1": {"class_type": "LingBotLoadWorldFolder", "inputs": load},
        "2": {
            "class_type": "LingBotRealtimeEndpoint",
            "inputs": {"model": ["1", 0], "clip": ["1", 1], "vae": ["1", 2], **serve},
        },
    }


def picture() -> bytes:
    done, png = cv2.imencode(".png", np.full((32, 48, 3), 90, np.uint8))
    assert done
    return png.tobytes()


async def walk(url: str, codec: Any, **options: Any) -> list[np.ndarray]:
    """Two chunks of a session, as soon as the server is ready."""
    async with aiohttp.ClientSession() as client:
        end = time.monotonic() + 60
        while True:
            async with client.get(url + "/v1/realtime/sessions") as response:
                if (await response.json())["state"] == "ready":
                    break
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        async with client.ws_connect(url + ADDRESS, max_msg_size=0) as socket:
            config = codec.unpack((await socket.receive()).data)
            assert config["image_resolution"] == [96, 160]
            frames = []
            for part in (slice(0, 9), slice(9, 21)):
                message: dict[str, Any] = {"cameras": {"poses": POSES[part], "intrinsics": INTRINSICS}}
                if not frames:
                    message |= {"image": picture(), "prompt": "a sunny day"}
                message["extra_body"] = {"height": 32, "width": 48, "frames_per_chunk": 100, **options}
                await socket.send_bytes(codec.pack(message))
                answer = codec.unpack((await socket.receive()).data)
                assert answer["type"] == "frame", answer
                frames.append(answer["video"])
            return frames


async def ask_without_a_world(url: str, codec: Any) -> dict[str, Any]:
    async with aiohttp.ClientSession() as client, client.ws_connect(url + ADDRESS) as socket:
        return codec.unpack((await socket.receive(timeout=10)).data)


def test_a_world_is_served_until_the_run_is_cancelled(server, client, codec):
    before = asyncio.run(ask_without_a_world(server.url, codec))
    assert (before["code"], "LingBotRealtimeEndpoint" in before["message"]) == ("internal", True)

    running = client.queue(endpoint())
    frames = asyncio.run(walk(server.url, codec, seed=3))
    again = asyncio.run(walk(server.url, codec, seed=3))
    assert [len(part) for part in frames] == [9, 12]
    assert all(np.array_equal(a, b) for a, b in zip(frames, again, strict=True))
    sessions = client.call("/v1/realtime/sessions")
    assert sessions["state"] == "ready"

    client.interrupt(running)
    entry = client.wait(running, 30)
    assert "interrupted in LingBotRealtimeEndpoint" in problems(entry)
    assert asyncio.run(ask_without_a_world(server.url, codec))["code"] == "internal"
    assert client.call("/v1/realtime/sessions") == {"state": "failed", "sessions": []}
    assert client.run({"1": {"class_type": "SecondPackEcho", "inputs": {"text": "still here"}}})


def test_a_cancel_ends_a_chunk_and_the_connection_and_a_second_endpoint_serves_again(server, client, codec):
    async def cancelled_meanwhile(prompt_id: str) -> aiohttp.WSMsgType:
        await walk(server.url, codec)
        async with aiohttp.ClientSession() as session, session.ws_connect(server.url + ADDRESS) as socket:
            await socket.receive()
            await socket.send_bytes(
                codec.pack(
                    {
                        "cameras": {"poses": POSES[:9], "intrinsics": INTRINSICS},
                        "image": picture(),
                        "prompt": "a sunny day",
                        "extra_body": {"num_frames": 4000, "height": 32, "width": 48},
                    }
                )
            )
            await socket.receive()
            await asyncio.to_thread(client.interrupt, prompt_id)
            while (message := await socket.receive(timeout=20)).type == aiohttp.WSMsgType.BINARY:
                pass
            return message.type

    first = client.queue(endpoint())
    ended = asyncio.run(cancelled_meanwhile(first))
    assert ended in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
    client.wait(first, 30)
    second = client.queue(endpoint(sessions=1))
    assert [len(part) for part in asyncio.run(walk(server.url, codec))] == [9, 12]
    client.interrupt(second)
    client.wait(second, 30)


def test_an_origin_that_is_none_is_refused(client):
    entry = client.wait(client.queue(endpoint(allow_origins="studio")), 60)
    assert "'studio' is no origin" in problems(entry)


def test_a_second_cancel_leaves_nothing_that_waits_for_ever(server, client, codec):
    async def asked(socket: Any, name: str, frames: int) -> None:
        message = {
            "session_id": name,
            "cameras": {"poses": POSES[:9], "intrinsics": INTRINSICS},
            "image": picture(),
            "prompt": "a sunny day",
            "extra_body": {"num_frames": frames, "height": 32, "width": 48},
        }
        await socket.send_bytes(codec.pack(message))

    async def ended(socket: Any) -> Any:
        while (message := await socket.receive(timeout=20)).type == aiohttp.WSMsgType.BINARY:
            pass
        return message.type, message.data

    async def scenario(prompt_id: str) -> list[Any]:
        await walk(server.url, codec)
        async with aiohttp.ClientSession() as session:
            sockets = [await session.ws_connect(server.url + ADDRESS, max_msg_size=0) for _ in range(4)]
            for number, socket in enumerate(sockets):
                await asked(socket, f"s{number}", 4000)
            await asyncio.sleep(2)
            for _ in range(2):
                await asyncio.to_thread(client.interrupt)
            await asyncio.to_thread(client.wait, prompt_id, 30)
            return await asyncio.gather(*map(ended, sockets))

    log = server.log(100_000).count("Task exception was never retrieved")
    running = client.queue(endpoint())
    assert asyncio.run(scenario(running)) == [(aiohttp.WSMsgType.CLOSE, 1001)] * 4
    assert server.log(100_000).count("Task exception was never retrieved") == log
    assert client.run({"1": {"class_type": "SecondPackEcho", "inputs": {"text": "still here"}}})


def test_a_video_is_made_in_comfyui_and_ends_with_the_run(server, client):
    import base64

    url = "data:image/png;base64," + base64.b64encode(picture()).decode()

    async def scenario(prompt_id: str) -> tuple[list[dict[str, Any]], int, Any]:
        told, fragments = [], 0
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(server.url + "/v1/realtime/sessions") as response:
                    if (await response.json())["state"] == "ready":
                        break
                await asyncio.sleep(0.05)
            async with session.ws_connect(server.url + "/v1/realtime/video", max_msg_size=0) as socket:
                start = {"type": "session.start", "prompt": "a sunny day", "width": 48, "height": 32}
                await socket.send_json({**start, "image_reference": {"image_url": url}})
                while (message := await socket.receive(timeout=30)).type in (
                    aiohttp.WSMsgType.TEXT,
                    aiohttp.WSMsgType.BINARY,
                ):
                    if message.type == aiohttp.WSMsgType.TEXT:
                        told.append(message.json())
                        continue
                    fragments += 1
                    if fragments == 2:
                        await asyncio.to_thread(client.interrupt, prompt_id)
                return told, fragments, message.type

    running = client.queue(endpoint())
    told, fragments, ended = asyncio.run(scenario(running))
    kinds = [message["type"] for message in told]
    assert kinds[0] == "video.start", told[:2]
    assert fragments == kinds.count("video.chunk_metadata") >= 2
    assert ended in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
    assert "interrupted in LingBotRealtimeEndpoint" in problems(client.wait(running, 30))
