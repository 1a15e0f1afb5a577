"""The video socket for a long time: 20 000 messages of noise, and videos that come and go."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time
from collections import Counter

import numpy as np
import psutil
from hostile_video import hostile_visit
from video_server import camera, interaction, run, start, video_server

from lingbot_core.engine.world import World

SECONDS = float(os.environ.get("LINGBOT_SOAK_SECONDS", "600"))
GROWTH = 0.03


def resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def test_twenty_thousand_messages():
    pick = random.Random(5)
    answers: Counter[str] = Counter()

    async def scenario():
        before = 0
        async with video_server(World.load("tiny", device="cpu")) as at:
            while answers["messages"] < 20_000:
                answers.update(await hostile_visit(at, pick, 100))
                before = before or (resident() if answers["messages"] > 4000 else 0)
            assert at.service.metrics.count("errors_total", code="internal") == 0
            await at.becomes_true(lambda: not len(at.service.residents))
        return before

    before = run(scenario(), 3600)
    print(f"\n{dict(answers)}, resident {before} then {resident()}")
    assert resident() <= before * (1 + GROWTH)


def test_videos_come_and_go():
    pick = random.Random(6)
    sizes: list[int] = []

    async def client(at, end: float) -> int:
        made = 0
        while time.monotonic() < end:
            async with at.peer() as peer:
                await peer.send(start(seed=pick.randrange(9)))
                wanted = pick.randrange(1, 12)
                while len(peer.chunks) < wanted:
                    message = await peer.get()
                    assert message["type"] != "error", message
                    if message["type"] == "video.chunk_metadata":
                        made += 1
                        turn = camera("velocity", (0, 0, 0.05), (0, 0.05, 0, 0.99875))
                        await peer.send(interaction({"prompt": str(pick.randrange(5)), **turn}))
                if pick.random() < 0.5:  # the others just leave
                    await peer.send({"type": "session.stop"})
                    await peer.until("session.done")
        return made

    async def scenario():
        async with video_server(World.load("tiny", device="cpu"), awake=3) as at:
            end = time.monotonic() + SECONDS
            clients = [asyncio.ensure_future(client(at, end)) for _ in range(4)]
            while not all(one.done() for one in clients):
                await asyncio.sleep(SECONDS / 60)
                sizes.append(resident())
            made = sum([await one for one in clients])
            await at.becomes_true(lambda: not len(at.service.residents))
            assert not at.service.residents.host.registry._living
            return made

    made = run(scenario(), SECONDS + 120)
    third = len(sizes) // 3
    first, last = np.median(sizes[third : 2 * third]), np.median(sizes[2 * third :])
    print(f"\n{made} chunks in {SECONDS:.0f} s; resident {first / 1e6:.1f} then {last / 1e6:.1f} MB")
    assert last <= first * (1 + GROWTH)
