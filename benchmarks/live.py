"""What walking live costs a chunk, how soon a key is seen, and how free the event loop stays.

    python -m benchmarks.live [--model tiny] [--chunks 12] [--rounds 3] [--browser SECONDS] [--full]

Without a browser: a live world with one viewer in this process, beside a session alone that makes the same chunks, in
turn; and, inside of the live chunks, the time from a chunk's boundary to its frames over denoising and decode alone.
--browser: keys are pressed at random for so long in Chromium, on ``lingbot-world play`` as a process of its own.
--full: random weights of full size in place of a model, on the GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from aiohttp.test_utils import TestServer

from lingbot_core.camera import PER_LATENT, KeyMotion
from lingbot_core.engine.image import PreparedImage, frames_to_uint8, prepare_image
from lingbot_core.engine.session import WorldSession
from lingbot_core.engine.world import World
from lingbot_core.presets import get_preset
from lingbot_core.realtime.host import Beginning, LoadedHost
from lingbot_core.realtime.live_routes import LIVE, LiveWorlds, play_application
from lingbot_core.realtime.live_walk import HostWalk
from lingbot_core.realtime.live_world import LiveWorld
from lingbot_core.realtime.server import Visitors
from lingbot_core.realtime.worker import ThreadWorker

from .random_world import random_world

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "examples" / "tiny" / "day.png"
PROMPT = "a sunny day"
# So many frames a second that the world never waits for its viewer: only what it costs is measured.
SETTINGS = {"translation_unit": 0.05, "unit_rule": "key", "first_delta": "from_rest", "fps": 10_000.0}
TICK = 0.005
WARM = 2  # chunks that are not counted


class TextGiven(LoadedHost):
    """A world without a text encoder."""

    def begin(self, beginning: Beginning) -> Any:
        states = torch.randn(100, self.world.dit.config.text_dim, generator=torch.Generator().manual_seed(1))
        settings = {**beginning.settings, "prompt_states": states.to(self.world.device)}
        return super().begin(Beginning(beginning.picture, beginning.prompt, beginning.preset, settings))


def alone(host: LoadedHost, picture: PreparedImage, chunks: int) -> float:
    """Seconds per chunk of advance, with frames as bytes, and nothing else."""
    handle = host.begin(Beginning(picture, PROMPT, host.preset, SETTINGS))
    living = host.registry.living(handle)
    assert living is not None
    assert living.session is not None
    session: WorldSession = living.session
    keys = KeyMotion(("w",) * host.preset.chunk, PER_LATENT)
    begun = 0.0
    for index in range(chunks + WARM):
        if index == WARM:
            begun = time.perf_counter()
        frames_to_uint8(session.advance(session.controls(keys)).frames)
    spent = time.perf_counter() - begun
    host.close(handle)
    return spent / chunks


async def watched(host: LoadedHost, picture: PreparedImage, chunks: int) -> dict[str, Any]:
    """The same chunks live, W held, one viewer: seconds per chunk, from boundary to frames, and the loop's blocks."""
    worker, worlds = ThreadWorker(), LiveWorlds()
    beginning = Beginning(picture, PROMPT, host.preset, SETTINGS)
    handle = await asyncio.wrap_future(worker.submit(lambda: host.begin(beginning)))
    walk, shown = HostWalk(host, handle), frames_to_uint8(picture.pixels[:, None])[0]
    world = LiveWorld(walk, worker, picture=shown, limit=chunks + WARM)
    worlds.open("", world)
    blocks: list[float] = []
    boundaries: list[float] = []
    took = world._pace.took

    def noted(to_frames: float, whole: float) -> None:
        boundaries.append(to_frames)
        took(to_frames, whole)

    world._pace.took = noted  # type: ignore[method-assign]

    async def listen() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(TICK)
            blocks.append(1000 * (time.perf_counter() - before - TICK))

    begun = ended = 0.0
    async with (
        TestServer(play_application(worlds, Visitors())) as server,
        aiohttp.ClientSession() as client,
        client.ws_connect(server.make_url(LIVE), max_msg_size=0) as socket,
    ):
        await socket.send_json({"type": "hello", "v": 1, "client": "benchmark", "drive": True})
        await socket.send_json({"type": "control", "seq": 1, "held": "w", "press": "w"})
        life, listening = asyncio.ensure_future(world.run()), asyncio.ensure_future(listen())
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.TEXT:
                continue
            told = message.json()
            if told["type"] == "chunk":
                if told["chunk"] == WARM - 1:
                    begun = time.perf_counter()
                    blocks.clear()
                await socket.send_json({"type": "control", "seq": told["chunk"] + 2, "held": "w"})
                if told["chunk"] == chunks + WARM - 1:
                    ended = time.perf_counter()
                    break
        listening.cancel()
        world.close()
        await life
    stages = [record.timings for record in walk.history.chunks[WARM:]]
    await asyncio.wrap_future(worker.submit(walk.close))
    await asyncio.to_thread(worker.close)
    return {
        "seconds": (ended - begun) / chunks,
        "boundary": [
            _over(have, one, "denoise", "decode") for have, one in zip(boundaries[WARM:], stages, strict=True)
        ],
        "added": [
            _over(have, one, "prepare", "denoise", "decode")
            for have, one in zip(boundaries[WARM:], stages, strict=True)
        ],
        "blocks": blocks,
    }


def _over(seconds: float, stages: Any, *names: str) -> float:
    return seconds / sum(stages[name] for name in names)


def measure(host: LoadedHost, picture: PreparedImage, *, chunks: int, rounds: int) -> dict[str, Any]:
    """Ratios of whole walks, in turn."""
    alone(host, picture, 1)
    ratios, own, boundary, added, blocks = [], [], [], [], []
    for _ in range(rounds):
        first = alone(host, picture, chunks)
        live = asyncio.run(watched(host, picture, chunks))
        ratios.append(first / live["seconds"])
        own.append(first)
        boundary += live["boundary"]
        added += live["added"]
        blocks += live["blocks"]
    blocks.sort()
    return {
        "chunks": chunks,
        "rounds": rounds,
        "size": [picture.height, picture.width],
        "seconds_per_chunk_alone": round(statistics.median(own), 4),
        "rate_over_alone": round(statistics.median(ratios), 3),
        "rates_over_alone": [round(ratio, 3) for ratio in ratios],
        "boundary_to_frames_over_denoise_and_decode": round(statistics.median(boundary), 3),
        "boundary_to_frames_over_session_stages": round(statistics.median(added), 3),
        "event_loop_blocked_ms": {
            "p50": round(blocks[len(blocks) // 2], 2),
            "p99": round(blocks[int(len(blocks) * 0.99)], 2),
            "worst": round(blocks[-1], 2),
        },
    }


def in_browser(model: str, seconds: float) -> dict[str, Any]:
    """Keys at random moments in Chromium; what its page measured from key to picture, against the time of a chunk."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from comfy_page import FLAGS, find_chromium
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "lingbot_core", "play", "--model", model, "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = next(found[1] for line in process.stderr if (found := re.match(r"ready: walk on (\S+)", line)))
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
            page = chromium.new_page(viewport={"width": 900, "height": 900})
            page.goto(url)
            page.wait_for_selector(".lbw-live[data-role=drive]", timeout=60_000)
            page.locator(".lbw-stage").focus()
            page.evaluate(WATCH)
            pick, end, down = random.Random(1), time.monotonic() + seconds, ""
            while time.monotonic() < end:
                page.wait_for_timeout(pick.uniform(300, 1500))
                page.keyboard.up(down) if down else None
                down = pick.choice("wasdjl")
                page.keyboard.down(down)
            seen = page.evaluate("() => window.seen")
            chromium.close()
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
    latencies, chunk = sorted(seen["latencies"]), statistics.median(seen["chunks"])
    frames_seconds = 12 / 16
    # A world that is made faster than it plays has a chunk every 12 frames of its video.
    period = max(chunk, frames_seconds)
    return {
        "seconds": seconds,
        "keys_measured": len(latencies),
        "chunk_seconds": round(chunk, 3),
        "period_seconds": round(period, 3),
        "key_to_picture_ms": {"median": round(statistics.median(latencies)), "worst": round(latencies[-1])},
        "asked_at_most_ms": round(1600 * period + 150),
        "asked_by_chunk_time_ms": round(1600 * chunk + 150),
    }


WATCH = """() => {
  window.seen = { latencies: [], chunks: [] }
  document.querySelector('.lbw-live').addEventListener('lbw-latency', event => window.seen.latencies.push(event.detail))
  setInterval(() => {
    const fps = document.querySelector('.lbw-fps').textContent.match(/makes ([\\d.]+)/)
    if (fps) window.seen.chunks.push(12 / Number(fps[1]))
  }, 250)
}"""


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--chunks", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--browser", type=float, metavar="SECONDS")
    parser.add_argument("--full", action="store_true")
    options = parser.parse_args()
    if options.full:
        device, preset = torch.device("cuda"), get_preset("v2-causal-fast")
        world = random_world(preset, device=device, dtype=torch.bfloat16)
        host: LoadedHost = TextGiven(world)
        pixels = np.random.default_rng(0).integers(0, 255, (480, 832, 3), dtype=np.uint8)
        picture = prepare_image(pixels, size=(480, 832), mode="stretch")
    else:
        from lingbot_core.cli.threads import limit_threads

        limit_threads()
        world = World.load(options.model)
        host, picture = LoadedHost(world), prepare_image(PICTURE.read_bytes(), area=world.area)
    found: dict[str, Any] = {"model": world.name, "torch": torch.__version__, "cores": os.cpu_count()}
    found |= measure(host, picture, chunks=options.chunks, rounds=options.rounds)
    if options.browser:
        found["browser"] = in_browser(options.model, options.browser)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
