"""Messages of noise and strangers at the socket: one answer to each, and the connection answers afterwards."""

from __future__ import annotations

import random

import hostile_messages
import pytest

from .conftest import hostile_peer, run, serving

CODES = {"malformed_payload", "missing_field", "bad_camera"}


@pytest.mark.parametrize("seed", [1, 2])
def test_every_broken_message_gets_one_answer(tiny, small_area, seed):
    pick = random.Random(seed)
    messages = hostile_messages.valid_messages()

    async def scenario():
        async with serving(tiny, timeout=0) as at, at.peer() as peer:
            endings = [
                await hostile_peer(peer, hostile_messages.mutated(pick, pick.choice(messages))) for _ in range(150)
            ]
            await peer.socket.send_bytes(messages[0])
            last = await peer.get()
            assert at.service.metrics.count("errors_total", code="internal") == 0
            return endings, last

    endings, last = run(scenario())
    assert set(endings) <= {*CODES, "frame", "reset_ok"}
    assert sum(ending in CODES for ending in endings) > 75
    assert last["type"] == "frame", last
