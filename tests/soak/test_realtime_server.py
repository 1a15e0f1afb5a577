"""A server for a long time: 20 000 messages, and sessions that come and go for ten minutes."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time
from collections import Counter

import hostile_messages
import numpy as np
import psutil

from tests.unit.realtime.conftest import SMALL, hostile_peer, run, serving

SECONDS = float(os.environ.get("LINGBOT_SOAK_SECONDS", "600"))
GROWTH = 0.03


def resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def test_twenty_thousand_messages(tiny, small_area):
    pick = random.Random(7)
    messages = hostile_messages.valid_messages()
    endings: Counter[str] = Counter()

    async def scenario():
        async with serving(tiny, timeout=0) as at:
            before = 0
            for count in range(100):
                async with at.peer() as peer:
                    for _ in range(200):
                        endings[await hostile_peer(peer, hostile_messages.mutated(pick, pick.choice(messages)))] += 1
                if count == 20:
                    before = resident()
            assert at.service.metrics.count("errors_total", code="internal") == 0
            await at.until(lambda: not len(at.service.residents))
            return before

    before = run(scenario(), 3600)
    print(f"\n{dict(endings)}, resident {before} then {resident()}")
    assert sum(endings.values()) == 20_000
    assert set(endings) <= {"malformed_payload", "missing_field", "bad_camera", "frame", "reset_ok"}
    assert resident() <= before * (1 + GROWTH)


def test_sessions_come_and_go(tiny, picture, path):
    pick = random.Random(11)
    poses, intrinsics = path
    sizes: list[int] = []
    chunks = 0

    async def client(at, number: int, end: float) -> int:
        made = 0
        while time.monotonic() < end:
            async with at.peer() as peer:
                name = f"{number}-{pick.randrange(3)}"
                message = {"image": picture, "prompt": "a sunny day", "extra_body": {**SMALL, "frames_per_chunk": 99}}
                for index in range(pick.randrange(1, 7)):
                    part = slice(0, 9) if index == 0 else slice(12 * index - 3, 12 * index + 9)
                    cameras = {"poses": poses[part], "intrinsics": intrinsics[part]}
                    answer = await peer.ask(session_id=name, cameras=cameras, **message)
                    made += answer["type"] == "frame"
                    assert answer["type"] == "frame" or answer["code"] == "session_busy", answer
                    message = {"extra_body": {"frames_per_chunk": 99}} if pick.random() < 0.8 else message
                if pick.random() < 0.3:
                    await peer.ask(endpoint="reset", session_id=name)
        return made

    async def scenario():
        nonlocal chunks
        async with serving(tiny, timeout=1.0, awake=3) as at:
            end = time.monotonic() + SECONDS
            walkers = [asyncio.ensure_future(client(at, number, end)) for number in range(4)]
            while not all(walker.done() for walker in walkers):
                await asyncio.sleep(SECONDS / 60)
                sizes.append(resident())
            chunks = sum([await walker for walker in walkers])
            await at.until(lambda: not len(at.service.residents))
            assert at.service.residents.nbytes() == 0

    run(scenario(), SECONDS + 120)
    third = len(sizes) // 3
    first, last = np.median(sizes[third : 2 * third]), np.median(sizes[2 * third :])
    print(f"\n{chunks} chunks in {SECONDS:.0f} s; resident {first / 1e6:.1f} then {last / 1e6:.1f} MB")
    assert last <= first * (1 + GROWTH)
