"""Walking by hand in a running ComfyUI: steered over the socket, stopped, cancelled, and walked again bit for bit."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import aiohttp
import av
import numpy as np
import pytest
from comfy_client import files_of, problems
from live_driver import Driver, drive

START: dict[str, Any] = {
    "1": {"class_type": "LingBotLoadWorldFolder",
          "inputs": {"folder": "tiny", "weight_dtype": "as stored", "preset": "auto"}},
    "2": {"class_type": "LoadImage", "inputs": {"image": "lingbot_tiny_day.png"}},
    "3": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 1], "text": "a sunny day"}},
    "4": {"class_type": "LingBotStartImage",
          "inputs": {"image": ["2", 0], "vae": ["1", 2], "fit": "crop", "size": "custom", "width": 48, "height": 32}},
    "5": {"class_type": "LingBotStartWorld",
          "inputs": {"model": ["1", 0], "vae": ["1", 2], "positive": ["3", 0], "start_image": ["4", 0],
                     "clip": ["1", 1], "preset": "auto", "seed": 7}},
}  # fmt: skip


def live(**settings: Any) -> dict[str, Any]:
    values = {"name": "live", "mode": "restart", "paused": True, "keep_going": False, "chunks": 0, "all_images": True}
    return {
        **START,
        "6": {"class_type": "LingBotLiveWorld", "inputs": {"world": ["5", 0], **values, **settings}},
        "7": {"class_type": "SaveVideo", "inputs": {"video": ["6", 1], "filename_prefix": "live", "format": "mp4",
                                                   "format.codec": "h264"}},
        "8": {"class_type": "PreviewAny", "inputs": {"source": ["6", 6]}},
    }  # fmt: skip


@pytest.fixture(autouse=True)
def start_picture(server):
    server.add_input(Path(__file__).resolve().parents[2] / "examples" / "tiny" / "day.png", "lingbot_tiny_day.png")


def frames_in(server, entry, tmp_path) -> list[np.ndarray]:
    [video] = [item for item in files_of(entry["outputs"]) if item["filename"].endswith(".mp4")]
    with av.open(str(server.client.download(video, tmp_path))) as file:
        return [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]


def report_of(entry) -> dict[str, Any]:
    return json.loads(entry["outputs"]["8"]["text"][0])


def test_a_walk_is_steered_stopped_and_walked_again_bit_for_bit(server, client, tmp_path):
    async def walk(driver: Driver) -> None:
        assert driver.status["state"] == "paused"
        await driver.step("w")
        await driver.step("wl")
        assert (await driver.ask("snapshot"))["chunks"] == 2
        await driver.ask("prompt", prompt="deep snow")
        await driver.step("e")
        await driver.step("s")
        await driver.ask("rewind")
        await driver.read(lambda: driver.status["chunks"] == 3 and not driver.status["making"])
        await driver.step("j")
        await driver.ask("stop")
        await driver.read(lambda: [m for m in driver.told if m["type"] == "closed"])
        assert driver.frames >= 33

    # The same walk again from its controls, and on from the snapshot. Images are compared inside of ComfyUI's server by
    # saving them losslessly.
    graph = live()
    graph["10"] = {"class_type": "SaveImage", "inputs": {"images": ["6", 0], "filename_prefix": "walked"}}
    graph["11"] = {
        "class_type": "LingBotAdvanceWorld",
        "inputs": {"world": ["5", 0], "controls": ["6", 5], "chunks": 1, "length": "all of the controls"},
    }
    graph["12"] = {"class_type": "SaveImage", "inputs": {"images": ["11", 0], "filename_prefix": "again"}}
    graph["13"] = {"class_type": "LingBotAdvanceWorld", "inputs": {"world": ["6", 3], "chunks": 1, "keys": "a"}}
    graph["14"] = {"class_type": "PreviewAny", "inputs": {"source": ["13", 3]}}
    running = client.queue(graph)
    drive(server, walk)
    entry = client.wait(running, 120)
    assert entry["status"]["status_str"] == "success", problems(entry)
    report = report_of(entry)
    assert report["made"] == {"chunks": 4, "frames": 9 + 3 * 12}
    assert (report["snapshot_at_chunk"], report["taken_back"]) == (2, True)
    assert len(frames_in(server, entry, tmp_path)) == 45
    walked, again = (
        [pixels(client.download(item, tmp_path).read_bytes()) for item in entry["outputs"][node]["images"]]
        for node in ("10", "12")
    )
    assert len(walked) == len(again) == 45
    assert walked == again
    from_snapshot = json.loads(entry["outputs"]["14"]["text"][0])
    assert from_snapshot["made"]["chunks"] == 1


def pixels(png: bytes) -> bytes:
    """Without the workflow, which is in each file."""
    import cv2

    return cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR).tobytes()


def test_a_replay_on_models_that_were_unloaded_makes_the_same_chunks(server, client, tmp_path):
    """As above, but nothing of the first run is left to be taken up: the second one denoises anew."""

    async def walk(driver: Driver) -> str:
        await driver.step("w")
        client.free()
        await driver.ask("prompt", prompt="deep snow")
        await driver.step("wj")
        record = (await driver.ask("record"))["record"]
        await driver.ask("stop")
        return record

    running = client.queue(live(paused=True, name="first"))
    record = drive(server, walk, "first")
    first = client.wait(running, 120)
    assert first["status"]["status_str"] == "success", problems(first)
    client.free()
    time.sleep(1.5)
    graph = {
        **START,
        "5": {**START["5"], "inputs": {**START["5"]["inputs"], "controls": ["20", 0]}},
        "20": {"class_type": "LingBotControls", "inputs": {"preset": "tiny", "record": record, "chunks": 0}},
        "21": {
            "class_type": "LingBotAdvanceWorld",
            "inputs": {"world": ["5", 0], "controls": ["20", 0], "chunks": 1, "length": "all of the controls"},
        },
        "7": {"class_type": "SaveVideo", "inputs": {"video": ["21", 1], "filename_prefix": "again", "format": "mp4",
                                                   "format.codec": "h264"}},
    }  # fmt: skip
    entry = client.wait(client.queue(graph), 120)
    assert entry["status"]["status_str"] == "success", problems(entry)
    walked, again = frames_in(server, first, tmp_path), frames_in(server, entry, tmp_path)
    assert len(walked) == len(again) == 21
    assert all(np.array_equal(one, other) for one, other in zip(walked, again, strict=True))


def test_a_cancelled_walk_keeps_its_frames_and_can_be_gone_on_with(server, client, tmp_path):
    async def walk(driver: Driver) -> None:
        await driver.step("w")
        await driver.ask("start")
        await driver.read(lambda: driver.status["chunks"] >= 2)

    name = "cancelled"
    running = client.queue(live(name=name))
    drive(server, walk, name)
    client.interrupt(running)
    entry = client.wait(running, 60)
    assert "interrupted in LingBotLiveWorld" in problems(entry)
    assert "frames are in" in server.log(2000)

    async def go_on(driver: Driver) -> int:
        made = driver.status["chunks"]
        await driver.step("s")
        await driver.ask("stop")
        return made

    running = client.queue(live(name=name, mode="continue", all_images=False))
    made = drive(server, go_on, name)
    entry = client.wait(running, 60)
    assert entry["status"]["status_str"] == "success", problems(entry)
    assert made >= 2
    # The walk is counted from the world that it began at, and its video has what was made before the cancel, too.
    assert report_of(entry)["made"]["chunks"] == made + 1
    assert len(frames_in(server, entry, tmp_path)) == 9 + 12 * made


def test_a_walk_ends_after_its_chunks_without_a_page(server, client):
    entry = client.wait(client.queue(live(paused=False, keep_going=True, chunks=2, all_images=False)), 120)
    assert entry["status"]["status_str"] == "success", problems(entry)
    assert report_of(entry)["made"]["chunks"] == 2


def test_a_walk_of_nothing_says_so(server, client):
    async def stop(driver: Driver) -> None:
        await driver.ask("stop")

    running = client.queue(live())
    drive(server, stop)
    assert "nothing was walked" in problems(client.wait(running, 60))


def test_pages_of_others_may_not_drive(server):
    async def ask() -> int:
        headers, url = {"Origin": "http://evil.example"}, f"{server.url}/v1/live"
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
            return response.status

    assert asyncio.run(ask()) == 403


def test_the_elements_modules_are_served_and_nothing_else(client):
    assert b"createLive" in client.call("/lingbot_world/web/live.mjs")
    from comfy_client import Refused

    for path in ("..%2f..%2fpyproject.toml", "nothing.mjs"):
        with pytest.raises(Refused):
            client.call(f"/lingbot_world/web/{path}")
