"""A long walk by hand: half an hour of keys, prompts and rewinds, with pages that come, go and vanish."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time

import psutil
from live_server import LivePeer, live_server
from video_server import run

from lingbot_core.engine.world import World
from lingbot_core.realtime.live_world import LiveWorld

SECONDS = float(os.environ.get("LINGBOT_SOAK_SECONDS", "1800"))
GROWTH = 0.05


def resident(world: LiveWorld) -> int:
    """Without the history, which is what the walk is for. Nothing is collected for it: that would hold up the loop."""
    return psutil.Process().memory_info().rss - world.walk.handle.history.nbytes


def test_a_long_walk():
    pick = random.Random(8)
    sizes: list[int] = []
    blocks: list[float] = []
    made = {"viewers": 0, "rewinds": 0, "prompts": 0, "frames": 0}

    async def steer(at, end: float) -> None:
        peer = await at.peer(client="driver")
        while time.monotonic() < end:
            held = "".join(pick.sample("wasdijklqe", pick.randrange(4)))
            await peer.control(held, look=[pick.uniform(-9, 9), pick.uniform(-3, 3)])
            await asyncio.sleep(pick.uniform(0.05, 1.5))
            if pick.random() < 0.02:
                made["prompts"] += 1
                await peer.ask("prompt", prompt=pick.choice(("a sunny day", "deep snow", "a moonlit night")))
            if pick.random() < 0.01 and at.world.chunks > 3:
                made["rewinds"] += 1
                await peer.ask("rewind")
            if pick.random() < 0.01:  # the page is loaded again, or its cable is pulled
                made["frames"] += len(peer.frames)
                await peer.leave() if pick.random() < 0.5 else peer.vanish()
                peer = await at.peer(client="driver")
            del peer.told[:-50]
            made["frames"] += len(peer.frames[:-50])
            del peer.frames[:-50]

    async def watch(at, end: float) -> None:
        while time.monotonic() < end:
            viewer: LivePeer = await at.peer(drive=False, format=pick.choice(("jpeg", "webp", "fragments")))
            made["viewers"] += 1
            await asyncio.sleep(pick.uniform(0.1, 8))
            await viewer.leave() if pick.random() < 0.5 else viewer.vanish()

    async def listen(end: float) -> None:
        while time.monotonic() < end:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            blocks.append(time.perf_counter() - before - 0.005)

    async def scenario() -> int:
        loaded = World.load("tiny", device="cpu")
        gc.collect()
        gc.freeze()  # as lingbot-world play does
        async with live_server(loaded) as at:
            end = time.monotonic() + SECONDS
            work = [asyncio.ensure_future(one) for one in (steer(at, end), watch(at, end), watch(at, end), listen(end))]
            await asyncio.sleep(SECONDS / 10)
            while not all(one.done() for one in work):
                sizes.append(resident(at.world))
                await asyncio.sleep(SECONDS / 60)
            for one in work:
                await one
            assert at.world.state != "failed", at.world.status()["problem"]
            assert len(at.host.registry._living) == 1
            return at.world.chunks

    chunks = run(scenario(), SECONDS + 300)
    ordered = sorted(blocks)
    print(f"\nresident MB: {[round(size / 1e6) for size in sizes]}")
    print(
        f"\n{chunks} chunks in {SECONDS:.0f} s, {made}, resident {sizes[0] / 1e6:.1f} then {sizes[-1] / 1e6:.1f} MB, "
        f"event loop p99 {1000 * ordered[int(0.99 * len(ordered))]:.1f} ms, worst {1000 * ordered[-1]:.0f} ms"
    )
    assert max(sizes) <= sizes[0] * (1 + GROWTH)
